"""One request is one trace, over the caller, the target and the drafter; and traces cost nothing where nobody wants them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from metrics_table import Scrape
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from service.conftest_draft import draft_service
from service.target_fixture import Running, happens, program, target_service

from draftwire.aio_client import AsyncClient
from draftwire.channels import Endpoint
from draftwire.errors import InvalidRequest
from draftwire.events import DrafterState
from draftwire.testing import FakeDraftService, hang, serve
from draftwire.testing_models import save_tiny_model
from draftwire.tracing import Tracing, note
from target_service.tracing import OtelRequests

TEXT = "a b c d e f a b c d e f a b c d"
OPTIONS: dict[str, Any] = {"drafting": "fixed", "num_draft_tokens": 4, "max_tokens": 40, "ignore_eos": True}
GENERATE, DRAFT, PREFILL = (
    "draftwire.v1.TargetService/Generate",
    "draftwire.v1.DraftService/Draft",
    "draftwire.v1.DraftService/Prefill",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


class Traced:
    """Traces of one service that stay in memory."""

    def __init__(self, service: str) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(service, "test", SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@asynccontextmanager
async def both(model: Path) -> AsyncIterator[tuple[Running, Traced, Traced]]:
    """A target and a drafter, each with traces of its own."""
    drafting, serving = Traced("draftwire-draft"), Traced("draftwire-target")
    tracer = OtelRequests(serving.tracing.tracer)
    async with (
        draft_service(observers=[drafting.tracing], note=note) as drafter,
        target_service(model, drafters=[drafter.address], observers=[serving.tracing], tracer=tracer) as running,
    ):
        await running.drafter_is(DrafterState.READY)
        yield running, serving, drafting


@pytest.fixture
def caller() -> Iterator[trace.Tracer]:
    """The tracer of a program that uses the client."""
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("caller")
    provider.shutdown()


def ids_of(spans: Sequence[ReadableSpan]) -> set[int]:
    return {span.context.trace_id for span in spans}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_one_trace_runs_through_caller_target_and_drafter(model: Path, caller: trace.Tracer) -> None:
    """Each call to the drafter is a child of the request, and what the drafter did is a child of that call."""
    async with both(model) as (running, serving, drafting):
        with caller.start_as_current_span("ask") as asked:
            done = await running.client.complete(TEXT, **OPTIONS)
        await running.at_rest()
    root = asked.get_span_context()
    (request,) = serving.named(GENERATE)
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert request.parent.span_id == root.span_id
    ours = [span for span in serving.spans if span.context.trace_id == root.trace_id]
    calls = {span.context.span_id: span for span in ours if span.kind is SpanKind.CLIENT}
    assert {span.name for span in calls.values()} == {PREFILL, DRAFT}
    served = [span for span in drafting.spans if span.context.trace_id == root.trace_id]
    assert {span.name for span in served} == {PREFILL, DRAFT}
    for span in served:
        assert span.parent is not None
        call = calls[span.parent.span_id]
        assert call.name == span.name
        assert call.parent is not None
        assert call.parent.span_id == request.context.span_id
        assert seconds(span) <= seconds(call)
    drafts = [span for span in served if span.name == DRAFT]
    answered = sum(int(span.attributes["draftwire.draft_tokens"]) for span in drafts if span.attributes)  # type: ignore[arg-type]
    assert answered >= done.speculation.num_draft_tokens > 0
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == done.usage.completion_tokens
    assert request.attributes["rpc.grpc.status_code"] == 0


async def test_phases_of_a_request_follow_each_other_and_count_its_rounds(model: Path) -> None:
    """queue, prefill, decode: in order, inside the request, as long as the reply says, with the reply's counts."""
    async with both(model) as (running, serving, _):
        done = await running.client.complete(TEXT, **OPTIONS)
        await running.at_rest()
    (request,) = serving.named(GENERATE)
    assert request.parent is None, "a call without a traceparent begins a trace"
    phases = [serving.named(name)[0] for name in ("queue", "prefill", "decode")]
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time
    assert all(span.parent and span.parent.span_id == request.context.span_id for span in phases)
    assert seconds(phases[1]) == pytest.approx(done.timings.prefill_s, abs=1e-6)
    assert seconds(phases[2]) == pytest.approx(done.timings.decode_s, abs=1e-6)
    assert abs(phases[0].start_time - request.start_time) < 50e6  # type: ignore[operator]
    counted, stats = phases[2].attributes, done.speculation
    assert counted is not None
    assert counted["draftwire.drafted"] == stats.num_draft_tokens
    assert counted["draftwire.accepted"] == stats.num_accepted_draft_tokens
    assert counted["draftwire.spec_rounds"] == stats.num_spec_steps
    for reason, rounds in stats.rounds_without_draft.items():
        assert counted[f"draftwire.rounds_without_draft.{reason}"] == rounds


async def test_requests_at_once_have_traces_of_their_own(model: Path) -> None:
    """Though the drafter's calls of all of them are made by one loop."""
    async with both(model) as (running, serving, drafting):
        await asyncio.gather(*(running.client.complete(f"{number} {TEXT}", **OPTIONS) for number in range(4)))
        await running.at_rest()
    requests = {span.context.trace_id: span.context.span_id for span in serving.named(GENERATE)}
    assert len(requests) == 4
    calls = [span for span in serving.spans if span.kind is SpanKind.CLIENT]
    assert all(span.parent and requests[span.context.trace_id] == span.parent.span_id for span in calls)
    assert {span.context.trace_id for span in drafting.named(DRAFT)} == set(requests)


async def test_failures_are_marked_with_their_reason(model: Path) -> None:
    """A refused request; a drafter that is too slow; a client that leaves. No text of anybody's is in a span."""
    serving = Traced("draftwire-target")
    tracer = OtelRequests(serving.tracing.tracer)
    async with (
        serve(FakeDraftService(hang())) as address,
        target_service(
            model, drafters=[address], observers=[serving.tracing], tracer=tracer, draft_timeout_s=0.05
        ) as running,
    ):
        await running.drafter_is(DrafterState.READY)
        with pytest.raises(InvalidRequest):
            await running.client.complete("swordfish", temperature=-1)
        await running.client.complete("swordfish", stop=["sword"], **OPTIONS)
        brake = running.brake()
        left = asyncio.ensure_future(running.client.complete("swordfish", **OPTIONS))
        await happens(lambda: brake.forwards)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        brake.release()
        await running.at_rest()
        await happens(lambda: len(serving.named(GENERATE)) == 3)
    outcomes = [(span.status.status_code, span.status.description) for span in serving.named(GENERATE)]
    assert (StatusCode.ERROR, "OUT_OF_BOUNDS") in outcomes
    assert (StatusCode.ERROR, "CANCELLED") in outcomes
    assert any(code is not StatusCode.ERROR for code, _ in outcomes)
    late = {span.status.description for span in serving.named(DRAFT)}
    assert late <= {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert "DEADLINE_EXCEEDED" in late
    assert "sword" not in "".join(span.to_json() for span in serving.spans)


async def test_a_call_outside_any_span_carries_nothing(caller: trace.Tracer) -> None:
    """Only a program that has a current span sends a traceparent, and beside a token it keeps both."""
    endpoint = Endpoint(address="127.0.0.1:1", token="secret")
    assert endpoint.metadata == (("authorization", "Bearer secret"),)
    with caller.start_as_current_span("ask") as span:
        context = span.get_span_context()
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert endpoint.metadata == (("authorization", "Bearer secret"), ("traceparent", expected))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stands for an OpenTelemetry collector."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """(service name, span)."""

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(frozen=True, slots=True)
class Collecting:
    """A collector that listens."""

    collector: Collector
    url: str


@asynccontextmanager
async def collecting() -> AsyncIterator[Collecting]:
    server, collector = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Collecting(collector, f"http://127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_programs_send_one_trace_to_a_collector_and_show_their_metrics(model: Path, caller: trace.Tracer) -> None:
    """Both services as processes, by their flags alone: one trace id, spans of both, and a scrape of each."""
    async with collecting() as found:
        flags = ("--otlp-endpoint", found.url, "--metrics-listen", "127.0.0.1:0", "--blas", "reference")
        async with program("draft_service", *flags) as drafter:
            await drafter.until("state", state="serving")
            own = ("--model", str(model), "--drafter", drafter.address)
            async with program("target_service", *flags, *own) as target:
                await target.until("state", state="serving")
                await target.until("drafter", state="ready")
                async with AsyncClient(target.address, timeout_s=60.0) as client:
                    with caller.start_as_current_span("ask") as span:
                        done = await client.complete(TEXT, **OPTIONS)
                for service, name in (
                    (target, "draftwire_generation_tokens_total"),
                    (drafter, "draftwire_drafts_total"),
                ):
                    address = (await service.until("metrics"))["address"]
                    scrape = await asyncio.to_thread(Scrape.of, int(address.rpartition(":")[2]))
                    assert scrape.total(name) > 0
                    if service is target:
                        assert scrape.total(name) == done.usage.completion_tokens
                target.process.terminate()
                assert await target.end() == 0, target.text
            drafter.process.terminate()
            assert await drafter.end() == 0, drafter.text
        ours = span.get_span_context().trace_id.to_bytes(16, "big")
        seen = {(service, one.name) for service, one in found.collector.spans if one.trace_id == ours}
    assert {("draftwire-target", GENERATE), ("draftwire-target", DRAFT), ("draftwire-target", "decode")} <= seen
    assert {("draftwire-draft", DRAFT), ("draftwire-draft", PREFILL)} <= seen
    line = next(line for line in target.lines if line.get("event") == "finished")
    assert line["trace_id"] == ours.hex()


async def test_a_collector_that_is_away_costs_nothing_but_its_spans() -> None:
    """The service serves, and ends in time with 0."""
    async with program("draft_service", "--otlp-endpoint", "http://127.0.0.1:1") as drafter:
        await drafter.until("state", state="serving")
        began_s = time.monotonic()
        drafter.process.terminate()
        assert await drafter.end() == 0, drafter.text
        assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
def test_the_flag_without_the_extra_is_a_clear_error(name: str) -> None:
    """Exit code 2, the flag and what to install; no traceback."""
    code = (
        "import sys, runpy; sys.modules['opentelemetry'] = None; "
        f"sys.argv = ['{name}', '--otlp-endpoint', 'http://127.0.0.1:4317']; runpy.run_module('{name}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "--otlp-endpoint" in done.stderr
    assert "pip install 'draftwire[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "right"),
    [
        ("--otlp-endpoint", "127.0.0.1:4317", "http://127.0.0.1:4317"),
        ("--metrics-listen", "9464", "127.0.0.1:9464"),
        ("--metrics-listen", "127.0.0.1:99999", "127.0.0.1:9464"),
    ],
)
def test_bad_addresses_are_named_with_a_right_one(flag: str, value: str, right: str) -> None:
    argv = [sys.executable, "-m", "draft_service", flag, value]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert flag in done.stderr
    assert right in done.stderr


async def test_a_metrics_port_that_is_taken_ends_the_program() -> None:
    """Exit code 1, with the flag; a service without its metrics would look healthy."""
    async with program("draft_service", "--metrics-listen", "127.0.0.1:0") as first:
        address = (await first.until("metrics"))["address"]
        async with program("draft_service", "--metrics-listen", address) as second:
            assert await second.end() == 1
        assert "--metrics-listen" in second.text


def test_without_flags_nothing_of_it_is_imported() -> None:
    """Neither OpenTelemetry nor the Prometheus client, in the services as in the client."""
    code = (
        "import sys; from draftwire.blas import load_blas_from_env; load_blas_from_env(); "
        "import target_service.__main__, target_service.service, target_service.loading, draft_service.program, "
        "draft_service.__main__, client.app, draftwire.client, draftwire.lm; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'opentelemetry', 'prometheus_client'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
