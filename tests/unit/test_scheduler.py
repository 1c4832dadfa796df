"""Nobody waits for another: prompts beside streams, prompts beside prompts, and forwards that fail, on a simulated clock."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import pytest
from simulation import MS, DelayedSource, House, SimulatedEngine, Stream, chunk_s, now_s, simulated, truth

from draftwire.errors import InternalError
from target_service.controller import Fixed
from target_service.prefill import Pace, PrefillBudget, PrefillCosts, Waiting, fills, whose_turn
from target_service.window import Window

LONG = 4000


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def alone_s(tokens: int) -> float:
    """Seconds until the first token of a prompt that nobody else is there for."""
    async with House(SimulatedEngine()) as house:
        began_s = now_s()
        stream, reading = house.stream(tokens, 1)
        await reading
        return stream.came_s[0] - began_s


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("others", "prompt", "slowest"), [(1, LONG, 3.6), (3, LONG, 2.9), (7, LONG, 2.5), (7, 1000, 2.5)]
)
def test_a_long_prompt_freezes_nobody_and_is_not_starved(
    monkeypatch: pytest.MonkeyPatch, beside: bool, others: int, prompt: int, slowest: float
) -> None:
    """Kind of fault: head-of-line blocking. p99 gap of the others at most 3 times their p50 without it.

    What the prompt may take follows: a chunk of its own reads all weights, and behind 4,000 tokens little fits beside that.
    """

    async def run() -> None:
        async with House(SimulatedEngine(reads_beside=beside)) as house:
            streams = [house.stream(20, 4000) for _ in range(others)]
            await asyncio.sleep(5)
            began_s = now_s()
            newcomer, reading = house.stream(prompt, 1)
            await reading
            ended_s = newcomer.came_s[0]
            before = [gap for stream, _ in streams for gap in stream.gaps_s(last_s=began_s)]
            during = [gap for stream, _ in streams for gap in stream.gaps_s(began_s, ended_s)]
            assert percentile(during, 0.99) <= 3 * statistics.median(before)
            took_s = ended_s - began_s
            for stream, _ in streams:
                house.scheduler.cancel(stream.sequence)
            assert len(during) >= others * 20
        assert took_s <= (1.95 if beside else slowest) * await alone_s(prompt), took_s / await alone_s(prompt)

    simulated(monkeypatch, run())


def test_short_prompts_do_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 60 tokens behind one of 4,000, beside four streams: each begins within a second or so."""

    async def run() -> None:
        async with House(SimulatedEngine()) as house:
            streams = [house.stream(20, 4000) for _ in range(4)]
            await asyncio.sleep(1)
            long, reading = house.stream(LONG, 1)
            await asyncio.sleep(2)
            asked_s = now_s()
            short = [house.stream(60, 1) for _ in range(3)]
            for _, done in short:
                await done
            assert max(stream.came_s[0] for stream, _ in short) - asked_s <= 2.0
            assert not long.came_s
            await reading
            for stream, _ in streams:
                house.scheduler.cancel(stream.sequence)

    simulated(monkeypatch, run())


def test_a_long_prompt_is_read_though_short_ones_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: starvation. A quarter of the chunks are of the prompt that was admitted first."""

    async def run() -> None:
        async with House(SimulatedEngine(), max_running=4) as house:
            long, reading = house.stream(1000, 1)

            async def crowd() -> None:
                while not reading.done():
                    await house.stream(250, 1)[1]

            await asyncio.gather(*(crowd() for _ in range(3)))
            assert long.came_s
            assert long.came_s[0] - 100.0 <= 6 * await alone_s(1000)

    simulated(monkeypatch, run())


def test_priorities_hold_for_places_and_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with House(SimulatedEngine(), max_running=2) as house:
            order: list[str] = []

            async def one(name: str, priority: int, prompt: int) -> None:
                await house.stream(prompt, 1, priority=priority)[1]
                order.append(name)

            await asyncio.gather(
                one("first", 0, 600),
                one("low", 0, 600),
                one("lower", -1, 300),
                one("high", 5, 900),
                one("urgent", 9, 900),
            )
            assert order[:2] == ["urgent", "high"]
            assert order[-1] == "lower"

    simulated(monkeypatch, run())


def test_memory_is_charged_as_the_shared_arrays_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: one long text makes everybody's row long, and the machine runs out of memory within its limits."""

    async def run(shared: bool) -> int:
        engine = SimulatedEngine()
        if not shared:
            engine.batch_costs = None
        async with House(engine, kv_bytes=8 * 1024) as house:
            streams = [house.stream(10, 40) for _ in range(3)] + [house.stream(4000, 10)]
            most = 0
            while any(not reading.done() for _, reading in streams):
                await asyncio.sleep(0.02)
                most = max(most, house.scheduler.running)
            assert all(stream.error is None and stream.came_s for stream, _ in streams)
            return most

    assert simulated(monkeypatch, run(shared=False)) == 4
    assert simulated(monkeypatch, run(shared=True)) == 3


def test_nobody_decodes_then_chunks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> float:
        return await alone_s(1025)

    seconds = simulated(monkeypatch, run())
    assert seconds == pytest.approx(sum(chunk_s(256, 256 * i) for i in range(4)) + 41.1 * MS, rel=0.01)


@pytest.mark.parametrize("turn", range(12))
def test_whose_turn(turn: int) -> None:
    """Priority, then the shortest rest, then who came first; each fourth chunk is of who came first."""
    prompts = [Waiting(0, 900), Waiting(2, 500), Waiting(2, 300), Waiting(2, 300), Waiting(1, 10)]
    assert whose_turn(prompts, turn) == (0 if turn % 4 == 3 else 2)


def budget(**options: bool) -> PrefillBudget:
    return PrefillBudget(256, PrefillCosts({4: 0.040, 16: 0.052, 64: 0.152}), **options)


def test_a_gap_holds_what_its_budget_says() -> None:
    """A round of 60 ms leaves 102 ms: 36 tokens at first, fewer behind a long text, never none."""
    gaps = budget()
    gaps.gap(0.060)
    first = gaps.chunk(4000, 0)
    assert first == 36
    gaps.took(first, 0, 0.095)
    assert gaps.chunk(4000, 36) == 0
    for _ in range(20):
        gaps.gap(0.060)
        tokens = gaps.chunk(2000, 2000)
        gaps.took(tokens, 2000, 0.040 + 0.00306e-3 * tokens * 2000 + tokens * 1e-3)
    assert 2 <= tokens < first
    for _ in range(9):
        gaps.gap(0.001)
    assert gaps.chunk(4000, 0) == 2
    assert gaps.chunk(1, 0) == 1
    gaps.took(2, 0, 0.04)
    assert gaps.chunk(4000, 2) == 0


def test_a_chunk_fills_the_tiles_of_its_forward() -> None:
    """What a linear layer would be padded with costs nearly what it brings. A prompt's end is what it is."""
    assert [rows for rows in range(1, 70) if fills(rows)] == [*range(1, 17), 20, 24, 28, 32, 36, 48, 52, 56, 60, 64]
    for rows in (0, 3, 7, 8):
        gaps = budget()
        gaps.gap(0.060)
        tokens = gaps.chunk(4000, 0, rows)
        assert fills(rows + tokens)
        assert 28 <= tokens <= 36
        assert gaps.chunk(33, 0, rows) == 33
    gaps = budget()
    gaps.gap(0.001)
    assert gaps.chunk(4000, 0, 33) == 2


def test_what_streams_are_used_to_is_no_outlier_s_and_no_other_crowd_s() -> None:
    pace = Pace()
    assert pace.usual_s((1, 0)) is None
    for number in range(9):
        assert pace.usual_s((1, 0, 1)) is None
        pace.observe((1, 0, 1), 1.0 if number == 4 else 0.040 + number * 1e-4)
    assert pace.usual_s((1, 0, 1)) == pytest.approx(0.0404, abs=2e-4)
    assert pace.usual_s((1, 0)) is None
    assert pace.usual_s((4, 0, 1)) is None
    for _ in range(500):
        pace.observe((1, 0, 1), 0.050)
    assert pace.usual_s((1, 0, 1)) == 0.050
    pace.observe((1, 0), 0.030)
    assert pace.usual_s((1, 0, 1)) is None


def test_chunks_of_one_size_are_saved_for() -> None:
    """Where every chunk must have the same size, it comes when the gaps before it have paid for it."""
    gaps = budget(one_size=True)
    chunks = []
    for _ in range(12):
        gaps.gap(0.060)
        tokens = gaps.chunk(4000, 0)
        chunks.append(tokens)
        if tokens:
            gaps.took(tokens, 0, 0.550)
    assert set(chunks) == {0, 256}
    assert 1 <= chunks.count(256) <= 2
    for _ in range(9):
        gaps.gap(1.0)
    assert gaps.chunk(100, 0) == 100


def test_costs_of_chunks_follow_what_is_measured() -> None:
    costs = PrefillCosts({4: 0.040, 64: 0.160})
    assert costs.seconds(34, 0) == pytest.approx(0.100)
    for _ in range(30):
        costs.observe(64, 0, 0.32)
    assert costs.seconds(64, 0) == pytest.approx(0.32, rel=0.01)
    for _ in range(30):
        for behind in range(0, 2000, 64):
            costs.observe(64, behind, 0.32 + 2e-4 * behind)
    assert costs.seconds(64, 1000) == pytest.approx(0.52, rel=0.05)
    assert costs.seconds(64, 2000) == pytest.approx(0.72, rel=0.05)
    before = costs.seconds(64, 1000)
    costs.observe(64, 1000, 100.0)
    assert costs.seconds(64, 1000) <= 1.7 * before, "an outlier counts at most as twice the usual"
    assert PrefillCosts({4: 0.04}).seconds(8, 0) == pytest.approx(0.08)
    assert PrefillCosts({4: 0.04, 16: 0.03}).seconds(100, 0) > 0


def test_costs_of_chunks_that_seem_to_cost_nothing_stay_costs() -> None:
    """What a chunk adds to a forward is a difference of two noisy numbers."""
    costs = PrefillCosts({4: 0.0, 16: 0.0, 64: 0.0})
    for _ in range(500):
        for behind in (0, 1000):
            costs.observe(16, behind, -1.0)
    assert costs.seconds(16, 1000) >= 0.0
    for _ in range(500):
        costs.observe(16, 1000, 0.05)
    assert costs.seconds(16, 1000) == pytest.approx(0.05, rel=0.01)


class Broken(Exception):
    """What a kernel may say."""


def poisoned(slot: int) -> SimulatedEngine:
    """An engine whose forwards raise where this slot takes part from its fifth step on."""
    engine = SimulatedEngine()

    def fails(windows: Sequence[Window]) -> None:
        if any(window.slot == slot and window.first_step >= 5 for window in windows):
            raise Broken

    engine.fails = fails
    return engine


def test_bystanders_of_a_forward_that_fails_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: one request's failure takes the batch with it. Caches are gone; ids are not."""

    async def run() -> None:
        async with House(poisoned(1)) as house:
            streams = [house.stream(10 * (number + 1), 30) for number in range(4)]
            await asyncio.gather(*(reading for _, reading in streams))
            for number, (stream, _) in enumerate(streams):
                if number == 1:
                    assert isinstance(stream.error, InternalError)
                    assert len(stream.came_s) == 5
                else:
                    assert stream.error is None
                    assert stream.sequence.ledger.ids == [*_ids(10 * (number + 1) + 30)]
            assert house.engine.caches == {}
            assert house.scheduler.running == 0

    simulated(monkeypatch, run())


def test_the_second_forward_of_a_tick_outlives_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide sequence among plain ones makes two forwards a tick. Where the narrow one fails, the wide one's cache is gone."""
    engine = SimulatedEngine()
    failures = [True]

    def fails(windows: Sequence[Window]) -> None:
        if len(engine.forwards) > 20 and len(windows) > 4 and failures:
            failures.clear()
            raise Broken

    engine.fails = fails

    async def run() -> None:
        async with House(engine) as house:
            right = DelayedSource(
                lambda position, asked: [truth(p) for p in range(position, position + asked)], lambda _: 0.0
            )
            streams = [house.stream(12, 200, source=right, controller=Fixed(7, 0.5))]
            streams += [house.stream(12, 60) for _ in range(7)]
            await asyncio.gather(*(reading for _, reading in streams))
            assert all(stream.error is None for stream, _ in streams)
            assert streams[0][0].sequence.ledger.ids == _ids(212)

    simulated(monkeypatch, run())
    assert not failures
    assert (7, 1) in engine.forwards
    assert (1, 8) in engine.forwards


def _ids(count: int) -> list[int]:
    return [truth(position) for position in range(count)]


def test_company_that_fails_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: retrying for ever. Each goes alone but never together; the third time in company is the last."""
    engine = SimulatedEngine()

    def fails(windows: Sequence[Window]) -> None:
        if len(windows) > 1:
            raise Broken

    engine.fails = fails

    async def run() -> list[Stream]:
        async with House(engine) as house:
            streams = [house.stream(10, 30) for _ in range(3)]
            await asyncio.gather(*(reading for _, reading in streams))
            return [stream for stream, _ in streams]

    streams = simulated(monkeypatch, run())
    # The last one may have nobody left to fail with.
    assert [isinstance(stream.error, InternalError) for stream in streams].count(True) >= 2
    assert all(stream.came_s for stream in streams)
    assert engine.caches == {}
