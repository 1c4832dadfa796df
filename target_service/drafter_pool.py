"""All drafters of a target: keeps them described and hands out the least loaded one that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from target_service.drafter_link import DrafterLink, Identity, LinkState
from target_service.recorder import NullRecorder, Recorder


class DrafterPool:
    """Owns the links and their background tasks. Belongs to the event loop; use as an async context manager."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        self.identity = identity
        self.recorder: Recorder = NullRecorder()
        """Told of sessions and Draft calls."""
        self._changed = asyncio.Event()
        self.links = [DrafterLink(address, identity, self._notify) for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DrafterPool:
        self._tasks = [asyncio.create_task(link.run()) for link in self.links]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        for task in (*self._tasks, *self._background):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._background, return_exceptions=True)
        for link in self.links:
            await link.close()

    def best(self, avoid: DrafterLink | None = None) -> DrafterLink | None:
        """The ready link with the fewest sessions of ours, the first of equals; `avoid` only where there is no other."""
        ready = [link for link in self.links if link.state is LinkState.READY]
        return min(ready, key=lambda link: (link is avoid, link.sessions), default=None)

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

    def _notify(self) -> None:
        # Wakes everybody who waits now; a new event is for who waits later.
        self._changed.set()
        self._changed = asyncio.Event()
