"""Helpers for tests of the target service: a real server in this process or in one of its own, and drafters beside it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.aio_client import AsyncClient
from draftwire.blas import BlasInfo
from draftwire.channels import TLS, Endpoint
from draftwire.compute import ComputeThread
from draftwire.events import Completion, Drafter, DrafterState
from draftwire.guard import guard_of
from draftwire.observe import Observer
from draftwire.serving import Lifecycle, State, listen
from draftwire.testing import FakeDraftService, serve
from draftwire.v1 import target_pb2, target_pb2_grpc
from target_service.config import TargetSettings
from target_service.core import Target
from target_service.engine import Engine
from target_service.loading import load_target
from target_service.resolver import Resolver
from target_service.service import FaceOptions, TargetService
from target_service.spans import Tracer

NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
LOCAL = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
PATIENCE_S = 8.0
"""How long a test waits for what must happen; far more than it takes."""

# Without a configuration every round would be printed, and errors in colours with the locals of each frame.
structlog.configure(
    processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A target service in this process."""

    address: str
    client: AsyncClient
    stub: Any
    target: Target
    service: TargetService
    lifecycle: Lifecycle
    server: grpc.aio.Server
    compute: ComputeThread
    brakes: list[Brake] = field(default_factory=list)

    def brake(self, *, prefill: bool = False) -> Brake:
        """Takes hold of the engine's forwards, or of both them and prefill chunks; let go at the end at the latest."""
        self.brakes.append(Brake(self.target.engine, prefill))
        return self.brakes[-1]

    async def drafter(self, index: int = 0) -> Drafter:
        """A drafter as ListDrafters shows it."""
        return (await self.client.drafters())[index]

    async def drafter_is(self, state: DrafterState, index: int = 0) -> Drafter:
        """Waits until a drafter has this state."""
        await until(lambda: self.drafter(index), lambda drafter: drafter.state is state)
        return await self.drafter(index)

    async def at_rest(self) -> None:
        """Waits until nothing is left of any request: queue, places, caches and sessions."""
        await until(
            lambda: _now(self._gauges()),
            lambda gauges: not any(gauges),
        )
        info = await self.client.model_info()
        assert (info.running, info.queued) == (0, 0)

    def _gauges(self) -> tuple[int, ...]:
        scheduler, links = self.target.scheduler, self.target.pool.links
        return (
            scheduler.running,
            scheduler.queued,
            self.target.engine.slots,
            len(self.service._live),
            *(link.sessions for link in links),
        )


@asynccontextmanager
async def target_service(
    model: Path,
    *,
    drafters: Sequence[str] = (),
    resolver: Resolver | None = None,
    tls: TLS | None = None,
    token: str | None = None,
    observers: Sequence[Observer] = (),
    tracer: Tracer | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Serves a saved model on a loopback port as the program does, without its signals. tls and token: of its client."""
    chosen = TargetSettings(
        model=str(model),
        drafter=list(drafters),
        _cli_parse_args=False,
        **settings,
    )  # type: ignore[call-arg]
    lifecycle = Lifecycle(NAME, frozenset({"Generate"}))
    service = TargetService(lifecycle, FaceOptions.of(chosen))
    service.tracer = tracer or service.tracer
    server, port = await listen(
        lifecycle,
        "127.0.0.1",
        0,
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server),
        guard_of(chosen),
        observers=observers,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        compute = ComputeThread()
        stack.push_async_callback(asyncio.to_thread, compute.close)
        blas = BlasInfo(kind="reference", reason="test")
        loading = await stack.enter_async_context(AsyncExitStack())
        service.target = await load_target(chosen, blas, compute, lifecycle.instance_id, loading, resolver=resolver)
        # Before the target goes, its streams do: as at the end of the program.
        loading.push_async_callback(server.stop, 0)
        await lifecycle.enter(State.SERVING)
        address = f"127.0.0.1:{port}"
        endpoint = Endpoint(address=address, tls=tls, token=token)
        client = await stack.enter_async_context(AsyncClient(address, tls=tls, token=token, timeout_s=60.0))
        channel = await stack.enter_async_context(endpoint.aio_channel())
        running = Running(
            address=address,
            client=client,
            stub=target_pb2_grpc.TargetServiceStub(channel),
            target=service.target,
            service=service,
            lifecycle=lifecycle,
            server=server,
            compute=compute,
        )
        try:
            yield running
        finally:
            for brake in running.brakes:
                brake.release()


@asynccontextmanager
async def drafted(
    model: Path, fake: FakeDraftService, **settings: Any
) -> AsyncIterator[tuple[Running, FakeDraftService]]:
    """A target whose only drafter is the fake one, described and ready."""
    async with serve(fake) as address, target_service(model, drafters=[address], **settings) as running:
        await running.drafter_is(DrafterState.READY)
        yield running, fake


class Brake:
    """Holds a target's forwards back, one permit each, so that a test knows where a request stands."""

    def __init__(self, engine: Engine, prefill: bool) -> None:
        self.forwards = 0
        """Forwards that have begun, or wait for a permit."""
        self.prefills = 0
        self._permits = asyncio.Semaphore(0)
        self._open = False
        self._holds_prefill = prefill
        self._forward, self._prefill = engine.forward, engine.prefill
        engine.forward, engine.prefill = self.forward, self.prefill  # type: ignore[method-assign]

    async def forward(self, windows: Any, chunks: Any = None) -> Any:
        self.forwards += 1
        await self._pass()
        return await self._forward(windows, chunks)

    async def prefill(self, slot: int, ids: Any) -> None:
        self.prefills += 1
        if self._holds_prefill:
            await self._pass()
        await self._prefill(slot, ids)

    def allow(self, count: int) -> None:
        """Lets so many more pass."""
        for _ in range(count):
            self._permits.release()

    def release(self) -> None:
        """Lets everything pass from now on."""
        self._open = True
        self._permits.release()

    async def _pass(self) -> None:
        if not self._open:
            await self._permits.acquire()
            # Once it is open, each that gets through lets the next one pass.
            self.allow(int(self._open))


@dataclass(slots=True)
class Program:
    """`python -m <program>` as a process whose log is read."""

    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    reader: asyncio.Task[None] | None = None
    more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        """Its whole log so far."""
        return "\n".join(str(line.get("raw", line)) for line in self.lines)

    async def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """The first log entry with these fields, waited for. Raises AssertionError where the log ends before."""
        seen = 0
        while True:
            self.more.clear()
            for line in self.lines[seen:]:
                if line.get("event") == event and all(line.get(key) == value for key, value in fields.items()):
                    return line
            seen = len(self.lines)
            assert self.reader is not None
            if self.reader.done():
                raise AssertionError(f"the log ended without {event!r}:\n{self.text}")
            await asyncio.wait_for(self.more.wait(), 60)

    async def end(self, timeout_s: float = 30.0) -> int:
        """Its exit status, once its log is read to the end."""
        assert self.reader is not None
        await asyncio.wait_for(asyncio.shield(self.reader), timeout_s)
        return await self.process.wait()

    async def read(self) -> None:
        """Reads the log to its end."""
        assert self.process.stderr is not None
        try:
            while raw := await self.process.stderr.readline():
                self._add(raw.decode(errors="replace").rstrip("\n"))
        finally:
            await self.process.wait()
            self.more.set()

    def _add(self, raw: str) -> None:
        entry: dict[str, Any] = json.loads(raw) if raw.startswith("{") else {}
        self.lines.append({**entry, "raw": raw})
        if entry.get("event") == "listening":
            self.port = int(entry["address"].rpartition(":")[2])
        self.more.set()


@asynccontextmanager
async def program(
    name: str, *flags: str, env: dict[str, str] | None = None, before: Sequence[str] = ()
) -> AsyncIterator[Program]:
    """Starts a service; kills it if it is still there at the end. Port, log format and threads come from the environment.

    before: a command that runs the rest of its arguments in the end, as `env` does.
    """
    usual = {"PORT": "0", "LOG_FORMAT": "json", "THREADS": "1"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWIRE_")}
    environment = {**inherited, **{f"DRAFTWIRE_{key}": value for key, value in usual.items()}, **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *before, sys.executable, "-m", name, *flags,
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    running = Program(process)
    running.reader = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.reader


async def health(address: str, service: str = "") -> int:
    """What the health service says: a ServingStatus."""
    async with grpc.aio.insecure_channel(address, options=LOCAL) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


async def until(look: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], timeout_s: float = PATIENCE_S) -> None:
    """Looks again and again until what is seen is good; AssertionError with what was seen last."""
    deadline_s = time.monotonic() + timeout_s
    seen = await look()
    while not good(seen):
        assert time.monotonic() < deadline_s, f"still {seen}"
        await asyncio.sleep(0.005)
        seen = await look()


async def happens(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Waits until a condition on this process holds."""
    await until(lambda: _now(condition()), bool, timeout_s)


async def _now(value: Any) -> Any:
    return value


def visible(completion: Completion) -> tuple[Any, ...]:
    """Everything that drafts must not change, and what was cached neither."""
    finished = completion.finished
    return (
        completion.token_ids,
        completion.text,
        finished.finish_reason,
        finished.matched,
        replace(finished.usage, cached_tokens=0),
        tuple((token.logprob, token.top_logprobs) for token in completion.tokens),
    )


def reconciled(completion: Completion) -> None:
    """L5: the counts of drafts add up."""
    stats = completion.speculation
    assert stats.num_rejected_draft_tokens >= 0
    assert sum(stats.drafted_by_position) == stats.num_draft_tokens
    assert sum(stats.accepted_by_position) == stats.num_accepted_draft_tokens
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert sum(token.from_draft for token in completion.tokens) <= stats.num_accepted_draft_tokens
    assert (stats.no_draft_reason is None) == (stats.num_draft_tokens > 0)
