"""OpenTelemetry for a service. Imported only where --otlp-endpoint is given; needs the extra [otel]."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from importlib.metadata import version

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from draftwire.observe import Method

_FLUSH_S = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The traces of one process. An `Observer`: each call to a server is a span of its own, in the caller's trace.

    There is no global tracer: what makes spans gets `tracer`. OTEL_TRACES_SAMPLER in the environment thins them out.
    """

    def __init__(self, service: str, instance_id: str, processor: SpanProcessor) -> None:
        """service: as traces name it, "draftwire-target"."""
        resource = Resource.create(
            {
                "service.name": service,
                "service.instance.id": instance_id,
                "service.version": version("draftwire"),
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("draftwire", version("draftwire"))

    @classmethod
    def to_collector(cls, service: str, instance_id: str, endpoint: str) -> Tracing:
        """Sends spans to a collector, in the background; one that cannot be reached costs nothing but the spans."""
        exporter = OTLPSpanExporter(endpoint=endpoint)
        return cls(service, instance_id, BatchSpanProcessor(exporter))

    def began(self, method: Method, metadata: Mapping[str, str | bytes]) -> ServedCall:
        """See `Observer`: the span is the current one of the task that serves the call."""
        carrier = {key: value for key, value in metadata.items() if isinstance(value, str)}
        span = self.tracer.start_span(
            f"{method.service}/{method.name}",
            context=_PROPAGATOR.extract(carrier, context=otel_context.Context()),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": method.service, "rpc.method": method.name},
        )
        # Never detached: the task ends with the call, and its context with it.
        otel_context.attach(trace.set_span_in_context(span))
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
        return ServedCall(span)

    async def close(self) -> None:
        """Sends what is left, for a few seconds at most: a collector that is away must not delay the end."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, _FLUSH_S)


class ServedCall:
    """The span of one call to this server."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def received(self) -> None:
        """See `CallWatch`."""

    def sent(self) -> None:
        """See `CallWatch`."""

    def ended(self, code: grpc.StatusCode, reason: str) -> None:
        """See `CallWatch`."""
        self._span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            self._span.set_status(Status(StatusCode.ERROR, reason or code.name))
        self._span.end()


def note(name: str, value: int | float | str) -> None:
    """Adds a fact to the span of the call that this task serves."""
    trace.get_current_span().set_attribute(name, value)


def traceparent(span: Span) -> tuple[tuple[str, str], ...]:
    """Metadata that makes a call a child of this span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return tuple(carrier.items())
