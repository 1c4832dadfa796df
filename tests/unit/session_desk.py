"""Helpers for tests of sessions: a clock, a source that hashes, and a runner that waits for the test."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from draft_service.calls import Outcome, Round
from draft_service.forwards import ForwardCounts
from draft_service.history import Advance, History
from draft_service.rounds import Rounds
from draft_service.sessions import Session, SessionLimits, SessionTable
from draft_service.sources.base import Ask, Computing, DraftEnd, Drafter, Guess, Prefix, Runner, SessionSpec, Stop
from draft_service.sources.one_by_one import OneByOne
from draftwire.sampling import Sampler
from draftwire.wire import prefix_hash

T = TypeVar("T")
NAME = "session-0123456789"
BYTES_PER_TOKEN = 10


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def spec(prompt_length: int = 1, max_length: int = 100) -> SessionSpec:
    return SessionSpec(prompt_length=prompt_length, max_length=max_length, sampler=Sampler(), end_ids=frozenset())


def history(ids: Sequence[int]) -> History:
    made = History()
    made.apply(advance(ids))
    return made


def advance(ids: Sequence[int], base_length: int = 0) -> Advance:
    """ids: the whole text; the advance carries what lies behind base_length."""
    return Advance(base_length=base_length, ids=tuple(ids[base_length:]), prefix_hash=prefix_hash(ids))


def asked(number: int, ids: Sequence[int], base_length: int = 0, **ask: Any) -> Round:
    budget_s = ask.pop("time_budget_s", None)
    return Round(
        session_id=NAME,
        number=number,
        advance=advance(ids, base_length),
        ask=Ask(**{"limit": 3, **ask}),
        time_budget_s=budget_s,
    )


def table(clock: Clock, **limits: Any) -> SessionTable:
    values = {"sessions": 3, "kv_bytes": 1000, "lease_s": 60.0, "max_lease_s": 600.0, "idle_s": 5.0, **limits}
    return SessionTable(SessionLimits(**values), clock)


def open_one(
    at: SessionTable, name: str, *, kv_bytes: int = 100, owner: str = "me", lease_s: float | None = None
) -> Session:
    return at.open(owner, name, spec=spec(), kv_bytes=kv_bytes, lease_s=lease_s)


def guessed(ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """What the source below drafts: a function of the whole path, so that a wrong state shows."""
    path = list(ids)
    for _ in range(limit):
        path.append(prefix_hash(path) % 1000)
    return tuple(path[len(ids) :])


class HashDrafter:
    """Drafts by hashing what it was told, one chunk of two ids at a time."""

    def __init__(self, source: HashSource) -> None:
        self.ids: list[int] = []
        self.source = source
        self.computed = 0
        self.closed = 0
        self.kv_bytes = 0

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def behind(self) -> int:
        return len(self.ids) - self.computed

    def advance(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def rewrite(self, ids: Sequence[int]) -> int:
        agreed = 0
        while agreed < min(self.computed, len(ids)) and self.ids[agreed] == ids[agreed]:
            agreed += 1
        self.ids, self.computed = list(ids), agreed
        return agreed

    def feed(self, stop: Stop) -> None:
        assert not self.closed
        self.computed = min(len(self.ids), self.computed + 2)

    def draft(self, ask: Ask, stop: Stop) -> Guess:
        assert not self.closed
        self.source.drafts += 1
        if self.source.failing:
            raise MemoryError("no memory for the test")
        if stop():
            self.source.stopped += 1
            return Guess(end=DraftEnd.TIME_BUDGET)
        self.computed = len(self.ids)
        return Guess(ids=guessed([*self.ids, *ask.assumed], ask.limit), end=DraftEnd.MAX_DRAFT_TOKENS)

    def keep(self) -> Prefix | None:
        return None

    def adopt(self, prefix: Prefix, length: int) -> None:
        raise AssertionError("nothing is ever kept")

    def close(self) -> None:
        self.closed += 1


class HashSource:
    kind, model_id, model_revision, tokenizer_fingerprint = "hash", "", "", ""
    batching = ""
    tokenizer_size = context_length = weights_bytes = 0
    draws = False

    def __init__(self) -> None:
        self.forwards = ForwardCounts()
        self.drafts = 0
        self.stopped = 0
        self.failing = False
        self.opened: list[HashDrafter] = []

    def bytes_for(self, length: int) -> int:
        return length * BYTES_PER_TOKEN

    def open(self, spec: SessionSpec) -> Drafter:
        self.opened.append(HashDrafter(self))
        return self.opened[-1]

    def computing(self, runner: Runner, clock: Callable[[], float]) -> Computing:
        return OneByOne(runner, clock, prefill_step_size=4)

    def close(self) -> None:
        pass


class HeldRunner:
    """Runs a job when the test says so."""

    def __init__(self) -> None:
        self.held: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    @property
    def queue_depth(self) -> int:
        return len(self.held)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.held.append((job, future))
        return future

    async def run(self, job: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.submit(job))

    async def arrive(self) -> None:
        """Lets everything that can go on without a job do so."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def step(self) -> None:
        await self.arrive()
        job, future = self.held.popleft()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        await self.arrive()

    async def run_out(self) -> None:
        await self.arrive()
        while self.held:
            await self.step()


class Desk:
    """Rounds over the source above, with one session opened on `ids`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.source = HashSource()
        self.runner = HeldRunner()
        self.table = table(self.clock, kv_bytes=10_000)
        self.rounds = Rounds(self.table, self.source, self.runner, self.clock, max_draft_tokens=5)

    async def done(self, work: Any) -> Outcome:
        task = asyncio.ensure_future(work)
        await self.runner.run_out()
        assert task.done()
        outcome = task.result()
        assert isinstance(outcome, Outcome)
        return outcome

    def prefill(self, ids: Sequence[int], **values: Any) -> Any:
        return self.rounds.prefill("me", NAME, spec=spec(**values), history=history(ids), lease_s=None)

    def draft(self, question: Round) -> Any:
        return self.rounds.draft("me", question)

    def held(self) -> list[int]:
        return self.table.find("me", NAME).history.since(0)


async def opened_desk(ids: Sequence[int] = (1, 2, 3)) -> Desk:
    desk = Desk()
    await desk.done(desk.prefill(ids))
    return desk
