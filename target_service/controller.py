"""What one sequence believes of its drafts, and what it asks for. Pure: numbers in, a plan out.

With s_j the share of questions whose first j drafts were all accepted and P(d) the share that brought d drafts, AUTO says what
asking for k would bring (`Hope`); `Crowd` decides for all sequences of a tick together (`widths`).

Where no k gains, it asks without waiting now and then, while plain steps run, and scores the late answers against what
the target wrote meanwhile: finding out that drafts pay again costs no forward and no wait.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from target_service.widths import Bid, Hope, Joint

_DECAY = 0.9
_SLOW_DECAY = 0.98
"""For what many sequences tell of a drafter."""
# What is believed before anything is known: four questions whose drafts are accepted with probability .7 each.
_PRIOR_QUESTIONS = 4.0
_PRIOR_ACCEPTANCE = 0.7
_MAX_PAUSE_ROUNDS = 32
_MOST_MISSES = 8
_REMEMBERED = 7
_MOST_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for the next round."""

    ask: int
    """Drafts to ask for; 0 asks nothing."""
    patience_s: float
    """How long the round may wait for the answer; 0 goes on at once and uses what comes late if it still fits."""
    reason: str
    """In one word, for the log and for rounds without drafts."""
    joint: Joint | None = None
    """What was weighed, for the log."""


class Controller(Protocol):
    """Decides for one sequence."""

    active: bool
    """Whether the last plan was to ask and wait."""

    def meet(self, drafter: str) -> None:
        """Says who answers from now on: what others saw of that drafter is where this sequence begins."""

    def hope(self, limit: int) -> Hope | None:
        """What asking for up to `limit` drafts would bring; None where that is not weighed."""

    def plan(self, limit: int, joint: Joint | None) -> Plan:
        """The next round. limit: most drafts that budget, cache and drafter allow; joint: what all who take part ask for, None
        where this one does not take part."""

    def bid(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> Bid:
        """What `available` drafts are worth, of which `agreed` more before them came true already.

        The first `sure` and the last `tail` of them are accepted with probability `chance` each, given those before.
        """

    def answered(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """An answer came, delay_s after its question, of which the drafter says it computed for computed_s."""

    def late(self) -> None:
        """A round waited as long as its plan said and went on without an answer."""

    def lost(self) -> None:
        """A question failed, or its deadline passed."""

    def scored(self, proposed: int, accepted: int) -> None:
        """A question's drafts met the truth: `accepted` of `proposed` agreed, by verifying or by hindsight."""


class Off:
    """Never asks."""

    def __init__(self, reason: str) -> None:
        """reason: as in `Plan`."""
        self.active = False
        self._reason = reason

    def meet(self, drafter: str) -> None:
        """Nothing to learn."""

    def hope(self, limit: int) -> Hope | None:
        """None."""
        return None

    def plan(self, limit: int, joint: Joint | None) -> Plan:
        """Nothing."""
        return Plan(0, 0.0, self._reason)

    def bid(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> Bid:
        """Its pending token."""
        return Bid()

    def answered(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """Nothing to learn."""

    def late(self) -> None:
        """Nothing to learn."""

    def lost(self) -> None:
        """Nothing to learn."""

    def scored(self, proposed: int, accepted: int) -> None:
        """Nothing to learn."""


class Fixed:
    """Always asks for the same number and waits, but never twice in a row for a drafter that does not answer.

    Patience halves with each question that is late or lost and returns with an answer in time, so that a dead drafter
    costs at most twice the timeout in a whole request.
    """

    def __init__(self, drafts: int, timeout_s: float) -> None:
        self.active = True
        self._drafts = drafts
        self._timeout_s = timeout_s
        self._patience_s = timeout_s
        self._acceptance = Acceptance(drafts)

    def meet(self, drafter: str) -> None:
        """All the same."""

    def hope(self, limit: int) -> Hope | None:
        """None: it asks whatever that brings."""
        return None

    def plan(self, limit: int, joint: Joint | None) -> Plan:
        """As many as fit."""
        return Plan(min(self._drafts, limit), self._patience_s, "fixed" if limit else "budget")

    def bid(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> Bid:
        """All of them."""
        return Bid(self._acceptance.tokens(available, agreed, sure, tail, chance), forced=True)

    def answered(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """Trust is back, if it came in time."""
        if delay_s <= self._timeout_s:
            self._patience_s = self._timeout_s

    def late(self) -> None:
        """Waits half as long next time."""
        self._patience_s /= 2

    def lost(self) -> None:
        """Waits half as long next time."""
        self._patience_s /= 2

    def scored(self, proposed: int, accepted: int) -> None:
        """Learns what its drafts are worth to those who would wait for them."""
        self._acceptance.score(proposed, accepted, self._drafts)


class Acceptance:
    """Decayed shares by position: of all questions, how many brought at least j drafts, and had the first j accepted."""

    def __init__(self, positions: int, prior: Acceptance | None = None, decay: float = _DECAY) -> None:
        """prior: what other sequences saw of the same drafter; it may have more or fewer positions."""
        self.questions = _PRIOR_QUESTIONS
        self._decay = decay
        self._misses = 0
        self.proposed: list[float] = []
        self.accepted: list[float] = []
        offered = stood = _PRIOR_QUESTIONS
        for j in range(positions):
            known = prior is not None and j < len(prior.proposed)
            share, survives = prior._ratio(j) if prior is not None and known else (1.0, _PRIOR_ACCEPTANCE)
            offered, stood = offered * share, stood * survives
            self.proposed.append(offered)
            self.accepted.append(min(offered, stood))

    def score(self, proposed: int, accepted: int, asked: int) -> None:
        """Books a question for `asked` drafts. Positions that were not asked for keep their conditional shares."""
        reach = min(max(asked, proposed), len(self.proposed))
        before = [self._ratio(j) for j in range(len(self.proposed))]
        # Wrong at once, again and again: what was learned before is out of date, so it fades faster.
        self._misses = min(self._misses + 1, _MOST_MISSES) if proposed and not accepted else 0
        decay: float = self._decay ** max(1, self._misses - 2)
        self.questions = self.questions * decay + 1.0
        for j in range(reach):
            self.proposed[j] = self.proposed[j] * decay + (1.0 if j < proposed else 0.0)
            self.accepted[j] = self.accepted[j] * decay + (1.0 if j < accepted else 0.0)
        for j in range(reach, len(self.proposed)):
            offered, stood = before[j]
            self.proposed[j] = (self.proposed[j - 1] if j else self.questions) * offered
            # What was accepted was offered, also where the two shares were learned from different questions.
            self.accepted[j] = min(self.proposed[j], (self.accepted[j - 1] if j else self.questions) * stood)

    def survival(self, j: int) -> float:
        """Share of questions whose first j drafts were all accepted; 1 for j = 0."""
        return self.accepted[j - 1] / self.questions if j else 1.0

    def offered(self, j: int) -> float:
        """Share of questions that brought at least j drafts; 1 for j = 0."""
        return self.proposed[j - 1] / self.questions if j else 1.0

    def tokens(
        self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0
    ) -> tuple[float, ...]:
        """tokens[d]: expected of a round with d of `available` drafts, given that `agreed` before them came true.

        sure, tail, chance: as in `Controller.bid`.
        """
        last = len(self.accepted)
        base = self.survival(min(agreed + sure, last))
        expected, stands = [1.0], 1.0
        for j in range(1, available + 1):
            if j <= sure or j > available - tail:
                stands *= chance
            else:
                survival = self.survival(min(agreed + j, last))
                stands = chance**sure * survival / base if base > 1e-9 else 0.0
            expected.append(expected[-1] + stands)
        return tuple(expected)

    def _ratio(self, j: int) -> tuple[float, float]:
        """What position j adds to the one before: share still offered, share still accepted."""
        offered = self.proposed[j - 1] if j else self.questions
        stood = self.accepted[j - 1] if j else self.questions
        return (
            min(1.0, self.proposed[j] / offered) if offered > 1e-9 else 0.0,
            min(1.0, self.accepted[j] / stood) if stood > 1e-9 else 0.0,
        )


class Profile:
    """What all sequences saw of one drafter: where a new one begins, and how long answers take now."""

    def __init__(self, delay_s: float) -> None:
        """delay_s: first guess of question to answer."""
        self.acceptance = Acceptance(_MOST_DRAFTS, decay=_SLOW_DECAY)
        self._first_delay_s = delay_s
        self._delays_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._drafts_s: deque[float] = deque(maxlen=_REMEMBERED)

    def follow(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """Follows the delay, apart into what each draft costs and the rest (round trip, queue)."""
        self._delays_s.append(max(0.0, delay_s - computed_s))
        if drafts:
            self._drafts_s.append(computed_s / drafts)

    @property
    def delay_s(self) -> float:
        """From question to answer, less computing. A median: one slow answer (a neighbour, a collection) says nothing."""
        return statistics.median_low(self._delays_s) if self._delays_s else self._first_delay_s

    @property
    def draft_s(self) -> float:
        """Computing of a draft."""
        return statistics.median_low(self._drafts_s) if self._drafts_s else 0.0


class Auto:
    """As many drafts as pay. One per sequence."""

    def __init__(self, drafts: int, *, timeout_s: float, profiles: Callable[[str], Profile]) -> None:
        """drafts: most a round; timeout_s: most that is ever waited; profiles: what is known of a drafter."""
        self.active = False
        self._drafts = drafts
        self._timeout_s = timeout_s
        self._profiles = profiles
        self._drafter: str | None = None
        self._pause = 0
        self._next_pause = 1
        self._asked = drafts
        self._missed = 0
        self.meet("")

    def meet(self, drafter: str) -> None:
        """Begins with what others saw of this drafter."""
        if drafter != self._drafter:
            self._drafter = drafter
            self._profile = self._profiles(drafter)
            self._acceptance = Acceptance(self._drafts, self._profile.acceptance)

    def hope(self, limit: int) -> Hope | None:
        """By position, from decayed counts."""
        top = min(self._drafts, limit)
        if top <= 0:
            return None
        shares = self._acceptance
        return Hope(
            survival=tuple(shares.survival(j) for j in range(1, top + 1)),
            offered=tuple(shares.offered(j) for j in range(1, top + 1)),
            delay_s=self._profile.delay_s,
            draft_s=self._profile.draft_s,
        )

    def plan(self, limit: int, joint: Joint | None) -> Plan:
        """Active: asks and waits. Watching: asks without waiting every few rounds, and not at all in between."""
        top = min(self._drafts, limit)
        self.active = joint is not None and top > 0
        if top <= 0:
            return Plan(0, 0.0, "budget")
        if joint is not None:
            self._pause, self._next_pause = 0, 1
            self._asked = min(joint.drafts, top)
            patience_s = min(self._timeout_s, max(2.0 * joint.wait_s + 0.002, joint.saved_s / 4))
            # Halved for each wait in vain: what was good until it fell silent must not be waited for at length.
            return Plan(self._asked, patience_s / 2**self._missed, "pays", joint)
        if self._pause > 0:
            self._pause -= 1
            return Plan(0, 0.0, "not_worth_it")
        self._pause = self._next_pause
        self._next_pause = min(_MAX_PAUSE_ROUNDS, self._next_pause * 2)
        self._asked = top
        return Plan(top, 0.0, "not_worth_it")

    def bid(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> Bid:
        """What they are worth, from decayed counts."""
        return Bid(self._acceptance.tokens(available, agreed, sure, tail, chance))

    def answered(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """Follows the delay."""
        self._missed = 0
        self._profile.follow(drafts, delay_s, computed_s)

    def late(self) -> None:
        """Waits half as long next time, unless the answer comes and says how late it was."""
        self._missed = min(self._missed + 1, 16)

    def lost(self) -> None:
        """A lost question brought nothing, after a long wait."""
        self._profile.follow(0, self._timeout_s, 0.0)
        self.scored(0, 0)

    def scored(self, proposed: int, accepted: int) -> None:
        """Learns, and lets others know."""
        self._acceptance.score(proposed, accepted, self._asked)
        self._profile.acceptance.score(proposed, accepted, self._asked)
