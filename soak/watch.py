"""Looks at the target each second: is health true, does it answer, what does it hold."""

from __future__ import annotations

import asyncio
import time

import psutil

from draftwire.aio_client import AsyncClient
from draftwire.errors import DraftwireError, Overloaded
from draftwire.events import Health
from soak.processes import Service
from soak.tally import Footprint, Tally

PROBE_S = 1.0
ANSWER_S = 2.0
"""Longer than health may take to answer on a busy machine."""


class Watch:
    """Probes until it is cancelled. A target that runs and was not asked to end must say SERVING, and mean it."""

    def __init__(self, target: Service, tally: Tally) -> None:
        self._target = target
        self._tally = tally
        self.samples: list[Footprint] = []
        self.slowest_s = 0.0
        """Longest that health took."""

    async def run(self) -> None:
        """One probe a second."""
        async with AsyncClient(self._target.address) as client:
            while True:
                began_s = time.monotonic()
                await self._probe(client)
                self._tally.probes += 1
                try:
                    self.samples.append(Footprint.of(self._target.pid))
                except psutil.Error as error:
                    self._tally.fault("target gone", str(error))
                await asyncio.sleep(max(0.0, PROBE_S - (time.monotonic() - began_s)))

    async def _probe(self, client: AsyncClient) -> None:
        began_s = time.monotonic()
        try:
            health = await client.health(timeout_s=ANSWER_S)
        except DraftwireError as error:
            self._tally.fault("health", f"no answer: {error}")
            return
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        if health is not Health.SERVING:
            self._tally.fault("health", f"says {health.value} while it serves")
            return
        try:
            # To serve is to take new work, or to say that there is too much of it.
            await client.complete("x", max_tokens=1, ignore_eos=True, timeout_s=30.0)
        except Overloaded:
            return
        except DraftwireError as error:
            self._tally.fault("health", f"says SERVING, and a request gets {error}")
