"""Which windows a tick has: how many drafts each sequence verifies, and whether all share one forward or two. Pure.

A forward of B sequences costs T(B, 1 + its widest drafts), so widths are chosen together. With E_i(d) the tokens that sequence
i expects of a round with d drafts, the choice maximises the geometric mean of the streams' rates,

    sum_i log E_i(d_i)  -  B log(seconds of the tick).

Where all are alike that is tokens a second. Where they are not, it says what one stream's drafts may cost the others: eight
times as many tokens for one of eight streams are worth a tick that takes 30 % longer, not one that takes twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from target_service.costs import Costs

_GAIN_TO_SPLIT = math.log(1.03)
"""What two forwards must bring over one: another shape of the next tick costs something too."""

_GAIN_TO_CHANGE = 1.03


@dataclass(frozen=True, slots=True)
class Bid:
    """What one sequence can bring to a tick."""

    tokens: tuple[float, ...] = (1.0,)
    """tokens[d]: expected of a round with d of its drafts, d = 0 to all that are here. tokens[0] is 1."""
    forced: bool = False
    """All of its drafts, whatever they cost."""

    @property
    def most(self) -> int:
        """Drafts that are here."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Share:
    """A tick's windows."""

    drafts: tuple[int, ...]
    """Of each bid."""
    groups: tuple[tuple[int, ...], ...]
    """Bids that share a forward, the narrow forward first: its streams need not wait for the wide one."""
    seconds: float
    """What the tick costs."""
    score: float
    """sum_i log E_i - B log(seconds)."""


def share(bids: Sequence[Bid], costs: Costs) -> Share:
    """The windows of these sequences' next tick. At least one bid."""
    if not costs.shared:
        return _apart(bids, costs)
    best = _together(bids, costs)
    if len({bid.most for bid in bids}) == 1:
        # Nobody is narrow.
        return best
    order = sorted(range(len(bids)), key=lambda i: (bids[i].forced, bids[i].tokens[-1]))
    most = sum(math.log(bid.tokens[-1]) for bid in bids)
    for cut in range(1, len(bids)):
        low, high = order[:cut], order[cut:]
        # No two forwards are shorter than this, and none bring more than all drafts: most cuts need no closer look.
        seconds = costs.batch_s(len(low), 1) + costs.batch_s(len(high), 2)
        least = best.score + _GAIN_TO_SPLIT * len(bids)
        if most - len(bids) * math.log(seconds) <= least:
            continue
        split = _split(bids, low, high, costs)
        if split is not None and split.score > least:
            best = split
    return best


def worth_waiting_s(now: Sequence[Bid], hoped: Sequence[Bid], costs: Costs) -> float:
    """Seconds after which it is no better to have what is hoped for than to have gone on with what is here; 0 for never."""
    if not costs.shared:
        here, there = _apart(now, costs), _apart(hoped, costs)
    else:
        here, there = _together(now, costs), _together(hoped, costs)
    value = there.score - here.score + len(now) * (math.log(there.seconds) - math.log(here.seconds))
    return max(0.0, here.seconds * math.exp(value / len(now)) - there.seconds)


def _apart(bids: Sequence[Bid], costs: Costs) -> Share:
    """Each in a forward of its own, as wide as pays there; one call of the engine for all."""
    drafts, seconds, gains = [], 0.0, 0.0
    for bid in bids:
        single = _together([bid], costs)
        drafts.append(single.drafts[0])
        seconds += single.seconds
        gains += math.log(bid.tokens[single.drafts[0]])
    everybody = tuple(range(len(bids)))
    return Share(tuple(drafts), (everybody,), seconds, gains - len(bids) * math.log(seconds))


def _together(bids: Sequence[Bid], costs: Costs) -> Share:
    curve = _Curve.of(bids, range(len(bids)))
    best = max(
        (curve.gains[width] - len(bids) * math.log(_tick_s(costs, len(bids), width)), -width)
        for width in range(curve.least, len(curve.gains))
    )
    width = -best[1]
    drafts = tuple(min(width, bid.most) for bid in bids)
    return Share(drafts, (tuple(range(len(bids))),), _tick_s(costs, len(bids), width), best[0])


def _split(bids: Sequence[Bid], low: Sequence[int], high: Sequence[int], costs: Costs) -> Share | None:
    narrow, wide = _Curve.of(bids, low), _Curve.of(bids, high)
    best: tuple[float, int, int] | None = None
    narrow_s = [costs.batch_s(len(low), 1 + width) for width in range(len(narrow.gains))]
    wide_s = [costs.batch_s(len(high), 1 + width) for width in range(len(wide.gains))]
    for first in range(narrow.least, len(narrow.gains)):
        for second in range(max(wide.least, first + 1), len(wide.gains)):
            score = narrow.gains[first] + wide.gains[second] - len(bids) * math.log(narrow_s[first] + wide_s[second])
            if best is None or score > best[0]:
                best = score, first, second
    if best is None:
        return None
    score, first, second = best
    widths = {**dict.fromkeys(low, first), **dict.fromkeys(high, second)}
    drafts = tuple(min(widths[i], bid.most) for i, bid in enumerate(bids))
    return Share(drafts, (tuple(sorted(low)), tuple(sorted(high))), narrow_s[first] + wide_s[second], score)


@dataclass(frozen=True, slots=True)
class _Curve:
    """What a group expects by the width that it is given."""

    gains: list[float]
    """gains[w]: sum of log E_i(min(w, its drafts))."""
    least: int
    """Width that forced drafts need."""

    @classmethod
    def of(cls, bids: Sequence[Bid], members: Sequence[int]) -> _Curve:
        most = max(bids[i].most for i in members)
        least = max((bids[i].most for i in members if bids[i].forced), default=0)
        gains = [0.0] * (most + 1)
        for i in members:
            logs = [math.log(tokens) if tokens != 1.0 else 0.0 for tokens in bids[i].tokens]
            gains = [gain + logs[min(width, bids[i].most)] for width, gain in enumerate(gains)]
        return cls(gains, least)


def _tick_s(costs: Costs, sequences: int, drafts: int) -> float:
    """Seconds of a tick in one forward."""
    return costs.batch_s(sequences, 1 + drafts)


@dataclass(frozen=True, slots=True)
class Hope:
    """What one sequence expects of asking its drafter."""

    survival: tuple[float, ...]
    """survival[j]: share of questions whose first j + 1 drafts are all accepted."""
    offered: tuple[float, ...]
    """offered[j]: share of questions that bring at least j + 1 drafts."""
    delay_s: float
    """From a question to its answer, less computing, and less what passes anyway before the round could begin."""
    draft_s: float
    """Computing of each draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What the sequences that ask should ask for, decided together."""

    askers: tuple[int, ...] = ()
    """Which of the hopes take part."""
    drafts: int = 0
    gain: float = 0.0
    """Geometric mean of the streams' rates over plain decoding's."""
    tokens: float = 1.0
    """Geometric mean of the tokens of a round, of those that ask."""
    forward_s: float = 0.0
    wait_s: float = 0.0
    plain_s: float = 0.0
    saved_s: float = 0.0
    """What a tick with these drafts saves, if nobody had to wait for them."""


def ask_together(hopes: Sequence[Hope], sequences: int, costs: Costs, before: int = 0) -> Joint:
    """The best number of drafts and who should ask for them. before: the number that is kept while it is nearly as good.

    hopes: of those that can ask, of `sequences` that run. With s_i(j) and P_i(j) their survival and offers, m of them asking
    for k drafts bring

        gain = (prod_i (1 + s_i(1) + ... + s_i(k)))^(1/B) T_plain / (wait + gap + T_k),
        T_k = T(B, 1) + sum_j P(any offers j) (T(B, 1 + j) - T(B, j)),

    or, where that is less, with the same sum for T(m, .) and T(B - m, 1) for the rest in a forward of its own.
    """
    order = sorted(range(len(hopes)), key=lambda i: -sum(hopes[i].survival))
    plain_s = costs.plain_batch_s(sequences)
    most = max((len(hope.survival) for hope in hopes), default=0)
    shared = [costs.batch_s(sequences, 1 + j) for j in range(most + 1)]
    nobody = [1.0] * (most + 1)
    value = [0.0] * (most + 1)
    wait_s = [0.0] * (most + 1)
    best = kept = (0.0, 0, 0, 0.0, 0.0, 0.0)
    for count, i in enumerate(order, 1):
        hope = hopes[i]
        own = [costs.batch_s(count, 1 + j) for j in range(most + 1)] if count < sequences else shared
        rest_s = costs.batch_s(sequences - count, 1) if count < sequences else math.inf
        shared_s, own_s, tokens, reach = shared[0], own[0] + rest_s, 1.0, len(hope.survival)
        for k in range(1, most + 1):
            if k <= reach:
                tokens += hope.survival[k - 1]
                nobody[k] *= 1.0 - hope.offered[k - 1]
            value[k] += math.log(tokens)
            wait_s[k] = max(wait_s[k], hope.delay_s + k * hope.draft_s)
            shared_s += (1.0 - nobody[k]) * (shared[k] - shared[k - 1])
            own_s += (1.0 - nobody[k]) * (own[k] - own[k - 1])
            seconds = min(shared_s, own_s) + costs.gap_s
            gain = math.exp(value[k] / sequences) * plain_s / max(seconds + wait_s[k], 1e-9)
            if gain > best[0]:
                best = gain, count, k, seconds, wait_s[k], value[k]
            if k == before and gain > kept[0]:
                kept = gain, count, k, seconds, wait_s[k], value[k]
    gain, count, drafts, seconds, waits_s, logs = kept if kept[0] * _GAIN_TO_CHANGE >= best[0] else best
    if not count:
        return Joint(plain_s=plain_s)
    return Joint(
        askers=tuple(order[:count]),
        drafts=drafts,
        gain=gain,
        tokens=math.exp(logs / count),
        forward_s=seconds,
        wait_s=waits_s,
        plain_s=plain_s,
        saved_s=math.exp(logs / sequences) * plain_s - seconds,
    )
