"""The cache of one draft session: the shared one, with the ids that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from draft_service.forwards import ForwardCounts
from draft_service.sources.base import SourceError
from draftwire.rollback import rollback_of

if TYPE_CHECKING:
    import mlx.core as mx

# mlx-lm grows a cache by this many tokens at a time.
_STEP = 256
_MARKS: Final = 4
"""States to go back to, where a model has recurrent state: the last settled one, and the ends of the latest forwards."""


class KvCache:
    """What a model remembers of the ids in `fed`, for one sequence. Belongs to the compute thread."""

    def __init__(self, model: Any, forwards: ForwardCounts | None = None) -> None:
        """forwards: counts what it feeds; nobody does if absent."""
        from draftwire.caches import SequenceCache

        self.fed: list[int] = []
        self._model = model
        self._forwards = forwards or ForwardCounts()
        self._cache: SequenceCache = SequenceCache(model, marks=_MARKS)

    def refresh(self) -> None:
        """Called before it is used: `fed` is then what it holds."""

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self._cache.nbytes

    def extend(self, ids: Sequence[int]) -> None:
        """Feeds ids for their keys and values alone; their logits are never computed."""
        import mlx.core as mx

        self._model(mx.array([list(ids)], mx.uint32), cache=self._cache.layers)
        self._cache.written(len(ids))
        self._cache.evaluate()
        self._forwards.prefilled(len(ids))
        self.fed += ids
        self.check()

    def logits(self, ids: Sequence[int]) -> mx.array:
        """Feeds ids, at least one. Returns what follows the last, (1, head width), not computed yet."""
        import mlx.core as mx

        row = self.logits_lazily(mx.array(list(ids), mx.uint32))
        self.fed += ids
        self.check()
        return row

    def logits_lazily(self, ids: mx.array) -> mx.array:
        """As `logits`, for ids (n,) that are not computed yet: the caller adds them to `fed` when it knows them."""
        rows: mx.array = self._model(ids[None], cache=self._cache.layers)
        self._cache.written(ids.shape[0])
        self._forwards.drafted(1, ids.shape[0], ids.shape[0])
        return rows[:, -1]

    def mark(self, settled: int) -> None:
        """Says that what is fed from now on may be cut off again, and that the first `settled` ids will hardly be."""
        self._cache.begin(1, settled=settled)

    def cut(self, length: int) -> None:
        """Keeps the first `length` ids, or fewer where its state cannot stand there: `fed` says how many."""
        if length < self._cache.length:
            del self.fed[self._cache.truncate(length) :]
        self.check()

    def reach(self, length: int) -> int:
        """How many of the first `length` ids, at most, a copy can have."""
        from draftwire.cache_copies import reach

        return reach(self._cache, length)

    def adopt(self, other: KvCache, length: int) -> None:
        """Holds a copy of the other's first `length` ids instead of its own."""
        from draftwire.cache_copies import copied

        self._cache = copied(other._cache, length)
        self.fed = other.fed[: self._cache.length]
        self.check()

    def settle(self) -> None:
        """Moves into arrays of its own, if it is elsewhere."""

    def drop(self) -> None:
        """Lets go of all arrays; it is at its end."""
        self._cache.drop()
        self.fed = []

    def check(self) -> None:
        """Raises SourceError unless every layer holds exactly the fed ids."""
        if self._cache.length != len(self.fed) or not self._cache.counted():
            raise SourceError(f"the KV cache does not hold the {len(self.fed)} tokens that it was fed")


def kv_bytes_for(length: int, bytes_per_token: int, state_bytes: int) -> int:
    """Most bytes that a cache of `length` tokens allocates. state_bytes: of the recurrent state at one position."""
    return (length + _STEP - 1) * bytes_per_token + (1 + _MARKS) * state_bytes


def require_rollback(model: Any, *, name: str) -> None:
    """Raises SourceError unless the model's cache can always give back its last tokens."""
    rollback = rollback_of(model)
    if not rollback.kind:
        raise SourceError(f"{name} cannot draft: {rollback.reason}; choose another draft model")
