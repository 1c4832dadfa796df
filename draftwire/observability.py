"""Metrics and traces of a service process, as its settings ask. What is not asked for is not imported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwire.observe import Observer
from draftwire.serving import Lifecycle
from draftwire.settings import ServiceSettings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from draftwire.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What watches a process."""

    observers: tuple[Observer, ...] = ()
    """For `listen`."""
    tracing: Tracing | None = None
    """None where no traces are asked for."""
    metrics_port: int | None = None
    """None where no metrics are asked for."""


@asynccontextmanager
async def watching(
    settings: ServiceSettings, lifecycle: Lifecycle, name: str, collectors: Callable[[], Sequence[Collector]]
) -> AsyncIterator[Watching]:
    """Serves metrics and sends traces while it is open.

    name: of the service in traces; collectors: made only where there are metrics. Raises OSError where the address of the
    metrics cannot be had.
    """
    observers: list[Observer] = []
    tracing: Tracing | None = None
    port: int | None = None
    async with AsyncExitStack() as stack:
        if settings.otlp_endpoint is not None:
            from draftwire.tracing import Tracing

            tracing = Tracing.to_collector(name, lifecycle.instance_id, settings.otlp_endpoint)
            stack.push_async_callback(tracing.close)
            observers.append(tracing)
        if settings.metrics_listen is not None:
            from draftwire.metrics import metrics_endpoint, rpc_collector
            from draftwire.rpc_tally import RpcTally

            tally = RpcTally()
            observers.append(tally)
            endpoint = metrics_endpoint(settings.metrics_listen, [rpc_collector(tally), *collectors()])
            port = await stack.enter_async_context(endpoint)
        yield Watching(observers=tuple(observers), tracing=tracing, metrics_port=port)
