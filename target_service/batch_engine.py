"""The engine that runs all live sequences in one forward, over a ragged pool. Everything but the forward is `Engine`'s.

A forward is a rectangle over the windows that it is given, padded to the widest; other sequences' rows stay as they are. A
sequence too long for the pool has its rows of the rectangle in caches of its own, where the model has learnt that.
Methods with a leading underscore run on the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.beside import Group, forward_beside
from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.own_row import OwnRow, grow_in_turn
from draftwire.ragged import RaggedPool, flat
from draftwire.rollback import Rollback
from target_service.batch_choose import Part, PendingBatch
from target_service.engine import Slot
from target_service.params import Choosing
from target_service.pooled_engine import Flight, PooledEngine, Undo, Work, seat_of
from target_service.window import Choice, Window

_MEASURED_SLOTS = (2, 4, 8)
_MEASURED_WIDTHS = (1, 2, 4, 8)
# Beside the most slots, rows that fill their tiles.
_MEASURED_CHUNKS = (8, 24, 56)
# Positions of all rows that a pool may be copied to have, for one that joins: 0.2 to 0.4 s for a model of 135M parameters. Who
# needs more stays beside it, at 1 to 2 ms a forward, and the others are not padded to its length.
_MOST_COPIED = 4096
_HEAD_START_S = 3e-4
Reads = Sequence[tuple[Slot, Sequence[int]]]


class BatchEngine(PooledEngine[RaggedPool]):
    """Forward passes for many sequences at once. Same public interface as `Engine`."""

    def __init__(self, compute: ComputeThread, loaded: LoadedModel, *, beside: bool = False) -> None:
        """loaded: a model that `batch_probe` found fit. beside: whether it has been taught to read prompts beside windows."""
        super().__init__(compute, loaded)
        self.batching = "ragged"
        self.batch_costs = {}
        self.reads_beside = beside

    async def prefill_together(self, chunks: Mapping[int, Sequence[int]]) -> None:
        """One forward, padded to the longest chunk: for short ones, whose weights cost more to read than their rows."""
        work = self._to_read(chunks)
        await self._compute.run(lambda: self._prefill_together(work))

    def forward(
        self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]] | None = None
    ) -> Awaitable[list[Choice]]:
        """As `Engine.forward`; the chunks are rows of the same forward, with caches of their own."""
        idle = not self.begun
        if not chunks or not self.reads_beside:
            queued = super().forward(windows, chunks)
        else:
            work, reads = self._to_run(windows), self._to_read(chunks)
            queued = self._queued(lambda: self._forward_beside(work, reads))
        if idle:
            # The compute thread needs the interpreter to begin; whomever the event loop serves next would hold it meanwhile.
            time.sleep(_HEAD_START_S)
        return queued

    def _to_read(self, chunks: Mapping[int, Sequence[int]]) -> list[tuple[Slot, list[int]]]:
        work = []
        for slot, ids in chunks.items():
            self._check_ids(ids)
            self._slots[slot].keep += len(ids)
            work.append((self._slots[slot], list(ids)))
        return work

    def _forward_beside(self, work: Work, reads: Reads) -> list[Choice]:
        try:
            return self._forward(work, lambda: self._run(work, reads))
        except Exception:
            for slot, _ in reads:
                slot.lost = True
            raise

    def _empty_pool(self, prototype: Sequence[Any]) -> RaggedPool:
        return RaggedPool(prototype)

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

    def _run(self, work: Work, reads: Reads = ()) -> list[Choice]:
        try:
            flight = self._take_ahead(work) if not reads else None
            if flight is None:
                flight = self._start(work, reads)
            if all(window.ahead or window.likely for _, window in work) and self._pool.fits(1):
                self._begin_ahead(flight, work)
            chosen = self._read(flight)
            for slot, _ in reads:
                slot.cache.cache.evaluate()
        except Exception:
            self._lose_all()
            raise
        return self._choices(work, flight, chosen)

    def _start(self, work: Work, reads: Reads) -> Flight:
        """Seats who has come, and builds the forward of everybody's window, with the chunks beside them."""
        self._drop_ahead()
        pool = self._pool
        for slot, _ in work:
            if slot.own is not None:
                slot.own.truncate(slot.keep)
            elif slot.row is not None:
                pool.truncate(slot.row, slot.keep)
        width = max(window.rows for _, window in work)
        self._seat([slot for slot, _ in work if slot.row is None and slot.own is None], width)
        pool.fit(width)
        places, beside = self._begin(width, [slot for slot, _ in work])
        ids = [[0] * width for _ in range(len(places) + len(beside))]
        parts = []
        for slot, window in work:
            own = [window.pending, *window.drafts]
            place = _place(slot, places, beside)
            # Padding repeats an id that the model takes anyway: an id of its own might bring a NaN into the row.
            ids[place] = own + own[-1:] * (width - len(own))
            parts.append(Part(place, slot.choosing, window))
        # It computes from here on.
        began_s = time.perf_counter()
        pool.eager = True
        try:
            logits = self._logits_beside(mx.array(ids), beside, reads)
        finally:
            pool.eager = False
        self._booked(work)
        slots = [slot for slot, _ in work]
        constrained = any(window.limits is not None for _, window in work)
        flight = Flight(
            slots=slots,
            choice=None if constrained else PendingBatch(logits, parts, self.near_tie_gap),
            logits=logits if constrained else None,
            places=places,
            beside=beside,
            began_s=began_s,
            last_keys=self._last_keys(beside),
        )
        self._hand_over(flight)
        if constrained:
            self._choose_late(flight, work)
        return flight

    def _begin(self, width: int, slots: Sequence[Slot]) -> tuple[list[int], list[Slot]]:
        """Prepares a forward of these slots' windows: the rows of the pool that take part, and who lies beside it."""
        seats = [slot.row for slot in slots if slot.row is not None]
        beside = [slot for slot in slots if slot.own is not None]
        for slot in beside:
            assert slot.own is not None
            slot.own.begin()
        return self._pool.begin(width, seats) if seats else [], beside

    def _logits_beside(self, ids: mx.array, beside: Sequence[Slot], reads: Reads = ()) -> mx.array:
        """ids: (rows, width), of the pool's forward and of those beside it. Returns their logits, (rows, width, vocab)."""
        groups: list[Group] = [(1, slot.own.layers) for slot in beside if slot.own is not None]
        pooled = len(groups) < ids.shape[0]
        if pooled:
            groups.insert(0, (ids.shape[0] - len(groups), self._pool.layers))
        chunks = [(own, slot.cache.cache.layers) for slot, own in reads]
        for slot, _ in reads:
            grow_in_turn(slot.cache.cache.layers, slot.positions)
        eager = self._pool.eager and not pooled
        logits = forward_beside(self._model, ids, groups, chunks, eager=eager)
        for slot, own in reads:
            slot.cache.written(len(own))
        return logits

    def _last_keys(self, beside: Sequence[Slot]) -> mx.array | None:
        """What a forward writes near its end."""
        own = [slot.own.last_keys() for slot in beside if slot.own is not None]
        return own[-1] if own else self._pool.last_keys()

    def _choose_late(self, flight: Flight, work: Work) -> None:
        """What constraints allow is looked up while the forward computes. Some of its sequences may have left by now."""
        assert flight.logits is not None
        parts = []
        for slot, window in work:
            parts.append(Part(_place(slot, flight.places, flight.beside), slot.choosing, window))
        flight.slots = [slot for slot, _ in work]
        flight.choice = PendingBatch(flight.logits, parts, self.near_tie_gap)
        mx.async_eval(flight.choice.arrays())  # type: ignore[no-untyped-call]

    def _seat(self, joining: Sequence[Slot], width: int) -> None:
        pool = self._pool
        together: list[Slot] = []
        for slot in sorted(joining, key=lambda slot: slot.cache.length):
            self._seated.append(slot)
            if self._joins(slot, width, len(together)):
                together.append(slot)
            else:
                slot.own = OwnRow(slot.cache.cache)
        # Those that read their prompts now join in a few rounds.
        known = {id(slot) for slot in together}
        reading = [
            slot for slot in self._slots.values() if slot.row is None and slot.own is None and id(slot) not in known
        ]
        pool.coming = len(pool.rows) + len(together)
        pool.coming += sum(self._joins(slot, width, len(together)) for slot in reading)
        pool.longest = max((slot.most for slot in (*self._seated, *together) if slot.own is None), default=0)
        if not together:
            return
        longest = max([row.length for row in pool.rows] + [slot.cache.length for slot in together])
        rows = pool.join_all([(slot.cache.cache.layers, slot.cache.length) for slot in together], longest + width)
        for slot, row in zip(together, rows, strict=True):
            slot.row = row
            slot.cache.cache.layers.clear()
        mx.clear_cache()

    def _joins(self, slot: Slot, width: int, others: int) -> bool:
        """Whether a sequence without a row has one in the pool, now or once its prompt is read. others: who joins before it."""
        if not self.reads_beside:
            return True
        pool = self._pool
        positions = max(slot.cache.length, slot.positions) + width
        return positions <= pool.capacity or (len(pool.rows) + others + 1) * positions <= _MOST_COPIED

    def _begin_ahead(self, flight: Flight, work: Work) -> None:
        """Builds the next plain forward from the lazy ids while this one computes."""
        pool = self._pool
        assert flight.choice is not None
        slots = [slot for slot in flight.slots if any(slot is one for one, _ in work)]
        beside = [(id(slot), slot.own.checkpoint()) for slot in slots if slot.own is not None]
        undo = Undo(pool.checkpoint(), dict(beside))
        if self._begin(1, slots) != (flight.places, flight.beside):
            # Somebody has left since it was begun; its ids are not the next one's input.
            return
        logits = self._logits_beside(flight.choice.first_ids(), flight.beside)
        parts = []
        staying = {window.slot for _, window in work}
        for part in flight.choice.parts:
            if part.window.slot not in staying:
                continue
            after = Window(slot=part.window.slot, pending=0, first_step=part.window.first_step + 1)
            parts.append(Part(part.index, part.choosing, after))
        constrained = any(window.limits is not None for _, window in work)
        # What a constraint forces may come first: mlx gets it when the next tick has confirmed it.
        sure = all(window.ahead for _, window in work)
        self._ahead = Flight(
            slots=slots,
            choice=None if constrained else PendingBatch(logits, parts, self.near_tie_gap),
            logits=logits if constrained else None,
            places=flight.places,
            beside=flight.beside,
            began_s=0.0,
            last_keys=self._last_keys(flight.beside),
            undo=undo,
            numbers=frozenset(staying) if sure else frozenset(),
        )

    def _take_ahead(self, work: Work) -> Flight | None:
        flight = super()._take_ahead(work)
        if flight is not None and flight.choice is None:
            self._choose_late(flight, work)
        return flight

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
            if self.reads_beside and size == _MEASURED_SLOTS[-1]:
                self.beside_costs = {tokens: self._extra_s(slots, tokens) for tokens in _MEASURED_CHUNKS}
            for slot in slots:
                self._drop(slot)
        return costs

    def _extra_s(self, slots: Sequence[Slot], tokens: int) -> float:
        """What a prompt's first chunk adds to a plain forward."""
        work = [(slot, Window(slot=n, pending=0, first_step=0)) for n, slot in enumerate(slots)]
        reader = self._empty(Choosing())
        seconds = self._forward_beside(work, [(reader, [0] * tokens)])[0].forward_s
        for slot in slots:
            slot.keep = 0
        self._drop(reader)
        assert self.batch_costs is not None
        return max(seconds - self.batch_costs[len(slots), 1], 0.0)

    def _timed(self, work: Work) -> float:
        seconds = self._forward(work)[0].forward_s
        for slot, _ in work:
            slot.keep = 0
        return seconds


def _place(slot: Slot, places: Sequence[int], beside: Sequence[Slot]) -> int:
    """The row of the model's input that is a slot's."""
    if slot.own is None:
        return places.index(seat_of(slot).index)
    return len(places) + next(number for number, one in enumerate(beside) if one is slot)
