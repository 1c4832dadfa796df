"""What a forward costs by its number of rows: measured at start-up, followed while serving. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_FOLLOW = 0.1


class Costs:
    """A table rows -> seconds. It is a staircase in practice, so rows between measured ones are interpolated, not fitted."""

    def __init__(self, measured: Mapping[int, float], *, plain_s: float | None = None) -> None:
        """measured: at least one entry. plain_s: a plain step whose graph is built ahead; the one-row forward if absent."""
        if not measured:
            raise ValueError("costs need at least one measured number of rows")
        self._table = dict(measured)
        self._plain_s = plain_s if plain_s is not None else self.forward_s(1)

    @property
    def plain_s(self) -> float:
        """Seconds of a plain decoding step."""
        return self._plain_s

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows that is not begun ahead."""
        if rows in self._table:
            return self._table[rows]
        below = max((known for known in self._table if known < rows), default=None)
        above = min((known for known in self._table if known > rows), default=None)
        if below is None:
            return self._table[above] if above is not None else 0.0
        if above is None:
            # Beyond the table: the slope of its last two entries, or proportional where there is one.
            known = sorted(self._table)
            before = known[-2] if len(known) > 1 else 0
            slope = (self._table[below] - self._table.get(before, 0.0)) / (below - before)
            return self._table[below] + max(0.0, slope) * (rows - below)
        share = (rows - below) / (above - below)
        return self._table[below] + share * (self._table[above] - self._table[below])

    def observe(self, rows: int, seconds: float, *, ahead: bool) -> None:
        """Follows a measured forward. An outlier (a garbage collection, a neighbour) counts at most as twice the usual."""
        if ahead and rows == 1:
            self._plain_s += _FOLLOW * (min(seconds, 2 * self._plain_s) - self._plain_s)
            return
        usual = self.forward_s(rows)
        self._table[rows] = usual + _FOLLOW * (min(seconds, 2 * usual) - usual)
