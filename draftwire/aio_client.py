"""The asyncio client of a target service, on grpc.aio. Its methods are those of `draftwire.client.Client`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2_grpc

from draftwire import parse, request
from draftwire.channels import DEFAULT_UNARY_TIMEOUT_S, READY_POLL_S, TLS, Endpoint, closed_client, not_ready
from draftwire.errors import Cancelled, DeadlineExceeded, NotFound, Unavailable
from draftwire.events import Activity, Completion, Drafter, Event, Finished, Health, ModelInfo, Started
from draftwire.request import GenerateOptions, TokenizeOptions
from draftwire.v1 import target_pb2 as pb
from draftwire.v1 import target_pb2_grpc
from draftwire.wire import MAX_MESSAGE_BYTES, from_rpc_error

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


class AsyncGenerateStream:
    """The events of one request: `async for` over it. Leaving the `async with` block, or `close`, ends the work on the
    server, and so does the cancellation of the task that reads.

    Iteration raises a DraftwireError where the request failed, IncompleteStream where the last event is missing.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._call: Any = None
        self._state = parse.StreamState()
        self._closed = False
        self._cancelled = False

    @property
    def started(self) -> Started | None:
        """The first event, once it was read."""
        return self._state.started

    @property
    def finished(self) -> Finished | None:
        """The last event, once it was read."""
        return self._state.finished

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            response = await self._read()
            if response is None:
                break
            try:
                event = self._state.observe(response)
            except BaseException:
                self.close()
                raise
            if event is not None:
                return event
        raise StopAsyncIteration

    async def _read(self) -> pb.GenerateResponse | None:
        """The next message; None where there is none and none is missing."""
        try:
            if self._call is None:
                if self._cancelled:
                    raise asyncio.CancelledError
                self._call = self._start()
            response: Any = await self._call.read()
        except grpc.RpcError as error:
            ended, self._closed = self._closed or self._state.finished is not None, True
            if not ended:
                # Not by way of a variable: this frame, an error in it and its traceback would hold each other, and the
                # connection, until garbage is collected.
                raise from_rpc_error(error) from error
            return None
        except asyncio.CancelledError:
            # grpc reports the cancellation of a call like the cancellation of the task that reads it.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.close()
                raise
            if self._closed or self._state.finished is not None:
                return None
            self._closed = True
            raise Cancelled("the client cancelled the request") from None
        if response is grpc.aio.EOF:
            self._closed = True
            self._state.end()
            return None
        message: pb.GenerateResponse = response
        return message

    def cancel(self) -> None:
        """Ends the work on the server; the iteration then raises Cancelled. Idempotent."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Like `cancel`, but the iteration just ends. Idempotent; nothing happens after the last event."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole answer, once the last event was read. Raises IncompleteStream before."""
        return self._state.completion()

    async def collect(self) -> Completion:
        """Reads what is left and returns the whole answer. Raises as the iteration does."""
        async with self:
            async for _ in self:
                pass
            return self._state.completion()


class AsyncClient:
    """Talks to a target service (and, for `health` and `wait_ready`, to any service with gRPC health checks).

    Belongs to the event loop of its first call. `timeout_s` is the deadline of each call unless the call has its own. A
    token is sent with each call: use TLS on any network that is not yours. Every method raises a DraftwireError.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLS | None = None,
        token: str | None = None,
        timeout_s: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """address: host:port. Nothing is sent before the first call."""
        self._endpoint = Endpoint(
            address=address, tls=tls, token=token, timeout_s=timeout_s, max_message_bytes=max_message_bytes
        )
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    @property
    def address(self) -> str:
        return self._endpoint.address

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_model: None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_model: type[M],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Awaitable[M]: ...

    def generate(
        self,
        prompt: str | None = None,
        *,
        response_model: type[M] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream | Awaitable[M]:
        """Streams one completion of a prompt, of `messages` or of `token_ids`; the call starts with the first read.

        Without a deadline unless one is given. A call that fails with UNAVAILABLE before its first event is tried
        again up to three times, never after. With a pydantic `response_model` it asks for that model's JSON schema
        instead, and gives the object when awaited; raises UnfinishedOutput where the answer was cut short.
        """
        if response_model is None:
            return self._stream(request.generate_request(prompt, options), timeout_s)
        from draftwire import structured

        asked = request.generate_request(prompt, structured.with_schema(response_model, options))
        return self._object(response_model, self._stream(asked, timeout_s))

    def _stream(self, message: pb.GenerateRequest, timeout_s: float | None) -> AsyncGenerateStream:
        timeout = self._endpoint.timeout(timeout_s)
        return AsyncGenerateStream(
            lambda: self._target().Generate(message, timeout=timeout, metadata=self._endpoint.metadata)
        )

    async def _object(self, model: type[M], stream: AsyncGenerateStream) -> M:
        from draftwire import structured

        return structured.parsed(model, await stream.collect())

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """`generate`, collected."""
        return await self.generate(prompt, timeout_s=timeout_s, **options).collect()

    async def tokenize(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> tuple[int, ...]:
        """Ids of a text or of `messages`, exactly as `generate` makes them."""
        message = request.tokenize_request(text, options)
        reply: pb.TokenizeResponse = await self._unary(self._target().Tokenize, message, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """Text of ids; invalid bytes become U+FFFD."""
        message = request.detokenize_request(token_ids, skip_special_tokens)
        reply: pb.DetokenizeResponse = await self._unary(self._target().Detokenize, message, timeout_s)
        return reply.text

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served and within which limits."""
        return parse.model_info(await self._unary(self._target().GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    async def drafters(self, *, timeout_s: float | None = None) -> tuple[Drafter, ...]:
        """The drafters as the target sees them, in the order of its configuration."""
        return parse.drafters(await self._unary(self._target().ListDrafters, pb.ListDraftersRequest(), timeout_s))

    async def activity(self, *, timeout_s: float | None = None) -> Activity:
        """The requests of the moment, without their texts, and the totals since the target began to serve."""
        return parse.activity(await self._unary(self._target().ListRequests, pb.ListRequestsRequest(), timeout_s))

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> tuple[str, ...]:
        """Ends requests of this peer by name; returns those that were running or queued."""
        message = request.abort_request(request_ids)
        reply: pb.AbortResponse = await self._unary(self._target().Abort, message, timeout_s)
        return tuple(reply.aborted_request_ids)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """Asks gRPC's health service; "" means the whole server. Raises Unavailable where nothing listens."""
        stub = health_pb2_grpc.HealthStub(self._open())
        try:
            return parse.health(await self._unary(stub.Check, request.health_request(service), timeout_s))
        except NotFound:
            return Health.UNKNOWN

    async def wait_ready(self, timeout_s: float, *, service: str = "") -> None:
        """Returns once the server is SERVING. Raises Unavailable (NOT_READY) after timeout_s with what was seen last."""
        deadline = time.monotonic() + timeout_s
        seen = "no answer"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                health = await self.health(service, timeout_s=min(left_s, 1.0))
            except (Unavailable, DeadlineExceeded) as error:
                seen = error.message
            else:
                if health is Health.SERVING:
                    return
                seen = health.value
            await asyncio.sleep(min(READY_POLL_S, max(0.0, deadline - time.monotonic())))
        raise not_ready(self.address, timeout_s, seen)

    async def close(self) -> None:
        """Ends all calls. Idempotent."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return self._endpoint.describe("AsyncClient")

    def _open(self) -> grpc.aio.Channel:
        # Not in __init__: a channel belongs to the loop that runs when it is made.
        if self._closed:
            raise closed_client()
        if self._channel is None:
            self._channel = self._endpoint.aio_channel()
        return self._channel

    def _target(self) -> target_pb2_grpc.TargetServiceAsyncStub:
        return target_pb2_grpc.TargetServiceStub(self._open())

    async def _unary(self, method: Callable[..., Any], message: object, timeout_s: float | None) -> Any:
        timeout = self._endpoint.timeout(timeout_s, DEFAULT_UNARY_TIMEOUT_S)
        try:
            return await method(message, timeout=timeout, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
