"""The engine of exact mode: every decode forward is a tile of one shape, so that no bit depends on drafts or on company.

A tick's rows are packed into tiles (`draftwire.tiles`), as many as they need. Prompts are read in chunks that begin at
multiples of one number of tokens, so that the same prompt always takes the same forwards. Methods with a leading underscore
run on the compute thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.caches import SequenceCache
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel
from draftwire.ragged import PoolRow, flat, prefill_caches
from draftwire.rollback import Rollback
from draftwire.rows import Place, RowPool, run_tile
from draftwire.tiles import PackedTile, Tile, TileRow, extent_class
from target_service.batch_choose import Part, PendingBatch
from target_service.choose import Chosen
from target_service.engine import Engine, Slot
from target_service.params import Choosing
from target_service.prefix.transfer import layout_of
from target_service.window import Choice, Window

Work = Sequence[tuple[Slot, Window]]
_MEASURED = 32


@dataclass(slots=True)
class _Flight:
    """The forwards of a tick that have been built."""

    slots: list[Slot]
    choice: PendingBatch
    began_s: float
    last_keys: mx.array | None
    """The last layer's keys after it: once they are there, hardly any array of the pool is in use."""
    undo: list[Any] | None = None
    """For a forward begun ahead and not yet handed to mlx: the pool's arrays before it."""
    numbers: frozenset[int] = frozenset()
    """For a forward begun ahead: the slots as the event loop knows them."""


class ExactEngine(Engine):
    """Same public interface as `Engine`; `tile` and `chunk` say what is fixed."""

    def __init__(
        self, compute: ComputeThread, loaded: LoadedModel, tile: Tile, chunk: int, *, alone: bool = False
    ) -> None:
        """loaded: a model that `tile_probe` found fit, and the tile that it found. chunk: prompt tokens a forward.

        alone: sequences share no forward, as with --batching off.
        """
        super().__init__(compute, loaded)
        self.batching = "one by one: switched off" if alone else "ragged"
        self.near_tie_gap = 0.0
        self.tile = self._tile = tile
        self.chunk = self._chunk = chunk
        self._alone = alone
        self._made_pool: RowPool | None = None
        self._ahead: _Flight | None = None
        self._seated: list[Slot] = []
        self._tails: dict[int, list[int]] = {}
        """By slot: ids of a last chunk that was not whole. They are read again if more comes."""

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool's arrays take; 0 when nobody is in it."""
        return self._made_pool.nbytes if self._made_pool is not None else 0

    @property
    def begun(self) -> frozenset[int]:
        """Slots of the next forward, where it was begun ahead: a tick of others too would throw it away."""
        return self._ahead.numbers if self._ahead is not None else frozenset()

    def room(self, live: int) -> int:
        """Drafts that each of `live` windows may have for all to share one forward."""
        return self._tile.share(1 if self._alone else live) - 1

    async def cached_rows(self, slot: int) -> SequenceCache:
        """A copy of the cache as it stands after truncation, for tests of law L3."""
        target = self._slots[slot]
        return await self._compute.run(lambda: self._copy(target))

    @property
    def _pool(self) -> RowPool:
        if self._made_pool is None:
            self._made_pool = RowPool(make_prompt_cache(self._model))
        return self._made_pool

    def _empty(self, choosing: Choosing) -> Slot:
        slot = super()._empty(choosing)
        slot.cache.cache.layers = prefill_caches(make_prompt_cache(self._model))
        return slot

    def _prefill(self, slot: Slot, ids: list[int]) -> None:
        """Reads on in forwards that begin at multiples of `chunk`, whatever pieces the prompt comes in."""
        tail = self._tails.pop(id(slot), [])
        if tail:
            slot.cache.truncate(slot.cache.length - len(tail))
            ids = [*tail, *ids]
        if slot.cache.length % self._chunk:
            raise InternalError(
                f"exact mode continues a prompt at multiples of {self._chunk} tokens, not at {slot.cache.length}",
                reason="CACHE_LENGTH",
            )
        for begin in range(0, len(ids), self._chunk):
            piece = ids[begin : begin + self._chunk]
            super()._prefill(slot, piece)
            if len(piece) < self._chunk:
                self._tails[id(slot)] = piece

    def _run(self, work: Work) -> list[Choice]:
        try:
            flight = self._take_ahead(work) or self._start(work)
            # What a constraint allows next depends on the id that nobody knows yet.
            if all(window.ahead and window.limits is None for _, window in work):
                self._begin_ahead(flight, work)
            chosen = flight.choice.read()
        except Exception:
            self._lose_all()
            raise
        if any(isinstance(one, Chosen) and not one.settled for one in chosen):
            # The forward begun ahead used an id that more filter passes have changed.
            self._drop_ahead()
        now_s = time.perf_counter()
        by_slot = {id(slot): one for slot, one in zip(flight.slots, chosen, strict=True)}
        return [_as_choice(by_slot[id(slot)], now_s - flight.began_s, now_s) for slot, _ in work]

    def _start(self, work: Work) -> _Flight:
        """Seats who has come, and builds and hands over the forwards of everybody's window."""
        self._drop_ahead()
        pool = self._pool
        for slot in self._seated:
            if slot.row is not None:
                pool.truncate(slot.row, slot.keep)
        self._seat([slot for slot, _ in work if slot.row is None], max(window.rows for _, window in work))
        pool.shrink()
        began_s = time.perf_counter()
        tiles = self._packed(work)
        built: list[mx.array] = []
        for number, tile in enumerate(tiles):
            logits = run_tile(self._model, pool, self._places(work, tile), self._tile.rows, tile.extent)
            if number:
                # Before, mlx would find the pool's arrays in use and copy them.
                mx.eval(built[-1])
            if number < len(tiles) - 1:
                mx.async_eval(logits)  # type: ignore[no-untyped-call]
            built.append(logits)
        for slot, window in work:
            pool.written(_seat_of(slot), window.rows)
        parts = [Part(number, slot.choosing, window) for number, (slot, window) in enumerate(work)]
        rows = _gathered(built, tiles, work)
        if any(window.limits is not None for _, window in work):
            # What constraints allow is looked up while this computes.
            mx.async_eval(rows)  # type: ignore[no-untyped-call]
        choice = PendingBatch(rows, parts)
        flight = _Flight([slot for slot, _ in work], choice, began_s, pool.last_keys())
        self._hand_over(flight)
        return flight

    def _packed(self, work: Work) -> list[PackedTile]:
        """The forwards of these windows; owners are numbered as in `work`."""
        rows = []
        # In the order of the pool, so that keys need not be gathered where every slot has a row.
        for number in sorted(range(len(work)), key=lambda number: _seat_of(work[number][0]).index):
            slot, window = work[number]
            length = _seat_of(slot).length
            rows += [TileRow(number, index, length + index) for index in range(window.rows)]
        if not self._alone:
            return self._tile.pack(rows)
        return [tile for number in range(len(work)) for tile in self._tile.pack([r for r in rows if r.owner == number])]

    @staticmethod
    def _places(work: Work, tile: PackedTile) -> list[Place]:
        places = []
        for row in tile.rows:
            slot, window = work[row.owner]
            places.append(Place(_seat_of(slot), row.position, (window.pending, *window.drafts)[row.index]))
        return places

    def _seat(self, joining: Sequence[Slot], width: int) -> None:
        if not joining:
            return
        pool = self._pool
        lengths = [row.length for row in pool.rows] + [slot.cache.length for slot in joining]
        pool.reserve(len(lengths), extent_class(max(lengths) + width))
        for slot in joining:
            slot.row = pool.join(slot.cache.cache.layers, slot.cache.length)
            self._seated.append(slot)
            slot.cache.cache.layers.clear()
            self._tails.pop(id(slot), None)
        mx.clear_cache()

    def _begin_ahead(self, flight: _Flight, work: Work) -> None:
        """Builds the next plain forward from the lazy ids while this one computes, where one tile holds it.

        mlx gets it when this one is nearly through: before, it would find the pool's arrays in use and copy them.
        """
        pool = self._pool
        after = [(slot, Window(slot=window.slot, pending=0, first_step=window.first_step + 1)) for slot, window in work]
        tiles = self._packed(after)
        if len(tiles) != 1 or tiles[0].extent > pool.capacity:
            return
        undo = pool.checkpoint()
        parts_of = {id(slot): number for number, slot in enumerate(flight.slots)}
        order = [parts_of[id(after[row.owner][0])] for row in tiles[0].rows]
        order += order[-1:] * (self._tile.rows - len(order))
        ids = flight.choice.first_ids()[mx.array(order), 0]
        places = self._places(after, tiles[0])
        logits = run_tile(self._model, pool, places, self._tile.rows, tiles[0].extent, ids=ids)
        parts = [Part(number, slot.choosing, window) for number, (slot, window) in enumerate(after)]
        choice = PendingBatch(_gathered([logits], tiles, after), parts)
        numbers = frozenset(window.slot for _, window in after)
        self._ahead = _Flight([slot for slot, _ in after], choice, 0.0, pool.last_keys(), undo, numbers)
        del undo
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
            self._pool.written(_seat_of(slot), 1)
        ahead.began_s = began_s
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
        mx.async_eval(flight.choice.arrays())  # type: ignore[no-untyped-call]

    def _drop_ahead(self) -> None:
        """Forgets the forward begun ahead. If mlx has it already, it only wrote past the lengths."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.undo is not None:
            self._pool.restore(ahead.undo)

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
        self._tails.pop(id(slot), None)
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
        # In the pool nothing slides out, so that drafts can always be taken back; a window has the rows of a tile.
        return Rollback("trim", "", widest=self._tile.rows)

    def _prepare(self, rows: Sequence[int]) -> dict[int, float]:
        """One number for all windows that a tile holds: they are the same forward."""
        self.rollback = self._look()
        slot = self._empty(Choosing())
        self._prefill(slot, [0] * _MEASURED)
        slot.keep = _MEASURED
        self.layout = layout_of(flat(slot.cache.cache.layers))
        seconds = math.inf
        for count in (1, self._tile.rows, 1, self._tile.rows, 1):
            window = Window(slot=0, pending=0, drafts=(0,) * (count - 1), first_step=0)
            choice = self._forward([(slot, window)])[0]
            if choice.error is not None:
                raise choice.error
            seconds = min(seconds, choice.forward_s)
        self._drop(slot)
        return dict.fromkeys(range(1, self._tile.rows + 1), seconds)


def _seat_of(slot: Slot) -> PoolRow:
    assert slot.row is not None
    return slot.row


def _gathered(built: Sequence[mx.array], tiles: Sequence[PackedTile], work: Work) -> mx.array:
    """(windows, widest, vocab): each window's rows from the tiles that have them; short windows repeat their last row."""
    where = {}
    for number, tile in enumerate(tiles):
        for place, row in enumerate(tile.rows):
            where[row.owner, row.index] = number * built[0].shape[0] + place
    widest = max(window.rows for _, window in work)
    order = [
        [where[number, min(index, window.rows - 1)] for index in range(widest)]
        for number, (_, window) in enumerate(work)
    ]
    every = built[0] if len(built) == 1 else mx.concatenate(list(built))
    return every[mx.array(order)]


def _as_choice(chosen: Chosen | InternalError, forward_s: float, landed_s: float) -> Choice:
    if isinstance(chosen, InternalError):
        return Choice((), None, forward_s, landed_s, chosen)
    return Choice(chosen.ids, chosen.logprobs, forward_s, landed_s, dead_row=chosen.dead_row, near=chosen.near)
