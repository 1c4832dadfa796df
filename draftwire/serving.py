"""The life of a service process: listen, load, serve, drain, stop. Both programs use it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from draftwire.compute import ComputeThread
from draftwire.errors import Unavailable
from draftwire.guard import Guard
from draftwire.interceptor import ErrorInterceptor
from draftwire.logs import get_logger
from draftwire.observe import Observer, ObservingInterceptor
from draftwire.refusals import Refusals

_log = get_logger("serving")

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),  # else two servers share one port in silence
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients that ping every 10 s while a long prefill sends nothing are welcome.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class State(Enum):
    """Where a service is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    STUCK = "stuck"
    DRAINING = "draining"


class Lifecycle:
    """The state of a service, told to health checks and to callers. Belongs to the event loop."""

    def __init__(self, service: str, new_work: frozenset[str]) -> None:
        """service: full gRPC name; new_work: method names that are refused while draining."""
        self.service = service
        self.instance_id = uuid.uuid4().hex
        self.health = health_aio.HealthServicer()
        self.state = State.LOADING
        self.refusals = Refusals()
        self._new_work = new_work

    async def enter(self, state: State) -> None:
        """Changes the state and what health says of it."""
        self.state = state
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if state is State.SERVING else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self.service):
            await self.health.set(name, status)
        _log.info("state", state=state.value, service=self.service)

    def check(self, method: str) -> None:
        """Raises Unavailable while loading, and for new work while draining or stuck."""
        if self.state is State.LOADING:
            raise Unavailable("the model is loading", reason="NOT_READY", retry_after_s=2.0)
        if self.state in (State.DRAINING, State.STUCK) and method.rsplit("/", 1)[-1] in self._new_work:
            raise Unavailable(f"the service is {self.state.value}", reason=self.state.name, retry_after_s=5.0)


async def watch(compute: ComputeThread, lifecycle: Lifecycle, limit_s: float) -> None:
    """The watchdog: a computation longer than limit_s turns health to NOT_SERVING until it ends. Runs for ever."""
    while True:
        await asyncio.sleep(min(1.0, limit_s / 4))
        stuck = compute.busy_for_s > limit_s
        if stuck and lifecycle.state is State.SERVING:
            _log.error("compute_stuck", busy_for_s=round(compute.busy_for_s, 1), limit_s=limit_s)
            await lifecycle.enter(State.STUCK)
        elif not stuck and lifecycle.state is State.STUCK:
            await lifecycle.enter(State.SERVING)


async def listen(
    lifecycle: Lifecycle,
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], None],
    guard: Guard | None = None,
    *,
    observers: Sequence[Observer] = (),
) -> tuple[grpc.aio.Server, int]:
    """Starts a server with health, reflection and the error interceptor; NOT_SERVING until told otherwise.

    Returns the server and the port that it got (port 0 lets the system choose). Raises OSError where the port is taken.
    """
    guard = guard or Guard()
    sizes = [(f"grpc.max_{way}_message_length", guard.max_message_bytes) for way in ("receive", "send")]
    watching = [ObservingInterceptor(observers)] if observers else []
    interceptors = [*watching, ErrorInterceptor(lifecycle, guard, lifecycle.refusals)]
    server = grpc.aio.server(interceptors=interceptors, options=[*SERVER_OPTIONS, *sizes])
    await lifecycle.enter(State.LOADING)
    health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, server)
    register(server)
    names = (lifecycle.service, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if guard.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, guard.tls.credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}; choose another --port") from error
    await server.start()
    _log.info("listening", address=f"{host}:{bound}", service=lifecycle.service, tls=guard.tls is not None)
    return server, bound


async def drain(
    lifecycle: Lifecycle,
    server: grpc.aio.Server,
    idle: Callable[[], Awaitable[None]],
    drain_s: float,
    hurry: asyncio.Event,
    *,
    cut: Callable[[], None] = lambda: None,
) -> None:
    """NOT_SERVING, wait for `idle` at most drain_s (or until `hurry`), then `cut` what is left and stop.

    What `cut` does not end within half a second, gRPC ends without a reason of ours.
    Not by `stop(grace)` alone: an open health Watch never ends by itself and would always take the whole grace.
    """
    await lifecycle.enter(State.DRAINING)
    waits = [asyncio.ensure_future(idle()), asyncio.ensure_future(hurry.wait())]
    await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    cut()
    await server.stop(0.5)


class Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


def leave(status: int) -> NoReturn:
    """Ends a process whose work is done and whose threads are joined, without taking its modules apart.

    That takes up to a second where torch has been imported (transformers does it if it is there), which is the grace of whoever
    sent the SIGTERM.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tune_interpreter() -> None:
    """Makes Python threads hand over quickly: a busy compute thread else delays each RPC by several milliseconds."""
    sys.setswitchinterval(0.0005)
