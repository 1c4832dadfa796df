"""What a forward costs by its shape: measured at start-up, followed while serving. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_FOLLOW = 0.1
_FOLLOW_MOST = 0.4
_FRESH = 8
"""Observations for which what was seen of a shape counts as of now: machines have better and worse minutes."""
_LEAST_GAP_S = 0.002


class Costs:
    """Tables rows -> seconds, and (sequences, width) -> seconds where sequences share a forward.

    Both are staircases in practice, so what lies between measured entries is interpolated, not fitted.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        *,
        shapes: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """measured: rows of one sequence -> seconds, at least one entry. shapes: (sequences, width) -> seconds of a shared
        forward; None where they run one by one."""
        if not measured:
            raise ValueError("costs need at least one measured number of rows")
        self._table = dict(measured)
        self.gap_s = 0.0
        """What a round takes beside its forward where that could not begin ahead. A plain round hides it."""
        self.shared = shapes is not None
        """Whether sequences share a forward."""
        self._grid: dict[int, dict[int, float]] = {1: self._table}
        for (count, width), seconds in (shapes or {}).items():
            if count > 1:
                self._grid.setdefault(count, {})[width] = seconds
        self._between: dict[tuple[int, int], float] = {}
        self._asked: dict[tuple[int, int], float] = {}
        """Answers since the last observation: a decision asks for the same shapes again and again."""
        self._observations = 0
        self._seen_at: dict[tuple[int, int], int] = {}
        """(sequences, width) -> observations when that was observed last."""

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows of one sequence."""
        return _interpolated(self._table, rows)

    def batch_s(self, sequences: int, width: int) -> float:
        """Seconds of a forward of so many sequences, `width` rows each, or of their forwards one after the other."""
        if sequences <= 1 or not self.shared:
            return sequences * self.forward_s(width)
        found = self._asked.get((sequences, width)) or self._between.get((sequences, width))
        if found is None:
            if sequences in self._grid:
                found = self._row_s(sequences, width)
            else:
                found = _interpolated({count: self._row_s(count, width) for count in self._grid}, sequences)
            self._asked[sequences, width] = found
        return found

    def plain_batch_s(self, sequences: int) -> float:
        """Seconds of a plain step of so many sequences."""
        return self.batch_s(sequences, 1)

    def plain_age(self, sequences: int) -> int:
        """Observations since a plain step of so many sequences was one."""
        return self._observations - self._seen_at.get((sequences, 1), 0)

    def observe(self, rows: int, seconds: float, *, sequences: int = 1) -> None:
        """Follows a measured forward of `rows` rows for each sequence: closely where its shape was not seen for long.

        An outlier (a garbage collection, a neighbour) counts at most as twice the usual.
        """
        self._observations += 1
        age = self._observations - self._seen_at.get((sequences, rows), 0)
        self._seen_at[sequences, rows] = self._observations
        usual = self.batch_s(sequences, rows)
        found = usual + min(_FOLLOW_MOST, _FOLLOW * max(1.0, age / _FRESH)) * (min(seconds, 2 * usual) - usual)
        if sequences in self._grid and (sequences == 1 or rows in self._grid[sequences]):
            self._grid[sequences][rows] = found
        else:
            self._between[sequences, rows] = found
        self._asked.clear()

    def observe_gap(self, seconds: float) -> None:
        """Follows what a round took beside its forward, where that was not begun ahead."""
        self.gap_s += _FOLLOW * (min(max(0.0, seconds), 2 * self.gap_s + _LEAST_GAP_S) - self.gap_s)

    def _row_s(self, sequences: int, width: int) -> float:
        """As `batch_s`, for a number of sequences that was measured, with some width at least."""
        row = self._grid[sequences]
        if len(row) > 1 or width in row:
            return _interpolated(row, width)
        # One width says nothing about the others; the rows of a single sequence do.
        (known,) = row
        return row[known] * self.forward_s(sequences * width) / max(self.forward_s(sequences * known), 1e-9)


def _interpolated(table: Mapping[int, float], key: int) -> float:
    if key in table:
        return table[key]
    below = max((known for known in table if known < key), default=None)
    above = min((known for known in table if known > key), default=None)
    if below is None:
        return table[above] if above is not None else 0.0
    if above is None:
        # Beyond the table: the slope of its last two entries, or proportional where there is one.
        known = sorted(table)
        before = known[-2] if len(known) > 1 else 0
        slope = (table[below] - table.get(before, 0.0)) / (below - before)
        return table[below] + max(0.0, slope) * (key - below)
    share = (key - below) / (above - below)
    return table[below] + share * (table[above] - table[below])
