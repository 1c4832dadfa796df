"""`python -m soak --seconds 600`: abuses real services, prints a table and one JSON object, exits with 1 for a missed bar."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from client.services import free_port
from draftwire.aio_client import AsyncClient
from draftwire.errors import DraftwireError, Unavailable
from draftwire.events import Chunk, Health
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from soak import report
from soak.cases import known, requests
from soak.chaos import END_S, Chaos
from soak.load import Users
from soak.processes import Service, save_models
from soak.tally import Footprint, Tally
from soak.watch import Watch

GRACE_S = 3.0
EXIT_S = GRACE_S + 2.0
LONG_S = 300.0
"""From here on a run is a long one: its figures are kept."""
REST_S = 30.0
"""How long sessions may take to go after the last request: leases of 5 seconds end what nobody releases."""
# So little room for prefixes that they are dropped all the time, and memory is at its bound within the first minute.
_SERVICE_FLAGS = ("--blas", "reference", "--log-level", "info", "--prompt-cache-bytes", str(2 * 1024**2))


class Soak:
    """One run."""

    def __init__(self, folder: Path, *, seconds: float, seed: int, users: int, console: Console) -> None:
        self.tally = Tally()
        self._seconds = seconds
        self._seed = seed
        self._users = users
        self._console = console
        model, stranger = save_models(folder)
        self._stranger = stranger

        def drafter(name: str, *usual: str) -> Service:
            flags = (*_SERVICE_FLAGS, "--drain-s", "2", "--lease-s", "5", "--session-limit", "12")
            return Service(
                name=name,
                program="draft_service",
                port=free_port("127.0.0.1"),
                flags=flags,
                log=folder / f"{name}.log",
                usual=usual,
            )

        self.drafters = [
            drafter("twin", "--source", "model", "--draft-model", str(model)),
            drafter("lookup", "--source", "lookup"),
        ]
        flags = [*_SERVICE_FLAGS, "--model", str(model), "--drain-s", str(GRACE_S), "--draft-timeout-s", "0.2"]
        flags += ["--max-running", "6", "--max-queued", "4", "--num-draft-tokens", "7"]
        flags += ["--drafter", self.drafters[0].address, "--drafter", f"dns:///localhost:{self.drafters[1].port}"]
        self.target = Service(
            name="target", program="target_service", port=free_port("127.0.0.1"), flags=flags, log=folder / "target.log"
        )

    async def run(self) -> tuple[list[report.Bar], dict[str, Any]]:
        """The whole of it; returns the bars and the JSON object."""
        try:
            await asyncio.gather(*(drafter.start() for drafter in self.drafters))
            await self.target.start()
            return await self._abuse()
        finally:
            for service in (self.target, *self.drafters):
                await service.kill()

    async def _abuse(self) -> tuple[list[report.Bar], dict[str, Any]]:
        async with AsyncClient(self.target.address) as client:
            cases = await known(client, requests(random.Random(self._seed), 24))
        self._console.print(f"{len(cases)} answers known; abuse for {self._seconds:g} s")
        addresses = [drafter.address for drafter in self.drafters]
        # Pools of threads and the like grow once: what comes after is held against this.
        warm = Users(self.target.address, addresses, cases, Tally(), self._seed + 1)
        async with _running(warm, self._users):
            await asyncio.sleep(min(10.0, self._seconds / 6))
        chaos = Chaos(self.drafters, self.target.address, self._stranger, self.tally, self._seed)
        await chaos.all_well()
        await self._sessions_left()
        before = Footprint.of(self.target.pid)
        began_s = time.monotonic()
        watch = Watch(self.target, self.tally)
        watching = asyncio.create_task(watch.run())
        users = Users(self.target.address, addresses, cases, self.tally, self._seed)
        async with _running(users, self._users):
            trouble = asyncio.create_task(chaos.run())
            await asyncio.wait([trouble], timeout=self._seconds)
            chaos.stop()
            await trouble
        await chaos.all_well()
        ending = await self._end(before, watching, chaos)
        found = report.bars(self.tally, ending, watch.samples, began_s)
        report.show(self.tally, found, self._console)
        result = report.as_json(
            self.tally, found, watch.samples, seconds=self._seconds, seed=self._seed, began_s=began_s
        )
        return found, result

    async def _end(self, before: Footprint, watching: asyncio.Task[None], chaos: Chaos) -> report.Ending:
        at_target, at_drafters = await self._sessions_left()
        after = Footprint.of(self.target.pid)
        # A channel to a drafter that came back has two sockets for a while; what leaks stays.
        deadline_s = time.monotonic() + REST_S
        while after.fds - before.fds > report.MAX_MORE_FDS and time.monotonic() < deadline_s:
            await asyncio.sleep(0.5)
            after = Footprint.of(self.target.pid)
        drafts_again = await self._drafts_again(chaos)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        exit_s = await self._terminate_target()
        for drafter in self.drafters:
            await drafter.terminate(END_S)
        return report.Ending(
            before=before,
            after=after,
            target_sessions=at_target,
            drafter_sessions=at_drafters,
            drafts_again=drafts_again,
            exit_status=self.target.exits[-1],
            exit_s=exit_s,
            exit_limit_s=EXIT_S,
            drafter_exits=[status for drafter in self.drafters for status in drafter.exits],
        )

    async def _drafts_again(self, chaos: Chaos) -> bool:
        """Whether each drafter is right again when it is the only one: the twin always is, the lookup where a text
        repeats itself."""
        twin, lookup = self.drafters
        usual: dict[str, Any] = {"prompt": "on and on and on and on", "max_tokens": 200, "ignore_eos": True}
        usual |= {"drafting": "fixed", "num_draft_tokens": 4}
        accepted = []
        for drafter, request in ((twin, usual), (lookup, usual | {"logit_bias": {97: 90.0}})):
            await chaos.alone(drafter)
            async with AsyncClient(self.target.address) as client:
                found = await client.complete(**request)
            accepted.append(found.speculation.num_accepted_draft_tokens)
            await chaos.all_well()
        self._console.print(f"accepted at the end: {accepted[0]} of the twin's drafts, {accepted[1]} of the lookup's")
        return min(accepted) > 50

    async def _terminate_target(self) -> float:
        """SIGTERM in the middle of streams, some of which nobody reads: they end, or are cut with a reason. Health says so."""

        async def stream(client: AsyncClient, read: bool) -> None:
            try:
                async with client.generate("on and on", max_tokens=4000, ignore_eos=True) as events:
                    async for event in events:
                        if isinstance(event, Chunk):
                            began.release()
                            if not read:
                                await ended.wait()
            except Unavailable as error:
                self.tally.outcome("streams at the end", error.reason)
            except DraftwireError as error:
                self.tally.fault("drain", str(error))

        began, ended = asyncio.Semaphore(0), asyncio.Event()
        async with AsyncClient(self.target.address) as client:
            streams = [asyncio.create_task(stream(client, read)) for read in (True, True, False)]
            for _ in streams:
                await began.acquire()
            ending = asyncio.create_task(self.target.terminate(EXIT_S + 10))
            await self._draining(client)
            exit_s = await ending
            ended.set()
            await asyncio.gather(*streams)
        return exit_s

    async def _draining(self, client: AsyncClient) -> None:
        """As long as it answers, it says that it does not serve."""
        for _ in range(50):
            with suppress(Unavailable):
                if await client.health(timeout_s=2.0) is Health.NOT_SERVING:
                    return
            await asyncio.sleep(0.02)
        self.tally.fault("health", "never says NOT_SERVING after SIGTERM")

    async def _sessions_left(self) -> tuple[int, int]:
        """(at the target, at drafters), once they have gone or had the time to."""
        deadline_s = time.monotonic() + REST_S
        while True:
            async with AsyncClient(self.target.address) as client:
                info = await client.model_info()
                at_target = info.running + info.queued + sum(found.sessions for found in await client.drafters())
            at_drafters = sum([await _sessions_of(drafter) for drafter in self.drafters])
            if not at_target + at_drafters or time.monotonic() > deadline_s:
                # Connections of clients that have gone are closed then, except those that garbage in here holds: tasks
                # and the errors in them.
                gc.collect()
                await asyncio.sleep(1.0)
                return at_target, at_drafters
            await asyncio.sleep(0.2)


async def _sessions_of(drafter: Service) -> int:
    """Sessions that a drafter holds, whoever opened them."""
    async with grpc.aio.insecure_channel(drafter.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = draft_pb2.DescribeRequest(protocol_version=1, target_instance_id="soak")
        reply = await draft_pb2_grpc.DraftServiceStub(channel).Describe(request, timeout=10.0)
    return int(reply.load.sessions)


@asynccontextmanager
async def _running(users: Users, count: int) -> AsyncIterator[None]:
    """Runs so many users, two of which only read steadily, until the block ends and each has come to its end."""
    loops = [asyncio.create_task(users.steady(number)) for number in range(2)]
    loops += [asyncio.create_task(users.mixed(number)) for number in range(count)]
    try:
        yield
    finally:
        users.stop()
        await asyncio.gather(*loops)


def main() -> int:
    """0 where all bars are held, 1 where one was missed."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to abuse (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (%(default)s)")
    parser.add_argument("--users", type=int, default=8, help="at once (%(default)s)")
    parser.add_argument(
        "--logs", type=Path, default=None, help="folder for models and logs; a temporary one when absent"
    )
    asked = parser.parse_args()
    console = Console(width=160, highlight=False)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = asked.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, seconds=asked.seconds, seed=asked.seed, users=asked.users, console=console)
        found, result = asyncio.run(soak.run())
    if asked.seconds >= LONG_S:
        report.write(result, Path(__file__).resolve().parents[1] / "benchmarks" / "results")
    print(json.dumps(result))
    return 0 if all(bar.held for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
