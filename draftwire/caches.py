"""The cache of one sequence and the one contract by which it takes rows back, whatever kinds of layers a model has.

    begin(drafts)      before a forward whose last `drafts` rows may turn out wrong
    truncate(length)   afterwards: keeps positions [0, length)

Keys and values are cut off. Recurrent state (Mamba, gated delta rule, short convolutions) has no rows to cut off: it goes
back to the mark that `begin` set, and the caller feeds the ids between the mark and `length` again, best at the head of its
next forward. Everything here runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from draftwire.errors import InternalError
from draftwire.sliding import SLACK, SlidingKVCache

NO_LIMIT: Final = 1 << 30
_CUT: Final = (KVCache, ConcatenateKVCache, QuantizedKVCache, ChunkedKVCache, SlidingKVCache)
SEQUENCE_KINDS: Final = (*_CUT, ArraysCache)
"""The kinds of layers that take rows back here. A class derived from one may have more state: it counts as foreign."""


@dataclass(frozen=True, slots=True)
class KvQuantisation:
    """Keys and values are stored in few bits, from the first token, in all layers alike."""

    bits: int
    group_size: int
    """Values that share a scale and a bias."""


class CacheFormatError(ValueError):
    """The model's cache cannot be stored as the settings ask; the message has the reason."""


@dataclass(slots=True)
class _Mark:
    """Recurrent state as it was at a position. The arrays are never written to, only replaced, so references are enough."""

    position: int
    states: list[list[Any]]


class SequenceCache:
    """The caches of all layers of one sequence, as one thing with a length.

    Positions [0, length) are written. Truncating is checked: mlx-lm's own trim answers a cache that it cannot trim in silence.
    """

    def __init__(self, model: Any, quantisation: KvQuantisation | None = None, *, marks: int = 1) -> None:
        """marks: states that are remembered at most, where a model has recurrent state."""
        self._model = model
        self._quantisation = quantisation
        self._most_marks = marks
        self._marks: list[_Mark] = []
        self.layers: list[Any] = make_layers(model, quantisation)
        self.length = 0
        leaves = list(flat(self.layers))
        self._foreign = any(type(leaf) not in SEQUENCE_KINDS for leaf in leaves)
        self._recurrent = any(type(leaf) is ArraysCache for leaf in leaves)
        self._most = min((leaf.slack for leaf in leaves if isinstance(leaf, SlidingKVCache)), default=NO_LIMIT)

    def fits(self, drafts: int) -> bool:
        """Whether a forward of one row and so many drafts can be taken back, now."""
        return drafts == 0 or (not self._foreign and 1 + drafts <= self._most)

    def begin(self, drafts: int, *, settled: int | None = None) -> None:
        """Says that the last `drafts` rows of what follows may be taken back. Costs no computing and no copy.

        settled: length below which nothing will be taken back, the present one if absent.
        """
        if not self._recurrent:
            return
        if drafts == 0:
            self._marks.clear()
            return
        settled = self.length if settled is None else settled
        if not self._marks or self._marks[-1].position != self.length:
            self._marks.append(_Mark(self.length, [list(leaf.cache) for leaf in self._states()]))
        useful = max((i for i, mark in enumerate(self._marks) if mark.position <= settled), default=0)
        del self._marks[:useful]
        if len(self._marks) > self._most_marks:
            # The first one is the surest; those after it save rows of a replay.
            del self._marks[min(1, len(self._marks) - 2)]

    def written(self, rows: int) -> None:
        """Books `rows` more positions, after a forward was built."""
        self.length += rows

    def truncate(self, length: int) -> int:
        """Takes back positions [length, self.length). Returns the length that it has now.

        That is `length` where rows can be cut off, a mark below it where state has to be computed again, and 0 where it could
        not go back so far: the caller feeds the ids from there on. Raises InternalError for a length that it never had.
        """
        if not 0 <= length <= self.length:
            raise InternalError(f"cache has {self.length} positions, cannot keep {length}", reason="CACHE_LENGTH")
        if length == self.length:
            return length
        stand = self.reachable(length)
        if stand is None:
            self.clear()
            return 0
        for leaf in flat(self.layers):
            if type(leaf) is not ArraysCache and leaf.trim(self.length - stand) != self.length - stand:
                raise InternalError("a layer's cache cannot be rolled back here", reason="CACHE_NOT_TRIMMABLE")
        if self._recurrent:
            while self._marks[-1].position > stand:
                self._marks.pop()
            for leaf, state in zip(self._states(), self._marks[-1].states, strict=True):
                leaf.cache = list(state)
        self.length = stand
        return stand

    def twin(self) -> SequenceCache:
        """A cache of the same model with the same marks and length, and layers that the caller has to fill in."""
        twin = SequenceCache(self._model, self._quantisation, marks=self._most_marks)
        twin._marks = [_Mark(mark.position, [list(state) for state in mark.states]) for mark in self._marks]
        twin.length = self.length
        return twin

    def clear(self) -> None:
        """Forgets everything."""
        self.layers = make_layers(self._model, self._quantisation)
        self._marks.clear()
        self.length = 0

    def counted(self) -> bool:
        """Whether every layer that counts its positions has as many as it should."""
        return all(leaf.offset == self.length for leaf in flat(self.layers) if isinstance(leaf, _CUT))

    def evaluate(self) -> None:
        """Computes everything that was written, so that a long prompt does not pile up a graph."""
        mx.eval([array for leaf in flat(self.layers) for array in arrays_of(leaf)])

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take, remembered states included."""
        leaves = sum(int(leaf.nbytes) for leaf in flat(self.layers))
        marked = (array for mark in self._marks for state in mark.states for array in state if array is not None)
        return leaves + sum(int(array.nbytes) for array in marked)

    def drop(self) -> None:
        """Lets go of all arrays; the cache is at its end."""
        self._model = None
        self.layers.clear()
        self._marks.clear()

    def _states(self) -> Iterator[ArraysCache]:
        return (leaf for leaf in flat(self.layers) if type(leaf) is ArraysCache)

    def reachable(self, length: int) -> int | None:
        """The longest length up to `length`, which is below the present one, that all layers can be taken back to."""
        if self._foreign:
            return None
        if self._recurrent:
            below = [mark.position for mark in self._marks if mark.position <= length]
            if not below:
                return None
            length = below[-1]
        return length if all(_lowest(leaf, length) <= length for leaf in flat(self.layers)) else None


def flat(layers: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers; a layer may hold several."""
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from flat(layer.caches)
        else:
            yield layer


def arrays_of(leaf: Any) -> Iterator[mx.array]:
    """The arrays of a layer's cache, to evaluate."""
    waiting = list(leaf.cache) if isinstance(leaf, ArraysCache) else [leaf.state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, mx.array):
            yield item
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def make_layers(model: Any, quantisation: KvQuantisation | None = None) -> list[Any]:
    """The caches that the model makes, sliding windows in time order, keys and values quantised where asked.

    Raises CacheFormatError where a layer has no quantised form.
    """
    return [_own(layer, quantisation) for layer in make_prompt_cache(model)]


def _own(layer: Any, quantisation: KvQuantisation | None) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_own(part, quantisation) for part in layer.caches))  # type: ignore[no-untyped-call]
    if quantisation is not None:
        if type(layer) is not KVCache:
            raise CacheFormatError(f"its {type(layer).__name__} cannot be quantised like the other layers' cache")
        return QuantizedKVCache(group_size=quantisation.group_size, bits=quantisation.bits)
    if type(layer) is RotatingKVCache:
        return SlidingKVCache(layer.max_size, layer.keep, SLACK)
    return layer


def _lowest(leaf: Any, length: int) -> int:
    """The shortest length that a layer's cache can be taken back to, if `length` is what is wanted."""
    if isinstance(leaf, SlidingKVCache):
        return leaf.lowest
    if isinstance(leaf, ChunkedKVCache):
        # A row sees its own chunk; what lies before the buffer's start is gone.
        return 0 if leaf.start_position <= length // leaf.chunk_size * leaf.chunk_size else length + 1
    return 0
