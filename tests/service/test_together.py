"""Sessions that draft together: nobody waits for another's draft or prompt, and what fails costs only who took part."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from draft_service.sources.base import Ask, DraftEnd, Guess, SessionSpec
from draft_service.sources.model import ModelDrafter, ModelSource
from draft_service.sources.pace import Pace
from draft_service.sources.together import Together
from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model

T = TypeVar("T")
STEP = 64


class Steps:
    """A runner whose jobs run when the test says so."""

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

    async def one(self) -> None:
        """Runs one job, and lets everybody see what it did."""
        await settled()
        job, future = self.held.popleft()
        future.set_result(job())
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    def __init__(self) -> None:
        self.computed_s = 0.0
        self.stopped = False

    def should_stop(self) -> bool:
        return self.stopped


class Watched:
    """A model that notes the (sessions, ids) of each forward, says what they cost, and fails when told to."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        if hasattr(model, "make_cache"):
            self.make_cache = model.make_cache
        self.shapes: list[tuple[int, int]] = []
        self.failing = False
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def __call__(self, ids: Any, cache: Any = None) -> Any:
        if self.failing:
            raise MemoryError("no memory for the test")
        self.shapes.append(tuple(ids.shape))
        self.now_s += 0.05 + 0.003 * ids.size
        return self.model(ids, cache=cache)


@dataclass
class Room:
    """A tiny model whose sessions draft together, step by step."""

    source: ModelSource
    model: Watched
    steps: Steps
    together: Together
    open_drafters: list[ModelDrafter] = field(default_factory=list)

    def drafter(self, ids: Sequence[int]) -> ModelDrafter:
        spec = SessionSpec(prompt_length=1, max_length=512, sampler=Sampler(), end_ids=frozenset())
        made = cast("ModelDrafter", self.source.open(spec))
        made.advance(ids)
        self.open_drafters.append(made)
        return made

    def ask(self, drafter: ModelDrafter, limit: int, work: Work | None = None) -> asyncio.Task[Guess]:
        return asyncio.ensure_future(self.together.draft(drafter, Ask(limit=limit), work or Work()))

    def truth(self, ids: Sequence[int], limit: int) -> tuple[int, ...]:
        alone = self.drafter(ids)
        return alone.draft(Ask(limit=limit), lambda: False).ids

    def close(self) -> None:
        for drafter in self.open_drafters:
            drafter.close()
        self.source.close()


def room(kind: TinyKind = "llama") -> Room:
    loaded = make_tiny_model(kind, seed=1)
    source = ModelSource(loaded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f", prefill_step_size=STEP)
    model = Watched(loaded.model)
    source._model = model
    steps = Steps()
    together = source.computing(steps, model.clock)
    assert isinstance(together, Together)
    together.spare(2**30)
    return Room(source, model, steps, together)


async def test_one_that_arrives_joins_at_the_next_step_and_leaves_when_it_has_enough() -> None:
    at = room()
    first = at.ask(at.drafter([1, 2, 3]), 8)
    for _ in range(3):
        await at.steps.one()
    second = at.ask(at.drafter([9, 8]), 2)
    await at.steps.one()
    assert not second.done()
    await at.steps.one()
    assert second.done()
    assert not first.done()
    for _ in range(3):
        await at.steps.one()
    assert first.done()
    assert [sessions for sessions, _ in at.model.shapes] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert ((await first).ids, (await second).ids) == (at.truth([1, 2, 3], 8), at.truth([9, 8], 2))
    at.close()


async def test_eight_sessions_take_as_many_forwards_as_one() -> None:
    at = room()
    asked = [at.ask(at.drafter([number, 7, 5, number]), 4) for number in range(8)]
    while not all(task.done() for task in asked):
        await at.steps.one()
    # 16 rows at most: the prompts of 4 ids take two forwards of 2 ids each.
    assert at.model.shapes == [(8, 2), (8, 2), (8, 1), (8, 1), (8, 1)]
    assert [(await task).ids for task in asked] == [at.truth([n, 7, 5, n], 4) for n in range(8)]
    at.close()


async def test_a_long_prompt_is_read_between_the_steps_of_others_in_small_chunks() -> None:
    at = room()
    long = list(range(200)) * 2
    reader = at.drafter(long)
    reading = asyncio.ensure_future(at.together.catch_up(reader, Work()))
    drafting = at.ask(at.drafter([1, 2, 3]), 12)
    while not drafting.done():
        await at.steps.one()
    assert not reading.done()
    chunks = [ids for sessions, ids in at.model.shapes[1:] if ids > 1]
    # One chunk a step; the first is a guess, then they take twice as long as a step.
    assert len(at.model.shapes) == 24
    assert chunks == sorted(chunks, reverse=True)
    assert (chunks[0], chunks[-1] in range(17, 22)) == (32, True)
    at.model.shapes.clear()
    await at.steps.one()
    # Its target verifies now, and will soon be back.
    assert at.model.shapes.pop()[1] <= chunks[-1]
    at.model.now_s += 2.0
    while not reading.done():
        await at.steps.one()
    assert at.model.shapes[0] == (1, STEP)
    assert reader.behind == 0
    answer = at.ask(reader, 3)
    while not answer.done():
        await at.steps.one()
    assert (await answer).ids == at.truth(long, 3)
    at.close()


async def test_two_prompts_take_turns() -> None:
    at = room()
    readers = [at.drafter(range(100, 100 + 2 * STEP + 1)), at.drafter(range(2 * STEP + 1))]
    reading = [asyncio.ensure_future(at.together.catch_up(reader, Work())) for reader in readers]
    behind = []
    while not all(task.done() for task in reading):
        await at.steps.one()
        behind.append([reader.behind for reader in readers])
    assert behind == [[64, 128], [64, 64], [0, 64], [0, 0]]
    at.close()


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_call_that_is_stopped_leaves_within_one_step(after: int) -> None:
    at = room()
    work = Work()
    stopped, going = at.ask(at.drafter([1, 2, 3]), 9, work), at.ask(at.drafter([4, 5]), 9)
    for _ in range(after):
        await at.steps.one()
    work.stopped = True
    await at.steps.one()
    guess = await stopped
    assert (guess.ids, guess.end) == (at.truth([1, 2, 3], 9)[: len(guess.ids)], DraftEnd.TIME_BUDGET)
    # Prompts of three ids are fed in one forward here, so that each step gave an id.
    assert len(guess.ids) == after
    while not going.done():
        await at.steps.one()
    assert (await going).ids == at.truth([4, 5], 9)
    at.close()


async def test_a_stopped_reading_ends_before_its_next_chunk() -> None:
    at = room()
    work = Work()
    reading = asyncio.ensure_future(at.together.catch_up(at.drafter(range(250)), work))
    await at.steps.one()
    work.stopped = True
    await at.steps.one()
    assert reading.done()
    assert at.model.shapes == [(1, STEP)]
    at.close()


async def test_a_cancelled_call_that_has_not_begun_is_never_computed() -> None:
    at = room()
    task = at.ask(at.drafter([1, 2, 3]), 9)
    await settled()
    task.cancel()
    await at.steps.one()
    assert (task.cancelled(), at.model.shapes, at.steps.queue_depth) == (True, [], 0)
    at.close()


async def test_a_failed_forward_costs_those_who_took_part_and_a_bystander_only_its_kv() -> None:
    at = room()
    bystander = at.drafter([1, 2, 3])
    first = at.ask(bystander, 4)
    while not first.done():
        await at.steps.one()
    at.model.failing = True
    failing = [at.ask(at.drafter([n, n]), 4) for n in (7, 8)]
    await at.steps.one()
    for task in failing:
        with pytest.raises(MemoryError):
            await task
    at.model.failing = False
    ids = (await first).ids
    bystander.advance(ids)
    again = at.ask(bystander, 4)
    while not again.done():
        await at.steps.one()
    assert (await again).ids == at.truth([1, 2, 3, *ids], 4)
    at.close()


async def test_a_session_that_sits_idle_makes_nobodys_forward_dearer_for_long() -> None:
    at = room()
    idle = [at.drafter([n, 1]) for n in range(4)]
    asked = [at.ask(drafter, 1) for drafter in idle]
    while not all(task.done() for task in asked):
        await at.steps.one()
    busy = at.ask(at.drafter([9, 9]), 12)
    while not busy.done():
        await at.steps.one()
    assert [sessions for sessions, _ in at.model.shapes][-7:] == [1] * 7
    for n, drafter in enumerate(idle):
        later = at.ask(drafter, 3)
        while not later.done():
            await at.steps.one()
        assert (await later).ids == at.truth([n, 1], 3)
    at.close()


async def test_a_long_session_sits_apart_where_memory_is_short_and_joins_where_it_is_not() -> None:
    at = room()
    at.together.spare(0)
    texts = [list(range(1, 240)) * 2, *([n, 3, n] for n in range(4))]
    # The short ones are charged for a short text, so that a rectangle of the long one's length is beyond their means.
    drafters = [at.drafter(text) for text in texts]
    for drafter in drafters[1:]:
        drafter.spec = SessionSpec(prompt_length=1, max_length=40, sampler=Sampler(), end_ids=frozenset())
        drafter._make_kv = lambda drafter=drafter: at.source._make_kv(drafter.spec)  # type: ignore[misc]
    for spare, benches in ((0, 2), (2**30, 1), (0, 2)):
        at.together.spare(spare)
        asked = [at.ask(drafter, 3) for drafter in drafters]
        while not all(task.done() for task in asked):
            await at.steps.one()
        assert [(await task).ids for task in asked] == [at.truth(text, 3) for text in texts]
        assert len({cast("Any", drafter.opened()).bench for drafter in drafters}) == benches
    at.close()


async def test_what_is_left_when_the_thread_closes_fails_and_does_not_hang() -> None:
    at = room()
    task = at.ask(at.drafter([1, 2, 3]), 9)
    await settled()

    def closed(job: Callable[[], T]) -> Future[T]:
        raise RuntimeError("the compute thread is closed")

    at.steps.submit = closed  # type: ignore[method-assign]
    await at.steps.one()
    with pytest.raises(RuntimeError, match="closed"):
        await task
    at.close()


@pytest.mark.parametrize(
    ("kind", "reason"), [("lfm2", "not plain keys and values"), ("gemma3", "more than 4 sliding windows of 16")]
)
def test_a_model_that_cannot_share_forwards_says_why(kind: TinyKind, reason: str) -> None:
    source = ModelSource(make_tiny_model(kind, seed=1), tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")
    assert source.batching.startswith("one by one: ")
    assert reason in source.batching
    source.close()


class TestPace:
    def test_alone_a_prompt_is_read_in_whole_chunks(self) -> None:
        pace = Pace(256)
        pace.stepped(0.05)
        pace.read(256, 1.0)
        assert pace.chunk(drafting=False) == 256

    def test_before_anything_is_known_chunks_are_small(self) -> None:
        assert (Pace(256).chunk(drafting=True), Pace(16).chunk(drafting=True)) == (32, 16)

    @pytest.mark.parametrize(("step_s", "id_s", "ids"), [(0.06, 0.003, 40), (0.06, 0.1, 16), (0.06, 0.00001, 256)])
    def test_a_chunk_takes_about_as_long_as_two_steps(self, step_s: float, id_s: float, ids: int) -> None:
        pace = Pace(256)
        for _ in range(5):
            pace.stepped(step_s)
            pace.read(100, 100 * id_s)
        assert pace.chunk(drafting=True) == ids

    def test_one_slow_moment_moves_it_by_a_quarter_at_most(self) -> None:
        pace = Pace(256)
        pace.stepped(0.06)
        pace.read(100, 0.2)
        pace.stepped(60.0)
        assert pace.chunk(drafting=True) == int(2 * 0.06 * 1.25 / 0.002)

    def test_a_few_ids_say_nothing_of_what_many_cost(self) -> None:
        pace = Pace(256)
        pace.stepped(0.06)
        pace.read(100, 0.2)
        pace.read(1, 0.05)
        assert pace.chunk(drafting=True) == 60
