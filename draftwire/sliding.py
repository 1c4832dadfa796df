"""The cache of a layer with a sliding window, kept in time order and able to take rows back, also past the wrap.

It stands in for mlx-lm's `RotatingKVCache`, which is a ring: there a row that leaves the window is overwritten at once, so
nothing comes back, and a one-row step sums over the keys in the order of the ring, several rows in the order of time.
Here every forward shows the attention the same columns in the order of time, whatever its number of rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

SLACK = 128
"""Rows below the longest length so far that can always be taken back; they are kept beyond the window."""


class SlidingKVCache:
    """Keys and values of positions [base, offset), (batch, heads, capacity, dim) each, in mlx-lm's duck interface.

    A row at position p sees position q where p - (window - keep) < q <= p, or q < keep: what mlx-lm's one-row steps see,
    and its masks where keep is 0.
    """

    def __init__(self, max_size: int, keep: int = 0, slack: int = SLACK) -> None:
        """max_size: rows that attention sees, `keep` first ones included. slack: rows that can always be taken back."""
        self.max_size = max_size
        self.keep = keep
        self.offset = 0
        self.keys: Any = None
        self.values: Any = None
        self._slack = slack
        self._base = 0
        self._first = 0
        """First column that the last forward saw, `_sinks` aside."""
        self._sinks: tuple[Any, Any] | None = None
        """Keys and values of positions [0, keep), once the buffer begins behind them."""

    @property
    def lowest(self) -> int:
        """The shortest length that it can be taken back to."""
        return self._base + self._span - 1 if self._base else 0

    @property
    def slack(self) -> int:
        """Rows below the longest length so far that can always be taken back."""
        return self._slack

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Appends rows, (batch, heads, rows, dim). Returns the columns that these rows may see, in the order of time."""
        rows = keys.shape[2]
        self._make_room(keys, values)
        begin = self.offset - self._base
        self.keys[..., begin : begin + rows, :] = keys
        self.values[..., begin : begin + rows, :] = values
        self._first = self._first_column()
        self.offset += rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last `update_and_fetch` returned, for layers that share these keys; after `trim`, what the next row sees."""
        begin, end = self._first - self._base, self.offset - self._base
        shown = self.keys[..., begin:end, :], self.values[..., begin:end, :]
        if not self._first or not self.keep:
            return shown
        sinks = self._sinks or (self.keys[..., : self.keep, :], self.values[..., : self.keep, :])
        return mx.concatenate([sinks[0], shown[0]], axis=2), mx.concatenate([sinks[1], shown[1]], axis=2)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask of a forward of N rows that begins at `offset`: None, "causal", or (N, columns) bool."""
        window = min(window_size or self.max_size, self.max_size)
        if self.offset + N <= window:
            if N == 1:
                return None
            if not return_array:
                return "causal"
        elif N == 1 and window == self.max_size:
            return None
        first = self._first_column()
        columns = mx.arange(first, self.offset + N)
        if first and self.keep:
            columns = mx.concatenate([mx.arange(self.keep), columns])
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        return (columns <= rows) & ((columns > rows - (window - self.keep)) | (columns < self.keep))

    def is_trimmable(self) -> bool:
        """Always, down to `lowest`."""
        return True

    def trim(self, n: int) -> int:
        """Takes back the last n rows, or as many as it can; returns how many."""
        n = max(0, min(n, self.offset - self.lowest))
        self.offset -= n
        self._first = self._first_column()
        return n

    def size(self) -> int:
        """Rows that the next row could see."""
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.keys is None

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays, for evaluation."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        if self.keys is None:
            return 0
        sinks = sum(int(array.nbytes) for array in self._sinks or ())
        return int(self.keys.nbytes) + int(self.values.nbytes) + sinks

    def saved(self) -> tuple[list[Any], tuple[int, ...]]:
        """What `load` needs: keys and values of the rows that are still wanted, and of the first ones where they slid out."""
        base = self._wanted_base()
        begin, end = base - self._base, self.offset - self._base
        arrays = [self.keys[..., begin:end, :], self.values[..., begin:end, :]]
        if base and self.keep:
            arrays += self._sinks or (self.keys[..., : self.keep, :], self.values[..., : self.keep, :])
        return arrays, (base, self.offset)

    @property
    def saved_lowest(self) -> int:
        """The shortest length that what `saved` gives can be taken back to."""
        base = self._wanted_base()
        return base + self._span - 1 if base else 0

    def load(self, arrays: list[Any], numbers: tuple[int, ...]) -> None:
        """Makes an empty cache the one that `saved` these."""
        self.keys, self.values = arrays[:2]
        self._sinks = (arrays[2], arrays[3]) if len(arrays) > 2 else None
        self._base, self.offset = numbers
        self._first = self._first_column()

    @property
    def _span(self) -> int:
        """Rows of the window that slide."""
        return self.max_size - self.keep

    def _first_column(self) -> int:
        """A function of the length alone, so that it does not matter by which windows the length was reached."""
        first = max(0, self.offset - self._span + 1)
        return 0 if first <= self.keep else first

    def _wanted_base(self) -> int:
        """The first position that a row may still see, also after `slack` rows were taken back."""
        base = max(self._base, self.offset - self._span + 1 - self._slack)
        return 0 if base <= self.keep else base

    def _make_room(self, keys: Any, values: Any) -> None:
        """Moves the rows that are still wanted into a larger buffer, or to the front of a new one, where these do not fit."""
        rows = keys.shape[2]
        if self.keys is not None and self.offset - self._base + rows <= self.keys.shape[2]:
            return
        base = self._wanted_base()
        if base and self.keep and self._sinks is None:
            self._sinks = mx.contiguous(self.keys[..., : self.keep, :]), mx.contiguous(self.values[..., : self.keep, :])
        needed = self.offset - base + rows
        step = min(256, max(16, self.max_size))
        # Once it slides, always a whole step more, so that the copy is rare.
        capacity = needed + step if base else -(-needed // step) * step
        self.keys = self._moved(self.keys, keys, base, capacity)
        self.values = self._moved(self.values, values, base, capacity)
        self._base = base

    def _moved(self, old: Any, like: Any, base: int, capacity: int) -> Any:
        batch, heads, _, dim = like.shape
        live = self.offset - base
        room = mx.zeros((batch, heads, capacity - live, dim), like.dtype)
        if not live:
            return room
        return mx.concatenate([old[..., base - self._base : self.offset - self._base, :], room], axis=2)
