"""The engine that runs all live sequences in one forward, over a ragged pool. Everything but the forward is `Engine`'s.

A forward is a rectangle over the windows that it is given, padded to the widest; other sequences' rows stay as they are.
Methods with a leading underscore run on the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.caches import SequenceCache
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel
from draftwire.ragged import RaggedPool, flat, prefill_caches
from draftwire.rollback import Rollback
from target_service.batch_choose import Part, PendingBatch
from target_service.choose import Chosen
from target_service.engine import Engine, Slot
from target_service.params import Choosing
from target_service.window import Choice, Window

_MEASURED_SLOTS = (2, 4, 8)
_MEASURED_WIDTHS = (1, 2, 4, 8)
Work = Sequence[tuple[Slot, Window]]


@dataclass(slots=True)
class _Flight:
    """A forward that has been built."""

    slots: list[Slot]
    logits: mx.array | None
    """Where a constraint's choice is built while they compute, or later, when the ids before them are known."""
    choice: PendingBatch | None
    places: list[int]
    """Rows of the pool that it covers, free ones between the slots' included: one a row of the model's input."""
    width: int
    began_s: float
    last_keys: mx.array | None
    """The last layer's keys after it: once they are there, hardly any array of the pool is in use."""
    undo: list[Any] | None = None
    """For a forward begun ahead and not yet handed to mlx: the pool's arrays before it."""
    numbers: frozenset[int] = frozenset()
    """For a forward begun ahead: the slots as the event loop knows them; none for one that is only prepared."""


class BatchEngine(Engine):
    """Forward passes for many sequences at once. Same public interface as `Engine`."""

    def __init__(self, compute: ComputeThread, loaded: LoadedModel) -> None:
        """loaded: a model that `batch_probe` found fit."""
        super().__init__(compute, loaded)
        self.batching = "ragged"
        self.batch_costs = {}
        self._made_pool: RaggedPool | None = None
        self._ahead: _Flight | None = None
        self._seated: list[Slot] = []

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool's arrays take; 0 when nobody is in it."""
        return self._made_pool.nbytes if self._made_pool is not None else 0

    @property
    def begun(self) -> frozenset[int]:
        """Slots of the next forward, where it was begun ahead: a tick of others too would throw it away."""
        return self._ahead.numbers if self._ahead is not None else frozenset()

    async def prefill_together(self, chunks: Mapping[int, Sequence[int]]) -> None:
        """One forward, padded to the longest chunk: for short ones, whose weights cost more to read than their rows."""
        work = []
        for slot, ids in chunks.items():
            self._check_ids(ids)
            self._slots[slot].keep += len(ids)
            work.append((self._slots[slot], list(ids)))
        await self._compute.run(lambda: self._prefill_together(work))

    async def cached_rows(self, slot: int) -> SequenceCache:
        """A copy of the cache as it stands after truncation, for tests of law L3."""
        target = self._slots[slot]
        return await self._compute.run(lambda: self._copy(target))

    @property
    def _pool(self) -> RaggedPool:
        if self._made_pool is None:
            self._made_pool = RaggedPool(make_prompt_cache(self._model))
        return self._made_pool

    def _empty(self, choosing: Choosing) -> Slot:
        slot = super()._empty(choosing)
        slot.cache.cache.layers = prefill_caches(make_prompt_cache(self._model))
        return slot

    def _prefill_together(self, work: Sequence[tuple[Slot, list[int]]]) -> None:
        """In a pool of their own that is gone afterwards: the caches stay the slots' own until they join the others."""
        pool = RaggedPool(make_prompt_cache(self._model), exact_slots=True)
        width = max(len(ids) for _, ids in work)
        pool.reserve(len(work), max(slot.cache.cache.length for slot, _ in work) + width)
        rows = [pool.join(slot.cache.cache.layers, slot.cache.cache.length) for slot, _ in work]
        pool.begin(width)
        self._model(mx.array([ids + ids[-1:] * (width - len(ids)) for _, ids in work]), cache=pool.layers)
        for row, (slot, ids) in zip(rows, work, strict=True):
            pool.written(row, len(ids))
            for own, copy in zip(flat(slot.cache.cache.layers), pool.rows_of(row), strict=True):
                own.keys, own.values, own.offset = copy.keys, copy.values, copy.offset
            slot.cache.written(len(ids))
        pool.clear()

    def _run(self, work: Work) -> list[Choice]:
        try:
            flight = self._take_ahead(work)
            if flight is None:
                flight = self._start(work)
            if all(window.ahead or window.likely for _, window in work) and self._pool.fits(1):
                self._begin_ahead(flight, work)
            chosen = self._finish(flight)
        except Exception:
            self._lose_all()
            raise
        now_s = time.perf_counter()
        forward_s = now_s - flight.began_s
        by_slot = {id(slot): one for slot, one in zip(flight.slots, chosen, strict=True)}
        return [_as_choice(by_slot[id(slot)], forward_s, now_s) for slot, _ in work]

    def _start(self, work: Work) -> _Flight:
        """Seats who has come, and builds the forward of everybody's window."""
        self._drop_ahead()
        pool = self._pool
        for slot, _ in work:
            if slot.row is not None:
                pool.truncate(slot.row, slot.keep)
        width = max(window.rows for _, window in work)
        self._seat([slot for slot, _ in work if slot.row is None], width)
        pool.fit(width)
        began_s = time.perf_counter()
        places = pool.begin(width, [slot.row for slot, _ in work if slot.row is not None])
        ids = [[0] * width for _ in places]
        parts = []
        for slot, window in work:
            assert slot.row is not None
            own = [window.pending, *window.drafts]
            place = slot.row.index - places[0] if places[-1] - places[0] < len(places) else places.index(slot.row.index)
            # Padding repeats an id that the model takes anyway: an id of its own might bring a NaN into the row.
            ids[place] = own + own[-1:] * (width - len(own))
            parts.append(Part(place, slot.choosing, window))
        logits = self._model(mx.array(ids), cache=pool.layers)
        for slot, window in work:
            assert slot.row is not None
            pool.written(slot.row, window.rows)
        slots = [slot for slot, _ in work]
        constrained = any(window.limits is not None for _, window in work)
        choice = None if constrained else PendingBatch(logits, parts, self.near_tie_gap)
        late = logits if constrained else None
        flight = _Flight(slots, late, choice, places, width, began_s, pool.last_keys())
        self._hand_over(flight)
        if constrained:
            self._choose_late(flight, work)
        return flight

    def _choose_late(self, flight: _Flight, work: Work) -> None:
        """What constraints allow is looked up while the forward computes. Some of its sequences may have left by now."""
        assert flight.logits is not None
        parts = []
        for slot, window in work:
            assert slot.row is not None
            parts.append(Part(flight.places.index(slot.row.index), slot.choosing, window))
        flight.slots = [slot for slot, _ in work]
        flight.choice = PendingBatch(flight.logits, parts, self.near_tie_gap)
        mx.async_eval(flight.choice.arrays())  # type: ignore[no-untyped-call]

    def _seat(self, joining: Sequence[Slot], width: int) -> None:
        if not joining:
            return
        pool = self._pool
        longest = max([row.length for row in pool.rows] + [slot.cache.length for slot in joining])
        rows = pool.join_all([(slot.cache.cache.layers, slot.cache.length) for slot in joining], longest + width)
        for slot, row in zip(joining, rows, strict=True):
            slot.row = row
            self._seated.append(slot)
            slot.cache.cache.layers.clear()
        mx.clear_cache()

    def _begin_ahead(self, flight: _Flight, work: Work) -> None:
        """Builds the next plain forward from the lazy ids while this one computes.

        mlx gets it when this one is nearly through: before, it would find the pool's arrays in use and copy them.
        """
        pool = self._pool
        assert flight.choice is not None
        undo = pool.checkpoint()
        if pool.begin(1, [slot.row for slot, _ in work if slot.row is not None]) != flight.places:
            # Somebody has left since it was begun; its ids are not the next one's input.
            return
        logits = self._model(flight.choice.first_ids(), cache=pool.layers)
        parts = []
        staying = {window.slot for _, window in work}
        for part in flight.choice.parts:
            if part.window.slot not in staying:
                continue
            after = Window(slot=part.window.slot, pending=0, first_step=part.window.first_step + 1)
            parts.append(Part(part.index, part.choosing, after))
        constrained = any(window.limits is not None for _, window in work)
        sure = all(window.ahead for _, window in work)
        self._ahead = _Flight(
            [slot for slot in flight.slots if any(slot is one for one, _ in work)],
            logits if constrained else None,
            None if constrained else PendingBatch(logits, parts, self.near_tie_gap),
            flight.places,
            1,
            0.0,
            pool.last_keys(),
            undo,
            frozenset(staying) if sure else frozenset(),
        )
        del undo
        if not sure:
            # What a constraint forces may come first: mlx gets it when the next tick has confirmed it.
            return
        # Whoever joins meanwhile waits for the forward after: see `begun`.
        if flight.last_keys is not None:
            mx.eval(flight.last_keys)
            flight.last_keys = None
        self._dispatch(self._ahead)

    def _take_ahead(self, work: Work) -> _Flight | None:
        """The forward that was begun ahead, if it holds these very windows; sequences that have left do not matter."""
        ahead = self._ahead
        if ahead is None:
            return None
        known = {id(slot) for slot in ahead.slots}
        for slot, window in work:
            if window.drafts or id(slot) not in known or slot.row is None or slot.keep != slot.row.length:
                return None
        began_s = time.perf_counter()
        self._dispatch(ahead)
        self._ahead = None
        for slot, _ in work:
            assert slot.row is not None
            self._pool.written(slot.row, 1)
        ahead.began_s = began_s
        if ahead.choice is None:
            self._choose_late(ahead, work)
        return ahead

    def _dispatch(self, flight: _Flight) -> None:
        if flight.undo is not None:
            flight.undo = None
            self._hand_over(flight)

    @staticmethod
    def _hand_over(flight: _Flight) -> None:
        """In two parts, so that the first can be waited for."""
        if flight.last_keys is not None:
            mx.async_eval(flight.last_keys)  # type: ignore[no-untyped-call]
        mx.async_eval(flight.logits if flight.choice is None else flight.choice.arrays())  # type: ignore[no-untyped-call]

    def _drop_ahead(self) -> None:
        """Forgets the forward begun ahead. If mlx has it already, it only wrote past the lengths."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.undo is not None:
            self._pool.restore(ahead.undo)

    def _finish(self, flight: _Flight) -> list[Chosen | InternalError]:
        assert flight.choice is not None
        chosen = flight.choice.read()
        if any(isinstance(one, Chosen) and not one.settled for one in chosen):
            # The forward begun ahead used an id that more filter passes have changed.
            self._drop_ahead()
        return chosen

    def _copy(self, slot: Slot) -> SequenceCache:
        if slot.row is None:
            return slot.cache.cache
        self._drop_ahead()
        self._pool.truncate(slot.row, slot.keep)
        copy = SequenceCache(self._model)
        copy.layers = list(self._pool.rows_of(slot.row))
        copy.length = slot.row.length
        return copy

    def _standing_rows(self, slot: Slot, length: int, state: bool) -> list[Any] | None:
        if slot.row is None:
            # Lost in a failed forward, its own layers are empty.
            return super()._standing_rows(slot, length, state) if slot.cache.cache.layers else None
        if slot.row.length < length:
            return None
        # A forward begun ahead and not yet handed to mlx: its arrays would compute it, and copy the pool.
        undo = self._ahead.undo if self._ahead is not None else None
        arrays = [array for pair in undo or self._pool.checkpoint() for array in pair]
        index = slot.row.index
        return [array[index : index + 1] for array in arrays if array is not None]

    def _drop(self, slot: Slot) -> None:
        super()._drop(slot)
        if slot.row is None:
            return
        if len(self._pool.rows) == 1:
            self._drop_ahead()
        self._pool.leave(slot.row)
        self._seated.remove(slot)
        slot.row = None

    def _lose_all(self) -> None:
        """After a failed forward no array can be trusted, those of bystanders neither."""
        self._ahead = None
        self._pool.clear()
        for slot in self._seated:
            slot.row, slot.lost = None, True
        self._seated.clear()

    def _unload(self) -> None:
        self._lose_all()
        self._made_pool = None
        super()._unload()

    def _look(self) -> Rollback:
        # In the pool nothing slides out, so that drafts can always be taken back.
        return Rollback("trim", "")

    def _prepare(self, rows: Sequence[int]) -> dict[int, float]:
        costs = super()._prepare(rows)
        self.batch_costs = {(1, count): seconds for count, seconds in costs.items()}
        for size in _MEASURED_SLOTS:
            slots = [self._empty(Choosing()) for _ in range(size)]
            for width in _MEASURED_WIDTHS:
                drafts = (0,) * (width - 1)
                work = [(slot, Window(slot=n, pending=0, drafts=drafts, first_step=0)) for n, slot in enumerate(slots)]
                self.batch_costs[size, width] = min(self._timed(work) for _ in range(2))
            for slot in slots:
                self._drop(slot)
        return costs

    def _timed(self, work: Work) -> float:
        seconds = self._forward(work)[0].forward_s
        for slot, _ in work:
            slot.keep = 0
        return seconds


def _as_choice(chosen: Chosen | InternalError, forward_s: float, landed_s: float) -> Choice:
    if isinstance(chosen, InternalError):
        return Choice((), None, forward_s, landed_s, chosen)
    return Choice(chosen.ids, chosen.logprobs, forward_s, landed_s, near=chosen.near, dead_row=chosen.dead_row)
