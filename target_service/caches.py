"""The cache of one running sequence, with the ids that have to be fed again after a rollback. On the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from draftwire.caches import KvQuantisation, SequenceCache
from draftwire.errors import InternalError

MOST_REPLAYED: Final = 12
"""Ids that may head windows with drafts, round after round, before they get a forward of their own; see docs/adr/0104."""


class ReplayCache:
    """A `SequenceCache` whose rollbacks may stand before the length that was asked for, and the ids between.

    `replay` are the ids of positions [cache.length, length): they stand, but their rows have to be computed again, at the
    head of the next forward.
    """

    def __init__(self, model: Any, quantisation: KvQuantisation | None = None) -> None:
        self.cache = SequenceCache(model, quantisation)
        self.replay: list[int] = []
        self._mark = 0
        self._since: list[int] = []
        """Ids fed from position `_mark` on, by the last forward that may be taken back."""

    @property
    def length(self) -> int:
        """Positions that stand, those of `replay` included."""
        return self.cache.length + len(self.replay)

    def begin(self, ids: Sequence[int], drafts: int) -> list[int]:
        """Says that a forward of `ids` follows whose last `drafts` rows may be taken back. Returns what to feed: replay first.

        Raises InternalError where the cache could not take so many back; the sequence's `Rollback.room` says how many.
        """
        if not self.cache.fits(len(self.replay) + drafts):
            raise InternalError(f"the cache cannot take {drafts} drafts back", reason="CACHE_NOT_TRIMMABLE")
        fed = [*self.replay, *ids]
        self.replay = []
        self.cache.begin(drafts)
        self._mark, self._since = self.cache.length, fed
        return fed

    def begin_ahead(self) -> None:
        """Says that a forward of one id that nobody knows yet follows, and that it may be taken back as a whole."""
        if self.cache.fits(1):
            self.cache.begin(1)
        self._mark, self._since = self.cache.length, []

    def written(self, rows: int) -> None:
        """Books `rows` more positions, after a forward was built."""
        self.cache.written(rows)

    def truncate(self, length: int) -> None:
        """Keeps positions [0, length). Raises InternalError where it cannot."""
        if length == self.length:
            return
        if length >= self.cache.length:
            raise InternalError(f"cache has {self.length} positions, cannot keep {length}", reason="CACHE_LENGTH")
        stand = self.cache.truncate(length)
        self.replay = self._since[stand - self._mark : length - self._mark] if stand >= self._mark else []
        if self.length != length:
            raise InternalError("the cache cannot be rolled back here", reason="CACHE_NOT_TRIMMABLE")
