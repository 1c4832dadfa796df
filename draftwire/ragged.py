"""A ragged cache: many sequences of different lengths in one array a layer, so that they share a forward.

Each layer has [slots, heads, capacity, dim] arrays. A row is a sequence; its length is a host integer. A forward writes a
window of every row at that row's own length, and the mask lets position i of row b see keys j <= length_b + i (and, in a
sliding layer, j > length_b + i - window). Taking back is a subtraction: what lies past a length is never seen.
Importing this module imports mlx, so the BLAS must have been loaded. Everything here belongs to the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from draftwire.errors import InternalError

CAPACITY_STEP: Final = 256
# Up to here a pool has as many slots as rows, beyond it an even number: what a slot more costs in copies when somebody joins
# is little beside reading that somebody's prompt, and memory is what bounds how many there are.
_MOST_EXACT: Final = 16
# Keys that a forward looks at come in steps, so that few shapes occur; a multiple of every vector width, so that sums over
# masked keys fall into the same lanes whatever the number of keys.
_EXTENT_STEP: Final = 32
# Positions before its end at which a pool begins to grow, a little in each forward, where its rows will need it.
_EARLY: Final = 64
# Forwards that a pool stays too large: copying it costs about as much as one.
_PATIENCE: Final = 16


@dataclass(slots=True, eq=False)
class PoolRow:
    """One sequence's place in a pool."""

    index: int
    """Where it lies now; changes when the pool is repacked."""
    length: int
    """Positions [0, length) stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """What all layers share in one forward."""

    offsets: mx.array
    """(rows,) int32: lengths before it."""
    after: mx.array
    """(rows,) int32: lengths plus the width."""
    positions: mx.array
    """(rows, 1, width, 1) int32: where each row's window goes."""
    extent: int
    """Keys [0, extent) are looked at."""
    places: tuple[int, ...]
    """Which rows of the arrays take part, in the order of the model's input."""
    scattered: tuple[mx.array, mx.array] | None
    """(rows, 1) and (rows, width): row and position of each key to write; None where every row takes part."""

    def seen(self, array: mx.array) -> mx.array:
        """(rows, heads, extent, dim): what the rows of this forward see of a layer's array. A view where they lie together."""
        first, last = self.places[0], self.places[-1]
        if last - first + 1 == len(self.places):
            return array[first : last + 1, :, : self.extent]
        return mx.take(array[:, :, : self.extent], mx.array(self.places, dtype=mx.int32), axis=0)


class WindowedKVCache(KVCache):
    """A sliding layer's cache of one sequence in time order: it keeps everything and masks what has slid out."""

    def __init__(self, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """mlx-lm's interface."""
        window_size = window_size or self.window
        return super().make_mask(N, window_size=window_size, return_array=return_array)  # type: ignore[no-untyped-call]


class RaggedLayer:
    """One layer's part of a pool, with the interface that mlx-lm's models expect of a cache.

    It has no `__len__`: an empty cache would be falsy, and mlx-lm would then build no mask.
    """

    def __init__(self, pool: RaggedPool, window: int | None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset: mx.array | int = 0
        self._pool = pool
        self._window = window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes each row's window at its own length. keys, values: (rows, heads, width, dim)."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._pool.empty(keys), self._pool.empty(values)
        now = self._pool.forward
        self.keys, self.values = _written(self.keys, keys, now), _written(self.values, values, now)
        self.offset = now.after
        if self._pool.eager:
            mx.async_eval(self.keys, self.values)  # type: ignore[no-untyped-call]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """(rows, heads, extent, dim) each, for the rows of the forward."""
        assert self.keys is not None
        assert self.values is not None
        now = self._pool.forward
        return now.seen(self.keys), now.seen(self.values)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """(rows, 1, N, extent) booleans, always an array: rows differ."""
        return self._pool.mask(N, window_size or self._window)

    def begin(self, offset: mx.array | int) -> None:
        """A forward starts: lengths are these until the layer has been written."""
        self.offset = offset

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """The arrays."""
        return self.keys, self.values

    @state.setter
    def state(self, arrays: tuple[mx.array | None, mx.array | None]) -> None:
        self.keys, self.values = arrays

    def resize(self, order: Sequence[int], slots: int, capacity: int) -> None:
        """Copies rows `order` into arrays of another size, if they are of another. Keys before values: the peak is the arrays
        and one more, not twice as many."""
        if self.keys is None or self.values is None:
            return
        shapes = {(array.shape[0], array.shape[2]) for array in (self.keys, self.values)}
        if shapes == {(slots, capacity)} and list(order) == list(range(len(order))):
            return
        self.keys = _resized(self.keys, order, slots, capacity)
        mx.eval(self.keys)
        self.values = _resized(self.values, order, slots, capacity)
        mx.eval(self.values)

    def stretch(self, capacity: int) -> None:
        """More positions, in the forward that comes next. Nobody's row moves."""
        assert self.keys is not None
        assert self.values is not None
        more = [(0, 0), (0, 0), (0, capacity - self.positions), (0, 0)]
        self.keys, self.values = mx.pad(self.keys, more), mx.pad(self.values, more)

    @property
    def positions(self) -> int:
        """Positions that the arrays have: the pool's capacity, or the next one already. 0 before anything was written."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(array.nbytes for array in self.state if array is not None)


class RaggedPool:
    """The caches of all layers of many sequences. The caller runs forwards over all rows: `begin`, the model, `written`.

    `slots` is a class (`slot_class`) and `capacity` a multiple of 256; arrays are copied, layer by layer, only when one of them
    changes. A forward covers every slot or some rows; free ones that take part are parked at length 0: it writes into them,
    nobody reads it.
    """

    def __init__(self, prototype: Sequence[Any], *, exact_slots: bool = False) -> None:
        """prototype: the caches that the model makes for one sequence. exact_slots: as many slots as rows, no classes.

        Raises ValueError if `unpoolable` names a reason.
        """
        reason = unpoolable(prototype)
        if reason:
            raise ValueError(reason)
        self._class_of: Callable[[int], int] = int if exact_slots else slot_class
        self.slots = 0
        self.capacity = 0
        self.layers: list[Any] = [self._mirror(cache) for cache in prototype]
        """What the model gets as its cache."""
        self._flat: list[RaggedLayer] = list(flat(self.layers))
        self.eager = False
        """Whether mlx gets a forward layer by layer while Python builds it, which takes 5 to 9 ms: not where another forward
        still uses the pool's arrays."""
        self.coming = 0
        """Sequences that there will soon be, those that have a row included: the pool grows once for all of them."""
        self.longest = 0
        """Positions that the longest of its rows may come to have: the pool grows before it must, up to there."""
        self._rows: list[PoolRow | None] = []
        self._reach: list[int] = []  # by index: positions that anything was ever written to
        self._roomy = 0
        self._forward: _Forward | None = None
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    @property
    def rows(self) -> list[PoolRow]:
        """The sequences in it."""
        return [row for row in self._rows if row is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(layer.nbytes for layer in self._flat)

    @property
    def forward(self) -> _Forward:
        """The forward that runs."""
        if self._forward is None:
            raise InternalError("a forward over a pool that was not begun", reason="CACHE_LENGTH")
        return self._forward

    def reserve(self, rows: int, capacity: int) -> None:
        """Makes room for `rows` rows in all and `capacity` positions, in one copy. Never shrinks."""
        size = self._size_for(rows, capacity)
        if size != (self.slots, self.capacity):
            self._repack(*size)

    def join(self, caches: Sequence[Any], length: int) -> PoolRow:
        """Copies a sequence's own caches (batch 1, `length` positions, in time order) into a free row."""
        return self.join_all([(caches, length)], length + 1)[0]

    def join_all(self, joining: Sequence[tuple[Sequence[Any], int]], capacity: int) -> list[PoolRow]:
        """Copies sequences' own caches into free rows, after making room for them and for `capacity` positions.

        Layer by layer, and each layer of a cache is emptied once it is copied: the peak is the larger pool and one layer.
        """
        size = self._size_for(len(self.rows) + len(joining), max([capacity, *(length for _, length in joining)]))
        old = [row.index for row in self.rows] if size != (self.slots, self.capacity) else None
        if old is not None:
            self._renumber(*size)
        rows = []
        for _, length in joining:
            index = self._rows.index(None)
            self._rows[index] = row = PoolRow(index, length)
            rows.append(row)
        sources = [list(flat(caches)) for caches, _ in joining]
        for number, layer in enumerate(self._flat):
            if old is not None:
                layer.resize(old, self.slots, self.capacity)
            for row, own in zip(rows, sources, strict=True):
                cache = own[number]
                end = max(row.length, self._reach[row.index])
                if layer.keys is None and cache.keys is not None:
                    layer.state = self.empty(cache.keys), self.empty(cache.values)
                if layer.keys is not None and layer.values is not None and end:
                    layer.keys = _put_row(layer.keys, cache.keys, row.index, (row.length, end))
                    layer.values = _put_row(layer.values, cache.values, row.index, (row.length, end))
                    mx.eval(layer.keys, layer.values)
                cache.keys = cache.values = None
        for row in rows:
            self._reach[row.index] = row.length
        if old is not None:
            mx.clear_cache()
        return rows

    def leave(self, row: PoolRow) -> None:
        """Frees a row. Nothing moves; the arrays go when nobody is left."""
        if self._rows[row.index] is row:
            self._rows[row.index] = None
        if not self.rows:
            self.clear()

    def clear(self) -> None:
        """Forgets every row and drops the arrays."""
        self._rows, self._reach = [], []
        self.slots = self.capacity = self._roomy = 0
        self._forward = None
        self._masks.clear()
        for layer in self._flat:
            layer.state = (None, None)
            layer.begin(0)
        mx.clear_cache()

    def truncate(self, row: PoolRow, length: int) -> None:
        """Keeps positions [0, length) of a row. Raises InternalError for more than it has."""
        if not 0 <= length <= row.length:
            raise InternalError(f"cache has {row.length} positions, cannot keep {length}", reason="CACHE_LENGTH")
        row.length = length

    def begin(self, width: int, rows: Sequence[PoolRow] | None = None) -> list[int]:
        """Prepares a forward over `width` positions of `rows`, of every slot by default. Grows the capacity where it must.

        Returns the index of each row of the model's input: free ones between those that were named take part.
        """
        end = max((row.length for row in (self.rows if rows is None else rows)), default=0) + width
        if end > self.capacity:
            self.reserve(len(self.rows), end)
        elif self._soon(end) > self.capacity:
            self._stretch()
        places = list(range(self.slots)) if rows is None else self._places(rows)
        lengths = [row.length if (row := self._rows[place]) is not None else 0 for place in places]
        # mlx writes past an array's end in silence, into the next row or beyond: this is the only guard.
        if not places or end > self.capacity or len(self._rows) != self.slots:
            raise InternalError(
                f"a window would end at {end} of {self.capacity} positions in {self.slots} slots", reason="CACHE_LENGTH"
            )
        for place, length in zip(places, lengths, strict=True):
            self._reach[place] = max(self._reach[place], length + width)
        offsets = mx.array(lengths, dtype=mx.int32)
        columns = offsets[:, None] + mx.arange(width, dtype=mx.int32)[None]
        scattered = None
        if len(places) < self.slots:
            scattered = mx.array(places, dtype=mx.int32)[:, None], columns
        self._forward = _Forward(
            offsets=offsets,
            after=offsets + width,
            positions=columns[:, None, :, None],
            extent=min(self.capacity, -(-end // _EXTENT_STEP) * _EXTENT_STEP),
            places=tuple(places),
            scattered=scattered,
        )
        self._masks.clear()
        self._roomy = 0 if self._wanted(width) == (self.slots, self.capacity) else self._roomy + 1
        for layer in self._flat:
            layer.begin(offsets)
        return places

    def written(self, row: PoolRow, positions: int) -> None:
        """Books positions of a row that the last forward wrote and that may stand; its padding is not booked."""
        row.length += positions

    def fits(self, width: int) -> bool:
        """Whether a forward of this width needs no copy first, neither to grow nor to shrink."""
        rows = self.rows
        return not rows or (max(row.length for row in rows) + width <= self.capacity and self._roomy < _PATIENCE)

    def fit(self, width: int) -> None:
        """Shrinks a pool that has been too large for a while: fewer slots make a cheaper forward."""
        if self._roomy >= _PATIENCE:
            self._repack(*self._wanted(width))

    def compact(self, width: int) -> None:
        """Shrinks to what its rows and a forward of this width need, at the price of a copy."""
        longest = max((row.length for row in self.rows), default=0)
        size = shape_for(len(self.rows), longest + width)
        if size != (self.slots, self.capacity):
            self._repack(*size)

    def _wanted(self, width: int) -> tuple[int, int]:
        """Slots and capacity that would do; the capacity that there is where that is less than twice what is needed."""
        rows = self.rows
        longest = self._soon(max((row.length for row in rows), default=0) + width)
        needed = (longest // CAPACITY_STEP + 1) * CAPACITY_STEP
        slots = self._class_of(max(len(rows), self.coming, 1))
        return slots, needed if 2 * needed <= self.capacity else self.capacity

    def rows_of(self, row: PoolRow) -> list[KVCache]:
        """A copy of a row as caches of its own, layer by layer: mlx-lm's, batch 1, in time order."""
        copies = []
        for layer in self._flat:
            copy = KVCache()  # type: ignore[no-untyped-call]
            if layer.keys is not None and layer.values is not None and row.length:
                one = slice(row.index, row.index + 1)
                keys, values = layer.keys[one, :, : row.length], layer.values[one, :, : row.length]
                copy.state = (mx.contiguous(keys), mx.contiguous(values), row.length)
                mx.eval(copy.keys, copy.values)
            copies.append(copy)
        return copies

    def last_keys(self) -> mx.array | None:
        """The last layer's keys, which a forward writes near its end."""
        return self._flat[-1].keys

    def checkpoint(self) -> list[tuple[mx.array | None, mx.array | None]]:
        """The arrays as they are, for `restore`. While it lives, a forward must copy them: drop it before evaluating one."""
        return [layer.state for layer in self._flat]

    def restore(self, arrays: Sequence[tuple[mx.array | None, mx.array | None]]) -> None:
        """Forgets the forwards built since `checkpoint`, which must not have been evaluated."""
        for layer, state in zip(self._flat, arrays, strict=True):
            layer.state = state
        # What had been stretched since is short again.
        self.capacity = min([self.capacity, *(layer.positions for layer in self._flat if layer.positions)])

    def empty(self, like: mx.array) -> mx.array:
        """Zeros for an array whose heads, dim and dtype are those of `like`."""
        return mx.zeros((self.slots, like.shape[1], self.capacity, like.shape[3]), dtype=like.dtype)

    def mask(self, width: int, window: int | None) -> mx.array:
        """(rows, 1, width, extent); made once a forward."""
        found = self._masks.get((width, window))
        if found is None:
            now = self.forward
            keys = mx.arange(now.extent, dtype=mx.int32)
            found = keys <= now.positions
            if window is not None:
                found = found & (keys > now.positions - window)
            self._masks[width, window] = found
        return found

    def _mirror(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(self._mirror(one) for one in cache.caches))  # type: ignore[no-untyped-call]
        return RaggedLayer(self, cache.max_size if isinstance(cache, RotatingKVCache) else None)

    def _size_for(self, rows: int, capacity: int) -> tuple[int, int]:
        """Slots and capacity that hold so much, and no less than there is."""
        slots = max(self.slots, self._class_of(max(rows, self.coming, 1)))
        return slots, max(self.capacity, _rounded(capacity))

    def _places(self, rows: Sequence[PoolRow]) -> list[int]:
        """The indices of these rows, in order, and of the free rows between them where nobody else lies there."""
        own = sorted(row.index for row in rows)
        span = range(own[0], own[-1] + 1) if own else range(0)
        between = set(span) - set(own)
        return own if any(self._rows[index] is not None for index in between) else list(span)

    def _soon(self, end: int) -> int:
        """Where rows that end at `end` will end in a while."""
        return max(end, min(end + _EARLY, self.longest))

    def _stretch(self) -> None:
        """Makes a few layers longer, and the capacity with the last. All at once, seven rows of 512 positions took 57 ms."""
        capacity = self.capacity + CAPACITY_STEP
        short = [layer for layer in self._flat if 0 < layer.positions < capacity]
        some = -(-2 * len(self._flat) // _EARLY)
        for layer in short[:some]:
            layer.stretch(capacity)
        if len(short) <= some:
            self.capacity = capacity

    def _repack(self, slots: int, capacity: int) -> None:
        """Copies everything into arrays of another size, rows in order and without gaps."""
        old = [row.index for row in self.rows]
        self._renumber(slots, capacity)
        for layer in self._flat:
            layer.resize(old, slots, capacity)
        mx.clear_cache()

    def _renumber(self, slots: int, capacity: int) -> None:
        """Books the new size; the arrays follow, one by one."""
        rows = self.rows
        self._reach = [min(self._reach[row.index], capacity) for row in rows] + [0] * (slots - len(rows))
        for index, row in enumerate(rows):
            row.index = index
        self._rows = [*rows, *([None] * (slots - len(rows)))]
        self.slots, self.capacity, self._roomy, self._forward = slots, capacity, 0, None


def unpoolable(prototype: Sequence[Any]) -> str:
    """Why a pool cannot hold these caches; "" where it can."""
    for cache in flat(prototype):
        if type(cache) is RotatingKVCache:
            if cache.keep:
                return "its sliding layers keep their first tokens"
        elif type(cache) is not KVCache:
            return f"its cache ({type(cache).__name__}) is not plain keys and values"
    return ""


def smallest_window(prototype: Sequence[Any]) -> int | None:
    """Tokens of the smallest sliding window; None without one."""
    return min((cache.max_size for cache in flat(prototype) if isinstance(cache, RotatingKVCache)), default=None)


def prefill_caches(prototype: Sequence[Any]) -> list[Any]:
    """Fresh caches for one sequence that is to join a pool: sliding layers in time order and whole."""

    def own(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(own(one) for one in cache.caches))  # type: ignore[no-untyped-call]
        if isinstance(cache, RotatingKVCache):
            return WindowedKVCache(cache.max_size)
        return KVCache()  # type: ignore[no-untyped-call]

    return [own(cache) for cache in prototype]


def slot_class(rows: int) -> int:
    """The slots that a pool of so many rows has."""
    return rows if rows <= _MOST_EXACT else rows + rows % 2


def shape_for(rows: int, positions: int) -> tuple[int, int]:
    """(slots, capacity) of the smallest pool for so many rows of so many positions."""
    return slot_class(max(rows, 1)), -(-positions // CAPACITY_STEP) * CAPACITY_STEP


def flat(layers: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers; a layer may hold several."""
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from flat(layer.caches)
        else:
            yield layer


def _rounded(positions: int) -> int:
    return -(-positions // CAPACITY_STEP) * CAPACITY_STEP


def _written(array: mx.array, window: mx.array, now: _Forward) -> mx.array:
    """The array with window (rows, heads, width, dim) at each row's own positions; in place where nobody else has it."""
    if now.scattered is None:
        return mx.put_along_axis(array, now.positions, window, axis=2)
    rows, columns = now.scattered
    # Another name for the same array, without a copy: whoever holds the old one (`checkpoint`) keeps it as it is.
    array = array[...]
    # An index array on each side of the slice brings the two to the front: (rows, width, heads, dim).
    array[rows, :, columns] = window.transpose(0, 2, 1, 3)
    return array


def _put_row(array: mx.array, own: mx.array | None, index: int, span: tuple[int, int]) -> mx.array:
    """Writes own[:, :, :length], then zeros up to `end`: a NaN that a former sequence left would survive any mask."""
    length, end = span
    parts = [own[:, :, :length]] if own is not None else []
    rest = end - length if own is not None else end
    parts.append(mx.zeros((1, array.shape[1], rest, array.shape[3]), dtype=array.dtype))
    array[index : index + 1, :, :end] = mx.concatenate(parts, axis=2)
    return array


def _resized(array: mx.array, order: Sequence[int], slots: int, capacity: int) -> mx.array:
    kept = min(array.shape[2], capacity)
    if list(order) == list(range(array.shape[0])):
        rows = array
    else:
        rows = mx.take(array, mx.array(list(order), dtype=mx.int32), axis=0) if order else array[:0]
    return mx.pad(rows[:, :, :kept], [(0, slots - len(order)), (0, 0), (0, capacity - kept), (0, 0)])
