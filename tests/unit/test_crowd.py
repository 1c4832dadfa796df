"""Widths chosen together, who asks, what is worth waiting for: tables, oracles, and law L4 for batches on a simulated clock."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import MS, DelayedSource, Guess, House, SimulatedEngine, now_s, simulated, smollm2, truth

from target_service.controller import Acceptance, Auto, Fixed, Off, Profile
from target_service.costs import Costs
from target_service.crowd import Benefit, Crowd
from target_service.widths import Bid, Hope, Joint, ask_together, share, worth_waiting_s

PLAIN = Bid()


def sure(drafts: int) -> Bid:
    """All of them will be accepted."""
    return Bid(tuple(float(1 + d) for d in range(drafts + 1)))


def worthless(drafts: int) -> Bid:
    return Bid((1.0,) * (drafts + 1))


@pytest.mark.parametrize(
    ("bids", "drafts", "groups"),
    [
        ([PLAIN], (0,), 1),
        ([sure(7)], (7,), 1),
        ([worthless(7)], (0,), 1),
        ([PLAIN] * 8, (0,) * 8, 1),
        ([worthless(7)] * 8, (0,) * 8, 1),
        ([sure(7)] * 8, (7,) * 8, 1),
        # One of eight: seven times as many tokens for it are not worth a tick that takes three times as long for all.
        ([sure(7)] + [PLAIN] * 7, (0,) * 8, 1),
        # One of two: they are.
        ([sure(7), PLAIN], (7, 0), 1),
        # Half of eight: fewer drafts, all in one forward.
        ([sure(15)] * 4 + [PLAIN] * 4, (3,) * 4 + (0,) * 4, 1),
        # Forced drafts are verified, and others ride along for nothing.
        ([Bid((1.0, 1.0, 1.0, 1.0), forced=True), Bid((1.0, 1.1, 1.2, 1.3))], (3, 3), 1),
    ],
)
def test_widths(bids: list[Bid], drafts: tuple[int, ...], groups: int) -> None:
    found = share(bids, smollm2())
    assert found.drafts == drafts
    assert len(found.groups) == groups
    assert sorted(itertools.chain(*found.groups)) == list(range(len(bids)))
    widest = [max(found.drafts[i] for i in group) for group in found.groups]
    assert widest == sorted(widest)


def test_two_forwards_where_one_would_be_wide_for_one_alone() -> None:
    """One of eight must verify seven drafts: 60 and 61 ms for two forwards are less than 179 for one. The narrow one first."""
    found = share([PLAIN, PLAIN, Bid(sure(7).tokens, forced=True), *[PLAIN] * 5], smollm2())
    assert found.groups == ((0, 1, 3, 4, 5, 6, 7), (2,))
    assert found.drafts == (0, 0, 7, 0, 0, 0, 0, 0)
    assert found.seconds == pytest.approx(smollm2().batch_s(7, 1) + smollm2().batch_s(1, 8))


def chances() -> st.SearchStrategy[Bid]:
    return st.lists(st.floats(0.0, 1.0), max_size=6).map(
        lambda gains: Bid(tuple(itertools.accumulate(sorted(gains, reverse=True), initial=1.0)))
    )


@given(st.lists(chances(), min_size=1, max_size=4))
def test_no_other_common_width_would_be_better(bids: list[Bid]) -> None:
    costs = smollm2()
    found = share(bids, costs)
    for width in range(7):
        drafts = [min(width, bid.most) for bid in bids]
        seconds = costs.batch_s(len(bids), 1 + max(drafts)) if any(drafts) else costs.plain_batch_s(len(bids))
        score = sum(math.log(bid.tokens[d]) for bid, d in zip(bids, drafts, strict=True)) - len(bids) * math.log(
            seconds
        )
        assert score <= found.score + 1e-9
    assert all(0 <= d <= bid.most for d, bid in zip(found.drafts, bids, strict=True))


@given(st.lists(chances(), min_size=1, max_size=4))
def test_where_forwards_are_not_shared_each_has_its_own_best(bids: list[Bid]) -> None:
    costs = Costs({1: 41 * MS, 4: 52 * MS, 8: 60 * MS})
    found = share(bids, costs)
    assert found.drafts == tuple(share([bid], costs).drafts[0] for bid in bids)
    assert found.groups == (tuple(range(len(bids))),)
    assert found.seconds == pytest.approx(sum(share([bid], costs).seconds for bid in bids))


def test_a_full_tile_is_preferred_to_a_step_behind_it() -> None:
    """The costs are a staircase: five rows cost more than eight here, so eight it is."""
    costs = Costs({1: 40 * MS, 4: 50 * MS, 5: 70 * MS, 8: 60 * MS, 9: 90 * MS})
    assert share([Bid(tuple(1 + 0.9 * d for d in range(10)))], costs).drafts == (7,)


def hope(rate: float, delay_ms: float = 2.0, drafts: int = 15) -> Hope:
    survival = tuple(rate ** (j + 1) for j in range(drafts))
    return Hope(survival, (1.0,) * drafts, delay_ms * MS, 0.0)


def test_who_asks_is_who_brings_more_than_it_costs_all() -> None:
    costs = smollm2()
    alone = ask_together([hope(0.8)], 1, costs)
    assert (alone.askers, alone.gain > 1.5) == ((0,), True)
    crowded = ask_together([hope(0.8)], 8, costs)
    assert crowded.gain < 1.0, "one of eight asks nothing"
    mixed = ask_together([hope(0.95), hope(0.0), hope(0.95), hope(0.02)], 4, costs)
    assert set(mixed.askers) >= {0, 2}
    assert mixed.gain > 1.2
    assert ask_together([hope(0.9, delay_ms=500)], 1, costs).gain < 1.0
    assert ask_together([], 3, costs) == Joint(plain_s=costs.plain_batch_s(3))


def test_a_width_that_is_nearly_as_good_is_kept() -> None:
    costs = smollm2()
    best = ask_together([hope(0.8)], 1, costs)
    near = best.drafts + 1
    assert ask_together([hope(0.8)], 1, costs, near).drafts == near
    assert ask_together([hope(0.8)], 1, costs, 1).drafts == best.drafts


def test_one_formula_for_one_and_for_many() -> None:
    """Where all are alike, the gain of eight is that of one with eight's costs."""
    joint = ask_together([hope(0.9)] * 8, 8, smollm2())
    tokens = sum(0.9**j for j in range(joint.drafts + 1))
    seconds = smollm2().batch_s(8, 1 + joint.drafts) + 2 * MS
    assert joint.gain == pytest.approx(tokens / seconds * smollm2().plain_batch_s(8))


@pytest.mark.parametrize(("others", "waits"), [(1, True), (3, True), (7, False)])
def test_the_wait_for_late_drafts_follows_from_what_they_bring(others: int, waits: bool) -> None:
    """Seven streams do not wait at all for the drafts of an eighth; of two, one waits for the other's."""
    costs = smollm2()
    here = [PLAIN] * (1 + others)
    seconds = worth_waiting_s(here, [sure(7), *here[1:]], costs)
    assert (seconds > 0) == waits
    assert worth_waiting_s(here, [worthless(7), *here[1:]], costs) == 0.0
    # After so long, going on at once would have been as good.
    if waits:
        late = share([sure(7), *here[1:]], costs)
        gained = math.exp(sum(math.log(8.0) for _ in range(1)) / (1 + others))
        best = max(
            math.exp(math.log(1 + w) / (1 + others)) * costs.plain_batch_s(1 + others)
            - costs.batch_s(1 + others, 1 + w)
            for w in range(1, 8)
        )
        assert seconds <= best + 1e-9
        assert late.seconds > 0 < gained


def test_what_drafting_really_brought_decides_in_the_end() -> None:
    """Below .98 it goes off, for pauses that double; what it brings afterwards is measured anew."""
    benefit = Benefit()
    pauses = []
    for _ in range(3):
        rounds = 0
        while not benefit.off:
            benefit.book(0.97, 1.0, drafting=True)
            rounds += 1
        assert rounds == 24
        pause = 0
        while benefit.off:
            benefit.book(1.0, 1.0, drafting=False)
            pause += 1
        pauses.append(pause)
    assert pauses == [32, 64, 128]
    benefit.book(1.0, 8.0, drafting=True)
    assert benefit.off, "much was lost at once"
    for _ in range(256):
        benefit.book(1.0, 1.0, drafting=False)
    for _ in range(200):
        benefit.book(1.5, 1.0, drafting=True)
        assert not benefit.off
    assert benefit.value == pytest.approx(1.5)
    for _ in range(1000):
        benefit.book(0.5, 1.0, drafting=False)
    assert not benefit.off, "plain rounds say nothing of drafts"


def test_a_new_sequence_begins_with_what_others_saw_of_its_drafter() -> None:
    good, bad = Profile(3 * MS), Profile(3 * MS)
    profiles = {"good": good, "bad": bad, "": Profile(3 * MS)}
    for name, accepted in (("good", 15), ("bad", 0)):
        teacher = Auto(16, timeout_s=0.5, profiles=profiles.__getitem__)
        teacher.meet(name)
        for _ in range(100):
            teacher.answered(15, 10 * MS, 8 * MS)
            teacher.scored(15, accepted)
    crowd = Crowd(smollm2())
    for name in profiles:
        fresh = Auto(8, timeout_s=0.5, profiles=profiles.__getitem__)
        fresh.meet(name)
        plan = crowd.plan([(fresh, 8)], 1)[0]
        assert plan.reason == ("not_worth_it" if name == "bad" else "pays")
        if name == "good":
            assert plan.ask >= 7
            assert plan.joint is not None
            assert plan.joint.wait_s == pytest.approx((2 + plan.ask * 8 / 15) * MS)


def test_priors_of_more_or_fewer_positions_fit() -> None:
    wide = Acceptance(64)
    for _ in range(50):
        wide.score(64, 32, 64)
    assert Acceptance(3, wide).survival(3) == pytest.approx(wide.survival(3))
    longer = Acceptance(80, Acceptance(4))
    assert longer.survival(80) <= longer.survival(4)


def test_plans_of_a_crowd_are_one_decision() -> None:
    """Askers get the same number; off and fixed controllers go their own way."""
    crowd = Crowd(smollm2())
    known = Profile(2 * MS)
    autos = [Auto(16, timeout_s=0.5, profiles=lambda _: known) for _ in range(3)]
    for one in autos[:2]:
        for _ in range(60):
            one.scored(16, 16)
    for _ in range(60):
        autos[2].scored(16, 0)
    plans = crowd.plan([(autos[0], 16), (autos[1], 5), (autos[2], 16), (Off("off"), 16), (Fixed(2, 0.5), 9)], 5)
    assert plans[0].reason == plans[1].reason == "pays"
    assert plans[1].ask == min(5, plans[0].ask)
    assert plans[3].ask == 0
    assert plans[4].ask == 2
    assert plans[0].joint is not None
    assert plans[0].joint.gain > 1.05


# Law L4 in company: the real scheduler and round loop on a simulated clock.


def guesses(rate: float, seed: int) -> Guess:
    luck = random.Random(seed)
    return lambda position, asked: [truth(p) if luck.random() < rate else 0 for p in range(position, position + asked)]


Sources = Callable[[int], DelayedSource | None]
TOKENS = 250


async def _serve(engine: SimulatedEngine, count: int, source: Sources) -> float:
    async with House(engine) as house:
        began_s = now_s()
        streams = [house.stream(12, TOKENS, source=source(number)) for number in range(count)]
        await asyncio.gather(*(reading for _, reading in streams))
        for stream, _ in streams:
            counts = stream.sequence.counts
            assert stream.error is None
            assert stream.sequence.ledger.ids == [truth(position) for position in range(12 + TOKENS)]
            assert counts.drafted == counts.accepted + counts.rejected + counts.cut
        return now_s() - began_s


def speedup(monkeypatch: pytest.MonkeyPatch, count: int, source: Sources, pace: float = 1.0) -> float:
    plain = simulated(monkeypatch, _serve(SimulatedEngine(), count, lambda _: None))
    return plain / simulated(monkeypatch, _serve(SimulatedEngine(pace=pace), count, source))


@pytest.mark.parametrize("delay_ms", [2, 30, 300, math.inf])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_poor_drafts_cost_a_batch_at_most_five_percent(
    monkeypatch: pytest.MonkeyPatch, count: int, rate: float, delay_ms: float
) -> None:
    """Kind of fault: rows that cost more than they bring, or a wait that nobody gains from. L4 for batches."""
    found = speedup(monkeypatch, count, lambda number: DelayedSource(guesses(rate, number), lambda _: delay_ms * MS))
    assert found >= 0.95


@pytest.mark.parametrize(("count", "least"), [(1, 2.5), (2, 2.2), (4, 1.7), (8, 1.4)])
def test_good_drafts_pay_in_a_batch(monkeypatch: pytest.MonkeyPatch, count: int, least: float) -> None:
    found = speedup(monkeypatch, count, lambda number: DelayedSource(guesses(0.95, number), lambda _: 3 * MS))
    assert found >= least


def test_one_silent_drafter_of_eight_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: a batch that waits for its slowest drafter. Seven go on as if the eighth asked nobody."""

    def source(silent: DelayedSource | None) -> Sources:
        return lambda number: DelayedSource(guesses(0.95, number), lambda _: 3 * MS) if number else silent

    good = speedup(monkeypatch, 8, source(None))
    assert speedup(monkeypatch, 8, source(DelayedSource(guesses(1.0, 0), lambda _: math.inf))) >= 0.95 * good


@pytest.mark.parametrize("count", [1, 8])
def test_a_drafter_that_slows_the_target_itself_is_found_out(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Kind of fault: trusting the table. Drafted forwards take three times what it says (a drafter on the same cores)."""
    found = speedup(monkeypatch, count, lambda number: DelayedSource(guesses(0.6, number), lambda _: 3 * MS), pace=3.0)
    assert found >= 0.93
