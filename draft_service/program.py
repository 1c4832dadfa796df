"""The life of the draft service: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import grpc

from draft_service import service
from draft_service.config import DraftSettings
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits, SessionTable
from draft_service.sources.base import Runner, Source, SourceError
from draft_service.sources.lookup import InlineRunner, LookupSource
from draftwire.compute import ComputeThread
from draftwire.logs import get_logger
from draftwire.models import ModelError
from draftwire.serving import Lifecycle, Signals, State, drain, listen, watch

_log = get_logger("draft_service")
_SWEEP_S = 1.0
# A model that is still loading cannot be interrupted; nothing is lost by leaving it.
_CLOSE_S = 5.0


async def serve(settings: DraftSettings) -> int:
    """Runs the service until SIGTERM or SIGINT. Returns the exit status: 0, or 1 where it could not begin."""
    signals = Signals()
    lifecycle = Lifecycle(service.SERVICE_NAME, service.NEW_WORK)
    limits = SessionLimits(
        sessions=settings.session_limit,
        kv_bytes=settings.kv_bytes_limit,
        lease_s=min(settings.lease_s, settings.max_lease_s),
        max_lease_s=settings.max_lease_s,
    )
    servicer = service.DraftServicer(lifecycle.instance_id, limits, max_draft_tokens=settings.num_draft_tokens)
    try:
        server, _ = await listen(
            lifecycle, settings.host, settings.port, lambda server: service.register(servicer, server)
        )
    except OSError as error:
        _log.error("cannot_listen", reason=str(error))
        return 1
    compute = ComputeThread() if settings.source_kind == "model" else None
    loading = asyncio.ensure_future(_load(settings, compute))
    stopping = asyncio.ensure_future(signals.stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done() and not signals.stop.is_set():
            runner = compute or InlineRunner()
            return await _serve(settings, lifecycle, signals, server, servicer, limits, loading.result(), runner)
        await server.stop(0)
        return 0
    except (ModelError, SourceError) as error:
        _log.error("cannot_load", draft_model=settings.draft_model, reason=str(error))
        await server.stop(0)
        return 1
    finally:
        stopping.cancel()
        loading.cancel()
        await asyncio.gather(loading, stopping, return_exceptions=True)
        # The frames above must not keep the model: it is dropped on the thread that made it.
        del loading
        if compute is not None:
            _close(compute)


async def _serve(
    settings: DraftSettings,
    lifecycle: Lifecycle,
    signals: Signals,
    server: grpc.aio.Server,
    servicer: service.DraftServicer,
    limits: SessionLimits,
    source: Source,
    runner: Runner,
) -> int:
    holder: list[Rounds] = []
    table = SessionTable(limits, time.monotonic, lambda session: holder[0].closed(session))
    rounds = Rounds(
        table,
        source,
        runner,
        time.monotonic,
        max_draft_tokens=settings.num_draft_tokens,
        prefill_step_size=settings.prefill_step_size,
    )
    holder.append(rounds)
    servicer.ready(rounds)
    await lifecycle.enter(State.SERVING)
    helpers = [asyncio.ensure_future(_sweep(table))]
    if isinstance(runner, ComputeThread):
        helpers.append(asyncio.ensure_future(watch(runner, lifecycle, settings.watchdog_s)))
    await signals.stop.wait()
    for helper in helpers:
        helper.cancel()
    await drain(lifecycle, server, rounds.idle, settings.drain_s, signals.hurry)
    await rounds.close()
    return 0


async def _load(settings: DraftSettings, compute: ComputeThread | None) -> Source:
    began_s = time.monotonic()
    if compute is None:
        return LookupSource(min_match=settings.lookup_min_match, context_length=settings.context_length or 0)
    name = settings.draft_model
    assert name is not None

    def load() -> Source:
        from draft_service.sources.model import load_model_source

        return load_model_source(
            name,
            dtype=settings.dtype,
            cache_dir=settings.cache_dir,
            context_length=settings.context_length,
            prefill_step_size=settings.prefill_step_size,
        )

    source = await compute.run(load)
    _log.info(
        "loaded",
        model_id=source.model_id,
        context_length=source.context_length,
        weights_bytes=source.weights_bytes,
        seconds=round(time.monotonic() - began_s, 1),
    )
    return source


async def _sweep(table: SessionTable) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        if closed := table.sweep():
            _log.info("leases_over", sessions=closed)


def _close(compute: ComputeThread, leave: Callable[[int], None] = os._exit) -> None:
    """Joins the compute thread; a load or a computation that does not end is left behind."""
    closing = threading.Thread(target=compute.close, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)
    if closing.is_alive():
        _log.warning("compute_left_behind", busy_for_s=round(compute.busy_for_s, 1))
        sys.stderr.flush()
        leave(0)
