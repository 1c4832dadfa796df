"""Decides for all sequences of a tick: who asks for how many drafts, which are verified, and whether drafting has paid.

Pure: no clock, no I/O. `widths` has the arithmetic, `controller` what each sequence believes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from target_service.controller import Controller, Plan
from target_service.costs import Costs
from target_service.widths import Bid, Hope, Joint, Share, ask_together, share, worth_waiting_s

_GAIN_TO_START = 1.05
_GAIN_TO_STAY = 1.0
_FOLLOW = 0.2
_PLAIN_EVERY = 64
"""Forwards after which the time of a plain step is out of date."""
_WORST_BENEFIT = 0.98
_BENEFIT_ROUNDS = 128
_FEWEST_ROUNDS = 24
_MOST_LOST_STEPS = 6.0
_FIRST_PAUSE_ROUNDS = 32
_PAUSE_FOR_LOSS = 32
"""Rounds of pause for each plain step that was lost: what is lost in all stays at a thirty-second part."""
_MAX_PAUSE_ROUNDS = 512


class Crowd:
    """One per target. Belongs to the event loop."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.benefit = Benefit()
        self._drafts = 0
        self._hidden_s = 0.0

    def hid(self, seconds: float) -> None:
        """Seconds from a question to the moment when the round could have begun: the part of a delay that costs nothing."""
        self._hidden_s += _FOLLOW * (seconds - self._hidden_s)

    def plan(self, wishes: Sequence[tuple[Controller, int]], sequences: int) -> list[Plan]:
        """Plans for those that can ask now, of `sequences` that run. A wish: whose, and most drafts that it may ask for."""
        if not self.costs.shared:
            return [self._plan([wish], 1)[0] for wish in wishes]
        return self._plan(wishes, max(sequences, len(wishes)))

    def share(self, bids: Sequence[Bid]) -> Share:
        """The windows of a tick.

        Nobody has drafts now and then, where no plain step was seen for long: what drafts bring is judged by what it takes.
        """
        chosen = share(bids, self.costs)
        if (
            any(chosen.drafts)
            and self.costs.plain_age(len(bids)) >= _PLAIN_EVERY
            and not any(bid.forced for bid in bids)
        ):
            return share([Bid()] * len(bids), self.costs)
        return chosen

    def patience_s(self, now: Sequence[Bid], hoped: Sequence[Bid]) -> float:
        """Most that a tick of several waits for drafts that are late: half of what would use up all that they bring."""
        return worth_waiting_s(now, hoped, self.costs) / 2

    def book(self, tokens: int, sequences: int, seconds: float, *, drafting: bool) -> None:
        """A tick that emitted so many tokens. drafting: whether anybody had drafts or waited for some."""
        if sequences:
            step_s = self.costs.plain_batch_s(sequences)
            self.benefit.book(tokens / sequences, seconds / max(step_s, 1e-9), drafting=drafting)

    def _plan(self, wishes: Sequence[tuple[Controller, int]], sequences: int) -> list[Plan]:
        hopes: list[Hope] = []
        whose: list[int] = []
        for number, (controller, limit) in enumerate(wishes):
            hope = controller.hope(limit)
            if hope is not None:
                hopes.append(replace(hope, delay_s=hope.delay_s - self._hidden_s))
                whose.append(number)
        joint: Joint | None = None
        if hopes and not self.benefit.off:
            joint = ask_together(hopes, sequences, self.costs, self._drafts)
            active = any(wishes[whose[i]][0].active for i in joint.askers)
            if joint.gain < (_GAIN_TO_STAY if active else _GAIN_TO_START):
                joint = None
        self._drafts = joint.drafts if joint else 0
        asking = {whose[i] for i in joint.askers} if joint else set()
        return [
            controller.plan(limit, joint if number in asking else None)
            for number, (controller, limit) in enumerate(wishes)
        ]


class Benefit:
    """What drafting really brought: tokens over what plain decoding would have made in the same time, over the last rounds.

    Below .98, or where it has lost the time of several plain steps, it goes off for a while: long enough for the loss to be
    small in the whole, and twice as long each time. Whatever the predictions say.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_BENEFIT_ROUNDS)
        self._pause = 0
        self._next_pause = _FIRST_PAUSE_ROUNDS

    @property
    def off(self) -> bool:
        """Whether nobody may draft now."""
        return self._pause > 0

    @property
    def value(self) -> float:
        """Over the remembered rounds; 1 without any."""
        steps = sum(took for _, took in self._rounds)
        return sum(made for made, _ in self._rounds) / steps if steps else 1.0

    def book(self, tokens: float, steps: float, *, drafting: bool) -> None:
        """A tick that took as long as so many plain steps (one of them makes one token), and made `tokens` a sequence."""
        if self._pause > 0:
            self._pause -= 1
            return
        if not drafting:
            return
        self._rounds.append((tokens, steps))
        lost = sum(took - made for made, took in self._rounds)
        if lost > _MOST_LOST_STEPS or (len(self._rounds) >= _FEWEST_ROUNDS and self.value < _WORST_BENEFIT):
            self._pause = max(self._next_pause, round(_PAUSE_FOR_LOSS * lost))
            self._next_pause = min(_MAX_PAUSE_ROUNDS, self._next_pause * 2)
            self._rounds.clear()
        elif len(self._rounds) == _BENEFIT_ROUNDS:
            self._next_pause = _FIRST_PAUSE_ROUNDS
