"""Tiles of exact mode: which rows of which sequences share a forward, and how many keys they look at. Pure; no mlx.

Every decode forward has the same number of rows, and the number of keys that a row looks at follows from its position. So what
a position gets does not depend on how many rows its sequence has in the forward, nor on the other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TILE_ROWS: Final = (8, 4)
"""Numbers of rows that are tried, the preferred one first."""
EXTENT_STEP: Final = 256
_WHOLE_STEPS: Final = 4


def extent_class(positions: int) -> int:
    """Keys that a forward looks at for the last of `positions` positions: 256, 512, 768, 1,024, 1,536, 2,048, 3,072, ..."""
    steps = -(-max(positions, 1) // EXTENT_STEP)
    if steps <= _WHOLE_STEPS:
        return steps * EXTENT_STEP
    doubled = (steps - 1).bit_length()
    half = 3 << (doubled - 2)
    return (half if steps <= half else 1 << doubled) * EXTENT_STEP


def extents_up_to(limit: int) -> list[int]:
    """The classes that do not exceed `limit`, in order."""
    found, extent = [], EXTENT_STEP
    while extent <= limit:
        found.append(extent)
        extent = extent_class(extent + 1)
    return found


@dataclass(frozen=True, slots=True)
class TileRow:
    """One row that a tick wants computed."""

    owner: int
    """Number of the window that it belongs to."""
    index: int
    """Row of that window; its rows are given in order."""
    position: int
    """Its position in the sequence."""


@dataclass(frozen=True, slots=True)
class PackedTile:
    """One forward."""

    rows: tuple[TileRow, ...]
    """At most as many as a tile has; the rest is padding."""
    extent: int
    """Keys that each row looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of every decode forward in exact mode."""

    rows: int
    runs: tuple[tuple[int, ...], ...] = ()
    """Numbers of keys (classes, ascending) that give a row the same bits. A class that is in none stands alone."""

    def share(self, live: int) -> int:
        """The widest window that each of `live` sequences may have for all to fit in one forward; 1 where they never do."""
        return max(1, self.rows // max(1, live))

    def forwards(self, rows: int) -> int:
        """Forwards that so many rows need, if their positions are alike."""
        return -(-rows // self.rows)

    def pack(self, rows: Sequence[TileRow]) -> list[PackedTile]:
        """Splits a tick's rows into forwards, to be run in this order.

        Rows share a forward only where the same number of keys suits all of them. A window's rows come in order, so that
        each finds the keys of those before it; windows that need more keys come first, else in the order given.
        """
        needs = {row: extent_class(row.position + 1) for row in rows}
        order: dict[int, int] = {}
        for row in rows:
            order[row.owner] = max(order.get(row.owner, 0), needs[row])
        batches: dict[int, list[TileRow]] = {}
        for row in sorted(rows, key=lambda row: -order[row.owner]):
            batches.setdefault(self._run(needs[row]), []).append(row)
        tiles = []
        for run in sorted(batches):
            for begin in range(0, len(batches[run]), self.rows):
                part = batches[run][begin : begin + self.rows]
                tiles.append(PackedTile(tuple(part), max(needs[row] for row in part)))
        return tiles

    def _run(self, extent: int) -> int:
        """The smallest class whose bits this class has."""
        return next((run[0] for run in self.runs if extent in run), extent)
