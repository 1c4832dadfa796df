"""What happens to drafters: killed, frozen, ended, and replaced by one with another tokenizer."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

from draftwire.aio_client import AsyncClient
from draftwire.errors import DraftwireError
from draftwire.events import DrafterState
from soak.processes import Service
from soak.tally import Tally

END_S = 10.0
"""More than a drafter may take to end: its drain of 2 seconds, and time on a busy machine."""


class Chaos:
    """Does one thing after another to the drafters, each of them in turn, until stopped; then all are well again."""

    def __init__(self, drafters: list[Service], target: str, stranger: Path, tally: Tally, seed: int) -> None:
        self._drafters = drafters
        self._target = target
        self._stranger = stranger
        self._tally = tally
        self._rng = random.Random(f"{seed}-chaos")
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Ends after the deed that is being done."""
        self._stopped.set()

    async def run(self) -> None:
        """Every kind of deed once, in random order, again and again."""
        deeds = (self.killed, self.frozen, self.ended, self.upgraded)
        while True:
            for deed in self._rng.sample(deeds, len(deeds)):
                await self._pause(0.5, 2.0)
                if self._stopped.is_set():
                    return
                drafter = self._rng.choice(self._drafters)
                await deed(drafter)
                self._tally.chaos[deed.__name__] += 1

    async def killed(self, drafter: Service) -> None:
        """SIGKILL in the middle of whatever it does; back after a while, with nothing of what it knew."""
        await drafter.kill()
        await self._pause(0.1, 2.0)
        await drafter.start()

    async def frozen(self, drafter: Service) -> None:
        """It takes connections and answers nothing, then wakes and answers everything too late."""
        drafter.signal(signal.SIGSTOP)
        await self._pause(0.5, 4.0)
        drafter.signal(signal.SIGCONT)

    async def ended(self, drafter: Service) -> None:
        """SIGTERM, as in a rolling update."""
        await drafter.terminate(END_S)
        if drafter.exits[-1] != 0:
            self._tally.fault("drafter exit", f"{drafter.name} ended with {drafter.exits[-1]}")
        await drafter.start()

    async def upgraded(self, drafter: Service) -> None:
        """Another model with another tokenizer at the same address: it must be refused, and its successor taken again."""
        await drafter.terminate(END_S)
        await drafter.start("--source", "model", "--draft-model", str(self._stranger))
        await self._is(drafter, DrafterState.REFUSED)
        await drafter.terminate(END_S)
        await drafter.start()

    async def all_well(self) -> None:
        """Every drafter serves and the target takes it."""
        for drafter in self._drafters:
            drafter.signal(signal.SIGCONT)
            if not drafter.running:
                await drafter.start()
            await self._is(drafter, DrafterState.READY)

    async def alone(self, drafter: Service) -> None:
        """Ends all others, until `all_well`, and waits for the target to see it."""
        for other in self._drafters:
            if other is not drafter:
                await other.terminate(END_S)
                await self._is(other, DrafterState.OPEN_BREAKER, DrafterState.DRAINING)

    async def _is(self, drafter: Service, *states: DrafterState, within_s: float = 20.0) -> None:
        """Waits until the target thinks so of it; a fault where it does not."""
        seen: object = None
        async with AsyncClient(self._target) as client:
            for _ in range(int(within_s / 0.1)):
                try:
                    found = {entry.address: entry for entry in await client.drafters(timeout_s=5.0)}
                    seen = found[drafter.address].state
                except DraftwireError as error:
                    seen = error
                if seen in states:
                    return
                await asyncio.sleep(0.1)
        self._tally.fault("drafter state", f"{drafter.name} is {seen}, not {states}, after {within_s:g} s")

    async def _pause(self, low_s: float, high_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(low_s, high_s))
