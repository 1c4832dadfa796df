"""A histogram of plain numbers, cheap enough for every round. Pure; what scrapes it turns it into a format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds for times, from a call on loopback to a long answer, in seconds."""
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Upper bounds for sizes of batches."""


class Histogram:
    """Counts values by upper bound, inclusive; the last bucket has no bound."""

    __slots__ = ("bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """bounds: rising."""
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        """Values of each bucket alone, not of those below it."""
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.buckets)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, values up to and including it), the infinite bound last."""
        seen = 0
        for bound, values in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += values
            yield bound, seen
