"""The target service over a real gRPC server: its calls, its refusals, and clients that leave, stall or come in crowds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from service.target_fixture import LOCAL, NAME, Brake, Running, drafted, happens, health, target_service

from draftwire import testing
from draftwire.aio_client import AsyncClient
from draftwire.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    DraftwireError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from draftwire.events import Chunk, Finished, FinishReason, Started
from draftwire.serving import Lifecycle, State, drain, listen, watch
from draftwire.testing import FakeDraftService
from draftwire.testing_models import TINY_END_IDS, TINY_VOCAB, save_tiny_model
from draftwire.v1 import target_pb2 as pb
from draftwire.v1 import target_pb2_grpc
from draftwire.wire import from_rpc_error
from target_service.sequence import Sequence
from target_service.service import TargetService

CHAT = [{"role": "user", "content": "hi there"}]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@pytest.fixture
async def target(model: Path) -> AsyncIterator[Running]:
    async with target_service(model) as running:
        yield running
        await running.at_rest()


@contextmanager
def refused(kind: type[DraftwireError], reason: str, field: str = "") -> Iterator[list[DraftwireError]]:
    caught: list[DraftwireError] = []
    with pytest.raises(kind) as info:
        yield caught
    caught.append(info.value)
    assert info.value.reason == reason
    if field:
        assert field in [violation.field for violation in info.value.violations]


@dataclass
class Peer:
    """What a handler sees of who calls, for calls without a network."""

    name: bytes = b""

    def peer_identities(self) -> list[bytes]:
        return [self.name] if self.name else []


def long_request(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="x",
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        response=pb.ResponseOptions(top_logprobs=20),
    )


async def all_admitted(target: Running, brake: Brake, count: int) -> None:
    """Lets forwards pass until so many requests have a place: those that come while a forward waits are admitted after it."""

    def look() -> bool:
        brake.allow(1)
        return target.target.scheduler.running == count

    await happens(look)


async def stalled(target: Running) -> tuple[Any, Sequence]:
    """A stream of 400 tokens that was read to its first message and whose outbox is full since. gRPC itself would buffer
    megabytes, so nothing is read from the handler."""
    stream = target.service.Generate(long_request(400), Peer())  # type: ignore[arg-type]
    assert (await anext(stream)).HasField("started")
    ((_, sequence),) = target.service._live.values()
    await happens(lambda: sequence.crowded)
    assert sequence.outbox.qsize() == 64
    return stream, sequence


class TestCalls:
    async def test_text_chat_and_ids_of_one_prompt_give_one_answer(self, target: Running) -> None:
        ids = await target.client.tokenize(messages=CHAT)
        by_chat = await target.client.complete(messages=CHAT, max_tokens=20)
        by_ids = await target.client.complete(token_ids=ids, max_tokens=20)
        text = await target.client.detokenize(ids, skip_special_tokens=False)
        by_text = await target.client.complete(text, max_tokens=20)
        assert by_chat.token_ids == by_ids.token_ids == by_text.token_ids
        assert (
            len({(done.usage.prompt_tokens, done.usage.completion_tokens) for done in (by_chat, by_ids, by_text)}) == 1
        )
        assert [done.usage.cached_tokens for done in (by_chat, by_ids, by_text)].count(0) == 1, "read once"
        assert by_chat.usage.prompt_tokens == len(ids)
        assert by_chat.text == await target.client.detokenize(by_chat.token_ids)

    async def test_a_prompt_of_one_token_is_continued(self, target: Running) -> None:
        answer = await target.client.complete(token_ids=[65], max_tokens=5, ignore_eos=True)
        assert (len(answer.tokens), answer.usage.prompt_tokens, answer.speculation.target_calls) == (5, 1, 5)

    async def test_events_come_as_started_then_chunks_then_finished(self, target: Running) -> None:
        events = [event async for event in target.client.generate("order", max_tokens=30, ignore_eos=True)]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        chunks = [event for event in events if isinstance(event, Chunk)]
        assert len(chunks) == len(events) - 2
        steps = [chunk.first_step for chunk in chunks]
        assert steps == [sum(len(c.tokens) for c in chunks[:i]) for i in range(len(chunks))]
        assert all(chunk.tokens or chunk.text for chunk in chunks)
        assert events[0].prompt_tokens == 5
        assert events[0].max_tokens == 30

    async def test_started_comes_when_work_begins_and_names_a_seed_that_repeats_the_answer(
        self, target: Running
    ) -> None:
        first = await target.client.complete("seed", temperature=1.0, max_tokens=30)
        seed = first.started.sampling.seed
        assert seed is not None
        again = await target.client.complete("seed", temperature=1.0, max_tokens=30, seed=seed)
        other = await target.client.complete("seed", temperature=1.0, max_tokens=30, seed=seed ^ 1)
        assert again.token_ids == first.token_ids != other.token_ids

    async def test_tokenize_is_what_generate_uses(self, target: Running) -> None:
        for options in ({"text": "Grüße\n 漢"}, {"messages": CHAT}, {"messages": CHAT, "add_generation_prompt": False}):
            text = options.pop("text", None)
            ids = await target.client.tokenize(text, **options)  # type: ignore[arg-type]
            answer = await target.client.complete(text, max_tokens=1, **options)  # type: ignore[arg-type]
            assert answer.usage.prompt_tokens == len(ids)
            again = await target.client.complete(token_ids=ids, max_tokens=1)
            assert again.token_ids == answer.token_ids

    async def test_detokenize_hides_special_tokens_unless_told_and_replaces_invalid_bytes(
        self, target: Running
    ) -> None:
        ids = [72, 105, TINY_END_IDS[0], 0xC3]
        assert await target.client.detokenize(ids) == "Hi\ufffd"
        assert await target.client.detokenize(ids, skip_special_tokens=False) == "Hi<|endoftext|>\ufffd"
        with refused(InvalidRequest, "TOKEN_OUT_OF_VOCAB", "token_ids[1]"):
            await target.client.detokenize([1, TINY_VOCAB])

    async def test_model_info_says_what_is_served_and_counts_what_runs(self, target: Running) -> None:
        info = await target.client.model_info()
        assert (info.model_id, info.instance_id) == ("tiny", target.lifecycle.instance_id)
        assert info.context_length == 4096
        assert info.end_token_ids == TINY_END_IDS
        assert {"chat", "logprobs", "tools"} <= info.capabilities
        assert (info.rollback, info.no_drafting_reason) == ("trim", "")
        brake = target.brake()
        running = [
            asyncio.ensure_future(target.client.complete("x", max_tokens=99, ignore_eos=True)) for _ in range(10)
        ]
        await all_admitted(target, brake, 8)
        busy = await target.client.model_info()
        assert (busy.running, busy.queued) == (8, 2)
        brake.release()
        await asyncio.gather(*running)

    async def test_list_drafters_is_empty_without_drafters_and_says_where_one_is(self, model: Path) -> None:
        async with target_service(model) as alone:
            assert await alone.client.drafters() == ()
        async with drafted(model, FakeDraftService()) as (running, fake):
            (drafter,) = await running.client.drafters()
            assert (drafter.instance_id, drafter.source_kind, drafter.sessions) == (fake.instance_id, "fake", 0)
            brake = running.brake()
            answer = asyncio.ensure_future(running.client.complete("count", max_tokens=5))
            await happens(lambda: fake.open_sessions)
            await happens(lambda: running.target.pool.links[0].sessions == 1)
            assert (await running.drafter()).sessions == 1
            brake.release()
            await answer

    async def test_services_are_listed_by_reflection(self, target: Running) -> None:
        async with grpc.aio.insecure_channel(target.address, options=LOCAL) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            reply = await call.read()
            await call.done_writing()
            names = {service.name for service in reply.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


class TestRefusals:
    async def test_a_name_in_use_is_refused_and_free_again_afterwards(self, target: Running) -> None:
        brake = target.brake()
        first = asyncio.ensure_future(target.client.complete("a", request_id="mine", max_tokens=2))
        await happens(lambda: brake.forwards)
        with refused(AlreadyExists, "REQUEST_ID_IN_USE"):
            await target.client.complete("b", request_id="mine")
        brake.release()
        assert (await first).request_id == "mine"
        await happens(lambda: not target.service._live)
        assert (await target.client.complete("a", request_id="mine", max_tokens=2)).request_id == "mine"

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"response": pb.ResponseOptions(n=2)}, "response.n"),
            ({"response": pb.ResponseOptions(echo=True)}, "response.echo"),
            ({"response": pb.ResponseOptions(prompt_logprobs=1)}, "response.prompt_logprobs"),
        ],
    )
    async def test_an_option_that_is_not_supported_is_refused_by_name(
        self, target: Running, change: dict[str, Any], name: str
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.stub.Generate(pb.GenerateRequest(text="x", **change)).read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, Unsupported)
        assert error.reason == "FEATURE_UNSUPPORTED"
        assert error.message.startswith(f"{name}:")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    @pytest.mark.parametrize(
        ("options", "field", "reason"),
        [
            ({"temperature": -1.0}, "sampling.temperature", "OUT_OF_BOUNDS"),
            ({"temperature": float("nan")}, "sampling.temperature", "OUT_OF_BOUNDS"),
            ({"top_p": 0.0}, "sampling.top_p", "OUT_OF_BOUNDS"),
            ({"max_tokens": 0}, "stopping.max_tokens", "OUT_OF_BOUNDS"),
            ({"stop": ["ok", ""]}, "stopping.stop[1]", "FIELD_INVALID"),
            ({"stop_token_ids": [3, TINY_VOCAB]}, "stopping.stop_token_ids[1]", "TOKEN_OUT_OF_VOCAB"),
            ({"logit_bias": {TINY_VOCAB: 1.0}}, f"sampling.logit_bias[{TINY_VOCAB}]", "TOKEN_OUT_OF_VOCAB"),
            ({"top_logprobs": 21}, "response.top_logprobs", "OUT_OF_BOUNDS"),
            ({"request_id": "n" * 129}, "request_id", "OUT_OF_BOUNDS"),
        ],
    )
    async def test_a_violation_arrives_as_a_typed_error_that_names_the_field(
        self, target: Running, options: Any, field: str, reason: str
    ) -> None:
        with refused(InvalidRequest, reason, field) as caught:
            await target.client.complete("x", **options)
        assert field in str(caught[0])

    async def test_all_violations_come_in_one_answer(self, target: Running) -> None:
        with refused(InvalidRequest, "OUT_OF_BOUNDS") as caught:
            await target.client.complete("x", temperature=-1.0, max_tokens=0, top_p=2.0)
        names = {violation.field for violation in caught[0].violations}
        assert names == {"sampling.temperature", "stopping.max_tokens", "sampling.top_p"}

    async def test_prompts_that_are_empty_missing_too_long_or_foreign_are_refused(self, target: Running) -> None:
        with refused(InvalidRequest, "FIELD_REQUIRED", "text"):
            await target.client.complete("")
        with refused(InvalidRequest, "TOKEN_OUT_OF_VOCAB", "token_ids.ids[1]"):
            await target.client.complete(token_ids=[1, TINY_VOCAB])
        with refused(InvalidRequest, "CONTEXT_LENGTH_EXCEEDED", "prompt") as caught:
            await target.client.complete(token_ids=[1] * 4096)
        assert "4096" in str(caught[0])
        assert "4095" in str(caught[0])
        with refused(NotFound, "MODEL_UNKNOWN"):
            await target.client.complete("x", model="another")
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await target.stub.Generate(pb.GenerateRequest()).read()
        assert missing.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_template_that_fails_is_the_requests_fault(self, target: Running) -> None:
        arguments = Struct()
        arguments.update({"tokenize": False})
        request = pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")], template_arguments=arguments)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.stub.Generate(request).read()
        assert from_rpc_error(caught.value).reason == "CHAT_TEMPLATE"

    async def test_a_message_over_the_size_limit_is_refused_and_the_server_lives(self, target: Running) -> None:
        options = [*LOCAL, ("grpc.max_send_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(target.address, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await target_pb2_grpc.TargetServiceStub(channel).Tokenize(pb.TokenizeRequest(text="x" * (9 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await target.client.tokenize("ab") == (97, 98)

    async def test_an_unexpected_exception_is_internal_with_an_id_and_without_its_text(self, target: Running) -> None:
        def broken(*args: object) -> None:
            raise KeyError("secret detail")

        target.target.submit = broken  # type: ignore[method-assign, assignment]
        with structlog.testing.capture_logs() as logs, refused(InternalError, "INTERNAL") as caught:
            await target.client.complete("x")
        assert "secret" not in str(caught[0])
        (entry,) = [entry for entry in logs if entry["event"] == "unexpected_error"]
        assert caught[0].metadata["error_id"] == entry["error_id"]
        assert entry["error_id"] in caught[0].message

    @pytest.mark.parametrize("error", [ValueError("secret detail"), InternalError("secret cache", reason="CACHE_X")])
    async def test_a_forward_that_fails_is_internal_with_an_id_that_the_log_explains(
        self, target: Running, error: Exception
    ) -> None:
        engine = target.target.engine
        forward = engine.forward

        async def broken(windows: object, chunks: object = None) -> Any:
            raise error

        engine.forward = broken  # type: ignore[method-assign]
        with structlog.testing.capture_logs() as logs, pytest.raises(InternalError) as caught:
            await target.client.complete("x")
        assert "secret" not in caught.value.message
        error_id = caught.value.metadata["error_id"]
        assert [entry for entry in logs if entry.get("error_id") == error_id and entry["exc_info"] is error]
        engine.forward = forward  # type: ignore[method-assign]
        assert (await target.client.complete("x", max_tokens=3)).tokens


class TestAbort:
    async def test_abort_ends_named_requests_passes_over_the_rest_and_can_be_repeated(self, target: Running) -> None:
        brake = target.brake()
        doomed = [
            asyncio.ensure_future(target.client.complete("x", request_id=name, max_tokens=1000, ignore_eos=True))
            for name in ("one", "two", "three")
        ]
        await happens(lambda: len(target.service._live) == 3 and brake.forwards)
        assert await target.client.abort("one", "unknown", "two", "one") == ("one", "two")
        brake.release()
        for request in doomed[:2]:
            with pytest.raises(Cancelled) as caught:
                await request
            assert caught.value.reason == "ABORTED_BY_CALL"
        await happens(lambda: set(target.service._live) == {"three"})
        assert await target.client.abort("one", "two") == ()
        assert await target.client.abort("three") == ("three",)
        with pytest.raises(Cancelled):
            await doomed[2]

    async def test_abort_of_a_queued_request_ends_it_before_any_work(self, model: Path) -> None:
        async with target_service(model, max_running=1) as target:
            brake = target.brake()
            first = asyncio.ensure_future(target.client.complete("x", max_tokens=2))
            await happens(lambda: brake.forwards)
            second = asyncio.ensure_future(target.client.complete("y", request_id="second"))
            await happens(lambda: target.target.scheduler.queued == 1)
            assert await target.client.abort("second") == ("second",)
            with pytest.raises(Cancelled):
                await second
            brake.release()
            await first
            await target.at_rest()

    async def test_abort_never_reaches_another_owners_requests(self, target: Running) -> None:
        brake = target.brake()
        stream = target.service.Generate(
            pb.GenerateRequest(text="x", request_id="alices"),
            Peer(b"alice"),  # type: ignore[arg-type]
        )
        assert (await anext(stream)).HasField("started")
        request = pb.AbortRequest(request_ids=["alices"])
        bob = await target.service.Abort(request, Peer(b"bob"))  # type: ignore[arg-type]
        nobody = await target.client.abort("alices")
        assert (list(bob.aborted_request_ids), nobody) == ([], ())
        alice = await target.service.Abort(request, Peer(b"alice"))  # type: ignore[arg-type]
        assert list(alice.aborted_request_ids) == ["alices"]
        with pytest.raises(Cancelled):
            await anext(stream)
        brake.release()

    async def test_too_many_names_are_refused(self, target: Running) -> None:
        with refused(InvalidRequest, "FIELD_INVALID", "request_ids"):
            await target.client.abort(*(f"r{i}" for i in range(1025)))


class TestAdmission:
    @pytest.mark.parametrize("limits", [{"max_running": 1}, {"kv_bytes_limit": 1}], ids=["places", "memory"])
    async def test_beyond_the_queue_is_refused_before_any_work(self, model: Path, limits: dict[str, Any]) -> None:
        if "kv_bytes_limit" in limits:
            # Room for one request of these sizes.
            limits = {"kv_bytes_limit": 256 * 2 * 2 * 2 * 16 * 4, "max_running": 8}
        async with target_service(model, max_queued=2, **limits) as target:
            brake = target.brake()
            first = asyncio.ensure_future(target.client.complete("x", max_tokens=3))
            await happens(lambda: brake.forwards)
            waiting = [asyncio.ensure_future(target.client.complete("y", max_tokens=3)) for _ in range(2)]
            await happens(lambda: target.target.scheduler.queued == 2)
            encoded: list[object] = []
            tokenizer = target.target.parts.tokenizer
            encode, tokenizer.encode = tokenizer.encode, lambda *args: encoded.append(args)  # type: ignore
            with refused(Overloaded, "QUEUE_FULL") as caught:
                await target.client.complete("z", max_tokens=3)
            tokenizer.encode = encode  # type: ignore[method-assign]
            assert caught[0].retry_after_s is not None
            assert caught[0].retry_after_s > 0
            assert encoded == []
            assert target.target.engine.slots == 1
            brake.release()
            for request in (first, *waiting):
                assert (await request).tokens
            await target.at_rest()

    async def test_a_crowd_at_once_gets_all_places_and_the_whole_queue_and_no_more(self, model: Path) -> None:
        async with target_service(model, max_running=2, max_queued=3) as target:
            brake = target.brake()
            crowd = [asyncio.ensure_future(target.client.complete("x", max_tokens=3)) for _ in range(40)]
            await happens(lambda: sum(request.done() for request in crowd) == 35)
            brake.release()
            outcomes = await asyncio.gather(*crowd, return_exceptions=True)
            assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 5
            assert {type(o) for o in outcomes if isinstance(o, BaseException)} == {Overloaded}
            await target.at_rest()

    async def test_without_a_queue_free_places_are_still_given(self, model: Path) -> None:
        async with target_service(model, max_running=2, max_queued=0) as target:
            brake = target.brake()
            both = [
                asyncio.ensure_future(target.client.complete("x", max_tokens=99, ignore_eos=True)) for _ in range(2)
            ]
            await all_admitted(target, brake, 2)
            with refused(Overloaded, "QUEUE_FULL"):
                await target.client.complete("x")
            brake.release()
            await asyncio.gather(*both)

    async def test_a_request_larger_than_the_whole_cache_is_refused_at_once(self, model: Path) -> None:
        async with target_service(model, kv_bytes_limit=1024) as target:
            with refused(Overloaded, "KV_BUDGET") as caught:
                await target.client.complete("x")
            assert "max_tokens" in str(caught[0])

    async def test_higher_priority_starts_first_and_equals_keep_their_order(self, model: Path) -> None:
        async with target_service(model, max_running=1) as target:
            brake = target.brake()
            started: list[str] = []

            async def ask(name: str, priority: int) -> None:
                async for event in target.client.generate("x", request_id=name, priority=priority, max_tokens=2):
                    if isinstance(event, Started):
                        started.append(event.request_id)

            tasks = [asyncio.ensure_future(ask("first", 0))]
            await happens(lambda: brake.forwards)
            for name, priority in (("low", -1), ("a", 0), ("b", 0), ("high", 5)):
                count = target.target.scheduler.queued
                tasks.append(asyncio.ensure_future(ask(name, priority)))
                await happens(lambda count=count: target.target.scheduler.queued == count + 1)  # type: ignore[misc]
            brake.release()
            await asyncio.gather(*tasks)
            assert started == ["first", "high", "a", "b", "low"]


class TestLeaving:
    """A client that is gone leaves nothing: no forward after the running one, no place, no session."""

    @pytest.fixture
    async def drafting(self, model: Path) -> AsyncIterator[tuple[Running, FakeDraftService]]:
        fake = FakeDraftService(testing.fixed(1, 2, 3))
        async with drafted(model, fake, max_running=1, prefill_step_size=64) as both:
            yield both
            await both[0].at_rest()
            await happens(lambda: not fake.open_sessions)
            assert not fake.refused

    async def _goes_on(self, target: Running) -> None:
        """The next request starts at once and is whole."""
        answer = await target.client.complete("next", max_tokens=5, ignore_eos=True, timeout_s=10)
        assert len(answer.tokens) == 5

    async def test_a_cancel_after_three_messages_ends_the_work_within_one_round(
        self, drafting: tuple[Running, FakeDraftService]
    ) -> None:
        target, fake = drafting
        brake = target.brake()
        brake.allow(3)
        stream = target.client.generate("x", max_tokens=4000, ignore_eos=True, drafting="fixed", num_draft_tokens=3)
        for _ in range(3):
            await anext(stream)
        await happens(lambda: brake.forwards == 4 and fake.open_sessions)
        stream.close()
        await happens(lambda: not target.service._live)
        brake.release()
        await target.at_rest()
        assert brake.forwards == 4
        await self._goes_on(target)

    async def test_a_cancel_during_prefill_ends_it_within_one_chunk(
        self, drafting: tuple[Running, FakeDraftService]
    ) -> None:
        target, fake = drafting
        brake = target.brake(prefill=True)
        brake.allow(2)
        stream = target.client.generate(token_ids=[65] * 2000, max_tokens=4)
        assert isinstance(await anext(stream), Started)
        await happens(lambda: brake.prefills == 3 and fake.open_sessions)
        stream.close()
        await happens(lambda: not target.service._live)
        brake.release()
        await target.at_rest()
        assert (brake.prefills, brake.forwards) == (3, 0)
        await self._goes_on(target)

    async def test_a_cancel_in_the_queue_costs_nothing(self, drafting: tuple[Running, FakeDraftService]) -> None:
        target, fake = drafting
        brake = target.brake()
        first = asyncio.ensure_future(target.client.complete("x", max_tokens=2, ignore_eos=True))
        await happens(lambda: brake.forwards and fake.prefills)
        queued = target.client.generate("y")
        reading = asyncio.ensure_future(anext(queued))
        await happens(lambda: target.target.scheduler.queued == 1)
        queued.cancel()
        with pytest.raises(Cancelled):
            await reading
        await happens(lambda: target.target.scheduler.queued == 0)
        brake.release()
        assert len((await first).tokens) == 2
        await self._goes_on(target)
        assert len({name for name, _ in fake.prefills}) == 2

    async def test_a_closed_channel_is_a_cancel(self, drafting: tuple[Running, FakeDraftService]) -> None:
        target, fake = drafting
        brake = target.brake()
        brake.allow(2)
        client = AsyncClient(target.address)
        stream = client.generate("x", max_tokens=4000, ignore_eos=True)
        for _ in range(2):
            await anext(stream)
        await happens(lambda: fake.open_sessions)
        await client.close()
        await happens(lambda: not target.service._live)
        forwards = brake.forwards
        brake.release()
        await target.at_rest()
        assert brake.forwards == forwards
        await self._goes_on(target)

    async def test_a_cancel_while_a_drafter_hangs_releases_its_session(self, model: Path) -> None:
        fake = FakeDraftService(testing.hang())
        async with drafted(model, fake, draft_timeout_s=30.0) as (target, _):
            stream = target.client.generate("x", max_tokens=4000, ignore_eos=True, drafting="fixed")
            await anext(stream)
            await happens(lambda: fake.drafts)
            stream.close()
            await happens(lambda: fake.cancelled == 1)
            await happens(lambda: not fake.open_sessions)

    async def test_a_deadline_ends_the_work(self, drafting: tuple[Running, FakeDraftService]) -> None:
        target, _ = drafting
        brake = target.brake()
        brake.allow(2)
        with pytest.raises(DeadlineExceeded):
            await target.client.complete("x", max_tokens=4000, ignore_eos=True, timeout_s=0.3)
        await happens(lambda: not target.service._live)
        forwards = brake.forwards
        brake.release()
        await target.at_rest()
        assert brake.forwards == forwards
        await self._goes_on(target)

    async def test_a_cancel_while_a_long_text_is_encoded_keeps_encoding_one_at_a_time(self, model: Path) -> None:
        async with target_service(model) as target:
            tokenizer = target.target.parts.tokenizer
            encode = tokenizer.encode
            most, now = 0, 0

            def slow(text: str, add_special_tokens: bool) -> list[int]:
                nonlocal most, now
                now += 1
                most = max(most, now)
                end_s = time.monotonic() + 0.1
                while time.monotonic() < end_s:
                    pass
                now -= 1
                return encode(text, add_special_tokens)

            tokenizer.encode = slow  # type: ignore[method-assign]
            calls = [asyncio.ensure_future(target.client.tokenize("ab", timeout_s=0.05 * i + 0.01)) for i in range(8)]
            await asyncio.gather(*calls, return_exceptions=True)
            assert await target.client.tokenize("ab") == (97, 98)
            assert most == 1

    @seed(20260)
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(moments=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=20, max_size=20))
    def test_200_requests_cancelled_at_random_moments_leave_nothing(
        self, model: Path, moments: list[tuple[int, int]]
    ) -> None:
        """moments: (messages read, milliseconds after that) before each of 20 clients leaves; ten times."""

        async def crowd() -> None:
            fake = FakeDraftService(testing.fixed(1, 2, 3))
            options = {"max_running": 4, "max_queued": 64, "prefill_step_size": 16}
            async with drafted(model, fake, **options) as (target, _):
                kinds = random.Random(1)

                async def leave(messages: int, after_ms: int) -> None:
                    prompt = [65] * kinds.choice((1, 20, 300))
                    mode: Any = kinds.choice(("auto", "fixed", "off"))
                    stream = target.client.generate(token_ids=prompt, max_tokens=900, ignore_eos=True, drafting=mode)
                    try:
                        async with asyncio.timeout(0.05 + after_ms / 1000):
                            for _ in range(messages):
                                await anext(stream)
                    except TimeoutError:
                        return
                    stream.close()

                await asyncio.gather(*(leave(*moment) for moment in moments))
                await target.at_rest()
                answer = await target.client.complete("after", max_tokens=20, ignore_eos=True, timeout_s=10)
                assert len(answer.tokens) == 20
                await target.at_rest()
                await happens(lambda: not fake.open_sessions)
                assert not fake.refused

        asyncio.run(crowd())


class TestSlowReaders:
    async def test_a_reader_that_stops_waits_alone_and_its_outbox_stays_bounded(self, target: Running) -> None:
        stream, sequence = await stalled(target)
        step = sequence.ledger.step
        others = [target.client.complete("y", max_tokens=30, ignore_eos=True) for _ in range(4)]
        assert [len(answer.tokens) for answer in await asyncio.gather(*others)] == [30] * 4
        assert (sequence.outbox.qsize(), sequence.ledger.step) == (64, step)
        # It may go on reading, and then gets everything.
        events = [event async for event in stream]
        assert sum(len(event.chunk.token_ids) for event in events) == 400
        assert events[-1].finished.usage.completion_tokens == 400

    async def test_a_client_that_reads_one_message_and_then_nothing_delays_nobody_and_gets_all_in_the_end(
        self, target: Running
    ) -> None:
        request = long_request(1000)
        call = target.stub.Generate(request)
        assert (await call.read()).HasField("started")
        answers = await asyncio.gather(*(target.client.complete("y", max_tokens=30, ignore_eos=True) for _ in range(4)))
        assert [len(answer.tokens) for answer in answers] == [30] * 4
        ids, last = [], None
        while (event := await call.read()) is not grpc.aio.EOF:
            ids.extend(event.chunk.token_ids)
            last = event
        assert last is not None
        assert len(ids) == last.finished.usage.completion_tokens == 1000

    async def test_a_reader_that_stops_and_leaves_frees_its_place(self, model: Path) -> None:
        async with target_service(model, max_running=1) as target:
            stream, _ = await stalled(target)
            await stream.aclose()
            await target.at_rest()
            assert (await target.client.complete("y", max_tokens=3)).tokens

    async def test_an_abort_reaches_a_reader_that_stopped(self, target: Running) -> None:
        stream, sequence = await stalled(target)
        assert await target.client.abort(sequence.generation.request_id) == (sequence.generation.request_id,)
        await happens(lambda: target.target.engine.slots == 0)
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass


class TestLife:
    async def test_while_loading_calls_say_not_ready_and_health_not_serving(self) -> None:
        lifecycle = Lifecycle(NAME, frozenset({"Generate"}))
        service = TargetService(lifecycle)
        server, port = await listen(
            lifecycle,
            "127.0.0.1",
            0,
            lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server),
        )
        address = f"127.0.0.1:{port}"
        async with AsyncClient(address) as client:
            assert [await health(address, name) for name in ("", NAME)] == [NOT_SERVING, NOT_SERVING]
            with refused(Unavailable, "NOT_READY") as caught:
                await client.model_info()
            assert caught[0].retry_after_s is not None
            with refused(Unavailable, "NOT_READY"):
                await client.complete("x")
        await server.stop(None)

    async def test_health_follows_serving_and_draining_and_a_running_stream_finishes(self, model: Path) -> None:
        async with target_service(model) as target:
            assert [await health(target.address, name) for name in ("", NAME)] == [SERVING, SERVING]
            brake = target.brake()
            running = asyncio.ensure_future(target.client.complete("x", max_tokens=50, ignore_eos=True))
            await happens(lambda: brake.forwards)
            hurry = asyncio.Event()
            leaving = asyncio.ensure_future(drain(target.lifecycle, target.server, target.service.idle, 20.0, hurry))
            await happens(lambda: target.lifecycle.state is State.DRAINING)
            assert [await health(target.address, name) for name in ("", NAME)] == [NOT_SERVING, NOT_SERVING]
            async with AsyncClient(target.address) as late:
                with refused(Unavailable, "DRAINING"):
                    await late.complete("y")
                assert (await late.model_info()).running == 1
            brake.release()
            assert len((await running).tokens) == 50
            await asyncio.wait_for(leaving, 5)

    async def test_draining_waits_for_what_was_made_but_not_yet_read(self, model: Path) -> None:
        """A slow reader whose completion is done has still not got it."""
        async with target_service(model) as target:
            stream, sequence = await stalled(target)
            while target.target.scheduler.running:
                await anext(stream)
                await happens(lambda: sequence.crowded or not target.target.scheduler.running)
            leaving = asyncio.ensure_future(
                drain(target.lifecycle, target.server, target.service.idle, 20.0, asyncio.Event())
            )
            await happens(lambda: target.lifecycle.state is State.DRAINING)
            assert sequence.outbox.qsize() > 1
            events = []
            async for event in stream:
                events.append(event)
                await asyncio.sleep(0)
                assert not leaving.done()
            assert events[-1].finished.usage.completion_tokens == 400
            await asyncio.wait_for(leaving, 5)

    async def test_a_cut_stream_ends_with_a_typed_error_and_its_session_is_released(self, model: Path) -> None:
        fake = FakeDraftService()
        async with drafted(model, fake) as (target, _):
            brake = target.brake()
            running = asyncio.ensure_future(target.client.complete("x", max_tokens=50, ignore_eos=True))
            await happens(lambda: brake.forwards and fake.open_sessions)
            hurry = asyncio.Event()
            hurry.set()
            await drain(target.lifecycle, target.server, target.service.idle, 20.0, hurry, cut=target.service.cut)
            with refused(Unavailable, "DRAINING"):
                await running
            brake.release()
            await happens(lambda: not fake.open_sessions)

    async def test_a_target_that_ends_releases_the_sessions_of_what_still_ran(self, model: Path) -> None:
        fake = FakeDraftService()
        async with drafted(model, fake) as (target, _):
            brake = target.brake()
            running = asyncio.ensure_future(target.client.complete("x", max_tokens=4000, ignore_eos=True))
            await happens(lambda: brake.forwards and fake.open_sessions)
            brake.release()
            target.target.scheduler.close()
        with pytest.raises(DraftwireError):
            await running
        assert not fake.open_sessions

    async def test_the_watchdog_turns_health_and_back(self, model: Path) -> None:
        async with target_service(model) as target:
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            watching = asyncio.ensure_future(watch(target.compute, target.lifecycle, 0.05))

            def stuck() -> None:
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

            job = asyncio.ensure_future(target.compute.run(stuck))
            await happens(lambda: target.lifecycle.state is State.STUCK)
            assert await health(target.address, NAME) == NOT_SERVING
            with refused(Unavailable, "STUCK"):
                await target.client.complete("x")
            release.set()
            await job
            await happens(lambda: target.lifecycle.state is State.SERVING)
            assert await health(target.address, NAME) == SERVING
            watching.cancel()
            assert (await target.client.complete("x", max_tokens=3)).tokens

    async def test_a_client_that_pings_each_second_is_welcome(self, model: Path) -> None:
        async with target_service(model, prefill_step_size=8) as target:
            brake = target.brake(prefill=True)
            options = [
                *LOCAL,
                ("grpc.keepalive_time_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_time_between_pings_ms", 1000),
            ]
            async with grpc.aio.insecure_channel(target.address, options=options) as channel:
                request = pb.GenerateRequest(text="x" * 64, stopping=pb.StoppingParams(max_tokens=4, ignore_eos=True))
                call = target_pb2_grpc.TargetServiceStub(channel).Generate(request)
                await call.read()
                # The one wait that must last: a server that minds says GOAWAY at the fourth ping or so.
                reading = asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait([reading], timeout=6.5)
                assert not done
                brake.release()
                event = await reading
                while event is not grpc.aio.EOF:
                    event = await call.read()
                assert await call.code() is grpc.StatusCode.OK


async def test_finish_reason_is_context_length_where_the_context_ends(model: Path) -> None:
    async with target_service(model, context_length=100) as target:
        answer = await target.client.complete(token_ids=[65] * 94, max_tokens=100, ignore_eos=True)
        assert (answer.finish_reason, len(answer.tokens)) == (FinishReason.CONTEXT_LENGTH, 6)
        assert answer.started.max_tokens == 6
