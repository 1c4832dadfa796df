"""Law L4 on a simulated clock: the real `Sequence` and controllers, a scripted drafter, and costs from a measured table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from draftwire.rollback import Rollback
from draftwire.sampling import Sampler
from target_service.controller import Acceptance, Auto, Controller, Fixed, Off, Plan, Profile
from target_service.costs import Costs
from target_service.crowd import Crowd
from target_service.drafts import Answer, Lost, SourceReport
from target_service.ledger import Ledger
from target_service.params import Choosing, Drafting, Generation, Stopping
from target_service.rounds import ask_all, commit_round, deliver
from target_service.sequence import Sequence as LiveSequence
from target_service.window import Choice, Window

MS = 1e-3
TABLE = {1: 37.7, 2: 41.3, 3: 48.5, 4: 49.9, 5: 54.1, 6: 61.8, 8: 53.8, 9: 60.0, 12: 65.3, 16: 63.6}
SMOLLM2 = {rows: ms * MS for rows, ms in TABLE.items()}
"""Seconds of a forward of the default model on two cores, by rows."""
PLAIN_S = TABLE[1] * MS
"""A plain step that was begun ahead."""
GAP_S = 2.7 * MS
"""What a round takes beside a forward that was not."""
TOKENS = 400
FIRST_DELAY_S = 3 * MS
TIMEOUT_S = 0.5
MOST = 16


@dataclass
class Clock:
    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


def truth(position: int) -> int:
    """What the target says at a position: no pattern that a wrong draft could meet by chance."""
    return 1 + (position * 7919) % 997


Guess = Callable[[int, int], Sequence[int]]
"""(position of the first draft, drafts asked for) -> drafts."""


def guesses(rate: Callable[[int], float], seed: int = 7) -> Guess:
    """A drafter that is right at each position with the probability that `rate` gives it."""
    luck = random.Random(seed)

    def guess(position: int, asked: int) -> list[int]:
        return [truth(p) if luck.random() < rate(p) else 0 for p in range(position, position + asked)]

    return guess


@dataclass
class ScriptedDrafter:
    """A drafter that answers after `delay_s`, or, where that is infinite, fails after `deadline_s`."""

    clock: Clock
    guess: Guess
    delay_s: Callable[[int], float]
    deadline_s: float = TIMEOUT_S
    computed_s: float = 0.0
    limit: int = 64
    questions: list[tuple[int, int]] = field(default_factory=list)
    _running: tuple[float, Answer | Lost] | None = None
    _inbox: Answer | Lost | None = None

    @property
    def asking(self) -> bool:
        self._arrive()
        return self._running is not None

    @property
    def ready(self) -> bool:
        return not self.asking

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        assert self.ready, "a question is running"
        assert 1 <= drafts <= self.limit
        position, now_s = len(ids), self.clock.now_s
        self.questions.append((position, drafts))
        delay_s = self.delay_s(position)
        if delay_s > self.deadline_s:
            self._running = (now_s + self.deadline_s, Lost("deadline"))
            return
        answer = Answer(position, tuple(self.guess(position, drafts)), delay_s, min(delay_s, self.computed_s))
        self._running = (now_s + delay_s, answer)

    def take(self) -> Answer | Lost | None:
        self._arrive()
        came, self._inbox = self._inbox, None
        return came

    def _arrive(self) -> None:
        """What has come by now takes the place of what was not taken, as in a real source."""
        if self._running is not None and self.clock.now_s >= self._running[0]:
            self._inbox, self._running = self._running[1], None

    async def arrival(self) -> None:
        raise AssertionError("the simulation waits itself")

    @property
    def due_s(self) -> float:
        return self._running[0] if self._running is not None else float("inf")

    def scored(self, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed

    def report(self) -> SourceReport:
        return SourceReport(drafter_id="scripted", missing="lost")

    def close(self) -> None:
        pass


@dataclass
class Run:
    """How a simulated request went."""

    total_s: float
    waited_s: float
    round_ends: list[tuple[float, int]]
    """(seconds since the first round, tokens so far)."""
    widths: list[int]
    drafter: ScriptedDrafter
    sequence: LiveSequence

    def slowdown(self) -> float:
        return self.total_s / (TOKENS * PLAIN_S)

    def speedup(self, first: int = 0, last: int = TOKENS) -> float:
        """Tokens [first, last) against plain decoding of as many."""
        marks = [(0.0, 0), *self.round_ends]
        begin = next(mark for mark in marks if mark[1] >= first)
        end = next(mark for mark in marks if mark[1] >= last)
        return (end[1] - begin[1]) * PLAIN_S / (end[0] - begin[0])


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    guess: Guess,
    delay_s: Callable[[int], float],
    *,
    controller: Callable[[], Controller] | None = None,
    tokens: int = TOKENS,
    computed_s: float = 0.0,
) -> Run:
    """One stream, as the scheduler and the round loop run it, except that time is `Clock`."""
    clock = Clock()
    monkeypatch.setattr("target_service.sequence.time", SimpleNamespace(monotonic=clock.monotonic))
    costs = Costs(SMOLLM2)
    crowd = Crowd(costs)
    make = controller or auto
    generation = Generation(
        request_id="simulated",
        prompt=(1, 2, 3),
        choosing=Choosing(sampler=Sampler()),
        stopping=Stopping(max_tokens=tokens),
        drafting=Drafting(max_drafts=MOST),
    )
    ledger = Ledger(generation.prompt, generation.stopping, lambda _: b"x")
    sequence = LiveSequence(generation, ledger, make())
    drafter = ScriptedDrafter(clock, guess, delay_s, computed_s=computed_s)
    sequence.admit(0, Rollback("trim", ""), drafter)
    engine: Any = SimpleNamespace(truncate=lambda slot, length: None)
    retired: list[LiveSequence] = []
    scheduler: Any = SimpleNamespace(retire=retired.append)
    run = Run(0.0, 0.0, [], [], drafter, sequence)
    begun_s, ahead = clock.now_s, False
    while not retired:
        waited_s, tick_s, before = run.waited_s, clock.now_s, ledger.step
        while (left_s := sequence.patience_left_s(clock.now_s)) > 0:
            wait_s = min(left_s, max(0.0, drafter.due_s - clock.now_s))
            clock.now_s += wait_s
            run.waited_s += wait_s
        sequence.collect()
        window = sequence.window(crowd.share([sequence.bid()]).drafts[0])
        assert not (ahead and window.drafts), "a forward that was begun ahead has no drafts"
        forward_s = costs_of(window)
        clock.now_s += forward_s
        if not ahead:
            clock.now_s += GAP_S
            costs.observe_gap(GAP_S)
        ahead = window.ahead
        costs.observe(window.rows, forward_s)
        position = ledger.prompt_length + window.first_step
        choice = Choice(tuple(truth(position + row) for row in range(window.rows)), None, forward_s, clock.now_s)
        committed = commit_round(engine, sequence, window, choice)
        drafting = bool(window.drafts) or run.waited_s > waited_s
        crowd.book(ledger.step - before, 1, clock.now_s - tick_s, drafting=drafting)
        if committed.finish is None:
            ask_all(scheduler, crowd, [sequence], 1)
        deliver(scheduler, sequence, committed)
        run.round_ends.append((clock.now_s - begun_s, ledger.step))
        run.widths.append(window.rows)
        while not sequence.outbox.empty():
            sequence.outbox.get_nowait()
    run.total_s = clock.now_s - begun_s
    counts = sequence.counts
    assert counts.emitted == tokens == ledger.completion_tokens
    assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    assert [truth(p) for p in range(3, 3 + tokens)] == ledger.ids[3:]
    return run


def costs_of(window: Window) -> float:
    return Costs(SMOLLM2).forward_s(window.rows)


def auto(profile: Profile | None = None) -> Auto:
    known = profile or Profile(FIRST_DELAY_S)
    return Auto(MOST, timeout_s=TIMEOUT_S, profiles=lambda _: known)


def planned(crowd: Crowd, controller: Controller, limit: int) -> Plan:
    """What one sequence alone asks for."""
    return crowd.plan([(controller, limit)], 1)[0]


def always(value: float) -> Callable[[int], float]:
    return lambda _: value


def nothing(position: int, asked: int) -> list[int]:
    return []


@pytest.mark.parametrize("delay_ms", [1.5, 10, 50, 200])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6])
def test_poor_drafts_cost_at_most_five_percent(monkeypatch: pytest.MonkeyPatch, rate: float, delay_ms: float) -> None:
    """Kind of fault: drafting makes it slower. Neither wrong nor slow drafts may cost the stream more than 5 %."""
    for seed in range(3):
        run = simulate(monkeypatch, guesses(always(rate), seed), always(delay_ms * MS))
        assert run.slowdown() <= 1.05


@pytest.mark.parametrize("delay_ms", [1.5, 50, 200])
def test_a_drafter_that_finds_nothing_costs_at_most_five_percent(
    monkeypatch: pytest.MonkeyPatch, delay_ms: float
) -> None:
    run = simulate(monkeypatch, nothing, always(delay_ms * MS))
    assert run.slowdown() <= 1.05
    assert run.sequence.counts.drafted == 0


def test_a_dead_drafter_costs_at_most_five_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind of fault: a fixed wait for the other service. A drafter that never answers is not waited for twice at length."""
    run = simulate(monkeypatch, nothing, always(float("inf")))
    assert run.slowdown() <= 1.05
    assert run.waited_s <= 0.05


@pytest.mark.parametrize(
    ("rate", "delay_ms", "least"), [(0.8, 1.5, 1.7), (1.0, 1.5, 3.0), (0.8, 10, 1.5), (1.0, 50, 2.0)]
)
def test_good_drafts_pay(monkeypatch: pytest.MonkeyPatch, rate: float, delay_ms: float, least: float) -> None:
    for seed in range(3):
        run = simulate(monkeypatch, guesses(always(rate), seed), always(delay_ms * MS))
        assert 1 / run.slowdown() >= least


def test_late_answers_that_still_fit_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A perfect drafter that needs six plain steps for an answer is not worth waiting for at first, and is never harmful."""
    run = simulate(monkeypatch, guesses(always(1.0)), always(200 * MS))
    assert 1 / run.slowdown() >= 1.3
    assert run.sequence.counts.accepted == run.sequence.counts.drafted > 0


def test_a_drafter_that_becomes_good_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    half = 3 + TOKENS // 2
    run = simulate(monkeypatch, guesses(lambda p: 1.0 if p >= half else 0.0), always(1.5 * MS))
    assert run.speedup(last=200) >= 0.95
    assert run.speedup(first=300) >= 3.0


def test_a_drafter_that_becomes_bad_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perfect for 200 tokens and wrong from then on: what was learned fades within a few rounds."""
    half = 3 + TOKENS // 2
    run = simulate(monkeypatch, guesses(lambda p: 0.0 if p >= half else 1.0), always(1.5 * MS))
    assert run.speedup(last=200) >= 3.0
    assert run.speedup(first=200) >= 0.94
    assert run.speedup(first=300) >= 0.95


def test_a_good_drafter_that_dies_is_hardly_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    half = 3 + TOKENS // 2
    run = simulate(monkeypatch, guesses(always(1.0)), lambda p: 1.5 * MS if p < half else float("inf"))
    assert run.speedup(first=200) >= 0.95


def test_probes_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing gains, the pauses between questions double up to 32 rounds; they never end."""
    run = simulate(monkeypatch, guesses(always(0.0)), always(1.5 * MS), tokens=1000)
    positions = [position for position, _ in run.drafter.questions]
    gaps = [after - before for before, after in pairwise(positions)]
    assert max(gaps[:8]) <= 2
    assert all(20 <= gap <= 40 for gap in gaps[-10:])


def test_the_first_round_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, guesses(always(1.0)), always(1.5 * MS))
    assert run.round_ends[0][0] == pytest.approx(SMOLLM2[1] + GAP_S)


@pytest.mark.parametrize("drafts", [1, 4, 16])
def test_fixed_waits_at_most_twice_the_timeout_for_a_silent_drafter(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """Kind of fault: a drafter lost for good stalls the stream. The whole request loses two timeouts at most."""
    run = simulate(monkeypatch, nothing, always(float("inf")), controller=lambda: Fixed(drafts, TIMEOUT_S))
    assert run.waited_s <= 2 * TIMEOUT_S
    assert run.sequence.counts.drafted == 0


def test_fixed_asks_for_as_many_as_fit_and_verifies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(
        monkeypatch, guesses(always(0.0)), always(1.5 * MS), controller=lambda: Fixed(4, TIMEOUT_S), tokens=20
    )
    # Always wrong: one token a round; the last rounds have room for fewer drafts, the very last for none. The first two
    # rounds are plain: nothing was asked before the first, which begins the second ahead.
    assert run.widths == [1, 1, *[5] * 14, 4, 3, 2, 1]
    assert run.drafter.questions[-1] == (3 + 18, 1)


def test_fixed_trusts_again_after_an_answer_in_time() -> None:
    fixed = Fixed(4, 0.4)
    assert fixed.plan(9, None) == Plan(4, 0.4, "fixed")
    fixed.late()
    fixed.lost()
    assert fixed.plan(9, None).patience_s == pytest.approx(0.1)
    fixed.answered(4, 0.5, 0.0)
    assert fixed.plan(9, None).patience_s == pytest.approx(0.1)
    fixed.answered(4, 0.3, 0.0)
    assert fixed.plan(2, None) == Plan(2, 0.4, "fixed")
    assert fixed.plan(0, None) == Plan(0, 0.4, "budget")


def test_off_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, guesses(always(1.0)), always(1.5 * MS), controller=lambda: Off("off"))
    assert run.drafter.questions == []
    assert set(run.widths) == {1}


@pytest.mark.parametrize("delay_ms", [1.5, 50])
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_no_patience_is_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch, rate: float, delay_ms: float) -> None:
    controller = Auto(MOST, timeout_s=0.02, profiles=lambda _: Profile(10.0))
    plan = planned(Crowd(Costs(SMOLLM2)), controller, MOST)
    assert plan.patience_s <= 0.02


def test_auto_plans_nothing_without_room() -> None:
    crowd = Crowd(Costs(SMOLLM2))
    assert planned(crowd, auto(), 0).ask == 0
    assert planned(crowd, Auto(0, timeout_s=1.0, profiles=lambda _: Profile(0.0)), 5).ask == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 64])
def test_auto_never_asks_for_more_than_the_limit(limit: int) -> None:
    plan = planned(Crowd(Costs(SMOLLM2)), auto(), limit)
    assert 1 <= plan.ask <= min(limit, MOST)


def test_a_good_drafter_is_asked_for_widths_that_are_cheap() -> None:
    """The costs are a staircase: 8 rows cost less than 6, so a steady .8 leads to 7 drafts, never to 5."""
    crowd, controller = Crowd(Costs(SMOLLM2)), auto()
    luck = random.Random(3)
    for _ in range(60):
        asked = planned(crowd, controller, MOST).ask
        accepted = next((i for i in range(asked) if luck.random() >= 0.8), asked)
        controller.answered(asked, 1.5 * MS, 0.0)
        controller.scored(asked, accepted)
        assert planned(crowd, controller, MOST).ask in (3, 7, 15, 16)


def test_a_tick_verifies_nothing_of_a_worthless_drafter_and_all_of_a_perfect_one() -> None:
    crowd, worthless, perfect = Crowd(Costs(SMOLLM2)), auto(), auto()
    for _ in range(40):
        worthless.scored(16, 0)
        perfect.scored(16, 16)
    assert crowd.share([worthless.bid(16, 0)]).drafts == (0,)
    assert crowd.share([perfect.bid(15, 0)]).drafts == (15,)
    assert crowd.share([perfect.bid(8, 7)]).drafts[0] in (7, 8)
    assert crowd.share([perfect.bid(0, 0)]).drafts == (0,)


def test_bids_survive_more_positions_than_were_learned() -> None:
    """A drafter that sends too much, or an offer whose agreed part is long, indexes nothing out of bounds."""
    crowd, controller = Crowd(Costs(SMOLLM2)), Auto(4, timeout_s=1.0, profiles=lambda _: Profile(0.0))
    assert 0 <= crowd.share([controller.bid(64, 3)]).drafts[0] <= 64
    assert 0 <= crowd.share([controller.bid(2, 64)]).drafts[0] <= 2
    controller.scored(64, 64)
    controller.scored(64, 0)


def test_acceptance_keeps_survival_falling_and_inside_zero_and_one() -> None:
    luck = random.Random(11)
    shares = Acceptance(8)
    for _ in range(500):
        asked = luck.randint(1, 8)
        proposed = luck.randint(0, asked)
        shares.score(proposed, luck.randint(0, proposed), asked)
        survival = [shares.survival(j) for j in range(9)]
        offered = [shares.offered(j) for j in range(9)]
        assert survival[0] == offered[0] == 1.0
        assert all(0.0 <= after <= before + 1e-9 for before, after in pairwise(survival))
        assert all(0.0 <= after <= before + 1e-9 for before, after in pairwise(offered))
        assert all(s <= o + 1e-9 for s, o in zip(survival, offered, strict=True))


def test_short_questions_do_not_forget_the_positions_that_they_skip() -> None:
    """Asking for 2 of 8 says nothing about drafts 3 to 8: their conditional shares stay."""
    shares = Acceptance(8)
    for _ in range(50):
        shares.score(8, 8, 8)
    for _ in range(50):
        shares.score(2, 2, 2)
    assert shares.survival(8) >= 0.95


def test_a_prior_from_other_sequences_carries_its_shares_with_little_weight() -> None:
    seen = Acceptance(4)
    for _ in range(100):
        seen.score(4, 2, 4)
    fresh = Acceptance(4, prior=seen)
    assert [fresh.survival(j) for j in range(5)] == pytest.approx([seen.survival(j) for j in range(5)])
    for _ in range(8):
        fresh.score(4, 4, 4)
    assert fresh.survival(4) > 0.5
