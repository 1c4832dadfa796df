"""Drives a real target in one process: tiny models, the real round loop, and drafters that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwire.blas import BlasInfo
from draftwire.compute import ComputeThread
from draftwire.errors import DraftwireError
from target_service.config import TargetSettings
from target_service.core import Target
from target_service.drafts import Answer, Lost, SourceReport
from target_service.ledger import Released, TokenLogprobs
from target_service.loading import load_target
from target_service.params import Choosing, Drafting, DraftingMode, Generation, Stopping
from target_service.sequence import Done
from target_service.sequence import Sequence as Request
from target_service.stats import SpeculationCounts

Script = Callable[[list[int], int], "list[int] | Lost | None"]
"""(committed ids, drafts asked for) -> drafts, a failure, or None for no answer until the next question is due."""


class ScriptedSource:
    """A `DraftSource` that answers at once from a script. `None` from the script delivers one round late."""

    def __init__(self, script: Script, limit: int = 64) -> None:
        self.limit = limit
        self.closed = False
        self._script = script
        self._inbox: Answer | Lost | None = None
        self._late: Answer | Lost | None = None

    @property
    def asking(self) -> bool:
        return self._late is not None

    @property
    def ready(self) -> bool:
        return not self.asking

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        answer = self._script(list(ids), drafts)
        if isinstance(answer, Lost):
            self._inbox = answer
        elif answer is None:
            late = self._script(list(ids), -drafts)
            self._late = late if isinstance(late, Lost) else Answer(len(ids), tuple(late or ()), 1.0, 0.0)
        else:
            self._inbox = Answer(len(ids), tuple(answer), 0.0, 0.0)

    def take(self) -> Answer | Lost | None:
        if self._inbox is None and self._late is not None:
            # Its time has come: it arrives while the next forward runs.
            self._inbox, self._late = self._late, None
            return None
        came, self._inbox = self._inbox, None
        return came

    async def arrival(self) -> None:
        if self.asking:
            await asyncio.Event().wait()

    def scored(self, proposed: int, accepted: int) -> None:
        return

    def report(self) -> SourceReport:
        return SourceReport(drafter_id="script")

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True)
class Result:
    """What a user sees of a completion, and what drafts did."""

    ids: tuple[int, ...]
    text: str
    finish: tuple[str, int | None, str | None]
    completion_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...]
    from_draft: tuple[bool, ...]
    counts: SpeculationCounts
    grammar_complete: bool | None = None

    @property
    def visible(self) -> tuple[Any, ...]:
        """Everything that drafts must not change."""
        return self.ids, self.text, self.finish, self.completion_tokens, self.logprobs, self.grammar_complete


@asynccontextmanager
async def loaded_target(model: Path | str, **settings: Any) -> AsyncIterator[Target]:
    """The target service without its gRPC face. Its patience is short: late drafts are part of the tests."""
    settings.setdefault("draft_timeout_s", 0.001)
    chosen = TargetSettings(model=str(model), _cli_parse_args=False, **settings)  # type: ignore[call-arg]
    compute = ComputeThread()
    try:
        async with AsyncExitStack() as stack:
            yield await load_target(chosen, BlasInfo(kind="reference", reason="test"), compute, "test", stack)
    finally:
        await asyncio.to_thread(compute.close)


def generation(
    prompt: Sequence[int],
    *,
    max_tokens: int = 40,
    choosing: Choosing | None = None,
    drafting: Drafting | None = None,
    **stopping: Any,
) -> Generation:
    """A request, greedy and without drafts unless told otherwise."""
    return Generation(
        request_id="test",
        prompt=tuple(prompt),
        choosing=choosing or Choosing(),
        stopping=Stopping(max_tokens=max_tokens, **stopping),
        drafting=drafting or Drafting(DraftingMode.OFF, 0),
    )


async def complete(target: Target, wanted: Generation, script: Script | None = None) -> Result:
    """Runs a request to its end; with a script, its drafts come from there."""
    if script is not None:
        target.scheduler.open_source = lambda _: ScriptedSource(script)
    sequence = target.submit(wanted, await target.matcher(wanted))
    return await drain(sequence)


async def drain(sequence: Request) -> Result:
    """Reads a request's outbox to the end. Raises the error that ended it."""
    text, tokens = [], []
    while True:
        outcome = await sequence.outbox.get()
        if isinstance(outcome, DraftwireError):
            raise outcome
        if isinstance(outcome, Released):
            assert outcome.first_step == len(tokens)
            text.append(outcome.text)
            tokens.extend(outcome.tokens)
        if isinstance(outcome, Done):
            finish = outcome.finish
            return Result(
                ids=tuple(token.id for token in tokens),
                text="".join(text),
                finish=(finish.reason.value, finish.stop_id, finish.stop),
                completion_tokens=sequence.ledger.completion_tokens,
                logprobs=tuple(token.logprobs for token in tokens),
                from_draft=tuple(token.from_draft for token in tokens),
                counts=sequence.counts,
                grammar_complete=sequence.ledger.grammar_complete,
            )


def fixed(wanted: Generation, drafts: int) -> Generation:
    """The same request with so many drafts in every round."""
    return replace(wanted, drafting=Drafting(DraftingMode.FIXED if drafts else DraftingMode.OFF, drafts))


def auto(wanted: Generation, drafts: int = 16) -> Generation:
    """The same request with as many drafts as pay."""
    return replace(wanted, drafting=Drafting(DraftingMode.AUTO, drafts))
