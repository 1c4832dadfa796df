"""Sequence caches and their rollback. Runs on the compute thread, except `Rollback`, which is plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from draftwire.errors import InternalError


@dataclass(frozen=True, slots=True)
class Rollback:
    """What a model's caches can take back. Decided once, at load."""

    kind: str
    """"trim", or "" where rejected drafts cannot be taken back and the target decodes plainly."""
    reason: str
    """Why not; "" where it can."""
    window: int | None
    """Tokens of the smallest sliding window; positions at or beyond it can no longer be taken back. None: no limit."""

    def room(self, length: int) -> int:
        """Drafts that a window may hold when `length` positions are cached: all of them must fit before the wrap."""
        if not self.kind:
            return 0
        return 1 << 30 if self.window is None else max(0, self.window - length - 2)


class SequenceCache:
    """The caches of all layers of one sequence, as one thing with a length.

    Rows [0, length) are written. Truncating is checked: mlx-lm's own trim answers a cache that it cannot trim in silence.
    """

    def __init__(self, model: Any) -> None:
        self.layers: list[Any] = make_prompt_cache(model)
        self.length = 0

    def written(self, rows: int) -> None:
        """Books `rows` more positions, after a forward was built."""
        self.length += rows

    def truncate(self, length: int) -> None:
        """Takes back positions [length, self.length). Raises InternalError where a layer cannot."""
        surplus = self.length - length
        if surplus < 0:
            raise InternalError(f"cache has {self.length} positions, cannot keep {length}", reason="CACHE_LENGTH")
        if surplus == 0:
            return
        for layer in flat(self.layers):
            if not layer.is_trimmable() or layer.trim(surplus) != surplus:
                raise InternalError("a layer's cache cannot be rolled back here", reason="CACHE_NOT_TRIMMABLE")
        self.length = length

    def evaluate(self) -> None:
        """Computes everything that was written, so that a long prompt does not pile up a graph."""
        mx.eval([layer.state for layer in self.layers])

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(int(layer.nbytes) for layer in self.layers)


def flat(layers: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers; a layer may hold several."""
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from flat(layer.caches)
        else:
            yield layer


def rollback_of(model: Any) -> Rollback:
    """Looks at the caches that the model really makes."""
    layers = list(flat(make_prompt_cache(model)))
    window: int | None = None
    for layer in layers:
        if isinstance(layer, RotatingKVCache):
            window = layer.max_size if window is None else min(window, layer.max_size)
        elif not isinstance(layer, KVCache | QuantizedKVCache | ChunkedKVCache):
            name = type(layer).__name__
            return Rollback("", f"its cache ({name}) cannot take rejected drafts back", None)
    return Rollback("trim", "", window)
