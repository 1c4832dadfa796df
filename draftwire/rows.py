"""A pool whose forwards are tiles of single positions: row r of a forward is one position of one sequence, whichever.

`RaggedPool` runs rectangles: how many positions a sequence has in a forward decides the shape of its attention, and the shape
decides in which order a BLAS adds up. Here the model always gets ids (rows, 1): every attention has one query a row, every
linear layer has `rows` rows, and the number of keys depends on the position alone. What a position gets can then depend on
nothing else, provided that a linear layer treats all rows of a tile alike (`draftwire.tiles` looks).

Importing this module imports mlx. Everything here belongs to the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache

from draftwire.errors import InternalError
from draftwire.ragged import PoolRow, RaggedLayer, RaggedPool, slot_class
from draftwire.tiles import extent_class

# Forwards that a pool stays too large: copying it costs about as much as one.
_PATIENCE: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """What one row of a tile is."""

    row: PoolRow
    position: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """What all layers share in one forward."""

    positions: mx.array
    """(rows,) int32."""
    indices: tuple[int, ...]
    """(rows,) the sequence of each row, by its place in the arrays."""
    extent: int
    flat: dict[int, mx.array] = field(default_factory=dict)
    """heads -> (rows * heads,) int32: where each row's keys go in an array seen as (slots * heads * capacity, dim)."""


class RowLayer(RaggedLayer):
    """One layer's part of a `RowPool`."""

    def __init__(self, pool: RowPool, window: int | None) -> None:
        super().__init__(pool, window)
        self._rows = pool

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes each row at its own position. keys, values: (rows, heads, 1, dim)."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._rows.empty(keys), self._rows.empty(values)
        self.keys = self._rows.put(self.keys, keys)
        self.values = self._rows.put(self.values, values)
        self.offset = self._rows.tile.positions + 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """(rows, heads, extent, dim) each."""
        assert self.keys is not None
        assert self.values is not None
        return self._rows.seen(self.keys), self._rows.seen(self.values)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """(rows, 1, 1, extent) booleans."""
        if N != 1:
            raise InternalError(f"a tile's rows have one position, not {N}", reason="CACHE_LENGTH")
        return self._rows.row_mask(window_size or self._window)


class RowPool(RaggedPool):
    """The caches of all layers of many sequences. The caller runs tiles: `run_tile`, then `written`."""

    def __init__(self, prototype: Sequence[Any]) -> None:
        super().__init__(prototype)
        self._tile: _Tile | None = None
        self._tile_masks: dict[int | None, mx.array] = {}

    @property
    def tile(self) -> _Tile:
        """The forward that runs."""
        if self._tile is None:
            raise InternalError("a forward over a pool that was not begun", reason="CACHE_LENGTH")
        return self._tile

    def begin_rows(self, places: Sequence[Place], extent: int) -> None:
        """Prepares a forward of these rows, of which several may be the same. Grows the capacity where it is needed.

        extent: keys that every row looks at; at least `extent_class(position + 1)` of each.
        """
        if extent > self.capacity:
            self.reserve(len(self.rows), extent)
        # mlx writes past an array's end in silence, into the next row or beyond: this is the only guard.
        for place in places:
            inside = 0 <= place.row.index < self.slots and 0 <= place.position < extent <= self.capacity
            if not inside or self._rows[place.row.index] is not place.row or place.position < 0:
                raise InternalError(
                    f"position {place.position} of slot {place.row.index} is outside of {extent} keys in {self.slots} slots",
                    reason="CACHE_LENGTH",
                )
            self._reach[place.row.index] = max(self._reach[place.row.index], place.position + 1)
        positions = mx.array([place.position for place in places], dtype=mx.int32)
        self._tile = _Tile(positions=positions, indices=tuple(place.row.index for place in places), extent=extent)
        self._tile_masks.clear()
        for layer in self._flat:
            layer.begin(positions)

    def clear(self) -> None:
        """Forgets every row and drops the arrays."""
        self._tile = None
        self._tile_masks.clear()
        super().clear()

    def put(self, array: mx.array, new: mx.array) -> mx.array:
        """Writes new (rows, heads, 1, dim) where the tile's rows belong; in place where nobody else holds the array."""
        slots, heads, capacity, dim = array.shape
        targets = self.tile.flat.get(heads)
        if targets is None:
            first = mx.array(self.tile.indices, dtype=mx.int32)[:, None] * heads + mx.arange(heads, dtype=mx.int32)
            targets = (first * capacity + self.tile.positions[:, None]).reshape(-1)
            self.tile.flat[heads] = targets
        flat = array.reshape(slots * heads * capacity, dim)
        flat[targets] = new.reshape(-1, dim).astype(array.dtype)
        return flat.reshape(array.shape)

    def seen(self, array: mx.array) -> mx.array:
        """(rows, heads, extent, dim): what each row looks at. A view where one sequence has all rows, or each slot has one."""
        indices, extent = self.tile.indices, self.tile.extent
        if len(set(indices)) == 1:
            one = array[indices[0] : indices[0] + 1, :, :extent]
            return mx.broadcast_to(one, (len(indices), *one.shape[1:]))
        if indices == tuple(range(indices[0], indices[0] + len(indices))):
            return array[indices[0] : indices[0] + len(indices), :, :extent]
        return mx.take(array[:, :, :extent], mx.array(indices, dtype=mx.int32), axis=0)

    def row_mask(self, window: int | None) -> mx.array:
        """(rows, 1, 1, extent); made once a forward."""
        found = self._tile_masks.get(window)
        if found is None:
            keys = mx.arange(self.tile.extent, dtype=mx.int32)
            positions = self.tile.positions[:, None, None, None]
            found = keys <= positions
            if window is not None:
                found = found & (keys > positions - window)
            self._tile_masks[window] = found
        return found

    def shrink(self) -> None:
        """Takes off slots and capacity that nobody has needed for a while."""
        rows = self.rows
        needed = extent_class(max((row.length for row in rows), default=0) + 1)
        slots = min(self.slots, slot_class(max(len(rows), 1)))
        capacity = needed if 2 * needed <= self.capacity else self.capacity
        if (slots, capacity) == (self.slots, self.capacity):
            self._roomy = 0
            return
        self._roomy += 1
        if self._roomy > _PATIENCE:
            self._repack(slots, capacity)

    def scatter_noise(self) -> None:
        """Fills every position with random keys and values, for a probe."""
        for number, layer in enumerate(self._flat):
            if layer.keys is not None and layer.values is not None:
                keys = mx.random.split(mx.random.key(number), 2)
                layer.state = (
                    mx.random.normal(layer.keys.shape, key=keys[0]).astype(layer.keys.dtype),
                    mx.random.normal(layer.values.shape, key=keys[1]).astype(layer.values.dtype),
                )
                mx.eval(layer.keys, layer.values)

    def _mirror(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(self._mirror(one) for one in cache.caches))  # type: ignore[no-untyped-call]
        return RowLayer(self, cache.max_size if isinstance(cache, RotatingKVCache) else None)


def run_tile(
    model: Any, pool: RowPool, places: Sequence[Place], rows: int, extent: int, *, ids: mx.array | None = None
) -> mx.array:
    """Builds one forward. Returns lazy logits (rows, vocab), of which those behind the places are padding.

    places: at least one, at most `rows`. The last is repeated as padding: it writes the same bits to the same place again.
    ids: (rows,) lazy ids in place of those of `places`.
    """
    padded = [*places, *[places[-1]] * (rows - len(places))]
    pool.begin_rows(padded, extent)
    if ids is None:
        ids = mx.array([place.token for place in padded])
    logits: mx.array = model(ids[:, None], cache=pool.layers)
    return logits[:, 0]
