"""The real scheduler, round loop, sequences and controllers on a clock that jumps; engine and drafters only take time."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from draftwire.errors import DraftwireError
from draftwire.rollback import Rollback
from target_service.controller import Auto, Controller, Off, Profile
from target_service.costs import Costs
from target_service.crowd import Crowd
from target_service.drafts import Answer, DraftSource, Lost, NoDrafts, SourceReport
from target_service.engine import CacheLost
from target_service.ledger import Ledger, Released
from target_service.params import Choosing, Drafting, Generation, Stopping
from target_service.rounds import run_rounds
from target_service.scheduler import Limits, Scheduler
from target_service.sequence import Done
from target_service.sequence import Sequence as Live
from target_service.window import Choice, Window

T = TypeVar("T")
MS = 1e-3
ROWS = {1: 41.1, 2: 46.5, 4: 52.2, 8: 59.6, 16: 74.2}
SHAPES = {
    **{(1, width): ms for width, ms in ROWS.items()},
    **{(2, 1): 47.5, (2, 2): 52.0, (2, 4): 59.7, (2, 8): 75.9, (2, 16): 112.2},
    **{(4, 1): 52.5, (4, 2): 62.7, (4, 4): 75.2, (4, 8): 113.1, (4, 16): 178.5},
    **{(8, 1): 62.6, (8, 2): 80.5, (8, 4): 109.4, (8, 8): 179.0, (8, 16): 313.9},
}
"""Milliseconds of a forward of the default model on two cores, by (sequences, width), as measured."""
CHUNKS = {1: 38.0, 4: 41.0, 16: 53.0, 64: 152.0, 256: 525.0}
CHUNK_SLOPE_MS = 3.06e-3
"""The same for prompts: milliseconds of a first chunk by tokens, and what each pair of a token and one behind it adds."""


def smollm2() -> Costs:
    """What those tables say."""
    return Costs(
        {rows: ms * MS for rows, ms in ROWS.items()},
        shapes={shape: ms * MS for shape, ms in SHAPES.items()},
    )


class _Jump(selectors.DefaultSelector):
    """Nothing is waited for: the clock is put to where the wait would have ended."""

    now_s = 100.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now_s


def simulated(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, T]) -> T:
    """Runs it on a clock that jumps."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        clock = SimpleNamespace(monotonic=loop.time)
        for module in ("scheduler", "sequence", "rounds"):
            monkeypatch.setattr(f"target_service.{module}.time", clock)
        return runner.run(work)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def truth(position: int) -> int:
    """What the model says at a position: no pattern that a wrong draft could meet by chance."""
    return 1 + (position * 7919) % 997


@dataclass
class SimulatedEngine:
    """Takes the time that its tables say, one thing after the other. `fails` may raise for a forward."""

    costs: Costs = field(default_factory=smollm2)
    fails: Callable[[Sequence[Window]], None] = lambda _: None
    forwards: list[tuple[int, int]] = field(default_factory=list)
    """(sequences, width) of each."""
    caches: dict[int, int] = field(default_factory=dict)
    """slot -> positions."""
    rollback: Rollback = field(default_factory=lambda: Rollback("trim", ""))
    prefill_costs: dict[int, float] = field(default_factory=lambda: {n: ms * MS for n, ms in CHUNKS.items() if n <= 64})
    batch_costs: dict[tuple[int, int], float] | None = field(default_factory=dict)
    begun: frozenset[int] = frozenset()
    lost: set[int] = field(default_factory=set)
    reads_beside: bool = False
    prefilled: int = 0
    pace: float = 1.0
    """Of forwards with drafts: what the table does not know, as a drafter that computes on the target's cores."""

    @property
    def beside_costs(self) -> dict[int, float]:
        return {n: added_s(n, 0) for n in (4, 16, 64)} if self.reads_beside else {}

    @property
    def batching(self) -> str:
        return "ragged" if self.batch_costs is not None else "one by one"

    def room(self, live: int) -> int:
        return 64

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()

    async def open(self, choosing: Choosing, *, positions: int = 0, most: int = 0) -> int:
        slot = next(self._numbers)
        self.caches[slot] = 0
        return slot

    async def prefill(self, slot: int, ids: Sequence[int]) -> None:
        async with self._lock:
            await asyncio.sleep(chunk_s(len(ids), self.caches[slot]))
            self.caches[slot] += len(ids)
            self.prefilled += len(ids)

    async def prefill_together(self, chunks: Mapping[int, Sequence[int]]) -> None:
        width = max(map(len, chunks.values()))
        async with self._lock:
            await asyncio.sleep(chunk_s(width * len(chunks), max(self.caches[slot] for slot in chunks)))
            for slot, ids in chunks.items():
                self.caches[slot] += len(ids)
                self.prefilled += len(ids)

    async def forward(
        self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]] | None = None
    ) -> list[Choice]:
        chunks = chunks or {}
        async with self._lock:
            if any(window.slot in self.lost for window in windows):
                raise CacheLost("lost")
            began_s = now_s()
            width = max(window.rows for window in windows)
            plain = all(window.ahead for window in windows)
            seconds = self.costs.plain_batch_s(len(windows)) if plain else self.costs.batch_s(len(windows), width)
            added = sum(added_s(len(ids), self.caches[slot]) for slot, ids in chunks.items())
            await asyncio.sleep(seconds * (self.pace if width > 1 else 1.0) + added)
            try:
                self.fails([*windows, *(Window(slot=slot, pending=0, first_step=0) for slot in chunks)])
            except Exception:
                # As in a pool: everybody's arrays are gone.
                self.lost |= {slot for slot, length in self.caches.items() if length or slot in chunks}
                raise
            for slot, ids in chunks.items():
                self.caches[slot] += len(ids)
                self.prefilled += len(ids)
            self.forwards.append((len(windows), width))
            choices = []
            for window in windows:
                position = self.caches[window.slot] + 1
                ids = tuple(truth(position + row) for row in range(window.rows))
                self.caches[window.slot] += window.rows
                choices.append(Choice(ids, None, now_s() - began_s, now_s()))
            return choices

    def truncate(self, slot: int, length: int) -> None:
        assert length <= self.caches[slot]
        self.caches[slot] = length

    def intact(self, slot: int) -> bool:
        return slot not in self.lost

    async def reopen(self, slot: int) -> None:
        self.lost.discard(slot)
        self.caches[slot] = 0

    def close(self, slot: int) -> None:
        self.caches.pop(slot, None)
        self.lost.discard(slot)


def chunk_s(tokens: int, behind: int) -> float:
    """Seconds of a chunk."""
    table = sorted(CHUNKS.items())
    at = next((i for i in range(1, len(table)) if table[i][0] >= tokens), len(table) - 1)
    (few, less), (many, more) = table[at - 1], table[at]
    return (less + (tokens - few) * (more - less) / (many - few) + CHUNK_SLOPE_MS * tokens * behind) * MS


def added_s(tokens: int, behind: int) -> float:
    """What a chunk adds to a forward that reads the weights anyway, but for those of attention."""
    return chunk_s(tokens, behind) - 0.7 * CHUNKS[1] * MS


Guess = Callable[[int, int], Sequence[int]]
"""(position of the first draft, drafts asked for) -> drafts."""


class DelayedSource:
    """A drafter that answers after a while; `delay_s` may be infinite, and then the deadline ends the question."""

    limit = 64

    def __init__(self, guess: Guess, delay_s: Callable[[int], float], deadline_s: float = 0.5) -> None:
        """delay_s: of a question at a position."""
        self._guess, self._delay_s, self._deadline_s = guess, delay_s, deadline_s
        self._question: asyncio.Task[None] | None = None
        self._inbox: Answer | Lost | None = None

    @property
    def asking(self) -> bool:
        return self._question is not None and not self._question.done()

    @property
    def ready(self) -> bool:
        return not self.asking

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        assert self.ready
        assert 1 <= drafts <= self.limit
        self._question = asyncio.ensure_future(self._answer(len(ids), drafts))

    async def _answer(self, position: int, drafts: int) -> None:
        delay_s = self._delay_s(position)
        await asyncio.sleep(min(delay_s, self._deadline_s))
        if delay_s > self._deadline_s:
            self._inbox = Lost("deadline")
        else:
            self._inbox = Answer(position, tuple(self._guess(position, drafts)), delay_s, 0.0)

    def take(self) -> Answer | Lost | None:
        came, self._inbox = self._inbox, None
        return came

    async def arrival(self) -> None:
        if self._question is not None:
            await asyncio.wait([self._question])

    def scored(self, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed

    def report(self) -> SourceReport:
        return SourceReport(drafter_id="simulated")

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()


@dataclass
class Stream:
    """One request and when its tokens came."""

    sequence: Live
    came_s: list[float] = field(default_factory=list)
    """One entry a token."""
    error: DraftwireError | None = None

    def gaps_s(self, first_s: float = 0.0, last_s: float = float("inf")) -> list[float]:
        """Between one chunk of tokens and the next, of chunks in [first_s, last_s)."""
        times = sorted(set(self.came_s))
        return [after - before for before, after in itertools.pairwise(times) if before >= first_s and after < last_s]

    async def read(self) -> None:
        while True:
            outcome = await self.sequence.outbox.get()
            if isinstance(outcome, Released):
                self.came_s += [now_s()] * len(outcome.tokens)
            elif isinstance(outcome, DraftwireError):
                self.error = outcome
                return
            elif isinstance(outcome, Done):
                return


class House:
    """A target that serves simulated streams."""

    def __init__(self, engine: SimulatedEngine, *, costs: Costs | None = None, **limits: Any) -> None:
        """costs: what the controller believes; the engine's own tables if absent."""
        self.engine = engine
        self.crowd = Crowd(costs or smollm2())
        self._sources: dict[int, DraftSource] = {}
        chosen: dict[str, Any] = {
            "max_running": 8, "max_queued": 64, "kv_bytes": 1 << 40, "kv_bytes_per_token": 1, "state_bytes": 0,
            "prefill_step_size": 256, **limits,
        }  # fmt: skip
        made: Any = engine
        self.scheduler = Scheduler(made, Limits(**chosen), self.crowd, lambda one: self._sources[id(one)])
        self.profile = Profile(3 * MS)

    async def __aenter__(self) -> House:
        made: Any = self.engine
        self._loop = asyncio.create_task(run_rounds(self.scheduler, made, self.crowd))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.scheduler.close()
        await self._loop

    def stream(
        self,
        prompt: int,
        tokens: int,
        *,
        source: DraftSource | None = None,
        controller: Controller | None = None,
        priority: int = 0,
        drafts: int = 16,
    ) -> tuple[Stream, asyncio.Task[None]]:
        """Submits a request with a prompt of so many ids. source: with it, drafting is automatic unless told otherwise."""
        generation = Generation(
            request_id="simulated",
            prompt=tuple(truth(position) for position in range(prompt)),
            choosing=Choosing(),
            stopping=Stopping(max_tokens=tokens),
            drafting=Drafting(max_drafts=drafts),
            priority=priority,
        )
        if controller is None and source is None:
            controller = Off("off")
        elif controller is None:
            controller = Auto(drafts, timeout_s=0.5, profiles=lambda _: self.profile)
        ledger = Ledger(generation.prompt, generation.stopping, lambda _: b"x")
        stream = Stream(Live(generation, ledger, controller))
        self._sources[id(stream.sequence)] = source or NoDrafts()
        self.scheduler.submit(stream.sequence)
        return stream, asyncio.create_task(stream.read())
