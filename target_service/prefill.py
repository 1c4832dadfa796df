"""How much of the prompts is read with a round, and whose. Pure: seconds in, tokens out.

Prompts may take `_BUDGET` times what a round usually takes: in the round's own forward, where the engine reads them beside its
windows, else between two rounds. A stream that is used to p seconds between its tokens gets them every (1 + _BUDGET) p, and a
prompt is read at _BUDGET / (1 + _BUDGET) of the speed that it has alone. Where more wait for their first token than have
theirs, prompts may take that many times more, up to `_LONGEST_S`: a stream among seven that wait is owed an eighth.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_BUDGET = 1.7
_LONGEST_S = 0.4
_REMEMBERED_ROUNDS = 9
_MOST_PACE_ROUNDS = 401
_FEWEST_PACE_ROUNDS = 9
"""Rounds that say what streams are used to: of some seconds, since they slow down as they get longer."""
_TILE = 4
_TILE_ROWS = 16
"""Rows of a linear layer's tile (`draftwire.blocks`): forwards of more are padded where their tiles would not be alike."""
_FEWEST = 2
"""Tokens that a gap reads whatever they cost: nobody starves."""
_FOLLOW = 0.3
_LEAST_S = 1e-6
_LEAST_PACE = 1e-3
_FIRST_SLOPE = 1e-3
"""What a token behind it adds to a token, of what that costs: the first guess. Attention overtakes the rest at 1,000 tokens."""
_READ = 4
"""To read a key and its value once for a chunk costs as much as so many tokens' attention to them: 13 and 3 ms at 3,800."""
_TURNS = 4


class PrefillCosts:
    """Seconds of a chunk of n tokens behind p others: T(n) + slope (n + `_READ`) p, T from a table. Followed while serving.

    Of a chunk in a forward of its own, or what it adds to the forward of a round.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        """measured: tokens -> seconds of a first chunk, at least one entry."""
        self._table = sorted(measured.items())
        self._pace = 1.0
        few, many = self._table[0], self._table[-1]
        each_s = (many[1] - few[1]) / (many[0] - few[0]) if many[0] > few[0] else few[1] / few[0]
        self._slope_s = max(each_s, 1e-7) * _FIRST_SLOPE

    def seconds(self, tokens: int, behind: int) -> float:
        """Of a chunk."""
        return self._pace * self._first_s(tokens) + self._slope_s * (tokens + _READ) * behind

    def observe(self, tokens: int, behind: int, seconds: float) -> None:
        """Follows a chunk that took `seconds`. An outlier counts at most as twice the usual, and as half of it at least: what
        a chunk adds to a forward is a difference, and may seem to be nothing, or less."""
        usual = max(self.seconds(tokens, behind), _LEAST_S)
        error = min(max(seconds, usual / 2), 2 * usual) / usual - 1.0
        # Each part follows as far as it made the sum: the first chunks tell the pace, those behind much text the slope.
        deep = self._slope_s * (tokens + _READ) * behind / usual
        self._pace = max(self._pace * (1.0 + _FOLLOW * (1.0 - deep) * error), _LEAST_PACE)
        self._slope_s *= 1.0 + min(1.0, 2 * _FOLLOW) * deep * error

    def _first_s(self, tokens: int) -> float:
        """From the table; beyond its ends, the slope of the nearest two entries, or in proportion where there is one."""
        table = self._table
        if len(table) == 1:
            return table[0][1] * tokens / table[0][0]
        index = next((i for i in range(1, len(table)) if table[i][0] >= tokens), len(table) - 1)
        (few, less_s), (many, more_s) = table[index - 1], table[index]
        slope_s = max(0.0, more_s - less_s) / (many - few)
        return max(less_s / 2, less_s + (tokens - few) * slope_s)


class Pace:
    """What the rounds of the same sequences take while nobody reads a prompt."""

    def __init__(self) -> None:
        self._who: tuple[int, ...] = ()
        self._seconds: deque[float] = deque(maxlen=_MOST_PACE_ROUNDS)

    def observe(self, who: tuple[int, ...], seconds: float) -> None:
        """A round that took `seconds`. who: any key; another one than last begins anew."""
        if who != self._who:
            self._who = who
            self._seconds.clear()
        self._seconds.append(seconds)

    def usual_s(self, who: tuple[int, ...]) -> float | None:
        """The median, so that no outlier moves it; None where these have hardly decoded undisturbed."""
        known = who == self._who and len(self._seconds) >= _FEWEST_PACE_ROUNDS
        return statistics.median(self._seconds) if known else None


class PrefillBudget:
    """The chunks of the gap between two rounds."""

    def __init__(self, step: int, costs: PrefillCosts, *, one_size: bool = False) -> None:
        """step: most tokens a chunk, and the tokens of each where nobody decodes. costs: of chunks beside those who decode.
        one_size: every chunk has `step` tokens (but a prompt's last), also where somebody decodes; it is then read once the
        gaps before it have saved up for it."""
        self._step = step
        self._costs = costs
        self._one_size = one_size
        self._rounds_s: deque[float] = deque(maxlen=_REMEMBERED_ROUNDS)
        self._left_s = 0.0
        self._read = 0

    def gap(self, round_s: float, crowding: float = 1.0) -> None:
        """A round has ended, which took round_s; another gap begins. crowding: prompts that wait, a stream that has its own."""
        self._rounds_s.append(round_s)
        # What a gap leaves is not saved: two small ones would make one large one. Chunks of one size have to be saved for.
        saved_s = self._left_s if self._one_size else 0.0
        usual_s = _BUDGET * statistics.median(self._rounds_s)
        self._left_s = saved_s + max(usual_s, min(crowding * usual_s, _LONGEST_S))
        self._read = 0

    def chunk(self, rest: int, behind: int, rows: int = 0) -> int:
        """Tokens to read now of a prompt that has `rest` left behind `behind`; 0 where the gap is over.

        rows: what the forward has besides.
        """
        if self._one_size:
            tokens = min(self._step, rest)
            return tokens if self._costs.seconds(tokens, behind) <= self._left_s else 0
        fits = bisect_right(range(1, min(self._step, rest) + 1), self._left_s, key=self._after(behind))
        if fits >= min(_FEWEST, rest):
            full = (few for few in range(fits, 0, -1) if few <= _FEWEST or fills(rows + few))
            return fits if fits == rest else next(full)
        return min(_FEWEST, rest) if self._read == 0 else 0

    def _after(self, behind: int) -> Callable[[int], float]:
        return lambda tokens: self._costs.seconds(tokens, behind)

    def took(self, tokens: int, behind: int, seconds: float) -> None:
        """A chunk has been read."""
        self._costs.observe(tokens, behind, seconds)
        self._left_s -= seconds
        self._read += tokens

    def planned(self, tokens: int, behind: int) -> None:
        """A chunk will be read in the next forward."""
        self._left_s -= self._costs.seconds(tokens, behind)
        self._read += tokens

    def added(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """What planned chunks, (tokens, behind) each, have added to a forward."""
        expected = [self._costs.seconds(*chunk) for chunk in chunks]
        for chunk, share_s in zip(chunks, expected, strict=True):
            self._costs.observe(*chunk, seconds * share_s / max(sum(expected), 1e-9))


def fills(rows: int) -> bool:
    """Whether a forward of so many rows wastes nothing: it is one tile, or tiles of one height that vectors fill."""
    tiles = -(-rows // _TILE_ROWS)
    return tiles <= 1 or rows % tiles == rows % _TILE == 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is not read yet."""

    priority: int
    rest: int
    """Tokens left."""


def whose_turn(prompts: Sequence[Waiting], turn: int) -> int:
    """Which prompt has the next chunk; prompts in the order of their admission, at least one.

    The shortest rest of the highest priority, so that nobody waits for a long prompt; and each fourth chunk is of the one
    admitted first, so that a long prompt, or a low priority, is not starved by those that keep coming.
    """
    if turn % _TURNS == _TURNS - 1:
        return 0
    return min(range(len(prompts)), key=lambda i: (-prompts[i].priority, prompts[i].rest, i))
