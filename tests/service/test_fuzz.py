"""Every RPC of both services under random and nearly valid messages: an answer or a status of the contract, no fault of ours.

Deterministic: hypothesis draws the same examples in each run. RPCs are taken from the descriptors, so that new ones are in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from service.conftest_draft import NAME as SESSION
from service.conftest_draft import draft_request, draft_service, opening, prefill_messages
from service.fuzzing import message_class, messages, mutations
from service.target_fixture import LOCAL, target_service

from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2, target_pb2

SERVICES = {
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"],
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
}
METHODS = [
    pytest.param(name, method, id=f"{name}-{method.name}")
    for name, service in SERVICES.items()
    for method in service.methods
]
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
CALL_S = 20.0
"""Longer than any of these calls takes: what is still running then hangs."""
EVENTS = 3
"""Of a stream, so many are read."""
# No shrinking and no clock: a failing example is shown as it was drawn, and a busy machine changes nothing.
FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True, slots=True)
class Face:
    """A service as seen from outside, by a client that sends whatever bytes it likes."""

    channel: grpc.Channel

    def call(self, method: MethodDescriptor, requests: list[bytes]) -> grpc.StatusCode:
        """The status; OK also for a stream that went well for a few events."""
        kind = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, False): self.channel.stream_unary,
            (True, True): self.channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        path = f"/{method.containing_service.full_name}/{method.name}"
        send: Any = kind(path, None, None)
        request = iter(requests) if method.client_streaming else requests[0]
        try:
            reply = send(request, timeout=CALL_S)
            if method.server_streaming:
                for _, _ in zip(range(EVENTS), reply, strict=False):
                    pass
                reply.cancel()
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code
        return grpc.StatusCode.OK

    def serving(self) -> bool:
        """What health says."""
        reply = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def elsewhere(service: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[Face]:
    """A service on an event loop of its own thread: hypothesis calls from this one."""
    started, stop = threading.Event(), asyncio.Event()
    address: list[str] = []
    loop = asyncio.new_event_loop()
    fault: list[BaseException] = []

    async def serve() -> None:
        async with service() as found:
            address.append(found)
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            fault.append(error)
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        if address:
            with grpc.insecure_channel(address[0], options=LOCAL) as channel:
                yield Face(channel)
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
        if fault:
            raise fault[0]


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Face]]:
    model = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=512)

    @asynccontextmanager
    async def drafter() -> AsyncIterator[str]:
        async with draft_service() as running:
            yield running.address

    @asynccontextmanager
    async def target() -> AsyncIterator[str]:
        async with draft_service() as beside, target_service(model, drafters=[beside.address]) as running:
            yield running.address

    with elsewhere(drafter) as draft_face, elsewhere(target) as target_face:
        yield {"draft": draft_face, "target": target_face}


def valid(method: MethodDescriptor) -> list[Message]:
    """A request that is good, with most of what it can have."""
    ids = [1, 2, 3, 1, 2]
    match method.name:
        case "Generate":
            return [
                target_pb2.GenerateRequest(
                    request_id="fuzz",
                    text="once upon a time",
                    sampling={
                        "temperature": 0.7,
                        "top_p": 0.9,
                        "top_k": 40,
                        "min_p": 0.01,
                        "seed": 5,
                        "logit_bias": {3: 1.0},
                    },
                    stopping={"max_tokens": 8, "min_tokens": 1, "stop": ["zz"], "stop_token_ids": [9]},
                    response={"top_logprobs": 2},
                    drafting={"mode": target_pb2.DRAFTING_MODE_FIXED, "num_draft_tokens": 3},
                )
            ]
        case "Abort":
            return [target_pb2.AbortRequest(request_ids=["fuzz", "other"])]
        case "Tokenize":
            return [target_pb2.TokenizeRequest(chat={"messages": [{"role": "user", "content": "hello"}]})]
        case "Detokenize":
            return [target_pb2.DetokenizeRequest(token_ids=ids)]
        case "Describe":
            return [draft_pb2.DescribeRequest(protocol_version=1, target_instance_id="fuzz")]
        case "Prefill":
            return list(prefill_messages(ids, chunk=3))
        case "Draft":
            return [draft_request(ids, 0)]
        case "Commit":
            request = draft_request(ids, 0)
            return [draft_pb2.CommitRequest(session_id=SESSION, round=2, advance=request.advance)]
        case "Release":
            return [draft_pb2.ReleaseRequest(session_ids=[SESSION])]
        case _:
            return [message_class(method.input_type)()]


def check(face: Face, method: MethodDescriptor, requests: list[bytes]) -> None:
    """Calls, and fails for a fault of ours or a hang."""
    code = face.call(method, requests)
    assert code not in NEVER, f"{method.name}: {code.name}"
    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED, f"{method.name} hangs"


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_good_requests_are_good(faces: dict[str, Face], name: str, method: MethodDescriptor) -> None:
    """So that the mutations below begin at something that goes far."""
    if method.name in ("Draft", "Commit"):
        prefill = method.containing_service.methods_by_name["Prefill"]
        faces[name].call(prefill, [message.SerializeToString() for message in valid(prefill)])
    code = faces[name].call(method, [message.SerializeToString() for message in valid(method)])
    assert code is grpc.StatusCode.OK


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_random_messages(faces: dict[str, Face], name: str, method: MethodDescriptor) -> None:
    @FUZZ
    @given(st.lists(messages(method.input_type), min_size=1, max_size=3))
    def call(requests: list[Message]) -> None:
        check(faces[name], method, [message.SerializeToString() for message in requests])

    call()
    assert faces[name].serving()


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_good_messages_with_one_random_part(faces: dict[str, Face], name: str, method: MethodDescriptor) -> None:
    """A random message over a good one: what gets past the first checks."""
    if not method.input_type.fields:
        pytest.skip("it has no fields")

    @FUZZ
    @given(st.data())
    def call(data: st.DataObject) -> None:
        requests = valid(method)
        place = data.draw(st.integers(0, len(requests) - 1))
        requests[place].MergeFrom(data.draw(messages(method.input_type)))
        check(faces[name], method, [message.SerializeToString() for message in requests])

    call()
    assert faces[name].serving()


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_bytes_that_are_nearly_a_message(faces: dict[str, Face], name: str, method: MethodDescriptor) -> None:
    @FUZZ
    @given(st.data())
    def call(data: st.DataObject) -> None:
        requests = [message.SerializeToString() for message in valid(method)]
        place = data.draw(st.integers(0, len(requests) - 1))
        requests[place] = data.draw(mutations(requests[place]))
        check(faces[name], method, requests)

    call()
    assert faces[name].serving()


def test_a_session_under_random_rounds(faces: dict[str, Face]) -> None:
    """Prefill, then random advances and rounds of that session: past the session's first checks."""
    service = SERVICES["draft"]
    face = faces["draft"]

    @FUZZ
    @given(st.data())
    def call(data: st.DataObject) -> None:
        prefill = [message.SerializeToString() for message in prefill_messages([1, 2, 3, 1, 2], chunk=3)]
        assert face.call(service.methods_by_name["Prefill"], prefill) is grpc.StatusCode.OK
        for _ in range(3):
            name = data.draw(st.sampled_from(["Draft", "Commit"]))
            method = service.methods_by_name[name]
            request = message_class(method.input_type)()
            request.MergeFrom(data.draw(messages(method.input_type)))
            request.session_id = SESSION  # type: ignore[attr-defined]
            check(face, method, [request.SerializeToString()])

    call()
    assert face.serving()


def test_calls_that_do_not_exist(faces: dict[str, Face]) -> None:
    for face in faces.values():
        for path in ("/draftwire.v1.TargetService/Nothing", "/nothing/at/all", "/x"):
            with pytest.raises(grpc.RpcError) as refused:
                face.channel.unary_unary(path, None, None)(b"", timeout=CALL_S)
            assert isinstance(refused.value, grpc.Call)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert face.serving()


def test_messages_over_the_limit(faces: dict[str, Face]) -> None:
    for name, service in SERVICES.items():
        for method in service.methods:
            code = faces[name].call(method, [b"\x00" * (8 * 1024 * 1024 + 1)])
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, method.name
        assert faces[name].serving()


def test_the_opening_that_tests_share_is_good() -> None:
    """A guard for `valid`: its session is the one that other requests speak of."""
    assert opening().session_id == SESSION
