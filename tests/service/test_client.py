"""The client library against a real gRPC server that plays scripts; each law holds for both stacks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from draftwire import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    Completion,
    DeadlineExceeded,
    DrafterState,
    DraftwireError,
    FailedPrecondition,
    FieldViolation,
    Finished,
    FinishReason,
    Health,
    IncompleteStream,
    InternalError,
    InvalidRequest,
    NoDraftReason,
    Overloaded,
    Started,
    Token,
    Unavailable,
)
from draftwire.parse import StreamState
from draftwire.scripted_target import ScriptedTarget, chunk, finished, serve, started
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import to_duration

GOOD = (
    started(),
    chunk(0, (5, "Hello")),
    chunk(1, (6, " big"), (7, " world"), drafted=1),
    finished(3, drafted=2, accepted=1),
)
Collected = tuple[list[Any], DraftwireError | None]


class Sync:
    """Drives the blocking client."""

    def call(self, address: str, method: str, *args: Any, client: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        with Client(address, **(client or {})) as connected:
            return getattr(connected, method)(*args, **kwargs)

    def events(self, address: str, **kwargs: Any) -> Collected:
        seen: list[Any] = []
        with Client(address) as client, client.generate("hi", **kwargs) as stream:
            try:
                for event in stream:
                    seen.append(event)
            except DraftwireError as error:
                return seen, error
        return seen, None

    def left(self, address: str) -> object:
        """What is left of a stream whose error has been handled; None where nothing is."""
        with Client(address) as client:
            stream = client.generate("hi")
            kept = weakref.ref(stream)
            with suppress(DraftwireError):
                stream.collect()
            del stream
            return kept()

    def read_one(self, address: str, end: Callable[[Any], None]) -> Collected:
        """Reads one event, lets `end` act on the stream, reads the rest."""
        with Client(address) as client, client.generate("hi") as stream:
            seen = [next(stream)]
            end(stream)
            try:
                seen.extend(stream)
            except DraftwireError as error:
                return seen, error
        return seen, None


class Async:
    """Drives the asyncio client, each time in a loop of its own."""

    def call(self, address: str, method: str, *args: Any, client: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        async def run() -> Any:
            async with AsyncClient(address, **(client or {})) as connected:
                return await getattr(connected, method)(*args, **kwargs)

        return asyncio.run(run())

    def events(self, address: str, **kwargs: Any) -> Collected:
        async def run() -> Collected:
            seen: list[Any] = []
            async with AsyncClient(address) as client, client.generate("hi", **kwargs) as stream:
                try:
                    async for event in stream:
                        seen.append(event)
                except DraftwireError as error:
                    return seen, error
            return seen, None

        return asyncio.run(run())

    def left(self, address: str) -> object:
        async def run() -> object:
            async with AsyncClient(address) as client:
                stream = client.generate("hi")
                kept = weakref.ref(stream)
                with suppress(DraftwireError):
                    await stream.collect()
                del stream
                return kept()

        return asyncio.run(run())

    def read_one(self, address: str, end: Callable[[Any], None]) -> Collected:
        async def run() -> Collected:
            async with AsyncClient(address) as client, client.generate("hi") as stream:
                seen = [await anext(stream)]
                end(stream)
                try:
                    async for event in stream:
                        seen.append(event)
                except DraftwireError as error:
                    return seen, error
            return seen, None

        return asyncio.run(run())


@pytest.fixture(params=[Sync, Async])
def driver(request: pytest.FixtureRequest) -> Sync | Async:
    made: Sync | Async = request.param()
    return made


def test_a_stream_is_typed_events_and_collects_into_a_completion(driver: Sync | Async) -> None:
    """Started, chunks, finished arrive in order, and `complete` is their sum."""
    target = ScriptedTarget(GOOD)
    with serve(target) as address:
        events, error = driver.events(address)
        whole: Completion = driver.call(address, "complete", "hi", max_tokens=3)
    assert error is None
    assert [type(event) for event in events] == [Started, Chunk, Chunk, Finished]
    assert events[2] == Chunk(
        first_step=1,
        text=" big world",
        tokens=(Token(id=6, text=" big", from_draft=True), Token(id=7, text=" world", from_draft=False)),
    )
    assert (whole.text, whole.token_ids, whole.events) == ("Hello big world", (5, 6, 7), tuple(events))
    assert whole.finish_reason is FinishReason.MAX_TOKENS
    assert (whole.started.sampling.seed, whole.started.sampling.top_p) == (7, None)
    assert (whole.timings.time_to_first_token_s, whole.timings.decode_s) == (0.25, 1.0)
    assert whole.speculation.num_rejected_draft_tokens == 1
    assert whole.finished.no_draft_reason is None
    assert target.requests[1].stopping.max_tokens == 3


def test_logprobs_matches_and_reasons_come_through(driver: Sync | Async) -> None:
    """Optional parts of chunk and finish keep their meaning; a reason of a newer server is UNKNOWN, not an error."""
    logprobs = pb.TokenLogprobs(logprob=-0.5, top_token_ids=[5, 9], top_logprobs=[-0.5, -2.0])
    with_logprobs = pb.GenerateChunk(text="a", token_ids=[5], from_draft=[False], logprobs=[logprobs], text_ends=[1])
    last = finished(1, no_draft_reason=pb.NO_DRAFT_REASON_NO_DRAFTER)
    last.finished.stop_string = "b"
    last.finished.grammar_complete = False
    last.finished.finish_reason = 99  # type: ignore[assignment]
    with serve(ScriptedTarget((started(), pb.GenerateResponse(chunk=with_logprobs), last))) as address:
        whole: Completion = driver.call(address, "complete", "hi")
    token = whole.tokens[0]
    assert (token.logprob, [(top.id, top.logprob) for top in token.top_logprobs]) == (-0.5, [(5, -0.5), (9, -2.0)])
    assert (whole.finished.matched, whole.finished.grammar_complete) == ("b", False)
    assert whole.finish_reason is FinishReason.UNKNOWN
    assert whole.finished.no_draft_reason is NoDraftReason.NO_DRAFTER


def test_a_refused_request_names_its_fields(driver: Sync | Async) -> None:
    """INVALID_ARGUMENT arrives as InvalidRequest with every violation, and is not tried again."""
    violations = [FieldViolation("sampling.top_p", "expected (0, 1]"), FieldViolation("stopping.stop[0]", "is empty")]
    target = ScriptedTarget((InvalidRequest("two fields are wrong", violations=violations),))
    with serve(target) as address:
        events, error = driver.events(address)
    assert events == []
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == violations
    assert len(target.requests) == 1


@pytest.mark.parametrize("script", [(InvalidRequest("no"),), (*GOOD[:2], InternalError("broke"))])
def test_a_handled_error_leaves_no_connection_behind(driver: Sync | Async, script: tuple[Any, ...]) -> None:
    """Stream, call and connection go with the error, not with the next garbage collection."""
    with serve(ScriptedTarget(script)) as address:
        gc.collect()
        gc.disable()
        try:
            assert driver.left(address) is None
        finally:
            gc.enable()


def test_a_request_refused_before_its_first_event_is_tried_again(driver: Sync | Async) -> None:
    """UNAVAILABLE without any event is safe to repeat."""
    not_ready = Unavailable("the model is loading", reason="NOT_READY")
    target = ScriptedTarget((not_ready,), (not_ready,), GOOD)
    with serve(target) as address:
        events, error = driver.events(address)
    assert error is None
    assert len(events) == 4
    assert len(target.requests) == 3


def test_a_request_that_stays_refused_fails_with_the_servers_reason(driver: Sync | Async) -> None:
    """The retries end, and the last refusal is what the caller sees."""
    target = ScriptedTarget((Unavailable("the model is loading", reason="NOT_READY", retry_after_s=2.0),))
    with serve(target) as address:
        _, error = driver.events(address)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retry_after_s) == ("NOT_READY", 2.0)
    assert len(target.requests) == 4


def test_nothing_is_tried_again_after_the_first_event(driver: Sync | Async) -> None:
    """A stream that breaks half-way is an error, never a second completion."""
    target = ScriptedTarget((started(), chunk(0, (1, "a")), Unavailable("draining", reason="DRAINING")), GOOD)
    with serve(target) as address:
        events, error = driver.events(address)
    assert [type(event) for event in events] == [Started, Chunk]
    assert isinstance(error, Unavailable)
    assert len(target.requests) == 1


def test_an_overloaded_server_is_left_alone(driver: Sync | Async) -> None:
    """RESOURCE_EXHAUSTED is not repeated behind the caller's back; the delay is handed on."""
    target = ScriptedTarget((Overloaded("full", retry_after_s=1.5),))
    with serve(target) as address:
        _, error = driver.events(address)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
    assert len(target.requests) == 1


def test_only_calls_that_change_nothing_are_tried_again(driver: Sync | Async) -> None:
    """Tokenize is repeated after UNAVAILABLE, Abort is not."""
    down = Unavailable("loading", reason="NOT_READY")
    target = ScriptedTarget(replies={"Tokenize": [down, pb.TokenizeResponse(token_ids=[1, 2])], "Abort": down})
    with serve(target) as address:
        assert driver.call(address, "tokenize", "hi") == (1, 2)
        assert len(target.requests) == 2
        with pytest.raises(Unavailable):
            driver.call(address, "abort", "r1")
    assert len(target.requests) == 3


def test_leaving_a_stream_early_cancels_the_request(driver: Sync | Async) -> None:
    """`close` ends the work on the server and the iteration, without an error."""
    target = ScriptedTarget((started(), threading.Event(), *GOOD[1:]))
    with serve(target) as address:
        events, error = driver.read_one(address, lambda stream: stream.close())
        assert target.cancelled.wait(5)
    assert ([type(event) for event in events], error) == ([Started], None)


def test_cancel_ends_the_request_and_says_so(driver: Sync | Async) -> None:
    """After `cancel` the iteration raises Cancelled: the text is not whole."""
    target = ScriptedTarget((started(), threading.Event(), *GOOD[1:]))
    with serve(target) as address:
        _, error = driver.read_one(address, lambda stream: stream.cancel())
        assert target.cancelled.wait(5)
    assert isinstance(error, Cancelled)


def test_a_stream_without_its_last_event_is_incomplete(driver: Sync | Async) -> None:
    """OK is not enough: without `finished` nobody knows whether text is missing."""
    with serve(ScriptedTarget((started("r9"), chunk(0, (1, "a"))))) as address:
        events, error = driver.events(address)
    assert len(events) == 2
    assert isinstance(error, IncompleteStream)
    assert error.metadata == {"request_id": "r9"}


@pytest.mark.parametrize(
    "script",
    [
        (chunk(0, (1, "a")), finished(1)),
        (started(), started()),
        (started(), chunk(1, (1, "a"))),
        (started(), chunk(0, (1, "a"), (2, "b")), chunk(1, (3, "c"))),
        (started(), pb.GenerateResponse(chunk=pb.GenerateChunk(text="a", token_ids=[1], text_ends=[1]))),
        (started(), finished(0), chunk(0, (1, "a"))),
    ],
    ids=["no start", "two starts", "gap", "overlap", "lengths", "after the end"],
)
def test_a_server_that_breaks_the_contract_is_caught(driver: Sync | Async, script: tuple[Any, ...]) -> None:
    """Out of order, with a gap or with unequal lengths: InternalError BAD_RESPONSE, never wrong text."""
    with serve(ScriptedTarget(script)) as address:
        _, error = driver.events(address)
    assert isinstance(error, InternalError)
    assert error.reason == "BAD_RESPONSE"


@pytest.mark.parametrize(
    ("text", "count", "ends"),
    [
        ("ab", 2, []),
        ("ab", 2, [2]),
        ("ab", 1, [1, 2]),
        ("ab", 2, [0, 1]),
        ("ab", 2, [1, 3]),
        ("ab", 3, [2, 1, 2]),
        ("ab", 2, [3, 2]),
        ("\U0001f600", 1, [4]),
        ("\U0001f600", 1, [2]),
        ("ab", 0, []),
    ],
    ids=["none", "few", "many", "short", "beyond", "falling", "falls back", "bytes", "UTF-16 units", "no token"],
)
def test_text_ends_that_do_not_divide_the_text_are_caught(text: str, count: int, ends: list[int]) -> None:
    """A server that counts anything but code points, or leaves text without a token, breaks the contract."""
    broken = pb.GenerateChunk(text=text, token_ids=range(count), from_draft=[False] * count, text_ends=ends)
    state = StreamState()
    state.observe(started())
    with pytest.raises(InternalError, match="text_ends") as caught:
        state.observe(pb.GenerateResponse(chunk=broken))
    assert caught.value.reason == "BAD_RESPONSE"


def test_text_is_divided_by_code_points() -> None:
    """Characters beyond the basic plane count once, combining marks for themselves, and a token may have no text."""
    state = StreamState()
    state.observe(started())
    texts = ["a", "", "\U0001f600", "e", "\u0301", ""]
    event = state.observe(chunk(0, *enumerate(texts)))
    assert isinstance(event, Chunk)
    assert [token.text for token in event.tokens] == texts
    assert event.text == "".join(texts)


def test_a_deadline_ends_the_request(driver: Sync | Async) -> None:
    """timeout_s is the deadline of the whole stream."""
    target = ScriptedTarget((started(), threading.Event(), *GOOD[1:]))
    with serve(target) as address:
        _, error = driver.events(address, timeout_s=0.3)
        assert target.cancelled.wait(5)
    assert isinstance(error, DeadlineExceeded)


def test_the_token_goes_into_each_call_and_into_no_repr(driver: Sync | Async) -> None:
    """The server sees a bearer token; a log of the client does not."""
    target = ScriptedTarget(GOOD, replies={"ListDrafters": pb.ListDraftersResponse()})
    options = {"token": "s3cret"}
    with serve(target) as address:
        driver.call(address, "complete", "hi", client=options)
        assert driver.call(address, "drafters", client=options) == ()
        assert driver.call(address, "health", client=options) is Health.SERVING
    assert [metadata["authorization"] for metadata in target.metadata] == ["Bearer s3cret"] * 2
    assert "s3cret" not in repr(Client(address, token="s3cret")) + repr(AsyncClient(address, token="s3cret"))


def test_model_and_drafters_are_records(driver: Sync | Async) -> None:
    """Absent times are None, unset sampling values too, states are enums."""
    info = pb.GetModelInfoResponse(model_id="m", context_length=64, end_token_ids=[2], capabilities=["chat"])
    info.default_sampling.temperature = 0.0
    listed = pb.ListDraftersResponse(
        drafters=[
            pb.Drafter(address="a:1", state=pb.DRAFTER_STATE_READY, rpc_p50=to_duration(0.5)),
            pb.Drafter(address="b:2", state=pb.DRAFTER_STATE_OPEN_BREAKER, refused_reason="refused"),
        ]
    )
    with serve(ScriptedTarget(replies={"GetModelInfo": info, "ListDrafters": listed})) as address:
        model = driver.call(address, "model_info")
        first, second = driver.call(address, "drafters")
    assert (model.model_id, model.end_token_ids, model.capabilities) == ("m", (2,), frozenset({"chat"}))
    assert (model.default_sampling.temperature, model.default_sampling.top_k) == (0.0, None)
    assert (first.state, first.rpc_p50_s) == (DrafterState.READY, 0.5)
    assert (second.state, second.rpc_p50_s) == (DrafterState.OPEN_BREAKER, None)


def test_detokenize_and_abort_are_plain_values(driver: Sync | Async) -> None:
    """Ids in, text out; names in, names out."""
    replies = {"Abort": pb.AbortResponse(aborted_request_ids=["r1"])}
    target = ScriptedTarget(replies=replies, pieces={1: "a", 2: "b"})
    with serve(target) as address:
        assert driver.call(address, "detokenize", [1, 2], skip_special_tokens=False) == "ab"
        assert driver.call(address, "abort", "r1", "r2") == ("r1",)
    assert target.requests[0].skip_special_tokens is False
    assert list(target.requests[1].request_ids) == ["r1", "r2"]


def test_wait_ready_needs_serving(driver: Sync | Async) -> None:
    """SERVING returns at once; NOT_SERVING or nobody there ends with Unavailable that says what was seen."""
    with serve(ScriptedTarget(GOOD)) as address:
        driver.call(address, "wait_ready", 5.0)
        assert driver.call(address, "health", "no.such.Service") is Health.UNKNOWN
    with serve(ScriptedTarget(GOOD), ready=False) as address, pytest.raises(Unavailable, match="not_serving") as caught:
        driver.call(address, "wait_ready", 0.3)
    assert caught.value.reason == "NOT_READY"
    with pytest.raises(Unavailable, match="not ready after"):
        driver.call(address, "wait_ready", 0.3)  # that server is gone


def test_a_server_that_is_not_there_is_unavailable(driver: Sync | Async) -> None:
    """A refused connection is an Unavailable like any other."""
    with serve(ScriptedTarget(GOOD)) as address:
        pass
    _, error = driver.events(address)
    assert isinstance(error, Unavailable)


def test_a_closed_client_refuses_calls() -> None:
    """A call after `close` is a FailedPrecondition, not a crash in gRPC."""
    client = Client("127.0.0.1:1")
    client.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        client.model_info()
    with pytest.raises(FailedPrecondition, match="closed"):
        client.generate("hi")


async def test_a_closed_async_client_refuses_calls() -> None:
    """The same for asyncio, where the call starts with the first read."""
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        await client.model_info()
    with pytest.raises(FailedPrecondition, match="closed"):
        await anext(client.generate("hi"))


async def test_cancelling_the_reading_task_cancels_the_request() -> None:
    """asyncio's own cancellation passes through as CancelledError, and the server stops."""
    target = ScriptedTarget((started(), threading.Event(), *GOOD[1:]))
    reading = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async for _ in client.generate("hi"):
            reading.set()

    with serve(target) as address:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(read(client))
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(target.cancelled.wait, 5)


def test_both_clients_have_the_same_methods() -> None:
    """What one stack can do, the other can do with the same arguments."""

    def methods(cls: type) -> dict[str, list[str]]:
        public = {name: value for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"}
        return {name: list(inspect.signature(value).parameters) for name, value in public.items()}

    assert methods(Client) == methods(AsyncClient)
