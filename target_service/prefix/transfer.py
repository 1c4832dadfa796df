"""Between a cache's layers and the host. Runs on the compute thread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache

from draftwire.ragged import RaggedLayer, WindowedKVCache
from draftwire.sliding import SlidingKVCache
from target_service.prefix.layout import Array, Layout, LeafState, Prefix, RowForm, state_bytes

_ROWS = (KVCache, ConcatenateKVCache, QuantizedKVCache, WindowedKVCache, RaggedLayer)
_STATES = (SlidingKVCache, ChunkedKVCache, ArraysCache)


def layout_of(leaves: Iterable[Any]) -> Layout:
    """Looks at the caches of all layers of a sequence that has read something."""
    leaves = list(leaves)
    odd = next((type(leaf).__name__ for leaf in leaves if type(leaf) not in (*_ROWS, *_STATES)), "")
    if odd:
        reason = f"its cache ({odd}) cannot be stored"
        return Layout(rows=(), stateful=False, name="", row_bytes=0, state_bytes=0, reason=reason)
    rows = [RowForm(a.shape[1], a.shape[3], _dtype(a)) for leaf in leaves for a in _row_arrays(leaf)]
    states = [_state_of(leaf) for leaf in leaves if type(leaf) in _STATES]
    return Layout(
        rows=tuple(rows),
        stateful=bool(states),
        name=json.dumps([_name(leaf) for leaf in leaves], separators=(",", ":")),
        row_bytes=sum(form.heads * form.dim * _itemsize(form.dtype) for form in rows),
        state_bytes=sum(state_bytes(state) for state in states),
    )


def take_rows(arrays: Sequence[Any], begin: int, length: int, block: int) -> tuple[tuple[Array, ...], ...]:
    """Copies positions [begin, length) of (1, heads, positions, dim) arrays to the host, in blocks."""
    # Views of mlx's own memory: dropped here, before a forward would find its arrays in use and copy them.
    views = [_view(array) for array in arrays]
    cuts = [(at, min(at + block, length)) for at in range(begin, length, block)]
    return tuple(tuple(view[:, :, at:end].copy() for view in views) for at, end in cuts)


def row_arrays(leaves: Iterable[Any]) -> list[Any]:
    """The arrays that have a row a position, in the order of `Layout.rows`."""
    return [array for leaf in leaves for array in _row_arrays(leaf)]


def take_state(leaves: Iterable[Any], length: int) -> tuple[tuple[LeafState, ...], int]:
    """The states of all layers that have one, at `length`, and the shortest length that they can be cut back to."""
    holders = [leaf for leaf in leaves if type(leaf) in _STATES]
    return tuple(_state_of(leaf) for leaf in holders), max((_lowest(leaf, length) for leaf in holders), default=0)


def give(leaves: Iterable[Any], prefix: Prefix, layout: Layout) -> None:
    """Fills the empty caches of a sequence. Nothing is changed where this raises: ValueError for what does not fit."""
    leaves = list(leaves)
    if len(prefix.rows) != len(layout.rows) or any(
        array.shape != (1, form.heads, prefix.length, form.dim)
        for array, form in zip(prefix.rows, layout.rows, strict=True)
    ):
        raise ValueError("a stored prefix does not have the shape of the model's cache")
    if len(prefix.state) != sum(type(leaf) in _STATES for leaf in leaves):
        raise ValueError("a stored prefix does not have the states of the model's cache")
    rows = iter([_back(array, form.dtype) for array, form in zip(prefix.rows, layout.rows, strict=True)])
    states = iter([_state_back(state) for state in prefix.state])
    for leaf in leaves:
        if type(leaf) in _ROWS:
            _fill_rows(leaf, rows, prefix.length)
            continue
        arrays, numbers = next(states)
        _fill_state(leaf, arrays, numbers)
        if type(leaf) is not ArraysCache and prefix.state_length > prefix.length:
            leaf.trim(prefix.state_length - prefix.length)


def _name(leaf: Any) -> list[Any]:
    arrays = _row_arrays(leaf) if type(leaf) in _ROWS else _arrays(leaf)
    shapes = [[a.shape[1], a.shape[3], _dtype(a)] for a in arrays] if type(leaf) is not ArraysCache else []
    if type(leaf) is ArraysCache:
        shapes = [[*a.shape, _dtype(a)] for a in arrays if a is not None]
    settings = [getattr(leaf, name, None) for name in ("bits", "group_size", "max_size", "keep", "slack", "chunk_size")]
    return [type(leaf).__name__, settings, shapes]


def _row_arrays(leaf: Any) -> list[Any]:
    kind: type = type(leaf)
    if kind not in _ROWS:
        return []
    if kind is QuantizedKVCache:
        return [*leaf.keys, *leaf.values]
    return [leaf.keys, leaf.values]


def _arrays(leaf: Any) -> list[Any]:
    return list(leaf.cache) if type(leaf) is ArraysCache else [leaf.keys, leaf.values]


def _fill_rows(leaf: Any, rows: Any, length: int) -> None:
    kind: type = type(leaf)
    if kind is QuantizedKVCache:
        leaf.keys = tuple(next(rows) for _ in range(3))
        leaf.values = tuple(next(rows) for _ in range(3))
    else:
        leaf.keys, leaf.values = next(rows), next(rows)
    leaf.offset = length


def _state_of(leaf: Any) -> LeafState:
    numbers: tuple[int, ...] = ()
    if type(leaf) is ArraysCache:
        arrays = list(leaf.cache)
    elif type(leaf) is SlidingKVCache:
        arrays, numbers = leaf.saved()
    else:
        end = leaf.offset - leaf.start_position
        arrays = [leaf.keys[..., :end, :], leaf.values[..., :end, :]]
        numbers = (leaf.offset, leaf.start_position)
    return LeafState(
        arrays=tuple(_view(array).copy() if array is not None else None for array in arrays),
        dtypes=tuple(_dtype(array) if array is not None else "" for array in arrays),
        numbers=numbers,
    )


def _fill_state(leaf: Any, arrays: list[Any], numbers: tuple[int, ...]) -> None:
    if type(leaf) is ArraysCache:
        leaf.cache = arrays
    elif type(leaf) is SlidingKVCache:
        leaf.load(arrays, numbers)
    else:
        leaf.keys, leaf.values = arrays
        leaf.offset, leaf.start_position = numbers


def _lowest(leaf: Any, length: int) -> int:
    if type(leaf) is ArraysCache:
        return length
    if type(leaf) is SlidingKVCache:
        lowest: int = leaf.saved_lowest
        return lowest
    # A row sees its own chunk, from its first position on.
    start: int = leaf.start_position
    chunk: int = leaf.chunk_size
    return -(-start // chunk) * chunk


def _view(array: Any) -> Array:
    """mlx's own memory, evaluated, as an array of the host."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _back(array: Array, dtype: str) -> Any:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "bfloat16" else made


def _state_back(state: LeafState) -> tuple[list[Any], tuple[int, ...]]:
    pairs = zip(state.arrays, state.dtypes, strict=True)
    return [_back(array, dtype) if array is not None else None for array, dtype in pairs], state.numbers


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _itemsize(dtype: str) -> int:
    return int(getattr(mx, dtype).size)
