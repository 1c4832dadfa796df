"""The draft service over a real gRPC server: the contract's words, faults and life."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from conftest_draft import (
    NAME,
    Program,
    Running,
    advance,
    connected,
    draft_request,
    draft_service,
    opening,
    prefill_messages,
    program,
)
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.sources.lookup import LookupSource
from draftwire.access import owner_of
from draftwire.errors import (
    DraftwireError,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    Overloaded,
    PositionGap,
    Superseded,
    Unavailable,
)
from draftwire.serving import State
from draftwire.v1 import common_pb2, draft_pb2
from draftwire.wire import from_rpc_error, to_duration

TEXT = [5, 6, 7, 8, 9, 1, 5, 6]


class Fitted(LookupSource):
    """Lookup that claims a vocabulary."""

    tokenizer_fingerprint = "a" * 64
    tokenizer_size = 50


@pytest.fixture
async def lookup() -> AsyncIterator[Running]:
    async with draft_service() as running:
        yield running


@contextmanager
def refused(cls: type[DraftwireError], reason: str | None = None) -> Iterator[list[DraftwireError]]:
    """The block must fail with this status; the list then has the typed error."""
    errors: list[DraftwireError] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield errors
    errors.append(from_rpc_error(caught.value))
    assert type(errors[0]) is cls, errors[0]
    assert reason is None or errors[0].reason == reason


async def prefill(running: Running, ids: Sequence[int], **values: Any) -> draft_pb2.PrefillResponse:
    reply = await running.stub.Prefill(iter(prefill_messages(ids, **values)))
    assert isinstance(reply, draft_pb2.PrefillResponse)
    return reply


async def test_describe_says_what_lookup_is(lookup: Running) -> None:
    reply = await lookup.stub.Describe(draft_pb2.DescribeRequest(protocol_version=1))
    assert reply.instance_id == lookup.lifecycle.instance_id
    assert (reply.source_kind, reply.model_id, reply.tokenizer_fingerprint) == ("lookup", "", "")
    assert (reply.min_protocol_version, reply.max_protocol_version, reply.max_draft_tokens) == (1, 1, 16)
    assert (list(reply.noise_versions), reply.HasField("taps"), reply.context_length) == ([], False, 0)
    assert (reply.load.sessions, reply.load.session_limit, reply.load.kv_bytes) == (0, 8, 0)


async def test_a_session_from_prefill_to_release(lookup: Running) -> None:
    opened = await prefill(lookup, TEXT, chunk=3)
    assert (opened.committed_length, opened.reused_length, opened.lease.seconds) == (8, 0, 60)
    assert (opened.load.sessions, opened.load.kv_bytes) == (1, lookup.rounds.source.bytes_for(1000))
    reply = await lookup.stub.Draft(draft_request(TEXT, 8, want_confidences=True))
    assert (list(reply.token_ids), reply.end) == ([7, 8, 9, 1], draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS)
    assert (reply.round, reply.committed_length, reply.first_position) == (1, 8, 8)
    assert len(reply.confidences) == 4
    reply = await lookup.stub.Draft(draft_request([*TEXT, 7], 8, 2, assumed_token_ids=[8], max_draft_tokens=2))
    assert (list(reply.token_ids), reply.committed_length, reply.first_position) == ([9, 1], 9, 10)
    assert not reply.confidences
    committed = await lookup.stub.Commit(
        draft_pb2.CommitRequest(session_id=NAME, round=3, advance=advance([*TEXT, 7, 3], 9))
    )
    assert (committed.committed_length, committed.lease.seconds) == (10, 60)
    instances = {opened.instance_id, reply.instance_id, committed.instance_id}
    assert instances == {lookup.lifecycle.instance_id}
    for _ in range(2):
        await lookup.stub.Release(draft_pb2.ReleaseRequest(session_ids=[NAME, "never opened"]))
    with refused(NotFound, "SESSION_UNKNOWN"):
        await lookup.stub.Draft(draft_request(TEXT, 8))
    assert lookup.rounds.table.kv_bytes == 0


async def test_the_limit_of_the_service_lowers_what_is_asked() -> None:
    async with draft_service(max_draft_tokens=3) as running:
        await prefill(running, [4] * 9)
        reply = await running.stub.Draft(draft_request([4] * 9, 9, max_draft_tokens=100))
        assert (list(reply.token_ids), reply.end) == ([4, 4, 4], draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS)


async def test_a_retry_gets_the_same_reply_and_an_older_round_none(lookup: Running) -> None:
    await prefill(lookup, TEXT)
    first = await lookup.stub.Draft(draft_request([*TEXT, 7], 8, 5))
    again = await lookup.stub.Draft(draft_request([*TEXT, 7], 8, 5))
    assert first == again
    with refused(Superseded, "SUPERSEDED"):
        await lookup.stub.Draft(draft_request([*TEXT, 7], 8, 4))


async def test_a_gap_and_another_prefix_are_told_apart(lookup: Running) -> None:
    await prefill(lookup, TEXT)
    with refused(PositionGap, "POSITION_GAP") as errors:
        await lookup.stub.Draft(draft_request([*TEXT, 7, 7], 9))
    assert errors[0].metadata["committed_length"] == "8"
    with refused(FailedPrecondition, "PREFIX_MISMATCH"):
        await lookup.stub.Draft(draft_request([*TEXT[:-1], 7, 7], 8))
    assert (await lookup.stub.Draft(draft_request([*TEXT, 7, 7], 8))).committed_length == 10


async def test_a_prefill_resumes_where_the_session_is(lookup: Running) -> None:
    await prefill(lookup, TEXT)
    reply = await prefill(lookup, [*TEXT, 7, 8], base_length=8)
    assert (reply.committed_length, reply.reused_length) == (10, 8)
    reply = await prefill(lookup, [*TEXT[:4], 2], base_length=4)
    assert reply.committed_length == 5
    with refused(PositionGap, "POSITION_GAP") as errors:
        await prefill(lookup, TEXT, base_length=7)
    assert errors[0].metadata["committed_length"] == "5"
    with refused(FailedPrecondition, "PREFIX_MISMATCH"):
        await prefill(lookup, [0, 0, 0, 0], base_length=3)


async def test_a_stream_that_breaks_off_changes_nothing(lookup: Running) -> None:
    await prefill(lookup, TEXT)
    call = lookup.stub.Prefill()
    for message in prefill_messages([1, 2, 3]):
        await call.write(message)
    call.cancel()
    with refused(InvalidRequest):
        await lookup.stub.Prefill(iter([*prefill_messages([1, 2, 3]), draft_pb2.PrefillRequest(open=opening())]))
    assert (await lookup.stub.Draft(draft_request(TEXT, 8))).committed_length == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"expected_instance_id": "somebody else"}, "INSTANCE_MISMATCH"),
        ({"tokenizer_fingerprint": "b" * 64}, "TOKENIZER_MISMATCH"),
    ],
)
async def test_a_target_that_does_not_fit_is_refused_at_prefill(fields: dict[str, Any], reason: str) -> None:
    async with draft_service(Fitted()) as running:
        await prefill(running, TEXT, tokenizer_fingerprint="a" * 64, expected_instance_id=running.lifecycle.instance_id)
        await prefill(running, TEXT)
        with refused(FailedPrecondition, reason):
            await prefill(running, TEXT, **fields)


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"session_id": ""}, "session_id", "FIELD_REQUIRED"),
        ({"session_id": "short"}, "session_id", "FIELD_INVALID"),
        ({"session_id": "x" * 129}, "session_id", "FIELD_INVALID"),
        ({"protocol_version": 0}, "protocol_version", "FIELD_REQUIRED"),
        ({"protocol_version": 2}, "protocol_version", "FIELD_INVALID"),
        ({"prompt_length": 0}, "prompt_length", "OUT_OF_BOUNDS"),
        ({"prompt_length": 9, "max_length": 8}, "max_length", "OUT_OF_BOUNDS"),
        ({"cache_salt": "x" * 129}, "cache_salt", "OUT_OF_BOUNDS"),
        ({"lease": to_duration(0)}, "lease", "OUT_OF_BOUNDS"),
        ({"sampling": common_pb2.NoiseSampling(temperature=-1)}, "sampling.temperature", "OUT_OF_BOUNDS"),
        ({"sampling": common_pb2.NoiseSampling(temperature=float("nan"))}, "sampling.temperature", "OUT_OF_BOUNDS"),
        (
            {"sampling": common_pb2.NoiseSampling(temperature=1, noise_version=1, sampler_version=1)},
            "sampling.top_p",
            "OUT_OF_BOUNDS",
        ),
        (
            {"sampling": common_pb2.NoiseSampling(temperature=1, top_p=1, min_p=2, noise_version=1, sampler_version=1)},
            "sampling.min_p",
            "OUT_OF_BOUNDS",
        ),
    ],
)
async def test_an_opening_with_a_bad_field_names_it(
    lookup: Running, fields: dict[str, Any], field: str, reason: str
) -> None:
    with refused(InvalidRequest, reason) as errors:
        await prefill(lookup, TEXT, **fields)
    assert [violation.field for violation in errors[0].violations] == [field]
    assert len(lookup.rounds.table) == 0


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"session_id": "short"}, "session_id", "FIELD_INVALID"),
        ({"max_draft_tokens": 0}, "max_draft_tokens", "OUT_OF_BOUNDS"),
        ({"advance": None}, "advance", "FIELD_REQUIRED"),
        ({"advance": draft_pb2.Advance(token_ids=[1, 50])}, "advance.token_ids[1]", "TOKEN_OUT_OF_VOCAB"),
        ({"advance": draft_pb2.Advance(rows=[common_pb2.Tensor()])}, "advance.rows", "FIELD_INVALID"),
        ({"assumed_token_ids": [2**32 - 1]}, "assumed_token_ids[0]", "TOKEN_OUT_OF_VOCAB"),
        ({"time_budget": Duration(seconds=-1)}, "time_budget", "OUT_OF_BOUNDS"),
    ],
)  # fmt: skip
async def test_a_draft_with_a_bad_field_names_it(fields: dict[str, Any], field: str, reason: str) -> None:
    async with draft_service(Fitted()) as running:
        await prefill(running, TEXT)
        with refused(InvalidRequest, reason) as errors:
            await running.stub.Draft(draft_request(TEXT, 8, **fields))
        assert [violation.field for violation in errors[0].violations] == [field]


async def test_all_bad_fields_are_named_at_once(lookup: Running) -> None:
    with refused(InvalidRequest) as errors:
        await prefill(lookup, TEXT, session_id="short", prompt_length=0, cache_salt="x" * 200)
    assert [violation.field for violation in errors[0].violations] == ["session_id", "prompt_length", "cache_salt"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [draft_pb2.PrefillRequest()],
        [draft_pb2.PrefillRequest(chunk=advance(TEXT))],
        [draft_pb2.PrefillRequest(open=opening()), draft_pb2.PrefillRequest(open=opening())],
        prefill_messages(TEXT, max_length=7),
    ],
    ids=["empty stream", "no part", "chunk first", "two opens", "longer than max_length"],
)
async def test_a_prefill_out_of_order_is_refused(lookup: Running, messages: list[draft_pb2.PrefillRequest]) -> None:
    with refused(InvalidRequest):
        await lookup.stub.Prefill(iter(messages))
    assert len(lookup.rounds.table) == 0


async def test_too_many_releases_and_an_overlong_name_are_refused(lookup: Running) -> None:
    with refused(InvalidRequest) as errors:
        await lookup.stub.Release(draft_pb2.ReleaseRequest(session_ids=["x"] * 1025))
    assert errors[0].violations[0].field == "session_ids"
    with refused(InvalidRequest) as errors:
        await lookup.stub.Describe(draft_pb2.DescribeRequest(target_instance_id="x" * 129))
    assert errors[0].violations[0].field == "target_instance_id"


async def test_a_full_drafter_says_when_to_come_back() -> None:
    async with draft_service(sessions=1) as running:
        await prefill(running, TEXT)
        with refused(Overloaded, "SESSION_LIMIT") as errors:
            await prefill(running, TEXT, session_id="another-0123456789")
        assert errors[0].retry_after_s is not None
        assert 0 < errors[0].retry_after_s <= 5
    async with draft_service(kv_bytes=1000) as running:
        with refused(Overloaded, "KV_BUDGET"):
            await prefill(running, TEXT)


async def test_a_lease_is_granted_up_to_the_limit_and_ends_the_session() -> None:
    now_s = [0.0]
    async with draft_service(clock=lambda: now_s[0], max_lease_s=5.0) as running:
        opened = await prefill(running, TEXT, lease=to_duration(100))
        assert opened.lease.seconds == 5
        now_s[0] = 5.0
        await running.stub.Draft(draft_request(TEXT, 8))
        now_s[0] = 10.1
        with refused(NotFound, "SESSION_UNKNOWN"):
            await running.stub.Draft(draft_request(TEXT, 8, 2))


async def test_nothing_is_served_before_the_source_is_loaded_and_nothing_new_while_draining(lookup: Running) -> None:
    await prefill(lookup, TEXT)
    await lookup.lifecycle.enter(State.DRAINING)
    with refused(Unavailable, "DRAINING"):
        await prefill(lookup, TEXT)
    assert (await lookup.stub.Draft(draft_request(TEXT, 8))).committed_length == 8
    await lookup.lifecycle.enter(State.LOADING)
    for call in (lookup.stub.Describe(draft_pb2.DescribeRequest()), lookup.stub.Draft(draft_request(TEXT, 8, 2))):
        with refused(Unavailable, "NOT_READY"):
            await call


class Peer:
    def __init__(self, names: list[bytes] | None) -> None:
        self.names = names

    def peer_identities(self) -> list[bytes] | None:
        return self.names


def test_the_owner_is_the_authenticated_peer_and_one_for_all_without_tls() -> None:
    assert owner_of(Peer(None)) == owner_of(Peer([])) == "insecure"
    assert owner_of(Peer([b"a.example", b"b.example"])) == owner_of(Peer([b"b.example", b"a.example"]))
    assert len({owner_of(Peer([name])) for name in (b"a", b"b", b"insecure")} | {"insecure"}) == 4


# --- the program -----------------------------------------------------------------------------------------------------


async def stopped(running: Program) -> int:
    running.process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(running.end(), 30)


async def busy(address: str, name: str) -> grpc.StatusCode:
    """Asks for drafts until the service is gone; what it then said."""
    text = [3, 4] * 20
    async with connected(address) as stub:
        try:
            await stub.Prefill(iter(prefill_messages(text, session_id=name, max_length=512)))
            number = 0
            while True:
                number += 1
                request = draft_request(text, len(text), number, session_id=name, max_draft_tokens=16)
                await stub.Draft(request)
        except grpc.aio.AioRpcError as error:
            return error.code()


@pytest.mark.parametrize("cycle", range(5))
async def test_sigterm_ends_an_idle_lookup_drafter_with_0(cycle: int) -> None:
    async with program() as running:
        await running.until("state", state="serving")
        assert await stopped(running) == 0, running.lines


@pytest.mark.parametrize("cycle", range(5))
async def test_sigterm_mid_call_ends_a_lookup_drafter_with_0(cycle: int) -> None:
    async with program("--drain-s", "0.2") as running:
        await running.until("state", state="serving")
        async with connected(running.address) as stub:
            open_stream = stub.Prefill()
            await open_stream.write(prefill_messages([])[0])
            callers = [asyncio.ensure_future(busy(running.address, f"session-{i:016}")) for i in range(2)]
            while (await stub.Describe(draft_pb2.DescribeRequest())).load.sessions < 2:
                pass
            assert await stopped(running) == 0, running.lines
            assert {await caller for caller in callers} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_a_taken_port_ends_with_1_and_names_the_flag() -> None:
    async with program() as first:
        await first.until("state", state="serving")
        async with program("--port", str(first.port)) as second:
            entry = await second.until("cannot_listen")
            assert "--port" in entry["reason"]
            assert await second.end() == 1


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--source", "model"], "--draft-model"),
        (["--source", "lookup", "--draft-model", "x"], "--draft-model"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens"),
    ],
)
async def test_bad_flags_end_with_2_and_name_the_flag(flags: list[str], hint: str) -> None:
    async with program(*flags) as running:
        assert await running.end() == 2
        assert any(hint in line["event"] for line in running.lines)


async def test_lookup_copies_only_from_matches_as_long_as_the_flag_says() -> None:
    """TEXT ends with 5, 6, which it has had before: a match of two."""
    for least, found in (("2", [7, 8]), ("3", [])):
        async with program("--lookup-min-match", least) as running:
            await running.until("state", state="serving")
            async with connected(running.address) as stub:
                await stub.Prefill(iter(prefill_messages(TEXT)))
                reply = await stub.Draft(draft_request(TEXT, len(TEXT), max_draft_tokens=2))
                assert list(reply.token_ids) == found


async def test_a_model_that_is_not_there_ends_with_1_and_a_reason() -> None:
    async with program("--draft-model", "./no-such-model") as running:
        entry = await running.until("cannot_load")
        assert "no-such-model" in entry["reason"]
        assert await running.end() == 1


async def test_health_is_not_serving_until_the_source_is_there_and_serving_then() -> None:
    async with program() as running:
        await running.until("state", state="serving")
        async with grpc.aio.insecure_channel(running.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for name in ("", "draftwire.v1.DraftService"):
                reply = await check(health_pb2.HealthCheckRequest(service=name))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert running.lines[0]["state"] == "loading"
        assert await stopped(running) == 0
