"""The life of the draft service: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from draft_service import service
from draft_service.config import DraftSettings
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits, SessionTable
from draft_service.sources.base import Source, SourceError
from draft_service.sources.lookup import InlineRunner, LookupSource
from draft_service.tally import Tally
from draftwire.compute import ComputeThread
from draftwire.guard import guard_of
from draftwire.logs import get_logger
from draftwire.models import ModelError
from draftwire.observability import watching
from draftwire.serving import Lifecycle, Signals, State, drain, listen, watch

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_log = get_logger("draft_service")
_SWEEP_S = 1.0
# A model that is still loading cannot be interrupted; nothing is lost by leaving it.
_CLOSE_S = 5.0


class DraftProgram:
    """One run of the service. Made inside the event loop."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._signals = Signals()
        self._lifecycle = Lifecycle(service.SERVICE_NAME, service.NEW_WORK)
        self._limits = SessionLimits(
            sessions=settings.session_limit,
            kv_bytes=settings.kv_bytes_limit,
            lease_s=min(settings.lease_s, settings.max_lease_s),
            max_lease_s=settings.max_lease_s,
            sessions_per_owner=settings.sessions_per_target,
        )
        self._tally = Tally()
        self._servicer = service.DraftServicer(
            self._lifecycle.instance_id,
            self._limits,
            max_draft_tokens=settings.num_draft_tokens,
            max_calls=settings.max_calls,
            max_message_bytes=settings.max_message_bytes,
            log_prompts=settings.log_prompts,
            recorder=self._tally,
        )
        self._compute = ComputeThread() if settings.source_kind == "model" else None
        self._source: Source | None = None

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT. Returns the exit status: 0, or 1 where it could not begin."""
        try:
            async with watching(self._settings, self._lifecycle, "draftwire-draft", self._collectors) as watched:
                if watched.tracing is not None:
                    from draftwire.tracing import note

                    self._servicer.note = note
                server, _ = await listen(
                    self._lifecycle,
                    self._settings.host,
                    self._settings.port,
                    lambda server: service.register(self._servicer, server),
                    guard_of(self._settings),
                    observers=watched.observers,
                )
                return await self._load_and_serve(server)
        except OSError as error:
            _log.error("cannot_listen", reason=str(error))
            return 1
        finally:
            self._close()

    def _collectors(self) -> list[Collector]:
        from draft_service.metrics import draft_collector

        return [draft_collector(self._lifecycle, lambda: self._servicer.rounds, self._limits, self._tally)]

    async def _load_and_serve(self, server: grpc.aio.Server) -> int:
        loading = asyncio.ensure_future(self._load())
        stopping = asyncio.ensure_future(self._signals.stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        try:
            if loading.done():
                await self._serve(server, loading.result())
            await server.stop(0)
            return 0
        except (ModelError, SourceError) as error:
            _log.error("cannot_load", draft_model=self._settings.draft_model, reason=str(error))
            await server.stop(0)
            return 1
        finally:
            for task in (loading, stopping):
                task.cancel()
            await asyncio.gather(loading, stopping, return_exceptions=True)

    async def _serve(self, server: grpc.aio.Server, source: Source) -> None:
        settings, signals, runner = self._settings, self._signals, self._compute or InlineRunner()
        table = SessionTable(self._limits, time.monotonic)
        rounds = Rounds(
            table,
            source,
            runner,
            time.monotonic,
            max_draft_tokens=settings.num_draft_tokens,
            # A lookup has nothing to keep, and what it never keeps must not count as looked up in vain.
            prompt_cache_bytes=settings.prompt_cache_bytes if settings.source_kind == "model" else 0,
        )
        self._servicer.ready(rounds)
        await self._lifecycle.enter(State.SERVING)
        helpers = [asyncio.ensure_future(_sweep(table))]
        if self._compute is not None:
            helpers.append(asyncio.ensure_future(watch(self._compute, self._lifecycle, settings.watchdog_s)))
        await signals.stop.wait()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await drain(self._lifecycle, server, rounds.idle, settings.drain_s, signals.hurry)
        await asyncio.wait([asyncio.ensure_future(rounds.close())], timeout=_CLOSE_S)

    async def _load(self) -> Source:
        settings = self._settings
        if self._compute is None:
            return LookupSource(min_match=settings.lookup_min_match, context_length=settings.context_length or 0)
        began_s = time.monotonic()
        source = await self._compute.run(self._load_model)
        _log.info(
            "loaded",
            model_id=source.model_id,
            context_length=source.context_length,
            weights_bytes=source.weights_bytes,
            batching=source.batching,
            seconds=round(time.monotonic() - began_s, 1),
        )
        if source.batching != "ragged" and settings.batching != "off":
            _log.warning("one_by_one", reason=source.batching.partition(": ")[2])
        return source

    def _load_model(self) -> Source:
        """Loads and warms up, on the compute thread."""
        from draft_service.sources.model import load_model_source

        settings = self._settings
        assert settings.draft_model is not None
        self._source = load_model_source(
            settings.draft_model,
            dtype=settings.dtype,
            cache_dir=settings.cache_dir,
            context_length=settings.context_length,
            prefill_step_size=settings.prefill_step_size,
            batching=settings.batching,
        )
        return self._source

    def _close(self, leave: Callable[[int], None] = os._exit) -> None:
        """Drops the model where it was made and joins the compute thread; one that does not end is left behind."""
        compute = self._compute
        if compute is None:
            return
        compute.submit(self._close_source)
        closing = threading.Thread(target=compute.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _log.warning("compute_left_behind", busy_for_s=round(compute.busy_for_s, 1))
            sys.stderr.flush()
            leave(0)

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()


async def _sweep(table: SessionTable) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        if closed := table.sweep():
            _log.info("leases_over", sessions=closed)


async def serve(settings: DraftSettings) -> int:
    """Runs the service; returns the exit status."""
    return await DraftProgram(settings).run()
