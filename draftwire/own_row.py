"""A sequence in caches of its own that decodes beside a pool's rows: a long one, for which the pool would be copied.

Like a pool's row it has a host integer for its length; taking back is a subtraction, and what lies past the length is never
seen. Importing this module imports mlx. Everything here belongs to the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from draftwire.caches import SequenceCache, flat
from draftwire.errors import InternalError

# Positions by which arrays grow that are full, and the least of a first array.
_GROWTH: Final = 512
_FIRST: Final = 32


class OwnRow:
    """The caches that a sequence read its prompt in, `prefill_caches`, as a row of a forward."""

    def __init__(self, cache: SequenceCache) -> None:
        """cache: filled; its length is the row's from now on."""
        self._cache = cache

    @property
    def length(self) -> int:
        """Positions [0, length) stand."""
        return self._cache.length

    @property
    def layers(self) -> list[Any]:
        """What the model gets as its cache."""
        return self._cache.layers

    def truncate(self, length: int) -> None:
        """Keeps positions [0, length). Raises InternalError for more than it has."""
        if not 0 <= length <= self._cache.length:
            raise InternalError(
                f"cache has {self._cache.length} positions, cannot keep {length}", reason="CACHE_LENGTH"
            )
        self._cache.length = length

    def begin(self) -> None:
        """A forward starts: its window goes behind the length, whatever was written there before."""
        for leaf in flat(self.layers):
            leaf.offset = self.length
        grow_in_turn(self.layers)

    def written(self, positions: int) -> None:
        """Books positions that the last forward wrote and that may stand; its padding is not booked."""
        self._cache.written(positions)

    def last_keys(self) -> mx.array | None:
        """The last layer's keys, which a forward writes near its end."""
        keys: mx.array | None = list(flat(self.layers))[-1].keys
        return keys

    def checkpoint(self) -> Arrays:
        """The arrays as they are, for `restore`. While it lives, a forward must copy them: drop it before evaluating one."""
        return [(leaf, leaf.keys, leaf.values) for leaf in flat(self.layers)]


Arrays = list[tuple[Any, mx.array, mx.array]]
"""Each layer's cache with its keys and values."""


def restore(arrays: Arrays) -> None:
    """Forgets the forwards built since `OwnRow.checkpoint`, which must not have been evaluated."""
    for leaf, keys, values in arrays:
        leaf.keys, leaf.values = keys, values


def grow_in_turn(caches: Sequence[Any], positions: int = 0) -> None:
    """Before rows are added to a sequence's own caches beside others that wait for the forward. A layer whose arrays are full
    is copied: not all of them in the same forward.

    positions: what the sequence will have, where that is known; no layer is copied twice until then.
    """
    layers = list(flat(caches))
    alike = len({cache.keys is not None and cache.keys.shape[2] for cache in layers}) == 1
    for number, cache in enumerate(layers):
        share = _GROWTH * number // len(layers) // _FIRST * _FIRST
        rest = -(-(positions + share - cache.offset) // _FIRST) * _FIRST
        cache.step = _FIRST + share if alike else max(_GROWTH, rest)
