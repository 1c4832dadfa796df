"""Copies of a sequence's cache, for a sequence that begins with the same ids. Runs on the compute thread, `reach` aside."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from draftwire.caches import SequenceCache
from draftwire.ragged import WindowedKVCache


def reach(cache: SequenceCache, length: int) -> int:
    """The longest length up to `length` that the cache can stand at; 0 where only an empty one is left."""
    if length >= cache.length:
        return cache.length
    return cache.reachable(length) or 0


def copied(cache: SequenceCache, length: int) -> SequenceCache:
    """A cache of its own with the first `length` positions, empty where `reach` did not name that length.

    The other one may go on or go away.
    """
    twin = cache.twin()
    twin.layers = [_layer(layer) for layer in cache.layers]
    twin.truncate(length)
    twin.layers = [_shortened(layer) for layer in twin.layers]
    twin.evaluate()
    return twin


def _layer(layer: Any) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_layer(part) for part in layer.caches))  # type: ignore[no-untyped-call]
    twin = copy.copy(layer)
    if isinstance(layer, ArraysCache):
        twin.cache = list(layer.cache)
        return twin
    for name, value in vars(layer).items():
        setattr(twin, name, _handle(value))
    return twin


def _handle(value: Any) -> Any:
    """An array object of its own on the same data: a cache writes into its object, and mlx copies what others still use."""
    if isinstance(value, mx.array):
        return mx.array(value)
    return type(value)(_handle(part) for part in value) if isinstance(value, list | tuple) else value


def _shortened(layer: Any) -> Any:
    """Gives back what lies past the length, where it is as simple as cutting it off."""
    if type(layer) is CacheList:
        return CacheList(*(_shortened(part) for part in layer.caches))  # type: ignore[no-untyped-call]
    if type(layer) in (KVCache, WindowedKVCache) and layer.keys is not None:
        layer.keys = mx.contiguous(layer.keys[..., : layer.offset, :])
        layer.values = mx.contiguous(layer.values[..., : layer.offset, :])
    return layer
