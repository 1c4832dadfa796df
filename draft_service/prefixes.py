"""What sessions computed, kept beyond their end for sessions of the same owner and salt that begin with the same ids.

Only bookkeeping: nothing here computes or waits. The least recently used prefix goes first, whoever owns it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable

from draft_service.sources.base import Prefix


class PrefixCache:
    """Prefixes by group: no group ever sees another's. Belongs to the event loop."""

    def __init__(self, limit_bytes: int, forget: Callable[[Prefix], None]) -> None:
        """forget: told of each prefix that has left the cache."""
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.queried_tokens = 0
        """Ids that prefixes were looked up for."""
        self.found_tokens = 0
        """Of those, ids that a prefix had."""
        self.evicted = {"prefix": 0, "session": 0}
        """Prefixes that had to go, by what needed the room."""
        self._forget = forget
        self._groups: dict[Hashable, OrderedDict[int, Prefix]] = {}
        # All prefixes, the least recently used first.
        self._order: OrderedDict[int, Hashable] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._order)

    def find(self, group: Hashable, ids: array[int]) -> tuple[Prefix, int] | None:
        """The prefix of which a session with these ids can take over most, and how many ids that is.

        Never all of `ids`: a draft needs the logits behind the last one, which are not kept.
        """
        self.queried_tokens += len(ids)
        best: tuple[int, int] | None = None
        for number, prefix in self._groups.get(group, {}).items():
            length = prefix.reach(max(0, min(common_length(prefix.ids, ids), len(ids) - 1)))
            if length > 0 and (best is None or length > best[0]):
                best = length, number
        if best is None:
            return None
        self.found_tokens += best[0]
        self._order.move_to_end(best[1])
        return self._groups[group][best[1]], best[0]

    def add(self, group: Hashable, prefix: Prefix) -> None:
        """Keeps it, unless it is too large or another already has all of it; those of which it has all are dropped."""
        entries = self._groups.get(group, OrderedDict())
        for number, other in list(entries.items()):
            common = common_length(other.ids, prefix.ids)
            if common == len(prefix.ids) == other.reach(common):
                self._order.move_to_end(number)
                self._forget(prefix)
                return
            if common == len(other.ids) == prefix.reach(common):
                self._remove(number)
        if prefix.nbytes > self.limit_bytes:
            self._forget(prefix)
            return
        self._made += 1
        self._groups.setdefault(group, OrderedDict())[self._made] = prefix
        self._order[self._made] = group
        self.nbytes += prefix.nbytes
        self._evict(self.limit_bytes, "prefix")

    def fit(self, most_bytes: int) -> None:
        """Drops the longest unused ones until at most so many bytes are kept: sessions need the rest."""
        self._evict(most_bytes, "session")

    def clear(self) -> None:
        """Drops everything."""
        while self._order:
            self._remove(next(iter(self._order)))

    def _evict(self, most_bytes: int, needed_by: str) -> None:
        while self._order and self.nbytes > most_bytes:
            self._remove(next(iter(self._order)))
            self.evicted[needed_by] += 1

    def _remove(self, number: int) -> None:
        group = self._order.pop(number)
        prefix = self._groups[group].pop(number)
        if not self._groups[group]:
            del self._groups[group]
        self.nbytes -= prefix.nbytes
        self._forget(prefix)


def common_length(left: array[int], right: array[int]) -> int:
    """Length of the common prefix, by comparing halves: memory is compared faster than ids one by one."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
