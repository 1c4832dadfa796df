"""The Prometheus endpoint of a service: plain HTTP on an address of its own, off unless it is asked for.

Values are read on the event loop, in one go, so that a scrape is consistent; the text is made on the thread of the scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from copy import deepcopy
from math import isinf
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwire.histogram import Histogram
from draftwire.logs import get_logger
from draftwire.observe import Method
from draftwire.rpc_tally import RpcTally

T = TypeVar("T")
_log = get_logger("metrics")
_READ_TIMEOUT_S = 5.0
_RPC = ("grpc_type", "grpc_service", "grpc_method")


class LoopCollector(Collector, Generic[T]):
    """Reads on the event loop, and turns what was read into metrics elsewhere."""

    def __init__(self, read: Callable[[], T], families: Callable[[T], Iterable[Metric]]) -> None:
        """Made on the event loop. read: runs there, must be quick, and what it returns must not change afterwards."""
        self._loop = asyncio.get_running_loop()
        self._read = read
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """On the thread of a scrape. Raises TimeoutError where the event loop hangs: the scrape fails, as it should."""
        seen: Future[T] = Future()

        def look() -> None:
            try:
                seen.set_result(self._read())
            except Exception as error:
                seen.set_exception(error)

        self._loop.call_soon_threadsafe(look)
        return self._families(seen.result(_READ_TIMEOUT_S))


@asynccontextmanager
async def metrics_endpoint(listen: str | None, collectors: Sequence[Collector]) -> AsyncIterator[int | None]:
    """Serves metrics at host:port; gives the port, or None where `listen` is None and nothing is served.

    Raises OSError where the address cannot be had.
    """
    if listen is None:
        yield None
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise OSError(f"cannot listen on {listen}: {error}; choose another --metrics-listen") from error
    bound: int = server.server_port
    _log.info("metrics", address=f"{host}:{bound}", path="/metrics")
    try:
        yield bound
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


def rpc_collector(tally: RpcTally) -> Collector:
    """The calls of a server."""
    return LoopCollector(lambda: deepcopy(tally), _rpc_families)


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels. name: without `_total`."""
    return CounterMetricFamily(name, text, value=value)


def counters(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """A counter with labels. values: (label values, count)."""
    family = CounterMetricFamily(name, text, labels=labels)
    for found, value in values:
        family.add_metric(found, value)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """A gauge with labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for found, value in values:
        family.add_metric(found, value)
    return family


def histogram(name: str, text: str, value: Histogram) -> Metric:
    """A histogram without labels."""
    return HistogramMetricFamily(name, text, buckets=_buckets(value), sum_value=value.total)


def histograms(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    """A histogram with labels."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for found, value in values:
        family.add_metric(found, _buckets(value), value.total)
    return family


def _buckets(value: Histogram) -> list[tuple[str, float]]:
    return [("+Inf" if isinf(bound) else repr(bound), float(count)) for bound, count in value.cumulative()]


def _rpc_families(tally: RpcTally) -> Iterable[Metric]:
    yield counters("grpc_server_started", "Calls that began.", _RPC, _by_method(tally.started))
    yield counters(
        "grpc_server_handled",
        "Calls that ended, by status.",
        (*_RPC, "grpc_code"),
        ((_labels(method, code), count) for (method, code), count in tally.handled.items()),
    )
    yield histograms("grpc_server_handling_seconds", "How long calls took.", _RPC, _by_method(tally.handling_s))
    yield counters("grpc_server_msg_received", "Messages that came.", _RPC, _by_method(tally.received))
    yield counters("grpc_server_msg_sent", "Messages that went.", _RPC, _by_method(tally.sent))
    yield counters(
        "draftwire_refusals",
        "Calls that were refused or failed, by status and reason.",
        ("grpc_method", "grpc_code", "reason"),
        (([method.name, code, reason], count) for (method, code, reason), count in tally.errors.items()),
    )


def _by_method(values: Mapping[Method, T]) -> Iterable[tuple[list[str], T]]:
    return ((_labels(method), value) for method, value in values.items())


def _labels(method: Method, *more: str) -> list[str]:
    return [method.type, method.service, method.name, *more]
