"""Blocks and states in memory, least recently used first. Belongs to the event loop; the arrays are only read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from target_service.prefix.counts import PrefixCounts
from target_service.prefix.keys import state_key
from target_service.prefix.layout import Array, LeafState, state_bytes

_ENTRY_BYTES = 1024
_ARRAY_BYTES = 192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The rows of up to `keys.BLOCK` positions; a shorter one is the end of a text."""

    key: bytes
    parent: bytes
    begin: int
    ids: tuple[int, ...]
    rows: tuple[Array, ...]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = sum(array.nbytes + _ARRAY_BYTES for array in self.rows)
        # What Python takes counts too: a model without rows must not keep ids without bound.
        object.__setattr__(self, "nbytes", _ENTRY_BYTES + 40 * len(self.ids) + arrays)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """The state at a block's end."""

    key: bytes
    parent: bytes
    """The block's key."""
    length: int
    lowest: int
    """The shortest length that it can be cut back to."""
    leaves: tuple[LeafState, ...]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = sum(state_bytes(leaf) + _ARRAY_BYTES * len(leaf.arrays) for leaf in self.leaves)
        object.__setattr__(self, "nbytes", _ENTRY_BYTES + arrays)


Item: TypeAlias = Block | State


class Memory:
    """A byte-capped store. A path is used as a whole, its end first, so that an end is evicted before its beginning."""

    def __init__(self, limit_bytes: int, counts: PrefixCounts) -> None:
        self._limit = limit_bytes
        self._counts = counts
        self._items: OrderedDict[bytes, Item] = OrderedDict()
        self._children: dict[bytes, dict[bytes, None]] = {}
        counts.memory_limit_bytes = limit_bytes

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def block(self, key: bytes) -> Block | None:
        """The block with a key."""
        found = self._items.get(key)
        return found if isinstance(found, Block) else None

    def state(self, block: bytes) -> State | None:
        """The state at a block's end."""
        found = self._items.get(state_key(block))
        return found if isinstance(found, State) else None

    def get(self, key: bytes) -> Item | None:
        """Either."""
        return self._items.get(key)

    def after(self, key: bytes) -> Iterator[Block]:
        """The blocks that follow one, in no order."""
        for child in self._children.get(key, ()):
            found = self._items[child]
            if isinstance(found, Block):
                yield found

    def add(self, path: Sequence[Item]) -> None:
        """Keeps items, a path from its beginning to its end; what is over the limit goes."""
        for item in path:
            if item.key not in self._items:
                self._items[item.key] = item
                self._children.setdefault(item.parent, {})[item.key] = None
                self._counts.memory_bytes += item.nbytes
        self.touch([item.key for item in path])
        while self._counts.memory_bytes > self._limit:
            self.drop(next(iter(self._items)))
            self._counts.memory_evictions += 1
        self._counts.memory_entries = len(self._items)

    def touch(self, path: Sequence[bytes]) -> None:
        """Says that a path was used."""
        for key in reversed(path):
            if key in self._items:
                self._items.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """Forgets an item. Idempotent."""
        item = self._items.pop(key, None)
        if item is None:
            return
        siblings = self._children[item.parent]
        del siblings[key]
        if not siblings:
            del self._children[item.parent]
        self._counts.memory_bytes -= item.nbytes
        self._counts.memory_entries = len(self._items)

    def clear(self) -> None:
        """Forgets everything."""
        self._items.clear()
        self._children.clear()
        self._counts.memory_bytes = self._counts.memory_entries = 0
