"""Who takes part in the next tick: admission, what is read of prompts between ticks, and the one patience of a batch."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from draftwire.errors import DraftwireError, Overloaded
from draftwire.interceptor import disclosed
from target_service.crowd import Crowd
from target_service.drafts import DraftSource
from target_service.engine import CacheLost, Engine
from target_service.prefill import PrefillBudget, PrefillCosts, Waiting, whose_turn
from target_service.prefix.cache import PrefixCache
from target_service.sequence import Sequence
from target_service.widths import Bid

SHORT_PREFILL: Final = 128
"""Rows of a prompt up to which reading the weights costs more than computing them, so that company is nearly free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be going on at once."""

    max_running: int
    max_queued: int
    kv_bytes: int
    """KV cache of all running sequences, charged at admission for prompt and max_tokens, and for the longest of those that
    share a forward."""
    kv_bytes_per_token: int
    state_bytes: int
    """Recurrent state of a sequence, whatever its length."""
    prefill_step_size: int
    """Most prompt tokens a chunk."""
    one_chunk_size: bool = False
    """Whether every chunk has that size, whoever waits meanwhile."""
    max_running_per_client: int | None = None
    """Places that sequences of one client may have; None is all."""


_MOST_FAULTS = 3


class Scheduler:
    """Owns the queue and the running sequences. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        crowd: Crowd,
        open_source: Callable[[Sequence], DraftSource],
        prefixes: PrefixCache | None = None,
    ) -> None:
        """open_source: makes the drafts of an admitted sequence. prefixes: where prompts may begin; None forgets all."""
        self._engine = engine
        self._limits = limits
        self.open_source = open_source
        self._prefixes = prefixes
        self._queue: list[tuple[int, int, Sequence]] = []
        self._order = itertools.count()
        self._running: list[Sequence] = []
        self._crowd = crowd
        costs = PrefillCosts(engine.beside_costs or engine.prefill_costs or {1: crowd.costs.forward_s(1)})
        self._budget = PrefillBudget(limits.prefill_step_size, costs, one_size=limits.one_chunk_size)
        self._turn = 0
        self._returned_s: float | None = None
        self.waited_s = 0.0
        """Of the last tick: seconds that it waited for drafts."""
        self.read_between = False
        """Of the last tick: whether prompts were read before it, in forwards of their own."""
        self._wake = asyncio.Event()
        self._patience: asyncio.Timeout | None = None
        self._closed = False
        self._joining = False

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Sequences that wait for one."""
        return sum(not sequence.cancelled for _, _, sequence in self._queue)

    @property
    def kv_bytes(self) -> int:
        """KV cache that running sequences are charged with."""
        return sum(self._kv_bytes(running) for running in self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises Overloaded before any work is done."""
        needed = self._kv_bytes(sequence)
        if needed > self._limits.kv_bytes:
            raise Overloaded(
                f"the request needs {needed} bytes of KV cache, the server has {self._limits.kv_bytes}; "
                "lower max_tokens or shorten the prompt",
                reason="KV_BUDGET",
            )
        self.check_room(sequence.generation.owner)
        heapq.heappush(self._queue, (-sequence.generation.priority, next(self._order), sequence))
        self.wake()

    def check_room(self, owner: str = "") -> None:
        """Raises Overloaded where one more request of `owner` would have to wait and the queue is full."""
        running, queued, limits = self.running, self.queued, self._limits
        # Those that just came are in the queue until the next tick, though there is a place for them.
        if running + queued < limits.max_running + limits.max_queued and (
            queued < limits.max_queued or not self._queue or self._place_for(owner)
        ):
            return
        raise Overloaded(f"{running} requests run and {queued} wait", reason="QUEUE_FULL", retry_after_s=1.0)

    def cancel(self, sequence: Sequence, error: DraftwireError | None = None) -> None:
        """Ends a sequence within one round; the stream gets `error` if it is still there to read it."""
        if error is not None and not sequence.cancelled:
            sequence.fail(error)
        sequence.cancelled = True
        self.wake()

    def wake(self) -> None:
        """Says that something may have become possible: a new request, room in an outbox, a cancellation."""
        self._wake.set()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)

    def close(self) -> None:
        """Makes `tick` return nothing, which ends the round loop."""
        self._closed = True
        self.wake()

    async def tick(self) -> list[Sequence]:
        """The sequences of the next round, at least one, with the drafts that came; empty once closed."""
        patient_since_s: float | None = None
        if self._returned_s is not None:
            # What came after the last tick was the round; before it, the wait for drafts.
            if not self._engine.reads_beside:
                round_s = self.waited_s + time.monotonic() - self._returned_s
                self._budget.gap(round_s, self._crowding)
            self._returned_s = None
        self.waited_s = 0.0
        self.read_between = False
        while not self._closed:
            self._wake.clear()
            self._drop_cancelled()
            await self._admit()
            prefilled = await self._prefill()
            self.read_between = self.read_between or prefilled
            live = [sequence for sequence in self._running if sequence.decodable and not sequence.cancelled]
            for sequence in live:
                sequence.room = self._engine.room(len(live))
            if live:
                # One that was in a forward that failed shows alone whether the fault is its own.
                live = [sequence for sequence in live if sequence.suspect][:1] or live
                patient_since_s = patient_since_s or time.monotonic()
                called_away = await self._called_away(live, patient_since_s)
                self.waited_s = time.monotonic() - patient_since_s
                if called_away:
                    continue
                if ready := [sequence for sequence in live if self._collected(sequence)]:
                    hidden_s = [one.waited_for_s(patient_since_s) for one in ready]
                    if any(seconds is not None for seconds in hidden_s):
                        self._crowd.hid(min(seconds for seconds in hidden_s if seconds is not None))
                    self._returned_s = time.monotonic()
                    return self._begun(ready)
            elif not prefilled:
                await self._wake.wait()
        return []

    def beside(self, ready: list[Sequence], round_s: float, round_rows: int) -> dict[Sequence, int]:
        """What the forward of `ready` reads of the prompts beside their windows: sequence -> rows.

        round_s, round_rows: what the round takes and what the forward has without them.
        """
        engine = self._engine
        if not engine.reads_beside or any(one.suspect or one.slot in engine.begun for one in ready):
            return {}
        waiting = [one for one in self._running if one.readable and not one.suspect]
        if waiting:
            self._budget.gap(round_s, self._crowding)
        chunks: dict[Sequence, int] = {}
        while waiting:
            turn = whose_turn([Waiting(one.generation.priority, one.unread) for one in waiting], self._turn)
            one = waiting.pop(turn)
            rest = self._rest(one)
            rows = self._budget.chunk(rest, one.prefilled, round_rows + sum(chunks.values()))
            if rows:
                self._turn += 1
                self._budget.planned(rows, one.prefilled)
                chunks[one] = rows
            if rows < rest:
                break
        return chunks

    def was_read(self, chunks: Mapping[Sequence, int], added_s: float) -> None:
        """Books what `beside` planned, and how much longer the forward took for it."""
        if chunks:
            self._budget.added([(rows, one.prefilled) for one, rows in chunks.items()], added_s)
            self._book_read(chunks)

    @property
    def settled(self) -> bool:
        """Whether the next tick will have the sequences of this one: nobody reads a prompt or waits to join."""
        return not self._joining and all(sequence.decodable or sequence.crowded for sequence in self._running)

    def retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Frees everything a sequence has. keep: whether its rows may serve later prompts."""
        if sequence in self._running:
            self._running.remove(sequence)
        sequence.source.close()
        if sequence.slot is not None:
            if self._prefixes is not None:
                self._prefixes.close(sequence.slot, sequence.cached_ids if keep else ())
            self._engine.close(sequence.slot)
            sequence.slot = None

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends sequences whose forward failed; their caches are not to be trusted."""
        shown = disclosed(error, "forward_failed")
        for sequence in sequences:
            if not sequence.cancelled:
                sequence.fail(shown)
            self.retire(sequence, keep=False)

    async def recover(self, failed: list[Sequence], error: Exception, *, touched: bool = False) -> None:
        """After a forward that raised: whose caches are gone begin again from their ids, with nothing lost but time.

        touched: whether those of the failed are, whatever the engine says.

        Alone in it, a sequence is at fault and ends. Those that shared it run their next round alone each, once; a fault that
        appears in company only ends them at the third time.
        """
        if not isinstance(error, CacheLost):
            guilty = failed if len(failed) == 1 else [one for one in failed if one.faulted() >= _MOST_FAULTS]
            self.fail(guilty, error)
        for sequence in list(self._running):
            gone = touched and sequence in failed
            if sequence.slot is None or (self._engine.intact(sequence.slot) and not gone):
                continue
            if self._limits.one_chunk_size:
                # Exact mode promises bits that reading again in chunks would not give.
                self.fail([sequence], error)
                continue
            try:
                if self._prefixes is not None:
                    # Nothing of it is kept: what it reads now is more than a prompt.
                    self._prefixes.close(sequence.slot)
                await self._engine.reopen(sequence.slot)
                sequence.restart()
            except Exception as other:
                self.fail([sequence], other)

    def fail_all(self, error: Exception) -> None:
        """Ends everything that runs or waits."""
        self.fail([*self._running, *(sequence for _, _, sequence in self._queue)], error)
        self._queue.clear()

    @property
    def _crowding(self) -> float:
        """Sequences that still read their prompts, for each that has its own behind it."""
        reading = sum(one.unread > 0 for one in self._running)
        return reading / max(1, len(self._running) - reading)

    def _begun(self, ready: list[Sequence]) -> list[Sequence]:
        """Those whose forward was begun ahead, where it was: who has come meanwhile joins the tick after."""
        begun = self._engine.begun
        first = [sequence for sequence in ready if sequence.slot in begun]
        self._joining = 0 < len(first) < len(ready)
        return first or ready

    def _kv_bytes(self, sequence: Sequence) -> int:
        tokens = sequence.ledger.prompt_length + sequence.generation.stopping.max_tokens
        return -(-tokens // 256) * 256 * self._limits.kv_bytes_per_token + self._limits.state_bytes

    def _collected(self, sequence: Sequence) -> bool:
        try:
            sequence.collect()
        except Exception as error:
            self.fail([sequence], error)
            return False
        return True

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is a place and memory for it now. Alone, it always fits: `submit` has seen to that."""
        if len(self._running) >= self._limits.max_running:
            return False
        each = [self._kv_bytes(one) for one in (*self._running, sequence)]
        # Sequences that share a forward lie in arrays as long as the longest of them.
        needed = len(each) * max(each) if self._engine.batching == "ragged" else sum(each)
        return not self._running or needed <= self._limits.kv_bytes

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in self._running if sequence.cancelled]:
            self.retire(sequence)
        if any(sequence.cancelled for _, _, sequence in self._queue):
            self._queue = [entry for entry in self._queue if not entry[2].cancelled]
            heapq.heapify(self._queue)

    async def _admit(self) -> None:
        while (entry := self._next()) and self._fits(entry[2]):
            first = self._take(entry)
            self._running.append(first)
            try:
                generation = first.generation
                positions = len(generation.prompt)
                most = positions + generation.stopping.max_tokens
                first.slot = await self._engine.open(generation.choosing, positions=positions, most=most)
                first.admit(first.slot, self._engine.rollback, self.open_source(first))
                self._begin(first)
            except Exception as error:
                self.fail([first], error)

    def _next(self) -> tuple[int, int, Sequence] | None:
        """The first that waits and whose client has not all the places that it may have."""
        share = self._limits.max_running_per_client
        if share is None or not self._queue:
            return self._queue[0] if self._queue else None
        held = Counter(sequence.generation.owner for sequence in self._running)
        return min((entry for entry in self._queue if held[entry[2].generation.owner] < share), default=None)

    def _place_for(self, owner: str) -> bool:
        """Whether the next tick has a place: for the first that waits, or past those that wait for their own share."""
        first = self._next()
        if first is not None:
            return self._fits(first[2])
        held = sum(sequence.generation.owner == owner for sequence in self._running)
        share = self._limits.max_running_per_client
        return len(self._running) < self._limits.max_running and (share is None or held < share)

    def _take(self, entry: tuple[int, int, Sequence]) -> Sequence:
        if entry is self._queue[0]:
            heapq.heappop(self._queue)
        else:
            self._queue.remove(entry)
            heapq.heapify(self._queue)
        return entry[2]

    def _begin(self, sequence: Sequence) -> None:
        generation = sequence.generation
        if self._prefixes is None or generation.cache_disabled:
            sequence.begin(0)
            return
        assert sequence.slot is not None

        def ready(cached: int) -> None:
            sequence.begin(cached)
            self.wake()

        self._prefixes.open(sequence.slot, generation.prompt, ready, owner=generation.owner, salt=generation.cache_salt)

    async def _prefill(self) -> bool:
        """Reads from the prompts in forwards of their own: one chunk where nobody decodes; where somebody does, what the gap
        between two rounds holds, unless the engine reads them beside its windows (`beside`).

        A chunk is of one prompt, or of all short rests in one forward. Drafters read them at the same time. True where
        something was read.
        """
        read = False
        while waiting := [one for one in self._running if one.readable]:
            somebody = any(one.decodable and not one.cancelled for one in self._running)
            if somebody and self._engine.reads_beside:
                # One that was in a forward that failed shows alone whether the fault is its own.
                waiting = [one for one in waiting if one.suspect]
                if not waiting:
                    break
            turn = whose_turn([Waiting(one.generation.priority, one.unread) for one in waiting], self._turn)
            first = waiting.pop(turn)
            rest = self._rest(first)
            together = rest <= SHORT_PREFILL and not self._limits.one_chunk_size and not first.suspect
            rows = self._limits.prefill_step_size
            if somebody and self._engine.reads_beside:
                rows = min(rest, SHORT_PREFILL)
            elif somebody:
                rows = self._budget.chunk(rows if together else rest, first.prefilled)
            if rows:
                self._turn += 1
                read = True
                others = sorted(waiting, key=lambda one: (-one.generation.priority, one.unread))
                company = [one for one in others if not one.suspect]
                chunks = short_rests({one: self._rest(one) for one in (first, *company)}, rows) if together else {}
                await self._read(chunks or {first: min(rest, rows)})
            # Where nobody decodes, the tick looks around after each chunk: somebody may have come or gone.
            if not rows or not somebody or self._closed:
                break
        return read

    async def _read(self, chunks: dict[Sequence, int]) -> None:
        began_s = time.monotonic()
        try:
            if len(chunks) == 1:
                ((only, rows),) = chunks.items()
                await self._engine.prefill(slot_of(only), only.next_ids(rows))
            else:
                await self._engine.prefill_together({slot_of(one): one.next_ids(rows) for one, rows in chunks.items()})
        except Exception as error:
            await self.recover(list(chunks), error, touched=True)
            return
        if not self._engine.reads_beside:
            behind = max(one.prefilled for one in chunks)
            self._budget.took(max(chunks.values()) * len(chunks), behind, time.monotonic() - began_s)
        self._book_read(chunks)

    def _book_read(self, chunks: Mapping[Sequence, int]) -> None:
        for sequence, rows in chunks.items():
            sequence.prefilled += rows
            if self._prefixes is not None:
                self._prefixes.prefilled(slot_of(sequence), sequence.prefilled)
            if not sequence.unread and sequence.times.prefilled is None:
                sequence.times.prefilled = time.monotonic()

    def _rest(self, sequence: Sequence) -> int:
        """Rows of its prompt up to its end, or to where what was read has to be kept."""
        stop = self._prefixes.next_stop(slot_of(sequence), sequence.prefilled) if self._prefixes is not None else None
        return sequence.unread if stop is None else stop - sequence.prefilled

    async def _called_away(self, live: list[Sequence], began_s: float) -> bool:
        """Waits for drafts: at most the longest patience of one sequence, and in company at most what they are worth to all.

        True where somebody came or left meanwhile: nobody waits for another's drafter, and nothing for a client that is gone.
        """
        while True:
            now_s = time.monotonic()
            left = {id(one): left_s for one in live if (left_s := one.patience_left_s(now_s)) > 0}
            waiting = [one for one in live if id(one) in left]
            if not waiting:
                return False
            left_s = max(left.values())
            # Those whose prompts are to be read beside this round wait for it too.
            readers = sum(one.readable for one in self._running) if self._engine.reads_beside else 0
            if len(live) + readers > 1:
                here = [one.bid() for one in live]
                hoped = [one.hoped() if id(one) in left else bid for one, bid in zip(live, here, strict=True)]
                here, hoped = [*here, *[Bid()] * readers], [*hoped, *[Bid()] * readers]
                left_s = min(left_s, began_s + self._crowd.patience_s(here, hoped) - now_s)
            if left_s <= 0:
                for one in waiting:
                    one.missed()
                return False
            if self._wake.is_set():
                return True
            await self._arrival(waiting, left_s)
            for one in waiting:
                if not one.source.asking:
                    self._collected(one)

    async def _arrival(self, waiting: list[Sequence], timeout_s: float) -> None:
        """Waits until one of them has its answer, the timeout or `wake`."""
        arrivals = [asyncio.ensure_future(one.source.arrival()) for one in waiting]
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return
        finally:
            self._patience = None
            for arrival in arrivals:
                arrival.cancel()


def short_rests(rests: Mapping[Sequence, int], most_rows: int) -> dict[Sequence, int]:
    """Who is read together with the first in one forward, first come first: sequence -> rows. Empty where its rest is long.

    rests: sequence -> rows it has to read. Padded, they have at most `most_rows` rows.
    """
    chunks: dict[Sequence, int] = {}
    for sequence, rest in rests.items():
        widest = max([rest, *chunks.values()])
        if widest <= SHORT_PREFILL and widest * (len(chunks) + 1) <= most_rows:
            chunks[sequence] = rest
        elif not chunks:
            break
    return chunks


def slot_of(sequence: Sequence) -> int:
    """The place of a sequence that was admitted."""
    assert sequence.slot is not None
    return sequence.slot
