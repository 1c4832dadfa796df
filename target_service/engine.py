"""The engine: the model, its caches and the forward pass, on the compute thread. One sequence a forward.

The event loop calls the public methods; methods with a leading underscore run on the compute thread. Lengths are host integers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from draftwire.caches import NO_LIMIT, KvQuantisation, SequenceCache, arrays_of, flat
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel
from draftwire.own_row import OwnRow
from draftwire.ragged import PoolRow
from draftwire.rollback import Rollback, rollback_of
from draftwire.tiles import Tile
from target_service.caches import MOST_REPLAYED, ReplayCache
from target_service.choose import NEAR_TIE_GAP_OTHERS, NEAR_TIE_GAPS, PendingChoice, choose, read
from target_service.params import Choosing
from target_service.prefix.layout import Layout, Prefix, Taken
from target_service.prefix.transfer import give, layout_of, row_arrays, take_rows, take_state
from target_service.window import Choice, Window

_MEASURED_CHUNKS = (4, 16, 64)


class CacheLost(InternalError):
    """A forward of sequences whose caches another forward has taken with it. Nobody here is at fault."""


@dataclass(slots=True)
class Slot:
    """One sequence. The cache and `ahead` are touched on the compute thread only."""

    cache: ReplayCache
    choosing: Choosing
    keep: int = 0
    """Positions that stand; the cache may hold more until the next forward."""
    ahead: PendingChoice | mx.array | None = None
    """The choice after [pending] at position `keep`, begun before pending was read back; under a constraint, which has to
    know pending, its logits."""
    row: PoolRow | None = None
    """Its row of a pool that many sequences share; the cache is then empty."""
    own: OwnRow | None = None
    """Where it shares forwards but lies in its own cache, beside the pool."""
    lost: bool = False
    """Whether a forward failed that may have left anything in the cache."""
    positions: int = 0
    """Positions that its prompt will have, where that is known."""
    most: int = 0
    """Positions that it may come to have, where that is known."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A window whose forward has been handed to mlx."""

    slot: Slot
    window: Window
    choice: PendingChoice
    replayed: int = 0
    """Rows before the window's own, computed again after a rollback."""
    began_s: float = field(default_factory=time.perf_counter)


class Engine:
    """Forward passes for many sequences, one after the other, queued together so that mlx never idles between them."""

    def __init__(self, compute: ComputeThread, loaded: LoadedModel, quantisation: KvQuantisation | None = None) -> None:
        """loaded: made on the compute thread; its module is only ever used, and in the end dropped, there."""
        self._quantisation = quantisation
        self._compute = compute
        self._model = loaded.model
        self._width = loaded.head_width
        self._slots: dict[int, Slot] = {}
        self._next_slot = 0
        self.rollback: Rollback = Rollback("", "not looked at yet")
        self.batching = "one by one"
        """How sequences share a forward, for people: "ragged", or "one by one: <reason>"."""
        self.near_tie_gap = NEAR_TIE_GAPS.get(loaded.dtype, NEAR_TIE_GAP_OTHERS)
        """Two logits closer than this are a near tie; 0 does not look for any."""
        self.tile: Tile | None = None
        """The shape of every decode forward in exact mode; None where any shape will do."""
        self.chunk: int | None = None
        """Prompt tokens a forward in exact mode: only prompt rows up to a multiple of it can be reused for another prompt."""
        self.batch_costs: dict[tuple[int, int], float] | None = None
        """(sequences, width) -> seconds of a forward that sequences share, from warm-up; None where they share none."""
        self.prefill_costs: dict[int, float] = {}
        """Tokens -> seconds of a prompt's first chunk, from warm-up."""
        self.reads_beside = False
        """Whether prompts can be read in the forward of other sequences' windows."""
        self.beside_costs: dict[int, float] = {}
        """Tokens -> seconds that a prompt's first chunk adds to such a forward, from warm-up."""
        self.kv_bytes_per_token: int | None = None
        """Measured where the cache is quantised, else what the model says holds."""
        self.layout: Layout | None = None
        """What a sequence's cache consists of; known once prepared."""

    @property
    def width(self) -> int:
        """Ids the model's embedding and head have; larger ids must never reach it."""
        return self._width

    @property
    def slots(self) -> int:
        """Sequences that are open."""
        return len(self._slots)

    @property
    def begun(self) -> frozenset[int]:
        """Slots of the next forward, where it was begun ahead and holds many: a tick of others too would throw it away."""
        return frozenset()

    def room(self, live: int) -> int:
        """Drafts that each of `live` windows may have in one forward; no limit unless the number of its rows is fixed."""
        return NO_LIMIT

    async def prepare(self, rows: Sequence[int]) -> dict[int, float]:
        """Looks at the caches, warms up, and measures a forward of each number of rows. Returns rows -> seconds."""
        return await self._compute.run(lambda: self._prepare(rows))

    async def open(self, choosing: Choosing, *, positions: int = 0, most: int = 0) -> int:
        """Makes an empty cache and returns its slot.

        positions, most: what its prompt will have, and it at its end, where that is known.
        """
        number = self._next_slot
        self._next_slot += 1
        self._slots[number] = await self._compute.run(lambda: self._empty(choosing))
        self._slots[number].positions, self._slots[number].most = positions, most
        return number

    async def prefill(self, slot: int, ids: Sequence[int]) -> None:
        """Appends a chunk of the prompt to the cache. Its logits are not needed: the last prompt token stays pending."""
        self._check_ids(ids)
        target = self._slots[slot]
        target.keep += len(ids)
        await self._compute.run(lambda: self._prefill(target, list(ids)))

    async def prefill_together(self, chunks: Mapping[int, Sequence[int]]) -> None:
        """The same for several slots whose rests are short: in one forward where the engine can. slot -> ids."""
        for slot, ids in chunks.items():
            await self.prefill(slot, ids)

    async def restore(self, slot: int, prefix: Prefix) -> None:
        """Fills an empty cache with stored positions. Raises ValueError, and changes nothing, where they do not fit."""
        target = self._slots[slot]
        await self._compute.run(lambda: self._restore(target, prefix))
        target.keep = prefix.length

    def take(self, slot: int, begin: int, length: int, *, block: int, state: bool) -> Future[Taken | None]:
        """Copies positions [begin, length) to the host in blocks, and the state at `length`, which must be where it stands.

        It is done in the order of the calls, before what is asked for later. None where the cache was lost.
        """
        target = self._slots[slot]
        return self._compute.submit(lambda: self._take(target, begin, length, block, state))

    def forward(
        self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]] | None = None
    ) -> Awaitable[list[Choice]]:
        """Runs a tick: every window's rows, processed, chosen and read back. It is queued before this returns, chunks aside.

        chunks: slot -> ids of prompts to append to caches, in the same forward where the engine `reads_beside`.
        """
        if chunks:
            return self._read_and_forward(windows, chunks)
        work = self._to_run(windows)
        return self._queued(lambda: self._forward(work))

    def _queued(self, job: Callable[[], list[Choice]]) -> Awaitable[list[Choice]]:
        # At once: a coroutine would wait until the event loop has served whoever was woken before.
        return asyncio.wrap_future(self._compute.submit(job))

    async def _read_and_forward(self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]]) -> list[Choice]:
        await self.prefill_together(chunks)
        return await self.forward(windows)

    def _to_run(self, windows: Sequence[Window]) -> list[tuple[Slot, Window]]:
        for window in windows:
            self._check_ids((window.pending, *window.drafts))
        return [(self._slots[window.slot], window) for window in windows]

    def truncate(self, slot: int, length: int) -> None:
        """Keeps positions [0, length). Costs nothing now: the cache follows at its next forward."""
        self._slots[slot].keep = length

    def intact(self, slot: int) -> bool:
        """Whether its cache can be used. Not after a forward that raised, whosever fault that was."""
        return not self._slots[slot].lost

    async def reopen(self, slot: int) -> None:
        """Puts an empty cache into the place of one that is not intact."""
        old = self._slots[slot]
        self._compute.submit(lambda: self._drop(old))
        new = await self._compute.run(lambda: self._empty(old.choosing))
        new.positions, new.most = old.positions, old.most
        self._slots[slot] = new

    def close(self, slot: int) -> None:
        """Frees a sequence. Idempotent. Arrays are dropped where they were made."""
        gone = self._slots.pop(slot, None)
        if gone is not None:
            self._compute.submit(lambda: self._drop(gone))

    async def unload(self) -> None:
        """Drops the model, on its thread. The engine is then at its end."""
        await self._compute.run(self._unload)

    async def cached_rows(self, slot: int) -> SequenceCache:
        """The cache as it stands after truncation, for tests of law L3."""
        target = self._slots[slot]
        await self._compute.run(lambda: self._settle(target, most_replayed=0))
        return target.cache.cache

    def _check_ids(self, ids: Sequence[int]) -> None:
        # mlx gathers out of bounds in silence.
        if not all(0 <= token < self.width for token in ids):
            raise InternalError(f"a token id is outside [0, {self.width})", reason="TOKEN_OUT_OF_VOCAB")

    def _look(self) -> Rollback:
        return rollback_of(self._model, self._quantisation)

    def _empty(self, choosing: Choosing) -> Slot:
        return Slot(ReplayCache(self._model, self._quantisation), choosing)

    def _prefill(self, slot: Slot, ids: list[int]) -> None:
        self._feed(slot, ids)
        slot.cache.cache.evaluate()
        mx.clear_cache()

    def _restore(self, slot: Slot, prefix: Prefix) -> None:
        assert self.layout is not None
        cache = slot.cache.cache
        try:
            give(flat(cache.layers), prefix, self.layout)
            cache.evaluate()
        except Exception:
            slot.cache = self._empty(slot.choosing).cache
            raise
        cache.written(prefix.length)

    def _take(self, slot: Slot, begin: int, length: int, block: int, state: bool) -> Taken | None:
        arrays = self._standing_rows(slot, length, state)
        if arrays is None:
            return None
        blocks = take_rows(arrays, begin, length, block)
        del arrays
        if not state:
            return Taken(begin=begin, length=length, blocks=blocks)
        states, lowest = take_state(flat(slot.cache.cache.layers), length)
        return Taken(begin=begin, length=length, blocks=blocks, state=states, lowest=lowest)

    def _standing_rows(self, slot: Slot, length: int, state: bool) -> list[Any] | None:
        """The arrays that have a row a position, of which [0, length) stand."""
        if state:
            # Not `keep`: it may already count the next chunk of the prompt.
            self._settle(slot, most_replayed=0, length=length)
        return row_arrays(flat(slot.cache.cache.layers)) if slot.cache.cache.length >= length else None

    def _forward(
        self, work: Sequence[tuple[Slot, Window]], run: Callable[[], list[Choice]] | None = None
    ) -> list[Choice]:
        """run: computes the work, where it is not `_run` alone."""
        if any(slot.lost for slot, _ in work):
            raise CacheLost("a cache was lost in a forward that failed", reason="CACHE_LOST")
        try:
            return run() if run is not None else self._run(work)
        except Exception:
            for slot, _ in work:
                slot.lost = True
            raise

    def _run(self, work: Sequence[tuple[Slot, Window]]) -> list[Choice]:
        flights = [self._launch(slot, window) for slot, window in work]
        for flight in flights:
            if flight.window.ahead:
                self._launch_ahead(flight)
        return [self._land(flight) for flight in flights]

    def _launch(self, slot: Slot, window: Window) -> _Flight:
        """Hands a window to mlx, or takes the forward that was begun ahead if it is this very window."""
        if slot.ahead is not None and not window.drafts:
            begun, slot.ahead = slot.ahead, None
            choice = self._handed_over(self._chosen(slot, begun, window) if isinstance(begun, mx.array) else begun)
            return _Flight(slot, window, choice)
        began_s = time.perf_counter()
        # Without drafts the replay costs its rows once; with them it may have to be done again.
        replayed = self._settle(slot, MOST_REPLAYED if window.drafts else None)
        ids = slot.cache.begin([window.pending, *window.drafts], len(window.drafts))
        choice = self._handed_over(self._build(slot, mx.array([ids]), window))
        return _Flight(slot, window, choice, replayed + len(ids) - window.rows, began_s)

    def _build(self, slot: Slot, ids: mx.array, window: Window) -> PendingChoice:
        """ids: (1, rows), of which the window's own are the last."""
        logits = self._logits(slot, ids, window.rows)
        if window.limits is not None:
            # What the constraint allows is looked up while this computes.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return self._chosen(slot, logits, window)

    def _logits(self, slot: Slot, ids: mx.array, rows: int) -> mx.array:
        logits: mx.array = self._model(ids, cache=slot.cache.cache.layers)[0, -rows:]
        slot.cache.written(ids.shape[1])
        return logits

    def _chosen(self, slot: Slot, logits: mx.array, window: Window) -> PendingChoice:
        return choose(logits, slot.choosing, window, self.near_tie_gap)

    @staticmethod
    def _handed_over(choice: PendingChoice) -> PendingChoice:
        mx.async_eval(choice.arrays())  # type: ignore[no-untyped-call]
        return choice

    def _launch_ahead(self, flight: _Flight) -> None:
        """Begins the next plain forward from the lazy id, so that building its graph overlaps this one's computing."""
        step = flight.window.first_step + 1
        window = Window(slot=flight.window.slot, pending=0, first_step=step)
        flight.slot.cache.begin_ahead()
        if flight.window.limits is None:
            flight.slot.ahead = self._handed_over(self._build(flight.slot, flight.choice.ids[None], window))
        else:
            flight.slot.ahead = self._logits(flight.slot, flight.choice.ids[None], 1)
            mx.async_eval(flight.slot.ahead)  # type: ignore[no-untyped-call]

    def _land(self, flight: _Flight) -> Choice:
        """A row that cannot be chosen from ends its own sequence, not the tick."""
        try:
            chosen = read(flight.choice)
        except InternalError as error:
            flight.slot.ahead = None
            return Choice((), None, 0.0, time.perf_counter(), error)
        if not chosen.settled:
            # The forward begun ahead used an id that more filter passes have changed.
            flight.slot.ahead = None
        now_s = time.perf_counter()
        return Choice(
            chosen.ids,
            chosen.logprobs,
            now_s - flight.began_s,
            now_s,
            dead_row=chosen.dead_row,
            near=chosen.near,
            replayed=flight.replayed,
        )

    def _settle(self, slot: Slot, most_replayed: int | None, length: int | None = None) -> int:
        """Drops what does not stand: rejected drafts, and a forward begun ahead that nobody wants.

        length: what stands, `slot.keep` where absent.

        Ids that have to be computed again wait for the next window, up to most_replayed of them (None: any number); more get
        a forward of their own. Returns how many did.
        """
        slot.ahead = None
        slot.cache.truncate(slot.keep if length is None else length)
        if most_replayed is None or len(slot.cache.replay) <= most_replayed:
            return 0
        ids = slot.cache.begin([], 0)
        self._feed(slot, ids)
        return len(ids)

    def _feed(self, slot: Slot, ids: list[int]) -> None:
        """Appends ids whose logits nobody needs."""
        self._model(mx.array([ids]), cache=slot.cache.cache.layers)
        slot.cache.written(len(ids))

    def _drop(self, slot: Slot) -> None:
        slot.ahead = None
        slot.cache.cache.drop()
        mx.clear_cache()

    def _measured(self, slot: Slot, window: Window) -> float:
        seconds = self._forward([(slot, window)])[0].forward_s
        slot.keep += int(not window.drafts)
        return seconds

    def _unload(self) -> None:
        self._slots.clear()
        self._model = None
        mx.clear_cache()

    def _prepare(self, rows: Sequence[int]) -> dict[int, float]:
        self.rollback = self._look()
        slot = self._empty(Choosing())
        self._prefill(slot, [0] * 32)
        slot.keep = 32
        self.layout = layout_of(flat(slot.cache.cache.layers))
        if self._quantisation is not None:
            stored = (array for leaf in flat(slot.cache.cache.layers) for array in arrays_of(leaf))
            self.kv_bytes_per_token = sum(array.nbytes // array.shape[2] for array in stored)
        costs = {}
        for count in rows:
            if count > 1 and self.rollback.room(32) < count - 1:
                continue
            window = Window(slot=0, pending=0, drafts=(0,) * (count - 1), first_step=0)
            self._forward([(slot, window)])
            if self.rollback.kind:
                # A row that is no draft is never taken back.
                slot.keep += int(count == 1)
                costs[count] = min(self._measured(slot, window) for _ in range(3))
            else:
                slot = self._empty(Choosing())
                costs[count] = self._forward([(slot, window)])[0].forward_s
        self._drop(slot)
        self.prefill_costs = self._prefill_table()
        return costs

    def _prefill_table(self) -> dict[int, float]:
        table = {}
        for tokens in _MEASURED_CHUNKS:
            slot = self._empty(Choosing())
            began_s = time.perf_counter()
            self._prefill(slot, [0] * tokens)
            table[tokens] = time.perf_counter() - began_s
            self._drop(slot)
        return table
