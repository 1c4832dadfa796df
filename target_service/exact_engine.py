"""The engine of exact mode: every decode forward is a tile of one shape, so that no bit depends on drafts or on company.

A tick's rows are packed into tiles (`draftwire.tiles`), as many as they need. Prompts are read in chunks that begin at
multiples of one number of tokens, so that the same prompt always takes the same forwards. Methods with a leading underscore
run on the compute thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel
from draftwire.ragged import flat
from draftwire.rollback import Rollback
from draftwire.rows import Place, RowPool, run_tile
from draftwire.tiles import PackedTile, Tile, TileRow, extent_class
from target_service.batch_choose import Part, PendingBatch
from target_service.engine import Slot
from target_service.params import Choosing
from target_service.pooled_engine import Flight, PooledEngine, Undo, Work, seat_of
from target_service.prefix.transfer import layout_of
from target_service.window import Choice, Window

_MEASURED = 32


class ExactEngine(PooledEngine[RowPool]):
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
        self._tails: dict[int, list[int]] = {}
        """By slot: ids of a last chunk that was not whole. They are read again if more comes."""

    def room(self, live: int) -> int:
        """Drafts that each of `live` windows may have for all to share one forward."""
        return self._tile.share(1 if self._alone else live) - 1

    def _empty_pool(self, prototype: Sequence[Any]) -> RowPool:
        return RowPool(prototype)

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
            chosen = self._read(flight)
        except Exception:
            self._lose_all()
            raise
        return self._choices(work, flight, chosen)

    def _start(self, work: Work) -> Flight:
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
            pool.written(seat_of(slot), window.rows)
        parts = [Part(number, slot.choosing, window) for number, (slot, window) in enumerate(work)]
        rows = _gathered(built, tiles, work)
        if any(window.limits is not None for _, window in work):
            # What constraints allow is looked up while this computes.
            mx.async_eval(rows)  # type: ignore[no-untyped-call]
        choice = PendingBatch(rows, parts)
        flight = Flight(slots=[slot for slot, _ in work], choice=choice, began_s=began_s, last_keys=pool.last_keys())
        self._hand_over(flight)
        return flight

    def _packed(self, work: Work) -> list[PackedTile]:
        """The forwards of these windows; owners are numbered as in `work`."""
        rows = []
        # In the order of the pool, so that keys need not be gathered where every slot has a row.
        for number in sorted(range(len(work)), key=lambda number: seat_of(work[number][0]).index):
            slot, window = work[number]
            length = seat_of(slot).length
            rows += [TileRow(number, index, length + index) for index in range(window.rows)]
        if not self._alone:
            return self._tile.pack(rows)
        return [tile for number in range(len(work)) for tile in self._tile.pack([r for r in rows if r.owner == number])]

    @staticmethod
    def _places(work: Work, tile: PackedTile) -> list[Place]:
        places = []
        for row in tile.rows:
            slot, window = work[row.owner]
            places.append(Place(seat_of(slot), row.position, (window.pending, *window.drafts)[row.index]))
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

    def _begin_ahead(self, flight: Flight, work: Work) -> None:
        """Builds the next plain forward from the lazy ids while this one computes, where one tile holds it."""
        pool = self._pool
        after = [(slot, Window(slot=window.slot, pending=0, first_step=window.first_step + 1)) for slot, window in work]
        tiles = self._packed(after)
        if len(tiles) != 1 or tiles[0].extent > pool.capacity:
            return
        undo = Undo(pool.checkpoint())
        parts_of = {id(slot): number for number, slot in enumerate(flight.slots)}
        order = [parts_of[id(after[row.owner][0])] for row in tiles[0].rows]
        order += order[-1:] * (self._tile.rows - len(order))
        assert flight.choice is not None
        ids = flight.choice.first_ids()[mx.array(order), 0]
        places = self._places(after, tiles[0])
        logits = run_tile(self._model, pool, places, self._tile.rows, tiles[0].extent, ids=ids)
        parts = [Part(number, slot.choosing, window) for number, (slot, window) in enumerate(after)]
        choice = PendingBatch(_gathered([logits], tiles, after), parts)
        numbers = frozenset(window.slot for _, window in after)
        self._ahead = Flight(
            slots=[slot for slot, _ in after],
            choice=choice,
            began_s=0.0,
            last_keys=pool.last_keys(),
            undo=undo,
            numbers=numbers,
        )

    def _drop(self, slot: Slot) -> None:
        super()._drop(slot)
        self._tails.pop(id(slot), None)

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
