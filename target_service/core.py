"""Puts the parts of a loaded target together, and makes sequences out of requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from draftwire.errors import Unavailable
from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from draftwire.tokenizer import Tokenizer
from target_service.controller import Auto, Controller, Fixed, Off, Profile
from target_service.costs import Costs
from target_service.crowd import Crowd
from target_service.drafter_pool import DrafterPool
from target_service.drafts import DraftSource, NoDrafts
from target_service.engine import Engine
from target_service.grammars import Grammars, missing
from target_service.ledger import Ledger
from target_service.matcher import Matcher
from target_service.params import DraftingMode, Generation
from target_service.prefix.cache import PrefixCache
from target_service.remote_drafts import RemoteDrafts, SessionTerms
from target_service.requests import Defaults
from target_service.rounds import run_rounds
from target_service.scheduler import Limits, Scheduler
from target_service.sequence import Sequence
from target_service.spans import RequestSpan
from target_service.tally import Tally

_log = get_logger("rounds")
_FIRST_DELAY_S = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What has been loaded and configured."""

    loaded: LoadedModel
    tokenizer: Tokenizer
    defaults: Defaults
    limits: Limits
    draft_timeout_s: float
    device: str
    """What computes, for people."""
    measured: Mapping[int, float] = field(default_factory=dict)
    """rows -> seconds of a forward, from warm-up."""
    numerics: str = "fast"
    """"fast" or "exact"."""


class Target:
    """A model that serves: the round loop runs as long as this context is open. Belongs to the event loop."""

    def __init__(
        self,
        parts: TargetParts,
        engine: Engine,
        pool: DrafterPool,
        *,
        grammars: Grammars | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """grammars: for requests with a constraint; None where the extra for them is missing. prefixes: None is off."""
        self.parts = parts
        self.grammars = grammars
        self.engine = engine
        self.pool = pool
        self.prefixes = prefixes
        self.tally = Tally()
        pool.recorder = self.tally
        self.crowd = Crowd(Costs(parts.measured, shapes=engine.batch_costs))
        self.scheduler = Scheduler(engine, parts.limits, self.crowd, self._open_source, prefixes)
        self._profiles: defaultdict[str, Profile] = defaultdict(lambda: Profile(_FIRST_DELAY_S))
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Target:
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.scheduler.close()
        if self._loop is not None:
            await self._loop
        # What the drain did not see to its end: its drafters' sessions are released while there is still a pool.
        self.scheduler.fail_all(Unavailable("the service has stopped", reason="DRAINING", retry_after_s=5.0))

    async def died(self) -> None:
        """Waits for the end of the round loop, which only a fault brings about while the target is open."""
        if self._loop is not None:
            await asyncio.wait([self._loop])

    async def _run(self) -> None:
        try:
            await run_rounds(self.scheduler, self.engine, self.crowd, self.tally)
        except Exception as error:
            # A fault outside any one request: nothing can be trusted to go on, and nobody may be left waiting.
            _log.critical("round_loop_died", exc_info=error)
            self.scheduler.fail_all(error)

    async def matcher(self, generation: Generation) -> Matcher | None:
        """The grammar of a request with a constraint, compiled. Raises InvalidRequest for one that cannot be kept."""
        constraint = generation.constraint
        if constraint is None:
            return None
        if self.grammars is None:
            raise missing(constraint.kind)
        return await self.grammars.matcher(constraint, generation.stopping)

    def submit(
        self, generation: Generation, matcher: Matcher | None = None, span: RequestSpan | None = None
    ) -> Sequence:
        """Queues a request. matcher: of `matcher`, for one with a constraint; span: its place in a trace. Raises Overloaded."""
        ledger = Ledger(generation.prompt, generation.stopping, self._piece(generation), matcher)
        sequence = Sequence(generation, ledger, self._controller(generation), matcher, self.tally)
        sequence.span = span or sequence.span
        self.scheduler.submit(sequence)
        return sequence

    def _piece(self, generation: Generation) -> Callable[[int], bytes]:
        tokenizer = self.parts.tokenizer
        if not generation.skip_special_tokens:
            return tokenizer.piece_bytes
        special = tokenizer.special_ids

        def piece(token_id: int) -> bytes:
            return b"" if token_id in special else tokenizer.piece_bytes(token_id)

        return piece

    def _controller(self, generation: Generation) -> Controller:
        drafting = generation.drafting
        if drafting.mode is DraftingMode.OFF:
            return Off("off")
        if drafting.mode is DraftingMode.FIXED:
            return Fixed(drafting.max_drafts, self.parts.draft_timeout_s)
        # Drafters are those of the settings, so that there are few profiles.
        return Auto(
            drafting.max_drafts, timeout_s=self.parts.draft_timeout_s, profiles=lambda drafter: self._profiles[drafter]
        )

    def _open_source(self, sequence: Sequence) -> DraftSource:
        generation = sequence.generation
        if generation.drafting.mode is DraftingMode.OFF or not self.pool.targets or not self.engine.rollback.kind:
            return NoDrafts()
        stopping = generation.stopping
        terms = SessionTerms(
            sampler=generation.choosing.sampler,
            prompt_length=len(generation.prompt),
            max_length=len(generation.prompt) + stopping.max_tokens,
            end_ids=stopping.end_ids | stopping.stop_ids,
            vocabulary=self.engine.width,
            cache_salt=generation.cache_salt,
            cache_disabled=generation.cache_disabled,
            timeout_s=self.parts.draft_timeout_s,
        )
        return RemoteDrafts(self.pool, terms, lambda: sequence.ledger.ids, sequence.span)
