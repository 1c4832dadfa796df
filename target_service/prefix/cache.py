"""The prefix cache as the scheduler sees it: what a prompt begins with is filled in, and what was computed is kept.

Belongs to the event loop. Copies are made by the engine on the compute thread, in the order of its other work; files are read
and written, and rows put together, on helper threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from draftwire.compute import ComputeClosed
from draftwire.logs import get_logger
from target_service.prefix.counts import PrefixCounts
from target_service.prefix.disk import Disk
from target_service.prefix.keys import BLOCK, block_key, root_key, state_key
from target_service.prefix.layout import Layout, Prefix, Taken
from target_service.prefix.lookup import Found, find, missing
from target_service.prefix.memory import Block, Item, Memory, State

_log = get_logger("prefix")


class Copies(Protocol):
    """The part of an engine that copies caches to the host and back."""

    async def restore(self, slot: int, prefix: Prefix) -> None:
        """Fills an empty cache."""

    def take(self, slot: int, begin: int, length: int, *, block: int, state: bool) -> Future[Taken | None]:
        """Copies positions [begin, length), and the state there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPolicy:
    """What may be reused, and by whom."""

    base: bytes
    """`keys.namespace` of the model, its cache and its numerics."""
    exact: bool = False
    """Whether reused rows must have the bits of a prefill: then only whole chunks of prefilled rows are kept and reused."""
    chunk: int = 1
    """Prompt tokens of a prefill chunk."""

    @property
    def multiple(self) -> int:
        """Reuse ends at a multiple of it."""
        return self.chunk if self.exact else 1


@dataclass(slots=True, kw_only=True)
class _Lease:
    """One running sequence."""

    root: bytes
    prompt: Sequence[int]
    stops: list[int] = field(default_factory=list)
    """Lengths at which the prompt's rows are kept, ascending."""
    filling: asyncio.Task[None] | None = None


class PrefixCache:
    """Prefixes of one model for all tenants, in memory and, with a disk, beyond a restart."""

    def __init__(
        self,
        engine: Copies,
        layout: Layout,
        policy: PrefixPolicy,
        *,
        limit_bytes: int,
        disk: Disk | None = None,
        counts: PrefixCounts | None = None,
    ) -> None:
        """limit_bytes: of memory. counts: those that the disk counts in, if there is one."""
        self.counts = counts or PrefixCounts()
        self._engine = engine
        self._layout = layout
        self._policy = policy
        self._limit = limit_bytes
        self._memory = Memory(limit_bytes, self.counts)
        self._disk = disk
        self._leases: dict[int, _Lease] = {}
        self._taking: set[Future[Taken | None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def snapshot(self) -> PrefixCounts:
        """The counters, for an exporter."""
        return self.counts.snapshot()

    def open(self, slot: int, prompt: Sequence[int], ready: Callable[[int], None], *, owner: str, salt: str) -> None:
        """Fills an empty slot with what the prompt begins with, its last token aside, then calls ready(positions filled).

        At once where nothing is stored, else later, unless the slot is closed before.
        """
        lease = _Lease(root=root_key(self._policy.base, owner=owner, salt=salt), prompt=prompt)
        self._leases[slot] = lease
        self.counts.lookups += 1
        self.counts.prompt_tokens += len(prompt)
        found = self._find(lease)
        if found.length:
            lease.filling = asyncio.create_task(self._fill(slot, lease, ready))
        else:
            self._opened(lease, found, ready)

    def next_stop(self, slot: int, position: int) -> int | None:
        """The next length after `position` at which a prefill has to pause, so that it can be kept."""
        lease = self._leases.get(slot)
        return next((stop for stop in lease.stops if stop > position), None) if lease else None

    def prefilled(self, slot: int, length: int) -> None:
        """Says that positions [0, length) of the prompt have been read."""
        lease = self._leases.get(slot)
        if lease is None or length not in lease.stops:
            return
        if not self._layout.stateful and not self._policy.exact:
            # The odd end follows with the answer, which grows into the same block.
            length -= length % BLOCK
        self._keep(slot, lease, lease.prompt[:length])

    def close(self, slot: int, ids: Sequence[int] = ()) -> None:
        """Keeps the rows of ids, which are all that the slot's cache holds, and forgets the slot. Before it is freed."""
        lease = self._leases.pop(slot, None)
        if lease is None:
            return
        if lease.filling is not None:
            lease.filling.cancel()
        if self._policy.exact and (len(ids) >= len(lease.prompt) or len(ids) % self._policy.chunk):
            # Decoded, or the odd end of a prompt: no bits of a prefill in whole chunks.
            return
        if ids:
            self._keep(slot, lease, ids)

    async def end(self) -> None:
        """Waits for copies that are being made, and for the disk. Slots are closed by then."""
        await asyncio.gather(
            *(lease.filling for lease in self._leases.values() if lease.filling), return_exceptions=True
        )
        await self._idle.wait()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)
        self._memory.clear()

    def _find(self, lease: _Lease) -> Found:
        return find(
            self._memory,
            self._disk if self._disk is not None else (),
            lease.root,
            lease.prompt,
            limit=len(lease.prompt) - 1,
            stateful=self._layout.stateful,
            multiple=self._policy.multiple,
        )

    async def _fill(self, slot: int, lease: _Lease, ready: Callable[[int], None]) -> None:
        found = Found(length=0, steps=(), state=None)
        try:
            found = await self._restored(slot, lease)
        except Exception:
            # The prompt is read instead: a fault of the cache is nobody's error.
            _log.exception("prefix_not_restored")
        self._opened(lease, found, ready)

    def _opened(self, lease: _Lease, found: Found, ready: Callable[[int], None]) -> None:
        lease.filling = None
        lease.stops = self._stops(lease, found)
        self.counts.hits += int(found.length > 0)
        self.counts.misses += int(found.length == 0)
        self.counts.reused_tokens += found.length
        ready(found.length)

    def _stops(self, lease: _Lease, found: Found) -> list[int]:
        last = len(lease.prompt) - 1
        stops = {last - last % self._policy.multiple}
        if self._layout.stateful and found.agreed - found.length >= BLOCK:
            # Where two texts part, a state serves whatever begins like them: a shared system prompt.
            stops.add(found.agreed)
        return sorted(stop for stop in stops if stop > found.length)

    async def _restored(self, slot: int, lease: _Lease) -> Found:
        while (found := self._find(lease)).length:
            items = await self._items(found)
            if items is None:
                # A file was damaged or gone, which the disk knows by now: what is left may still serve.
                continue
            prefix = await asyncio.to_thread(_assembled, found, items)
            await self._engine.restore(slot, prefix)
            return found
        return found

    async def _items(self, found: Found) -> dict[bytes, Item] | None:
        """The blocks and the state by key, what is not in memory from disk; None where one cannot be had."""
        path = [step.key for step in found.steps]
        wanted = [*path, *([found.state] if found.state else [])]
        items = {key: item for key in wanted if (item := self._memory.get(key)) is not None}
        absent = [key for key in wanted if key not in items]
        if absent and self._disk is None:
            return None
        if absent:
            assert self._disk is not None
            read = await asyncio.to_thread(_read, self._disk, absent)
            if read is None:
                return None
            items |= read
            self._memory.add([items[key] for key in wanted])
            self.counts.disk_reused_tokens += sum(step.count for step in found.steps if step.key in read)
        used = [*path, *found.state_path, *([found.state] if found.state else [])]
        self._memory.touch(used)
        if self._disk is not None:
            self._disk.touch(used)
        return items

    def _keep(self, slot: int, lease: _Lease, ids: Sequence[int]) -> None:
        """Has copied what is not in memory yet."""
        ids = tuple(ids)
        if not self._layout.stateful and self._layout.row_bytes:
            # More than fits would only push out its own beginning.
            ids = ids[: self._limit // self._layout.row_bytes]
        begin = missing(self._memory, lease.root, ids, stateful=self._layout.stateful)
        state = self._layout.stateful and state_key(_last_key(lease.root, ids)) not in self._memory
        needed = (len(ids) - begin) * self._layout.row_bytes + self._layout.state_bytes * state
        if not ids or (begin == len(ids) and not state) or needed > self._limit:
            return
        try:
            copying = self._engine.take(slot, begin, len(ids), block=BLOCK, state=state)
        except ComputeClosed:
            return
        loop = asyncio.get_running_loop()
        self._taking.add(copying)
        self._idle.clear()
        copying.add_done_callback(lambda done: loop.call_soon_threadsafe(self._taken, lease.root, ids, done))

    def _taken(self, root: bytes, ids: tuple[int, ...], copying: Future[Taken | None]) -> None:
        self._taking.discard(copying)
        if not self._taking:
            self._idle.set()
        error = copying.exception()
        if error is not None:
            _log.warning("prefix_not_kept", reason=str(error))
            return
        taken = copying.result()
        if taken is not None:
            self._store(root, ids, taken)

    def _store(self, root: bytes, ids: tuple[int, ...], taken: Taken) -> None:
        path: list[Item] = []
        key, at = root, 0
        while at < len(ids):
            part = ids[at : at + BLOCK]
            parent, key = key, block_key(key, part)
            block = self._memory.block(key)
            if block is None:
                if at < taken.begin:
                    # Its beginning was pushed out meanwhile.
                    return
                if (at - taken.begin) // BLOCK >= len(taken.blocks):
                    # Without a state, a longer block begins with these ids.
                    break
                rows = taken.blocks[(at - taken.begin) // BLOCK]
                block = Block(key=key, parent=parent, begin=at, ids=part, rows=rows)
            path.append(block)
            at += BLOCK
        if taken.state is not None:
            path.append(State(key=state_key(key), parent=key, length=len(ids), lowest=taken.lowest, leaves=taken.state))
        new = [item for item in path if item.key not in self._memory]
        for item in new:
            if isinstance(item, Block):
                self._supersede(item)
        self._memory.add(path)
        if self._disk is not None:
            for item in path:
                self._disk.write(item)
            self._disk.touch([item.key for item in path])

    def _supersede(self, block: Block) -> None:
        """A longer block takes the place of the ends that it begins with, unless a state stands there."""
        for other in list(self._memory.after(block.parent)):
            shorter = len(other.ids) < len(block.ids) and block.ids[: len(other.ids)] == other.ids
            if shorter and self._memory.state(other.key) is None:
                self._memory.drop(other.key)
                if self._disk is not None:
                    self._disk.remove(other.key)


def _last_key(root: bytes, ids: Sequence[int]) -> bytes:
    key = root
    for at in range(0, len(ids), BLOCK):
        key = block_key(key, ids[at : at + BLOCK])
    return key


def _read(disk: Disk, keys: Sequence[bytes]) -> dict[bytes, Item] | None:
    items: dict[bytes, Item] = {}
    for key in keys:
        item = disk.read(key)
        if item is None:
            return None
        items[key] = item
    return items


def _assembled(found: Found, items: dict[bytes, Item]) -> Prefix:
    """Rows [0, length) in one array each. Raises ValueError where a block is not what it was found as."""
    parts = []
    for step in found.steps:
        block = items[step.key]
        if not isinstance(block, Block) or block.begin != step.begin or len(block.ids) < step.count:
            raise ValueError("a stored block is not where it was found")
        parts.append([rows[:, :, : step.count] for rows in block.rows])
    rows = tuple(np.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True))
    state = items[found.state] if found.state else None
    if isinstance(state, State):
        return Prefix(length=found.length, rows=rows, state=state.leaves, state_length=state.length)
    return Prefix(length=found.length, rows=rows)
