"""KV of sessions that draft together: rows of shared pools, and which session sits in which.

A pool is a rectangle, as long as its longest row. So that a long session does not make short ones large, a pool's bytes stay
within what its sessions are charged and what nobody else is; sessions that do not fit beside each other sit in pools
("benches") of their own.
Everything here runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draft_service.forwards import ForwardCounts
from draft_service.sources.base import SourceError
from draft_service.sources.kv import KvCache
from draftwire.ragged import PoolRow, RaggedPool, flat, prefill_caches, shape_for, slot_class

# Forwards after which a session that takes no part in them gives its row back, if that makes them cheaper: about one draft.
# Rows of sessions whose target verifies at the moment stay: where all draft at the same time, no forward runs without them.
_IDLE_FORWARDS: Final = 4


class PooledKv(KvCache):
    """A session's KV: in arrays of its own while it is filled, in a row of a bench while it drafts and afterwards."""

    def __init__(self, model: Any, forwards: ForwardCounts | None = None, *, charged_bytes: int) -> None:
        """forwards: as in KvCache; charged_bytes: what its session may take."""
        super().__init__(model, forwards)
        self._cache.layers = prefill_caches(make_prompt_cache(model))
        self.charged_bytes = charged_bytes
        self.bench: Bench | None = None
        self.row: PoolRow | None = None
        self.idle = 0
        """Forwards of its bench in a row that went without it."""
        self._lost = False

    @property
    def nbytes(self) -> int:
        """Bytes of its own arrays, or its share of the bench's."""
        if self.bench is None:
            return super().nbytes
        return self.bench.pool.nbytes // max(1, self.bench.pool.slots)

    @property
    def layers(self) -> list[Any]:
        """Its own caches; empty while it is seated."""
        return self._cache.layers

    def refresh(self) -> None:
        """Forgets what a failed forward has taken."""
        if self._lost:
            self._lost = False
            self.fed.clear()

    def extend(self, ids: Sequence[int]) -> None:
        """As in KvCache; leaves the bench."""
        self.settle()
        super().extend(ids)

    def logits_lazily(self, ids: mx.array) -> mx.array:
        """As in KvCache; leaves the bench."""
        self.settle()
        return super().logits_lazily(ids)

    def cut(self, length: int) -> None:
        """Keeps the first `length` ids."""
        if self.row is None or self.bench is None:
            super().cut(length)
            return
        if length < self.row.length:
            self.bench.pool.truncate(self.row, length)
            del self.fed[length:]
        self.check()

    def check(self) -> None:
        """Raises SourceError unless it holds exactly the fed ids."""
        if self.row is None:
            super().check()
        elif self.row.length != len(self.fed):
            raise SourceError(f"the pool does not hold the {len(self.fed)} tokens that it was fed")

    def settle(self) -> None:
        """Moves out of the bench, with a copy."""
        if self.row is None or self.bench is None:
            return
        layers = prefill_caches(make_prompt_cache(self._model))
        for own, copy in zip(flat(layers), self.bench.pool.rows_of(self.row), strict=True):
            own.keys, own.values, own.offset = copy.keys, copy.values, copy.offset
        length = self.row.length
        self.bench.leave(self)
        self._cache.layers, self._cache.length = layers, length

    def drop(self) -> None:
        """Leaves without a copy."""
        if self.bench is not None:
            self.bench.leave(self)
        super().drop()

    def seated(self, bench: Bench, row: PoolRow) -> None:
        """Its arrays are in the bench's now."""
        self.bench, self.row, self.idle = bench, row, 0
        self._cache.layers = []

    def unseated(self, *, lost: bool = False) -> None:
        """It has no arrays any more."""
        self.bench = self.row = None
        self._cache.layers, self._cache.length = prefill_caches(make_prompt_cache(self._model)), 0
        self._lost = lost


class Bench:
    """Sessions that share forwards."""

    def __init__(self, model: Any) -> None:
        self.pool = RaggedPool(make_prompt_cache(model))
        self.seated: list[PooledKv] = []
        self._model = model

    def seat(self, joining: Sequence[PooledKv], width: int) -> None:
        """Takes sessions in, with room for a forward of this width."""
        if not joining:
            return
        lengths = [len(kv.fed) for kv in (*self.seated, *joining)]
        self.pool.reserve(len(lengths), max(lengths) + width)
        for kv in joining:
            kv.seated(self, self.pool.join(kv.layers, len(kv.fed)))
            self.seated.append(kv)
        mx.clear_cache()

    def leave(self, kv: PooledKv) -> None:
        """Frees the session's row."""
        assert kv.row is not None
        self.pool.leave(kv.row)
        self.seated.remove(kv)
        kv.unseated()

    def lose(self) -> None:
        """After a failed forward no array can be trusted, those of bystanders neither."""
        self.pool.clear()
        for kv in self.seated:
            kv.unseated(lost=True)
        self.seated.clear()

    def forward(self, work: Sequence[tuple[PooledKv, list[int]]], width: int) -> mx.array:
        """Feeds each session its next ids, 1 to `width` of them. Returns logits (slots, width, head width), not computed."""
        pool = self.pool
        pool.fit(width)
        pool.begin(width)
        ids = [[0] * width for _ in range(pool.slots)]
        for kv in self.seated:
            assert kv.row is not None
            kv.idle += 1
            # Padding repeats an id that the model takes anyway: an id of its own might bring a NaN into the row.
            ids[kv.row.index] = (kv.fed[-1:] or [0]) * width
        for kv, new in work:
            assert kv.row is not None
            kv.idle = 0
            ids[kv.row.index] = new + new[-1:] * (width - len(new))
        logits: mx.array = self._model(mx.array(ids, mx.uint32), cache=pool.layers)
        for kv, new in work:
            assert kv.row is not None
            pool.written(kv.row, len(new))
            kv.fed += new
        return logits

    def evaluate(self) -> None:
        """Computes what was fed."""
        mx.eval([layer.state for layer in flat(self.pool.layers)])


class Benches:
    """All benches of a model."""

    def __init__(self, model: Any, bytes_per_token: int) -> None:
        self._model = model
        self._bytes_per_token = bytes_per_token
        self._benches: list[Bench] = []
        self.spare_bytes = 0
        """What pools may take beyond the charges of their sessions, all together. Set from any thread."""

    @property
    def nbytes(self) -> int:
        """Bytes that all pools take."""
        return sum(bench.pool.nbytes for bench in self._benches)

    def arrange(self, wanted: Sequence[PooledKv], width: int) -> list[Bench]:
        """Seats these sessions for forwards of this width. Returns the benches on which one of them sits."""
        present = set(wanted)
        for bench in self._benches:
            self._bound(bench, present, width)
        joining = [kv for kv in wanted if kv.bench is None or self._lonely(kv, width)]
        for kv in joining:
            kv.settle()
        # The short ones first: each place takes as many as fit.
        joining.sort(key=lambda kv: len(kv.fed))
        while joining:
            bench, count = self._place_for(joining, present, width)
            bench.seat(joining[:count], width)
            del joining[:count]
        self._benches = [bench for bench in self._benches if bench.seated]
        return [bench for bench in self._benches if not present.isdisjoint(bench.seated)]

    def _bound(self, bench: Bench, present: Collection[PooledKv], width: int) -> None:
        """Lets go of rows that make the forward dearer or the rectangle larger than was paid for."""
        idle = [kv for kv in bench.seated if kv not in present]
        long_idle = [kv for kv in idle if kv.idle >= _IDLE_FORWARDS]
        rows = len(bench.seated)
        leaving = long_idle if rows and slot_class(rows) > slot_class(max(1, rows - len(long_idle))) else []
        if not self._fits(bench.seated, width, bench):
            leaving = idle
        staying = [kv for kv in bench.seated if kv not in leaving]
        while not self._fits(staying, width, bench):
            longest = max(staying, key=lambda kv: len(kv.fed))
            staying.remove(longest)
            leaving = [*leaving, longest]
        for kv in leaving:
            kv.settle()
        if bench.seated and (leaving or self._excess(bench) > self._spare_for(bench)):
            bench.pool.compact(width)

    def _place_for(self, joining: Sequence[PooledKv], present: Collection[PooledKv], width: int) -> tuple[Bench, int]:
        """A bench, and how many of `joining`, from the front, may sit down there."""
        for bench in self._benches:
            active = [kv for kv in bench.seated if kv in present]
            for others in (bench.seated, active):
                count = self._room(joining, others, bench, width) if others else 0
                if count:
                    if others is active and len(active) < len(bench.seated):
                        for kv in [kv for kv in bench.seated if kv not in present]:
                            kv.settle()
                        bench.pool.compact(width)
                    return bench, count
        bench = Bench(self._model)
        self._benches.append(bench)
        return bench, self._room(joining, (), bench, width)

    def _room(self, joining: Sequence[PooledKv], others: Sequence[PooledKv], bench: Bench, width: int) -> int:
        counts = range(len(joining), 0, -1)
        return next((count for count in counts if self._fits([*others, *joining[:count]], width, bench)), 0)

    def _lonely(self, kv: PooledKv, width: int) -> bool:
        """Whether it sits alone and another bench has room by now."""
        if kv.bench is None or len(kv.bench.seated) > 1:
            return False
        others = [bench for bench in self._benches if bench is not kv.bench and bench.seated]
        return any(self._fits([*bench.seated, kv], width, bench) for bench in others)

    def _fits(self, kvs: Sequence[PooledKv], width: int, bench: Bench) -> bool:
        """Whether these sessions may sit on this bench, and nobody else."""
        if len(kvs) < 2:
            return True
        slots, capacity = shape_for(len(kvs), max(len(kv.fed) for kv in kvs) + width)
        excess = slots * capacity * self._bytes_per_token - sum(kv.charged_bytes for kv in kvs)
        return excess <= 0 or excess <= self._spare_for(bench)

    def _spare_for(self, bench: Bench) -> int:
        return self.spare_bytes - sum(self._excess(other) for other in self._benches if other is not bench)

    @staticmethod
    def _excess(bench: Bench) -> int:
        return max(0, bench.pool.nbytes - sum(kv.charged_bytes for kv in bench.seated))
