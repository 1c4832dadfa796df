"""Makes every error of docs/errors.md happen over real connections: one function for each reason and service."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from conftest_draft import NAME, draft_request, draft_service, prefill_messages
from google.protobuf.struct_pb2 import Struct
from secrets_fixture import token_file
from service.target_fixture import LOCAL, Running, happens, target_service

from draft_service.sources.lookup import LookupSource
from draftwire.access import Access, TokenFile
from draftwire.channels import Endpoint
from draftwire.errors import FailedPrecondition, InternalError, Overloaded
from draftwire.guard import Guard
from draftwire.serving import Lifecycle, State, listen
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import from_rpc_error

Trigger = Callable[[Path, Path], Awaitable[object]]
"""Takes a tiny model and an empty folder; raises what the caller sees."""

TRIGGERS: dict[tuple[str, str], Trigger] = {}
TEXT = [5, 6, 7, 8, 9, 1, 5, 6]
SHORT = pb.StoppingParams(max_tokens=4, ignore_eos=True)


def row(service: str, reason: str) -> Callable[[Trigger], Trigger]:
    """Registers the function for a row."""

    def register(trigger: Trigger) -> Trigger:
        assert (service, reason) not in TRIGGERS
        TRIGGERS[service, reason] = trigger
        return trigger

    return register


async def answered(call: Awaitable[Any]) -> Any:
    """The reply. Raises DraftwireError for a failed call."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def generated(target: Running, request: pb.GenerateRequest) -> None:
    """Reads a stream to its end."""
    call = target.stub.Generate(request)
    while await answered(call.read()) is not grpc.aio.EOF:
        pass


def bad_request(reason: str, request: pb.GenerateRequest) -> None:
    @row("target", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async with target_service(model) as target:
            await generated(target, request)


def with_limit(reason: str, request: pb.GenerateRequest, **limits: Any) -> None:
    @row("target", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async with target_service(model, **limits) as target:
            await generated(target, request)


bad_request("FIELD_REQUIRED", pb.GenerateRequest())
bad_request("FIELD_INVALID", pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=[""])))
bad_request("OUT_OF_BOUNDS", pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=2.0)))
bad_request("TOKEN_OUT_OF_VOCAB", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**9])))
bad_request("FEATURE_UNSUPPORTED", pb.GenerateRequest(text="x", response=pb.ResponseOptions(echo=True)))
bad_request("MODEL_UNKNOWN", pb.GenerateRequest(text="x", model="another"))
with_limit("CONTEXT_LENGTH_EXCEEDED", pb.GenerateRequest(text="x" * 9), max_prompt_tokens=8)
with_limit("KV_BUDGET", pb.GenerateRequest(text="x"), kv_bytes_limit=1)


@row("target", "NO_CHAT_TEMPLATE")
async def _(model: Path, folder: Path) -> None:
    bare = folder / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    async with target_service(bare) as target:
        await target.client.complete(messages=[{"role": "user", "content": "x"}])


@row("target", "CHAT_TEMPLATE")
async def _(model: Path, folder: Path) -> None:
    arguments = Struct()
    arguments.update({"tokenize": False})
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")], template_arguments=arguments)
    async with target_service(model) as target:
        await generated(target, pb.GenerateRequest(chat=chat))


@row("target", "MALFORMED_MESSAGE")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model) as target, grpc.aio.insecure_channel(target.address, options=LOCAL) as channel:
        await answered(channel.unary_unary("/draftwire.v1.TargetService/Tokenize")(b"\xff\xff secret"))


@asynccontextmanager
async def held(model: Path, **settings: Any) -> AsyncIterator[Running]:
    """A target in which one request, named held, runs and does not get on."""
    async with target_service(model, **settings) as target:
        target.brake()
        call = target.stub.Generate(pb.GenerateRequest(text="x", request_id="held", stopping=SHORT))
        assert (await call.read()).HasField("started")
        try:
            yield target
        finally:
            call.cancel()


@row("target", "REQUEST_ID_IN_USE")
async def _(model: Path, folder: Path) -> None:
    async with held(model) as target:
        await generated(target, pb.GenerateRequest(text="x", request_id="held"))


@row("target", "QUEUE_FULL")
async def _(model: Path, folder: Path) -> None:
    async with held(model, max_running=1, max_queued=0) as target:
        await target.client.complete("x")


@row("target", "CLIENT_LIMIT")
async def _(model: Path, folder: Path) -> None:
    async with held(model, max_requests_per_client=1) as target:
        await target.client.complete("x")


@row("target", "RATE_LIMIT")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model, client_rate=0.001, client_burst=2) as target:
        assert await target.client.tokenize("ab")
        assert await target.client.detokenize([97])
        await target.client.tokenize("ab")


@row("target", "MESSAGE_TOO_LARGE")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model, max_message_bytes=64 * 1024) as target:
        await target.client.tokenize("x" * (64 * 1024))


def in_state(state: State) -> None:
    @row("target", "NOT_READY" if state is State.LOADING else state.name)
    async def of_target(model: Path, folder: Path) -> None:
        async with target_service(model) as target:
            await target.lifecycle.enter(state)
            # Without the client library, which would try again.
            async with grpc.aio.insecure_channel(target.address, options=[*LOCAL, ("grpc.enable_retries", 0)]) as raw:
                call = raw.unary_stream(
                    "/draftwire.v1.TargetService/Generate",
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )
                await answered(call(pb.GenerateRequest(text="x")).read())

    @row("drafter", "NOT_READY" if state is State.LOADING else state.name)
    async def of_drafter(model: Path, folder: Path) -> None:
        async with draft_service() as drafter:
            await drafter.lifecycle.enter(state)
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT))))


for state in (State.LOADING, State.DRAINING, State.STUCK):
    in_state(state)


@row("target", "DEADLINE_EXCEEDED")
async def _(model: Path, folder: Path) -> None:
    async with held(model) as target:
        await target.client.complete("x", timeout_s=0.05)


@row("target", "DEADLINE_CAP")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model, max_deadline_s=0.2) as target:
        brake = target.brake()
        try:
            await target.client.complete("x", timeout_s=30)
        finally:
            brake.release()
            await target.at_rest()


@row("target", "READER_STALLED")
async def _(model: Path, folder: Path) -> None:
    """The same server, with a method that has more to say than gRPC buffers."""

    async def flood(request: bytes, context: object) -> AsyncIterator[bytes]:
        for _ in range(2000):
            yield bytes(40_000)

    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(flood)}
    lifecycle = Lifecycle("draftwire.v1.TargetService", frozenset())
    server, port = await listen(
        lifecycle,
        "127.0.0.1",
        0,
        lambda server: server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("draftwire.v1.TargetService", handlers),)
        ),
        Guard(stalled_reader_timeout_s=0.2),
    )
    try:
        await lifecycle.enter(State.SERVING)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LOCAL) as channel:
            call = channel.unary_stream("/draftwire.v1.TargetService/Generate")(b"")
            assert len(await answered(call.read())) == 40_000
            await happens(lambda: lifecycle.refusals.snapshot() == {"READER_STALLED": 1})
            while await answered(call.read()) is not grpc.aio.EOF:
                pass
    finally:
        await server.stop(0)


@row("target", "ABORTED_BY_CALL")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model) as target:
        target.brake()
        stream = target.client.generate("x", request_id="mine")
        await anext(aiter(stream))
        assert await target.client.abort("mine") == ("mine",)
        await stream.collect()


def not_admitted(service: str, reason: str, role: str | None) -> None:
    @row(service, reason)
    async def trigger(model: Path, folder: Path) -> None:
        tokens = token_file(folder / "tokens", alice=role or "generate")
        token = tokens["alice"] if role else "dw_another"
        if service == "target":
            async with target_service(model, token_file=folder / "tokens", token=token) as target:
                await target.client.tokenize("x")
        guard = Guard(access=Access(TokenFile(folder / "tokens")))
        async with draft_service(guard=guard) as drafter, with_token(drafter.address, token) as stub:
            await answered(stub.Describe(draft_pb2.DescribeRequest()))


for service in ("target", "drafter"):
    not_admitted(service, "AUTH_REQUIRED", None)
not_admitted("target", "ROLE_REQUIRED", "admin")
not_admitted("drafter", "ROLE_REQUIRED", "generate")


@asynccontextmanager
async def with_token(address: str, token: str) -> AsyncIterator[Any]:
    """A stub of a draft service whose calls carry a token."""
    metadata = (("authorization", f"Bearer {token}"),)
    async with Endpoint(address=address).aio_channel() as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)

        class Named:
            def __getattr__(self, name: str) -> Any:
                method = getattr(stub, name)
                return lambda request: method(request, metadata=metadata)

        yield Named()


def broken_forward(reason: str, error: Exception) -> None:
    @row("target", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async def forward(windows: object, chunks: object = None) -> None:
            raise error

        async with target_service(model) as target:
            target.target.engine.forward = forward  # type: ignore[method-assign, assignment]
            await target.client.complete("x")


broken_forward("INTERNAL", RuntimeError("secret of /models/private"))
for reason in ("LOGITS_NOT_FINITE", "CACHE_LENGTH", "CACHE_NOT_TRIMMABLE", "CACHE_LOST", "CONSTRAINT_VIOLATED"):
    broken_forward(reason, InternalError("secret of /models/private", reason=reason))
for reason in ("CONSTRAINT_DEAD_END", "CONSTRAINT_TOO_SLOW"):
    broken_forward(reason, FailedPrecondition("the constraint cannot go on", reason=reason))


@row("target", "GRAMMAR_INVALID")
async def bad_grammar(model: Path, folder: Path) -> None:
    async with target_service(model) as target:
        await target.client.complete("x", regex="(")


@row("target", "COMPILER_BUSY")
async def busy_compiler(model: Path, folder: Path) -> None:
    async def busy(job: object, timeout_s: float) -> str:
        raise Overloaded("the grammar compiler is busy", reason="COMPILER_BUSY", retry_after_s=1.0)

    async with target_service(model) as target:
        assert target.target.grammars is not None
        target.target.grammars._process.ask = busy  # type: ignore[method-assign]
        await target.client.complete("x", regex="a")


class Fitted(LookupSource):
    """A lookup that has a vocabulary."""

    tokenizer_fingerprint = "a" * 64
    tokenizer_size = 100


class Broken(LookupSource):
    """A lookup that cannot."""

    def open(self, spec: object) -> Any:
        """Raises what nobody expects."""
        raise RuntimeError("secret of /models/private")


def bad_opening(reason: str, **fields: Any) -> None:
    @row("drafter", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async with draft_service(Fitted()) as drafter:
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT, **fields))))


bad_opening("FIELD_REQUIRED", session_id="")
bad_opening("FIELD_INVALID", session_id="short")
bad_opening("OUT_OF_BOUNDS", prompt_length=0)
bad_opening("INSTANCE_MISMATCH", expected_instance_id="somebody else")
bad_opening("TOKENIZER_MISMATCH", tokenizer_fingerprint="b" * 64)


@row("drafter", "TOKEN_OUT_OF_VOCAB")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(Fitted()) as drafter:
        await answered(drafter.stub.Prefill(iter(prefill_messages([100]))))


@row("drafter", "MALFORMED_MESSAGE")
async def _(model: Path, folder: Path) -> None:
    async with draft_service() as drafter, grpc.aio.insecure_channel(drafter.address, options=LOCAL) as channel:
        await answered(channel.stream_unary("/draftwire.v1.DraftService/Prefill")(iter([b"\xff\xff secret"])))


@row("drafter", "SESSION_UNKNOWN")
async def _(model: Path, folder: Path) -> None:
    async with draft_service() as drafter:
        await answered(drafter.stub.Draft(draft_request(TEXT, 0)))


def after_prefill(reason: str, request: draft_pb2.DraftRequest) -> None:
    @row("drafter", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async with draft_service() as drafter:
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT))))
            await answered(drafter.stub.Draft(draft_request(TEXT, len(TEXT), number=5)))
            await answered(drafter.stub.Draft(request))


after_prefill("POSITION_GAP", draft_request([*TEXT, 1, 2], len(TEXT) + 1, number=6))
after_prefill("PREFIX_MISMATCH", draft_request([0] * len(TEXT), 2, number=6))
after_prefill("SUPERSEDED", draft_request(TEXT, len(TEXT), number=4))


@row("drafter", "QUEUE_FULL")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(max_calls=1) as drafter:
        waiting = drafter.stub.Prefill()
        await waiting.write(prefill_messages([])[0])
        while True:
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT, session_id="another-0123456789"))))


def second_session(reason: str, **limits: Any) -> None:
    @row("drafter", reason)
    async def trigger(model: Path, folder: Path) -> None:
        async with draft_service(**limits) as drafter:
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT))))
            await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT, session_id="another-0123456789"))))


second_session("SESSION_LIMIT", sessions=1)
second_session("OWNER_LIMIT", sessions_per_owner=1)


@row("drafter", "KV_BUDGET")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(kv_bytes=1) as drafter:
        await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT))))


@row("drafter", "MESSAGE_TOO_LARGE")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(guard=Guard(max_message_bytes=64 * 1024)) as drafter:
        await answered(drafter.stub.Release(draft_pb2.ReleaseRequest(session_ids=["x" * 70_000])))


@row("drafter", "DEADLINE_EXCEEDED")
async def _(model: Path, folder: Path) -> None:
    async with draft_service() as drafter:
        call = drafter.stub.Prefill(timeout=0.05)
        await call.write(prefill_messages([])[0])
        await answered(call)


@row("drafter", "DEADLINE_CAP")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(guard=Guard(max_deadline_s=0.1)) as drafter:
        call = drafter.stub.Prefill(timeout=30)
        await call.write(prefill_messages([])[0])
        await answered(call)


@row("drafter", "NOT_OWNER")
async def _(model: Path, folder: Path) -> None:
    tokens = token_file(folder / "tokens", one="drafter", two="drafter")
    guard = Guard(access=Access(TokenFile(folder / "tokens")))
    async with draft_service(guard=guard) as drafter, with_token(drafter.address, tokens["one"]) as one:
        await answered(one.Prefill(iter(prefill_messages(TEXT))))
        async with with_token(drafter.address, tokens["two"]) as two:
            # Release is silent about what belongs to another.
            await answered(two.Release(draft_pb2.ReleaseRequest(session_ids=[NAME])))
            assert len(drafter.rounds.table) == 1
            await answered(two.Draft(draft_request(TEXT, len(TEXT))))


@row("drafter", "INTERNAL")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(Broken()) as drafter:
        await answered(drafter.stub.Prefill(iter(prefill_messages(TEXT))))
