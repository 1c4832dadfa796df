"""What a scrape shows is what docs/metrics.md says, and adds up to what the replies said."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from metrics_table import Documented, Scrape, documented
from prometheus_client.registry import Collector
from service.conftest_draft import NAME as SESSION
from service.conftest_draft import Running as RunningDrafter
from service.conftest_draft import draft_request, draft_service, prefill_messages
from service.target_fixture import Running, happens, reconciled, target_service

from draft_service.metrics import draft_collector
from draft_service.sessions import SessionLimits
from draft_service.tally import Tally as DraftTally
from draftwire.errors import DraftwireError, InternalError, InvalidRequest, Overloaded
from draftwire.events import Completion, DrafterState
from draftwire.metrics import LoopCollector, metrics_endpoint, rpc_collector
from draftwire.rpc_tally import RpcTally
from draftwire.serving import State
from draftwire.testing import FakeDraftService, Reply, fixed, in_turn, serve
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2
from target_service.metrics import families, reading_of, target_collector

GENERATE = {"grpc_type": "server_stream", "grpc_service": "draftwire.v1.TargetService", "grpc_method": "Generate"}


@dataclass(slots=True)
class Cached:
    """What a prefix cache says."""

    prompt_tokens: int = 100
    reused_tokens: int = 60
    disk_reused_tokens: int = 20
    memory_bytes: int = 4096
    memory_limit_bytes: int = 8192
    memory_entries: int = 3
    memory_evictions: int = 2
    disk_bytes: int = 1 << 20
    disk_limit_bytes: int = 1 << 30
    disk_entries: int = 9
    disk_evictions: int = 1
    disk_errors: int = 4
    disk_dropped: int = 5
    disk_skipped: int = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A service and its metrics."""

    running: Running
    port: int

    async def scrape(self) -> Scrape:
        return await asyncio.to_thread(Scrape.of, self.port)


@asynccontextmanager
async def observed(model: Path, drafters: Sequence[str], **settings: Any) -> AsyncIterator[Observed]:
    """A target with its endpoint, as `watching` puts them together."""
    rpcs = RpcTally()
    async with target_service(model, drafters=drafters, observers=[rpcs], **settings) as running:
        collectors = [rpc_collector(rpcs), target_collector(running.lifecycle, lambda: running.target, Cached)]
        async with metrics_endpoint("127.0.0.1:0", collectors) as port:
            assert port is not None
            yield Observed(running=running, port=port)


def kinds() -> list[dict[str, Any]]:
    """Requests of every sort that changes what is counted."""
    copied = "a b c d e f a b c d e f a b c d"
    return [
        {"prompt": copied, "drafting": "fixed", "num_draft_tokens": 4, "max_tokens": 40, "ignore_eos": True},
        {"prompt": copied, "drafting": "auto", "max_tokens": 30},
        {"prompt": "once upon", "drafting": "off", "max_tokens": 20},
        {"prompt": "once", "drafting": "fixed", "num_draft_tokens": 2, "max_tokens": 1},
        {"prompt": "x", "drafting": "fixed", "num_draft_tokens": 8, "max_tokens": 25, "temperature": 1.0, "seed": 5},
        {"prompt": copied, "drafting": "fixed", "num_draft_tokens": 3, "max_tokens": 40, "stop": ["e", "t"]},
        {"prompt": copied, "drafting": "fixed", "num_draft_tokens": 6, "max_tokens": 60, "top_logprobs": 2},
        {"prompt": "z" * 300, "drafting": "fixed", "num_draft_tokens": 5, "max_tokens": 12},
    ]


async def every_kind(target: Running, times: int) -> list[Completion]:
    """All kinds at once, so many times."""
    calls = [target.client.complete(**wanted) for _ in range(times) for wanted in kinds()]
    return list(await asyncio.gather(*calls))


async def refused(call: Any, error: type[DraftwireError]) -> None:
    with pytest.raises(error):
        await call


def summed(completions: Sequence[Completion], each: Callable[[Completion], Sequence[int]]) -> dict[str, float]:
    """Sums by position, zeros left out."""
    sums: Counter[str] = Counter()
    for completion in completions:
        sums.update({str(position): count for position, count in enumerate(each(completion))})
    return {position: float(count) for position, count in sums.items() if count}


async def test_counters_are_the_sums_of_the_replies(model: Path) -> None:
    """Exactly, after a mixed load of 24 requests at once: tokens, rounds, drafts, by position and by reason."""
    async with draft_service() as drafter, observed(model, [drafter.address], max_running=6) as seen:
        await seen.running.drafter_is(DrafterState.READY)
        done = await every_kind(seen.running, 3)
        scrape = await seen.scrape()
        for completion in done:
            reconciled(completion)
        stats = [completion.speculation for completion in done]
        stem = "draftwire_spec_decode_num_"
        for name, expected in {
            "draftwire_prompt_tokens_total": sum(completion.usage.prompt_tokens for completion in done),
            "draftwire_generation_tokens_total": sum(completion.usage.completion_tokens for completion in done),
            f"{stem}drafts_total": sum(each.num_spec_steps for each in stats),
            f"{stem}draft_tokens_total": sum(each.num_draft_tokens for each in stats),
            f"{stem}accepted_tokens_total": sum(each.num_accepted_draft_tokens for each in stats),
            f"{stem}cut_tokens_total": sum(each.num_cut_draft_tokens for each in stats),
            "draftwire_drafter_reseeds_total": sum(each.reseeds for each in stats),
            "draftwire_drafter_failovers_total": sum(each.failovers for each in stats),
            # The whole prefill counts as one target call, and is no round.
            "draftwire_rounds_total": sum(each.target_calls for each in stats)
            - sum(completion.usage.prompt_tokens - 1 > completion.usage.cached_tokens for completion in done),
        }.items():
            assert scrape.value(name) == expected, name
        assert scrape.value(f"{stem}accepted_tokens_total") > 0, "the load must have something to count"
        assert scrape.by(f"{stem}accepted_tokens_per_pos_total", "position") == summed(
            done, lambda completion: completion.speculation.accepted_by_position
        )
        assert scrape.by(f"{stem}draft_tokens_per_pos_total", "position") == summed(
            done, lambda completion: completion.speculation.drafted_by_position
        )
        reasons: Counter[str] = Counter()
        for each in stats:
            reasons.update(each.rounds_without_draft)
        assert scrape.by("draftwire_rounds_without_draft_total", "reason") == reasons
        assert scrape.by("draftwire_request_success_total", "finished_reason") == Counter(
            completion.finish_reason.value for completion in done
        )
        assert scrape.total("draftwire_request_failure_total") == 0
        totals = (await seen.running.client.activity()).totals
        assert totals.completion_tokens == scrape.value("draftwire_generation_tokens_total")
        assert totals.num_accepted_draft_tokens == scrape.value(f"{stem}accepted_tokens_total")
        assert totals.requests_finished == len(done)


async def test_times_and_calls_are_those_of_the_requests(model: Path) -> None:
    """Each request is once in each histogram; each message and status of each call is counted."""
    async with observed(model, []) as seen:
        done = await every_kind(seen.running, 1)
        await refused(seen.running.client.complete("x", temperature=-1), InvalidRequest)
        scrape = await seen.scrape()
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
        ):
            assert scrape.value(f"draftwire_{name}_count") == len(done), name
        several = sum(completion.usage.completion_tokens > 1 for completion in done)
        assert scrape.value("draftwire_request_time_per_output_token_seconds_count") == several
        deliveries = sum(len(completion.chunks) for completion in done)
        # The first delivery of a stream has none before it; an end token alone is one without a chunk.
        gaps = scrape.value("draftwire_inter_token_latency_seconds_count")
        assert deliveries - len(done) <= gaps <= deliveries
        first = sum(completion.timings.time_to_first_token_s for completion in done)
        assert scrape.value("draftwire_time_to_first_token_seconds_sum") == pytest.approx(first, rel=1e-3, abs=1e-3)
        assert scrape.value("draftwire_batch_size_sum") == scrape.value("draftwire_rounds_total")
        assert scrape.value("grpc_server_started_total", **GENERATE) == len(done) + 1
        assert scrape.value("grpc_server_handled_total", **GENERATE, grpc_code="OK") == len(done)
        assert scrape.value("grpc_server_handled_total", **GENERATE, grpc_code="INVALID_ARGUMENT") == 1
        assert scrape.value("grpc_server_handling_seconds_count", **GENERATE) == len(done) + 1
        assert scrape.value("grpc_server_msg_sent_total", **GENERATE) == deliveries + 2 * len(done)
        assert scrape.value("grpc_server_msg_received_total", **GENERATE) == len(done) + 1
        bad = {"grpc_method": "Generate", "grpc_code": "INVALID_ARGUMENT", "reason": "OUT_OF_BOUNDS"}
        assert scrape.value("draftwire_refusals_total", **bad) == 1, scrape.text


async def test_what_runs_waits_and_is_refused_shows_at_once(model: Path) -> None:
    """Gauges while requests are held; the refusal of a full queue; a client that leaves; nothing is left at the end."""
    async with observed(model, [], max_running=1, max_queued=1) as seen:
        brake = seen.running.brake()
        calls = []
        for number in range(2):
            wanted = {"max_tokens": 5, "ignore_eos": True, "request_id": f"r{number}"}
            calls.append(asyncio.ensure_future(seen.running.client.complete("once upon", **wanted)))
            await happens(lambda number=number: len(seen.running.service._live) > number)  # type: ignore[misc]
        await happens(lambda: brake.forwards)
        await refused(seen.running.client.complete("one too many"), Overloaded)
        scrape = await seen.scrape()
        assert scrape.value("draftwire_num_requests_running") == 1
        assert scrape.value("draftwire_num_requests_waiting") == 1
        assert 0 < scrape.value("draftwire_kv_cache_bytes") <= scrape.value("draftwire_kv_cache_capacity_bytes")
        full = {"grpc_method": "Generate", "grpc_code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL"}
        assert scrape.value("draftwire_refusals_total", **full) == 1
        assert scrape.by("draftwire_service_state", "state") == {"serving": 1}
        calls[1].cancel()
        await seen.running.client.abort("r0")
        await asyncio.gather(*calls, return_exceptions=True)
        brake.release()
        await seen.running.at_rest()
        scrape = await seen.scrape()
        assert scrape.by("draftwire_request_failure_total", "reason") == {"CLIENT_LEFT": 1, "ABORTED_BY_CALL": 1}
        assert scrape.value("grpc_server_handled_total", **GENERATE, grpc_code="CANCELLED") == 2
        assert scrape.value("draftwire_num_requests_running") == scrape.value("draftwire_kv_cache_bytes") == 0


def faulty() -> FakeDraftService:
    """Fails, is found again, and drafts."""

    async def drafts(asked: Any) -> Reply:
        return Reply(ids=(1,) * asked.limit)

    async def fails(asked: Any) -> Reply:
        raise InternalError("broken")

    return FakeDraftService(in_turn(drafts, fails, drafts))


async def test_a_target_exposes_what_is_documented(model: Path) -> None:
    """Names, types and labels of every metric: those of the table, none more, none less; each with its help."""
    async with serve(faulty()) as address, observed(model, [address]) as seen:
        await seen.running.drafter_is(DrafterState.READY)
        await every_kind(seen.running, 1)
        await refused(seen.running.client.complete("x", temperature=-1), InvalidRequest)
        brake = seen.running.brake()
        task = asyncio.ensure_future(seen.running.client.complete("x", max_tokens=9, request_id="r"))
        await happens(lambda: brake.forwards)
        await seen.running.client.abort("r")
        brake.release()
        await asyncio.gather(task, return_exceptions=True)
        scrape = await seen.scrape()
        compare(scrape, documented("target", "both"))
        assert scrape.value("draftwire_prefix_cache_hits_total") == 60
        assert scrape.by("draftwire_prefix_cache_bytes", "tier") == {"memory": 4096, "disk": 1 << 20}
        assert scrape.by("draftwire_prefix_cache_disk_failures_total", "reason") == {
            "error": 4,
            "damaged": 5,
            "busy": 6,
        }


async def test_a_draft_service_exposes_what_is_documented() -> None:
    """As for the target; and its counters are those of its replies."""
    rpcs, tally = RpcTally(), DraftTally()
    limits = SessionLimits(sessions=2, kv_bytes=2**30, lease_s=60.0, max_lease_s=600.0, idle_s=0.0)
    async with draft_service(observers=[rpcs], recorder=tally, sessions=2, idle_s=0.0) as running:
        collectors = [rpc_collector(rpcs), draft_collector(running.lifecycle, lambda: running.rounds, limits, tally)]
        async with metrics_endpoint("127.0.0.1:0", collectors) as port:
            assert port is not None
            answers = await drafted_some(running)
            scrape = await asyncio.to_thread(Scrape.of, port)
    compare(scrape, documented("draft", "both"))
    assert scrape.value("draftwire_draft_tokens_total") == sum(len(answer.token_ids) for answer in answers) > 0
    assert scrape.value("draftwire_draft_tokens_asked_total") == 4 * len(answers)
    assert scrape.by("draftwire_drafts_total", "end") == Counter(
        draft_pb2.DraftEnd.Name(answer.end).removeprefix("DRAFT_END_").lower() for answer in answers
    )
    assert scrape.by("draftwire_prefill_tokens_total", "source") == {"computed": 24 + 6, "reused": 6}
    assert scrape.value("draftwire_sessions") == 2
    assert scrape.value("draftwire_sessions_opened_total") == 4
    assert scrape.by("draftwire_sessions_closed_total", "reason") == {"released": 1, "evicted": 1}
    assert scrape.value("draftwire_compute_seconds_count", call="draft") == len(answers)
    assert scrape.value("draftwire_queue_seconds_count", call="prefill") == 5


async def drafted_some(running: RunningDrafter) -> list[Any]:
    """Four sessions where two fit, one of them prefilled twice, drafts that match and that do not, and one refusal."""
    text = [1, 2, 3, 1, 2, 3]
    answers = []
    for number in range(4):
        name = f"{SESSION}-{number}"
        await running.stub.Prefill(iter(prefill_messages(text, session_id=name)))
        answers.append(await running.stub.Draft(draft_request(text, 6, session_id=name)))
        if number == 0:
            await running.stub.Release(draft_pb2.ReleaseRequest(session_ids=[name]))
    await running.stub.Prefill(iter(prefill_messages([*text, *text[::-1]], session_id=name)))
    odd = [*text, *text[::-1], 9]
    answers.append(await running.stub.Draft(draft_request(odd, 12, session_id=name)))
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.Draft(draft_request(text, 6, session_id="unknown-0123456789"))
    return answers


def compare(scrape: Scrape, expected: dict[str, Documented]) -> None:
    """Every family is documented, and every row is there with its labels."""
    assert sorted(scrape.families) == sorted(expected)
    for name, row in expected.items():
        found = scrape.families[name]
        assert found.type == row.type, name
        assert sorted(found.labels) == sorted(row.labels), name
        assert scrape.helps[name].strip(), name


async def test_a_loading_target_shows_its_state_and_no_more(model: Path) -> None:
    """A scrape of a service that is not ready is no error."""
    async with target_service(model) as running:
        async with metrics_endpoint("127.0.0.1:0", [target_collector(running.lifecycle, lambda: None)]) as port:
            assert port is not None
            await running.lifecycle.enter(State.LOADING)
            scrape = await asyncio.to_thread(Scrape.of, port)
        assert scrape.by("draftwire_service_state", "state") == {"loading": 1}
        assert {name for name in scrape.families if name.startswith("draftwire")} == {"draftwire_service_state"}


async def test_drafters_that_are_gone_are_forgotten(model: Path) -> None:
    """Replicas come and go under new addresses: their series go with them."""
    async with target_service(model) as running:
        tally = running.target.tally
        for number in range(100):
            tally.draft_answered(f"10.0.0.{number}:1", 0.001)
            tally.draft_failed(f"10.0.0.{number}:1", "UNAVAILABLE")
        reading = reading_of(running.target, "test")
        assert not reading.tally.draft_rpc_s
        assert not tally.draft_failures
        assert {family.name for family in families(State.SERVING, reading)} > {"draftwire_draft_rpc_seconds"}


async def test_a_fault_while_reading_fails_the_scrape_and_nothing_else() -> None:
    """The scrape is a 500, the service goes on, and the next scrape is good."""
    healthy = False

    def read() -> int:
        if not healthy:
            raise RuntimeError("broken")
        return 1

    def shown(value: int) -> list[Any]:
        return []

    collector: Collector = LoopCollector(read, shown)
    async with metrics_endpoint("127.0.0.1:0", [collector]) as port:
        assert port is not None
        with pytest.raises(urllib.error.HTTPError, match="500"):
            await asyncio.to_thread(Scrape.of, port)
        healthy = True
        assert "process_open_fds" in (await asyncio.to_thread(Scrape.of, port)).families


async def test_an_address_that_is_taken_is_said_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}.*--metrics-listen"):
            async with metrics_endpoint(address, []):
                raise AssertionError("it listens")


async def test_nothing_listens_unless_it_is_asked_for() -> None:
    async with metrics_endpoint(None, []) as port:
        assert port is None


async def test_scrapes_under_load_are_consistent(model: Path) -> None:
    """Every scrape in the middle of things adds up: drafted by position, buckets, rounds of all kinds."""
    async with serve(FakeDraftService(fixed(1, 2, 3))) as address, observed(model, [address]) as seen:
        await seen.running.drafter_is(DrafterState.READY)
        load = asyncio.ensure_future(every_kind(seen.running, 3))
        checked = 0
        while not load.done():
            scrape = await seen.scrape()
            stem = "draftwire_spec_decode_num_"
            assert scrape.total(f"{stem}draft_tokens_per_pos_total") == scrape.value(f"{stem}draft_tokens_total")
            plain = scrape.total("draftwire_rounds_without_draft_total")
            assert scrape.value("draftwire_rounds_total") == scrape.value(f"{stem}drafts_total") + plain
            checked += 1
        await load
        assert checked
