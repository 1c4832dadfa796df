"""How much a source computes at once. Counted on the compute thread, read on the event loop."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import dataclass, field

from draftwire.histogram import COUNTS, Histogram


@dataclass(slots=True)
class Forwards:
    """Forwards since the start. A row is one position of one session in one forward."""

    batch_size: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    """Sessions of each forward that drafts."""
    draft_rows: int = 0
    """Ids that those forwards fed."""
    prefill_rows: int = 0
    """Ids that were read without a draft, in chunks of one session."""
    padding_rows: int = 0
    """Rows of drafting forwards that were computed for nobody: they are rectangles."""


class ForwardCounts:
    """Adds forwards up, once a forward: the lock, which makes a scrape one moment, is taken as rarely."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Forwards()

    def drafted(self, sessions: int, rows: int, computed_rows: int) -> None:
        """A forward for the drafts of so many sessions, that fed `rows` ids in a rectangle of `computed_rows`."""
        with self._lock:
            self._sums.batch_size.observe(sessions)
            self._sums.draft_rows += rows
            self._sums.padding_rows += computed_rows - rows

    def prefilled(self, rows: int) -> None:
        """A forward that read so many ids."""
        with self._lock:
            self._sums.prefill_rows += rows

    def snapshot(self) -> Forwards:
        """A copy, of one moment. From any thread."""
        with self._lock:
            return deepcopy(self._sums)
