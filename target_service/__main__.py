"""`python -m target_service`: listen, load, warm up, serve, drain, exit 0."""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["healthcheck"]:
    # Before the other imports: it runs every few seconds.
    from draftwire.healthcheck import main as healthcheck

    sys.exit(healthcheck(sys.argv[2:], program="target_service", port=50051))

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from draftwire.blas import BlasError, BlasInfo, load_blas
from draftwire.compute import ComputeThread
from draftwire.guard import Guard, guard_of
from draftwire.logs import configure, get_logger
from draftwire.models import ModelError
from draftwire.observability import Watching, watching
from draftwire.serving import Lifecycle, Signals, State, drain, leave, listen, tune_interpreter, watch
from draftwire.settings import parse
from draftwire.v1 import target_pb2, target_pb2_grpc
from target_service.config import TargetSettings
from target_service.drafter_channel import credentials_of

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from target_service.prefix.counts import PrefixCounts
    from target_service.service import TargetService

_log = get_logger("target")
_CLOSE_S = 5.0
_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


def main() -> None:
    """Parses the settings once, chooses the BLAS before anything imports mlx, and runs until SIGTERM."""
    settings = parse(TargetSettings, sys.argv[1:], program="target_service")
    configure(settings.log_level, settings.log_format)
    tune_interpreter()
    try:
        blas = load_blas(settings.blas, threads=settings.blas_threads)
        (_log.warning if blas.kind == "reference" else _log.info)(
            "blas", kind=blas.kind, threads=blas.threads, version=blas.version, reason=blas.reason
        )
        asyncio.run(run(settings, blas))
    except (ModelError, BlasError, OSError, RuntimeError) as error:
        _log.error("cannot_serve", reason=str(error))
        sys.exit(1)


async def run(settings: TargetSettings, blas: BlasInfo) -> None:
    """The life of the process. Raises ModelError where the model cannot be loaded, OSError where the port is taken."""
    # First: importing takes a while, in which a SIGTERM must not kill.
    signals = Signals()
    # Before anything that takes long: a slip in a file's name is told at once.
    credentials_of(settings).checked()
    guard = guard_of(settings)
    # Late: these import mlx, which must find the BLAS in place.
    from target_service.service import FaceOptions, TargetService

    lifecycle = Lifecycle(_SERVICE, frozenset({"Generate"}))
    service = TargetService(lifecycle, FaceOptions.of(settings))
    async with watching(settings, lifecycle, "draftwire-target", lambda: _collectors(lifecycle, service)) as watched:
        if watched.tracing is not None:
            from target_service.tracing import OtelRequests

            service.tracer = OtelRequests(watched.tracing.tracer)
        await _serve(settings, blas, signals, guard, lifecycle=lifecycle, service=service, watched=watched)


async def _serve(
    settings: TargetSettings,
    blas: BlasInfo,
    signals: Signals,
    guard: Guard,
    *,
    lifecycle: Lifecycle,
    service: TargetService,
    watched: Watching,
) -> None:
    from target_service.loading import load_target

    server, _ = await listen(
        lifecycle,
        settings.host,
        settings.port,
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server),
        guard,
        observers=watched.observers,
    )
    compute = ComputeThread()
    try:
        async with AsyncExitStack() as stack:
            loading = asyncio.create_task(load_target(settings, blas, compute, lifecycle.instance_id, stack))
            if await _stop_asked(signals, loading):
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                _leave_after(_CLOSE_S)
                return
            service.target = loading.result()
            watchdog = asyncio.create_task(watch(compute, lifecycle, settings.watchdog_s))
            await lifecycle.enter(State.SERVING)
            if not await _stop_asked(signals, asyncio.create_task(service.target.died())):
                raise RuntimeError("the round loop died")
            watchdog.cancel()
            await drain(lifecycle, server, service.idle, settings.drain_s, signals.hurry, cut=service.cut)
            _leave_after(_CLOSE_S)
    finally:
        await server.stop(0)
        # Jobs that close sequences are still queued: the thread runs them, then clears its streams and ends.
        await asyncio.to_thread(compute.close)


def _collectors(lifecycle: Lifecycle, service: TargetService) -> list[Collector]:
    from target_service.metrics import target_collector

    def prefix_cache() -> PrefixCounts | None:
        prefixes = service.target.prefixes if service.target is not None else None
        return prefixes.snapshot() if prefixes is not None else None

    return [target_collector(lifecycle, lambda: service.target, prefix_cache)]


async def _stop_asked(signals: Signals, other: asyncio.Task[Any]) -> bool:
    """Waits for a signal to stop (True) or the end of `other` (False)."""
    stop = asyncio.create_task(signals.stop.wait())
    await asyncio.wait([stop, other], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    return signals.stop.is_set()


def _leave_after(seconds: float, leave: Callable[[int], None] = os._exit) -> None:
    """Ends the process if it has not ended by itself: a forward pass or a load cannot be interrupted."""

    def too_late() -> None:
        _log.warning("compute_left_behind", after_s=seconds)
        sys.stderr.flush()
        leave(0)

    timer = threading.Timer(seconds, too_late)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
    leave(0)
