"""All drafters of a target: keeps them described, follows their names, and hands out the best one that is ready."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Coroutine, Sequence
from typing import Any

from draftwire.logs import get_logger
from target_service.drafter_link import DrafterLink, Identity, LinkState
from target_service.recorder import NullRecorder, Recorder
from target_service.resolver import Addresses, Resolver, SystemResolver, parse_name, watch_name

_log = get_logger("drafters")


class DrafterPool:
    """Owns the links and their background tasks. Belongs to the event loop; use as an async context manager.

    A target is host:port, one drafter for as long as the pool lives, or dns:///name:port, all that the name stands for: one
    that appears gets a link, one that disappears gets no new sessions and loses its link when the last session has moved.
    """

    def __init__(
        self,
        targets: Sequence[str],
        identity: Identity,
        *,
        resolver: Resolver | None = None,
        resolve_interval_s: float = 5.0,
    ) -> None:
        """Raises ValueError for a target that is neither."""
        self.identity = identity
        self.targets = tuple(targets)
        self.recorder: Recorder = NullRecorder()
        """Told of sessions and Draft calls."""
        self._resolver = resolver or SystemResolver()
        self._interval_s = resolve_interval_s
        self._changed = asyncio.Event()
        self._names = [target for target in self.targets if parse_name(target) is not None]
        self._found: dict[str, Addresses] = {
            target: frozenset() if target in self._names else frozenset({target}) for target in self.targets
        }
        self._links: dict[str, DrafterLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._draining: set[DrafterLink] = set()
        self._background: set[asyncio.Task[None]] = set()
        for target in self.targets:
            if target not in self._names:
                self._links[target] = self._link(target)

    async def __aenter__(self) -> DrafterPool:
        for link in self._links.values():
            self._start(link)
        for name in self._names:
            self._watch(watch_name(name, self._resolver, self._interval_s, self.resolved))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        tasks = [*self._watches, *self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            await link.close()

    @property
    def links(self) -> list[DrafterLink]:
        """All links, in the order of the targets that stand for them; those that drain come last."""

        def place(link: DrafterLink) -> int:
            found = (index for index, target in enumerate(self.targets) if link.address in self._found[target])
            return next(found, len(self.targets))

        return sorted(self._links.values(), key=place)

    def best(self, avoid: DrafterLink | None = None) -> DrafterLink | None:
        """The ready link on which one more session costs least, the first of equals; `avoid` only where there is no other.

        The cost is what a Draft call takes there times the sessions that would share it.
        """
        ready: dict[str, DrafterLink] = {}
        for link in self.links:
            if link.state is LinkState.READY and link.description is not None:
                # One drafter at two addresses, as with IPv4 and IPv6, must not get twice its share.
                ready.setdefault(link.description.instance_id, link)
        known = [seconds for link in ready.values() if (seconds := link.recent_rpc_s) is not None]
        # One that has not been measured lately is taken for an average one, so that it is measured again.
        usual_s = statistics.median(known) if known else 1.0

        def cost(link: DrafterLink) -> tuple[bool, float]:
            seconds = link.recent_rpc_s
            return link is avoid, (link.sessions + 1) * (usual_s if seconds is None else seconds)

        return min(ready.values(), key=cost, default=None)

    def missing(self) -> str:
        """Why `best` has none, as a reason for statistics."""
        return "tokenizer_mismatch" if any(link.tokenizer_mismatch for link in self.links) else "no_drafter"

    async def change(self) -> None:
        """Waits until some link changes its state."""
        await self._changed.wait()

    def spawn(self, task: asyncio.Task[None]) -> None:
        """Keeps a reference to a task that may outlive its request (a Release), until it is done."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def resolved(self, target: str, addresses: Addresses) -> None:
        """What a name stands for now: places and drains."""
        if addresses == self._found[target]:
            return
        _log.info("resolved", name=target, addresses=sorted(addresses))
        self._found[target] = addresses
        wanted: Addresses = frozenset().union(*self._found.values())
        for address in sorted(wanted):
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = self._link(address, target)
                self._start(link)
            elif link.leaving:
                link.stay()
        for address, link in self._links.items():
            if address not in wanted and not link.leaving:
                link.leave(f"{target} no longer stands for it")
                if link not in self._draining:
                    self._draining.add(link)
                    self._watch(self._drop(link))

    async def _drop(self, link: DrafterLink) -> None:
        """Closes a link that leaves, once its sessions have gone; lets it be if it stays after all."""
        while link.leaving and link.busy:
            await link.moved()
        self._draining.discard(link)
        if link.leaving:
            del self._links[link.address]
            task = self._tasks.pop(link.address)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.close()
            _log.info("drafter_dropped", address=link.address)

    def _link(self, address: str, target: str = "") -> DrafterLink:
        # Certificates are made for names, not for the addresses behind them.
        return DrafterLink(address, self.identity, self._notify, authority=target.removeprefix("dns:///"))

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def _start(self, link: DrafterLink) -> None:
        self._tasks[link.address] = asyncio.create_task(link.run())

    def _notify(self) -> None:
        # Wakes everybody who waits now; a new event is for who waits later.
        self._changed.set()
        self._changed = asyncio.Event()
