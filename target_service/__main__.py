"""`python -m target_service`: listen, load, warm up, serve, drain, exit 0."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from draftwire.blas import BlasError, BlasInfo, load_blas
from draftwire.compute import ComputeThread
from draftwire.logs import configure, get_logger
from draftwire.models import ModelError
from draftwire.serving import Lifecycle, Signals, State, drain, listen, tune_interpreter, watch
from draftwire.settings import parse
from draftwire.v1 import target_pb2, target_pb2_grpc
from target_service.config import TargetSettings

if TYPE_CHECKING:
    from target_service.core import Target

_log = get_logger("target")
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
    # Late: these import mlx, which must find the BLAS in place.
    from target_service.loading import load_target
    from target_service.service import TargetService

    signals = Signals()
    lifecycle = Lifecycle(_SERVICE, frozenset({"Generate"}))
    service = TargetService(lifecycle)
    server, _ = await listen(
        lifecycle,
        settings.host,
        settings.port,
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server),
    )
    compute = ComputeThread()
    try:
        async with AsyncExitStack() as stack:
            service.target = await load_target(settings, blas, compute, lifecycle.instance_id, stack)
            watchdog = asyncio.create_task(watch(compute, lifecycle, settings.watchdog_s))
            await lifecycle.enter(State.SERVING)
            if not await _stop_asked(signals, service.target):
                raise RuntimeError("the round loop died")
            watchdog.cancel()
            await drain(lifecycle, server, service.idle, settings.drain_s, signals.hurry)
    finally:
        await server.stop(0)
        # Jobs that close sequences are still queued: the thread runs them, then clears its streams and ends.
        await asyncio.to_thread(compute.close)


async def _stop_asked(signals: Signals, target: Target) -> bool:
    """Waits for a signal to stop (True) or the death of the round loop (False)."""
    waits = [asyncio.ensure_future(signals.stop.wait()), asyncio.ensure_future(target.died())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return signals.stop.is_set()


if __name__ == "__main__":
    main()
