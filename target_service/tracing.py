"""The spans of a request, in OpenTelemetry. Imported only where traces are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace import Tracer as OtelTracer

from draftwire.errors import DraftwireError
from draftwire.tracing import traceparent
from draftwire.v1 import draft_pb2
from target_service.sequence import Sequence

_DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class OtelRequests:
    """A `Tracer`."""

    def __init__(self, tracer: OtelTracer) -> None:
        self._tracer = tracer

    def request(self) -> OtelRequest:
        """See `Tracer`."""
        return OtelRequest(self._tracer, trace.get_current_span())


class OtelCall:
    """A `CallSpan`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.metadata = traceparent(span)

    def note(self, name: str, value: int | float | str) -> None:
        """See `CallSpan`."""
        self._span.set_attribute(f"draftwire.{name}", value)


class OtelRequest:
    """A `RequestSpan` under the span of the Generate call."""

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)

    @contextmanager
    def call(self, method: str, drafter: str) -> Iterator[OtelCall]:
        """See `RequestSpan`."""
        span = self._tracer.start_span(
            f"{_DRAFT_SERVICE}/{method}",
            context=self._context,
            kind=SpanKind.CLIENT,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": _DRAFT_SERVICE,
                "rpc.method": method,
                "server.address": drafter,
            },
        )
        try:
            yield OtelCall(span)
        except BaseException as error:
            code = error.code.name if isinstance(error, DraftwireError) else "CANCELLED"
            span.set_status(Status(StatusCode.ERROR, code))
            raise
        finally:
            span.end()

    def ended(self, sequence: Sequence) -> None:
        """See `RequestSpan`: queue, prefill and decode become spans once their times are known; rounds are counted in them."""
        ledger, counts, times = sequence.ledger, sequence.counts, sequence.times
        now_s = time.monotonic()
        end_s = times.finished or now_s
        self._span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.max_tokens": sequence.generation.stopping.max_tokens,
                "gen_ai.usage.input_tokens": ledger.prompt_length,
                "gen_ai.usage.output_tokens": ledger.completion_tokens,
                "draftwire.request_id": sequence.generation.request_id,
                "draftwire.time_to_first_token_s": times.time_to_first_token_s,
            }
        )
        rounds: dict[str, int | float | str] = {
            "draftwire.rounds": counts.forwards,
            "draftwire.spec_rounds": counts.spec_rounds,
            "draftwire.drafted": counts.drafted,
            "draftwire.accepted": counts.accepted,
            "draftwire.cut": counts.cut,
            **{f"draftwire.rounds_without_draft.{why}": count for why, count in counts.without_draft.items()},
        }
        # Spans speak of the time of day, our clock does not.
        day_ns = time.time_ns() - round(now_s * 1e9)
        self._phase("queue", times.arrived, times.admitted or end_s, day_ns, {})
        if times.admitted is not None:
            read = {"draftwire.prompt_tokens": sequence.prefilled}
            self._phase("prefill", times.admitted, times.prefilled or end_s, day_ns, read)
        if times.prefilled is not None:
            self._phase("decode", times.prefilled, end_s, day_ns, rounds)

    def _phase(
        self, name: str, begin_s: float, end_s: float, day_ns: int, attributes: Mapping[str, int | float | str]
    ) -> None:
        span = self._tracer.start_span(
            name, context=self._context, start_time=day_ns + round(begin_s * 1e9), attributes=attributes
        )
        span.end(day_ns + round(end_s * 1e9))
