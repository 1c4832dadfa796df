"""What a sequence's cache consists of, as plain values on the host. No mlx, for any thread.

Two kinds of parts: *rows*, one a position, of which any prefix can be used (keys and values, quantised ones too); and a
*state*, which belongs to one length (recurrent state, a sliding window's last rows, a chunk).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RowForm:
    """One array that has a row a position: (1, heads, positions, dim)."""

    heads: int
    dim: int
    dtype: str
    """mlx's name of it; bfloat16 lies on the host as uint16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafState:
    """What a layer holds at one length, beyond rows."""

    arrays: tuple[Array | None, ...]
    dtypes: tuple[str, ...]
    """One an array, "" for None."""
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A copy on the host of positions [begin, length) of a cache, and of its state at `length`."""

    begin: int
    length: int
    blocks: tuple[tuple[Array, ...], ...]
    """Block by block, one array a `RowForm`: (1, heads, positions of the block, dim)."""
    state: tuple[LeafState, ...] | None = None
    lowest: int = 0
    """The shortest length that the state can be cut back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What an empty cache is filled with."""

    length: int
    rows: tuple[Array, ...]
    """One a `RowForm`: (1, heads, length, dim)."""
    state: tuple[LeafState, ...] = ()
    state_length: int = 0
    """Where the state was taken; it is cut back to `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of a model's cache. Plain values, for any thread."""

    rows: tuple[RowForm, ...]
    stateful: bool
    """Whether there is a state, without which rows are of no use."""
    name: str
    """All that decides whether a stored part fits: kinds of layers, shapes, types. Part of every key."""
    row_bytes: int
    """Bytes of one position's rows."""
    state_bytes: int
    """Bytes of a state when this was looked at; windows grow from there."""
    reason: str = ""
    """Why nothing can be stored; "" where it can."""


def state_bytes(state: LeafState) -> int:
    """Bytes of its arrays."""
    return sum(array.nbytes for array in state.arrays if array is not None)
