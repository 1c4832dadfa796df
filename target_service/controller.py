"""How many drafts to ask for, and how long to wait for them. Pure: numbers in, a plan out.

AUTO maximises expected tokens a second from measured costs. With s_j the share of questions whose first j drafts were all
accepted, P(d) the share that brought d drafts, and W(k) the wait:

    rate(k) = (1 + s_1 + ... + s_k) / (W(k) + sum_d P(min(d, k)) T(1 + d)),        rate(0) = 1 / T_plain

Where no k gains, it asks without waiting now and then, while plain steps run, and scores the late answers against what
the target wrote meanwhile: finding out that drafts pay again costs no forward and no wait.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from target_service.costs import Costs

_DECAY = 0.9
_GAIN_TO_START = 1.05
_GAIN_TO_STAY = 1.0
# What is believed before anything is known: four questions whose drafts are accepted with probability .7 each.
_PRIOR_QUESTIONS = 4.0
_PRIOR_ACCEPTANCE = 0.7
_MAX_PAUSE_ROUNDS = 32
_MOST_MISSES = 8
_REMEMBERED = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for the next round."""

    ask: int
    """Drafts to ask for; 0 asks nothing."""
    patience_s: float
    """How long the round may wait for the answer; 0 goes on at once and uses what comes late if it still fits."""
    reason: str
    """In one word, for the log and for rounds without drafts."""


class Controller(Protocol):
    """Decides for one sequence."""

    def plan(self, limit: int) -> Plan:
        """The next round. limit: most drafts that budget, cache and drafter allow."""

    def use(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> int:
        """How many of `available` drafts to verify, of which `agreed` more before them came true already.

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
        self._reason = reason

    def plan(self, limit: int) -> Plan:
        """Nothing."""
        return Plan(0, 0.0, self._reason)

    def use(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> int:
        """None."""
        return 0

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
        self._drafts = drafts
        self._timeout_s = timeout_s
        self._patience_s = timeout_s

    def plan(self, limit: int) -> Plan:
        """As many as fit."""
        return Plan(min(self._drafts, limit), self._patience_s, "fixed" if limit else "budget")

    def use(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> int:
        """All of them."""
        return available

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
        """Nothing to learn."""


class Acceptance:
    """Decayed shares by position: of all questions, how many brought at least j drafts, and had the first j accepted."""

    def __init__(self, positions: int, prior: Acceptance | None = None) -> None:
        """prior: what other sequences saw of the same drafter."""
        self.questions = _PRIOR_QUESTIONS
        self._misses = 0
        if prior is None:
            self.proposed = [_PRIOR_QUESTIONS] * positions
            self.accepted = [_PRIOR_QUESTIONS * _PRIOR_ACCEPTANCE ** (j + 1) for j in range(positions)]
        else:
            scale = _PRIOR_QUESTIONS / prior.questions
            self.proposed = [count * scale for count in prior.proposed]
            self.accepted = [count * scale for count in prior.accepted]

    def score(self, proposed: int, accepted: int, asked: int) -> None:
        """Books a question for `asked` drafts. Positions that were not asked for keep their conditional shares."""
        reach = min(max(asked, proposed), len(self.proposed))
        before = [self._ratio(j) for j in range(len(self.proposed))]
        # Wrong at once, again and again: what was learned before is out of date, so it fades faster.
        self._misses = min(self._misses + 1, _MOST_MISSES) if proposed and not accepted else 0
        decay: float = _DECAY ** max(1, self._misses - 2)
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

    def _ratio(self, j: int) -> tuple[float, float]:
        """What position j adds to the one before: share still offered, share still accepted."""
        offered = self.proposed[j - 1] if j else self.questions
        stood = self.accepted[j - 1] if j else self.questions
        return (
            min(1.0, self.proposed[j] / offered) if offered > 1e-9 else 0.0,
            min(1.0, self.accepted[j] / stood) if stood > 1e-9 else 0.0,
        )


class Auto:
    """As many drafts as pay. One per sequence; `acceptance` may begin with what the drafter did elsewhere."""

    def __init__(self, costs: Costs, drafts: int, *, delay_s: float, timeout_s: float, acceptance: Acceptance) -> None:
        """drafts: most a round; delay_s: first guess of question to answer; timeout_s: most that is ever waited."""
        self._costs = costs
        self._drafts = drafts
        self._first_delay_s = delay_s
        self._delays_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._drafts_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._timeout_s = timeout_s
        self._acceptance = acceptance
        self._active = False
        self._pause = 0
        self._next_pause = 1
        self._asked = drafts
        self._missed = 0

    def plan(self, limit: int) -> Plan:
        """Active: asks and waits. Watching: asks without waiting every few rounds, and not at all in between."""
        top = min(self._drafts, limit)
        if top <= 0:
            return Plan(0, 0.0, "budget")
        best, gain = self.best(top)
        self._active = gain >= (_GAIN_TO_STAY if self._active else _GAIN_TO_START)
        if self._active:
            self._pause, self._next_pause = 0, 1
            self._asked = best
            patience_s = min(self._timeout_s, max(2.0 * self._wait_s(best) + 0.002, self._saved_s(best) / 4))
            # Halved for each wait in vain: what was good until it fell silent must not be waited for at length.
            return Plan(best, patience_s / 2**self._missed, "pays")
        if self._pause > 0:
            self._pause -= 1
            return Plan(0, 0.0, "not_worth_it")
        self._pause = self._next_pause
        self._next_pause = min(_MAX_PAUSE_ROUNDS, self._next_pause * 2)
        self._asked = top
        return Plan(top, 0.0, "not_worth_it")

    def best(self, top: int) -> tuple[int, float]:
        """(k, gain): the k in [1, top] with the highest rate, and that rate over plain decoding's."""
        shares = self._acceptance
        tokens, cost, best, gain = 1.0, self._costs.forward_s(1), 1, 0.0
        # cost(k) - cost(k - 1) = P(at least k drafts) * (T(1 + k) - T(k)).
        for k in range(1, top + 1):
            tokens += shares.survival(k)
            cost += shares.offered(k) * (self._costs.forward_s(1 + k) - self._costs.forward_s(k))
            rate = tokens / max(cost + self._wait_s(k), 1e-9) * self._costs.plain_s
            if rate > gain:
                best, gain = k, rate
        return best, gain

    def use(self, available: int, agreed: int, sure: int = 0, tail: int = 0, chance: float = 1.0) -> int:
        """The number j that maximises tokens / T(1 + j), given that these drafts are here."""
        tokens, best, top_rate = 1.0, 0, 1.0 / self._costs.plain_s
        positions = len(self._acceptance.accepted)
        base = self._acceptance.survival(min(agreed + sure, positions))
        stood = 1.0
        for j in range(1, available + 1):
            if j <= sure or j > available - tail:
                stood *= chance
                tokens += stood
            else:
                survival = self._acceptance.survival(min(agreed + j, positions))
                stood = chance**sure * survival / base if base > 1e-9 else 0.0
                tokens += stood
            rate = tokens / self._costs.forward_s(1 + j)
            if rate > top_rate:
                best, top_rate = j, rate
        return best

    def answered(self, drafts: int, delay_s: float, computed_s: float) -> None:
        """Follows the delay, apart into what each draft costs and the rest (round trip, queue)."""
        self._missed = 0
        self._follow(drafts, delay_s, computed_s)

    def _follow(self, drafts: int, delay_s: float, computed_s: float) -> None:
        self._delays_s.append(max(0.0, delay_s - computed_s))
        if drafts:
            self._drafts_s.append(computed_s / drafts)

    def late(self) -> None:
        """Waits half as long next time, unless the answer comes and says how late it was."""
        self._missed = min(self._missed + 1, 16)

    def lost(self) -> None:
        """A lost question brought nothing, after a long wait."""
        self._follow(0, self._timeout_s, 0.0)
        self.scored(0, 0)

    def _wait_s(self, drafts: int) -> float:
        """Seconds until an answer. Medians: one slow answer (a neighbour, a collection) says nothing about the next."""
        delay_s = statistics.median_low(self._delays_s) if self._delays_s else self._first_delay_s
        return delay_s + drafts * (statistics.median_low(self._drafts_s) if self._drafts_s else 0.0)

    def _saved_s(self, drafts: int) -> float:
        """Seconds that a round with drafts saves. A quarter of it, halved at each miss, loses at most half of one round."""
        tokens = 1.0 + sum(self._acceptance.survival(j) for j in range(1, drafts + 1))
        return tokens * self._costs.plain_s - self._costs.forward_s(1 + drafts)

    def scored(self, proposed: int, accepted: int) -> None:
        """Learns."""
        self._acceptance.score(proposed, accepted, self._asked)
