"""What engines have in common whose sequences share a pool: places in it or beside it, and the forward that is begun ahead.

Methods with a leading underscore run on the compute thread.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.caches import SequenceCache
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel
from draftwire.own_row import Arrays, restore
from draftwire.ragged import PoolRow, RaggedPool, prefill_caches
from target_service.batch_choose import PendingBatch
from target_service.choose import Chosen
from target_service.engine import Engine, Slot
from target_service.params import Choosing
from target_service.window import Choice, Window

P = TypeVar("P", bound=RaggedPool)
Work = Sequence[tuple[Slot, Window]]


@dataclass(frozen=True, slots=True)
class Undo:
    """The arrays before a forward that was begun ahead. While it lives, that forward must not be evaluated."""

    pool: list[tuple[mx.array | None, mx.array | None]]
    own: dict[int, Arrays] = field(default_factory=dict)
    """By id of the slot: of those beside the pool."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A forward that has been built, or the forwards of a tick."""

    slots: list[Slot]
    choice: PendingBatch | None
    logits: mx.array | None = None
    """Where a constraint's choice is built while they compute, or later, when the ids before them are known."""
    places: list[int] = field(default_factory=list)
    """Rows of the pool that it covers, free ones between the slots' included: one a row of the model's input."""
    beside: list[Slot] = field(default_factory=list)
    """Those beside the pool: a row each, behind the pool's."""
    began_s: float
    last_keys: mx.array | None
    """The last layer's keys after it: once they are there, hardly any array of the pool is in use."""
    undo: Undo | None = None
    """For a forward begun ahead and not yet handed to mlx."""
    numbers: frozenset[int] = frozenset()
    """For a forward begun ahead: the slots as the event loop knows them; none for one that is only prepared."""


class PooledEngine(Engine, Generic[P]):
    """A sequence reads its prompt in caches of its own, and has a row of the pool from its first window on."""

    def __init__(self, compute: ComputeThread, loaded: LoadedModel) -> None:
        super().__init__(compute, loaded)
        self._made_pool: P | None = None
        self._ahead: Flight | None = None
        self._seated: list[Slot] = []
        self._landed_s = 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool's arrays take; 0 when nobody is in it."""
        return self._made_pool.nbytes if self._made_pool is not None else 0

    @property
    def begun(self) -> frozenset[int]:
        """Slots of the next forward, where it was begun ahead: a tick of others too would throw it away."""
        return self._ahead.numbers if self._ahead is not None else frozenset()

    async def cached_rows(self, slot: int) -> SequenceCache:
        """A copy of the cache as it stands after truncation, for tests of law L3."""
        target = self._slots[slot]
        return await self._compute.run(lambda: self._copy(target))

    @abstractmethod
    def _empty_pool(self, prototype: Sequence[Any]) -> P:
        """Makes one. prototype: the caches that the model makes for one sequence."""

    @property
    def _pool(self) -> P:
        if self._made_pool is None:
            self._made_pool = self._empty_pool(make_prompt_cache(self._model))
        return self._made_pool

    def _empty(self, choosing: Choosing) -> Slot:
        slot = super()._empty(choosing)
        slot.cache.cache.layers = prefill_caches(make_prompt_cache(self._model))
        return slot

    def _take_ahead(self, work: Work) -> Flight | None:
        """The forward that was begun ahead, if it holds these very windows; sequences that have left do not matter."""
        ahead = self._ahead
        if ahead is None:
            return None
        known = {id(slot) for slot in ahead.slots}
        for slot, window in work:
            seat = slot.row or slot.own
            if window.drafts or id(slot) not in known or seat is None or slot.keep != seat.length:
                return None
        self._dispatch(ahead)
        self._ahead = None
        self._booked(work)
        return ahead

    def _booked(self, work: Work) -> None:
        """Books the windows that a forward has written."""
        for slot, window in work:
            if slot.own is not None:
                slot.own.written(window.rows)
            else:
                self._pool.written(seat_of(slot), window.rows)

    def _read(self, flight: Flight) -> list[Chosen | InternalError]:
        """The choices of a forward. The next one is handed over before: when this one is nearly through, since until then mlx
        would find the pool's arrays in use and copy them. Whoever joins meanwhile waits for the one after: see `begun`."""
        if self._ahead is not None and self._ahead.numbers:
            if flight.last_keys is not None:
                mx.eval(flight.last_keys)
                flight.last_keys = None
            self._dispatch(self._ahead)
        assert flight.choice is not None
        chosen = flight.choice.read()
        if any(isinstance(one, Chosen) and not one.settled for one in chosen):
            # The forward begun ahead used an id that more filter passes have changed.
            self._drop_ahead()
        return chosen

    def _dispatch(self, flight: Flight) -> None:
        if flight.undo is not None:
            flight.undo = None
            flight.began_s = time.perf_counter()
            self._hand_over(flight)

    @staticmethod
    def _hand_over(flight: Flight) -> None:
        """In two parts, so that the first can be waited for."""
        if flight.last_keys is not None:
            mx.async_eval(flight.last_keys)  # type: ignore[no-untyped-call]
        mx.async_eval(flight.logits if flight.choice is None else flight.choice.arrays())  # type: ignore[no-untyped-call]

    def _drop_ahead(self) -> None:
        """Forgets the forward begun ahead. If mlx has it already, it only wrote past the lengths."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.undo is not None:
            self._pool.restore(ahead.undo.pool)
            for arrays in ahead.undo.own.values():
                restore(arrays)

    def _choices(self, work: Work, flight: Flight, chosen: Sequence[Chosen | InternalError]) -> list[Choice]:
        """In the order of the windows: some of the flight's slots may have left."""
        now_s = time.perf_counter()
        # One that was handed over while the last one still computed began with its end.
        forward_s = now_s - max(flight.began_s, self._landed_s)
        self._landed_s = now_s
        by_slot = {id(slot): one for slot, one in zip(flight.slots, chosen, strict=True)}
        return [_as_choice(by_slot[id(slot)], forward_s, now_s) for slot, _ in work]

    def _copy(self, slot: Slot) -> SequenceCache:
        if slot.own is not None:
            self._drop_ahead()
            slot.own.truncate(slot.keep)
            slot.own.begin()
        if slot.row is None:
            return slot.cache.cache
        self._drop_ahead()
        self._pool.truncate(slot.row, slot.keep)
        copy = SequenceCache(self._model)
        copy.layers = list(self._pool.rows_of(slot.row))
        copy.length = slot.row.length
        return copy

    def _standing_rows(self, slot: Slot, length: int, state: bool) -> list[Any] | None:
        # A forward begun ahead and not yet handed to mlx: its arrays would compute it, and copy the pool.
        undo = self._ahead.undo if self._ahead is not None else None
        if slot.row is None:
            before = undo.own.get(id(slot)) if undo is not None else None
            if before is not None and slot.cache.cache.length >= length:
                return [array for _, *pair in before for array in pair]
            # Lost in a failed forward, its own layers are empty.
            return super()._standing_rows(slot, length, state) if slot.cache.cache.layers else None
        if slot.row.length < length:
            return None
        arrays = [array for pair in (undo.pool if undo is not None else self._pool.checkpoint()) for array in pair]
        index = slot.row.index
        return [array[index : index + 1] for array in arrays if array is not None]

    def _drop(self, slot: Slot) -> None:
        super()._drop(slot)
        if slot.own is not None:
            slot.own = None
            self._seated.remove(slot)
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
            if slot.own is not None:
                slot.cache.cache.layers.clear()
            slot.row, slot.own, slot.lost = None, None, True
        self._seated.clear()

    def _unload(self) -> None:
        self._lose_all()
        self._made_pool = None
        super()._unload()


def seat_of(slot: Slot) -> PoolRow:
    """The row of a slot that has one."""
    assert slot.row is not None
    return slot.row


def _as_choice(chosen: Chosen | InternalError, forward_s: float, landed_s: float) -> Choice:
    if isinstance(chosen, InternalError):
        return Choice((), None, forward_s, landed_s, chosen)
    return Choice(chosen.ids, chosen.logprobs, forward_s, landed_s, near=chosen.near, dead_row=chosen.dead_row)
