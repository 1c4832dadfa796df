"""The blocking client of a target service, on gRPC's sync stack. Safe to share between threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2_grpc

from draftwire import parse, request
from draftwire.channels import DEFAULT_UNARY_TIMEOUT_S, READY_POLL_S, TLS, Endpoint, closed_client, not_ready
from draftwire.errors import DeadlineExceeded, NotFound, Unavailable
from draftwire.events import Activity, Completion, Drafter, Event, Finished, Health, ModelInfo, Started
from draftwire.request import GenerateOptions, TokenizeOptions
from draftwire.v1 import target_pb2 as pb
from draftwire.v1 import target_pb2_grpc
from draftwire.wire import MAX_MESSAGE_BYTES, from_rpc_error

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")


class GenerateStream:
    """The events of one request: iterate over it. Leaving the `with` block, or `close`, ends the work on the server.

    Iteration raises a DraftwireError where the request failed, IncompleteStream where the last event is missing.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._state = parse.StreamState()
        self._closed = False

    @property
    def started(self) -> Started | None:
        """The first event, once it was read."""
        return self._state.started

    @property
    def finished(self) -> Finished | None:
        """The last event, once it was read."""
        return self._state.finished

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed:
            try:
                event = self._state.observe(next(self._call))
            except StopIteration:
                self._closed = True
                self._state.end()
            except grpc.RpcError as error:
                # Closed by another thread: the reader wanted no more. After the last event nothing can be missing.
                ended, self._closed = self._closed or self._state.finished is not None, True
                if not ended:
                    # Neither a variable with the error nor gRPC's, which is the call, with its traceback: each is a cycle
                    # with this frame that holds the connection until garbage is collected.
                    raise from_rpc_error(error) from error.with_traceback(None)
            except BaseException:
                self.close()
                raise
            else:
                if event is not None:
                    return event
        raise StopIteration

    def cancel(self) -> None:
        """Ends the work on the server; the iteration then raises Cancelled. Safe from any thread, idempotent."""
        self._call.cancel()

    def close(self) -> None:
        """Like `cancel`, but the iteration just ends. Idempotent; nothing happens after the last event."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole answer, once the last event was read. Raises IncompleteStream before."""
        return self._state.completion()

    def collect(self) -> Completion:
        """Reads what is left and returns the whole answer. Raises as the iteration does."""
        with self:
            for _ in self:
                pass
            return self._state.completion()


class Client:
    """Talks to a target service (and, for `health` and `wait_ready`, to any service with gRPC health checks).

    `timeout_s` is the deadline of each call unless the call has its own. A token is sent with each call: use TLS on
    any network that is not yours. Every method raises a DraftwireError.
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
        self._channel = self._endpoint.sync_channel()
        self._target = target_pb2_grpc.TargetServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
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
    ) -> GenerateStream: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_model: type[M],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> M: ...

    def generate(
        self,
        prompt: str | None = None,
        *,
        response_model: type[M] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateStream | M:
        """Streams one completion of a prompt, of `messages` or of `token_ids`. Without a deadline unless one is given.

        A call that fails with UNAVAILABLE before its first event is tried again up to three times, never after. With a
        pydantic `response_model` it asks for that model's JSON schema instead, waits, and returns the object; raises
        UnfinishedOutput where the answer was cut short.
        """
        if response_model is not None:
            from draftwire import structured

            asked = request.generate_request(prompt, structured.with_schema(response_model, options))
            stream = GenerateStream(self._start(self._target.Generate, asked, self._endpoint.timeout(timeout_s)))
            return structured.parsed(response_model, stream.collect())
        message = request.generate_request(prompt, options)
        timeout = self._endpoint.timeout(timeout_s)
        return GenerateStream(self._start(self._target.Generate, message, timeout))

    def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """`generate`, collected."""
        return self.generate(prompt, timeout_s=timeout_s, **options).collect()

    def tokenize(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> tuple[int, ...]:
        """Ids of a text or of `messages`, exactly as `generate` makes them."""
        message = request.tokenize_request(text, options)
        return tuple(self._unary(self._target.Tokenize, message, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """Text of ids; invalid bytes become U+FFFD."""
        message = request.detokenize_request(token_ids, skip_special_tokens)
        return self._unary(self._target.Detokenize, message, timeout_s).text

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served and within which limits."""
        return parse.model_info(self._unary(self._target.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def drafters(self, *, timeout_s: float | None = None) -> tuple[Drafter, ...]:
        """The drafters as the target sees them, in the order of its configuration."""
        return parse.drafters(self._unary(self._target.ListDrafters, pb.ListDraftersRequest(), timeout_s))

    def activity(self, *, timeout_s: float | None = None) -> Activity:
        """The requests of the moment, without their texts, and the totals since the target began to serve."""
        return parse.activity(self._unary(self._target.ListRequests, pb.ListRequestsRequest(), timeout_s))

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> tuple[str, ...]:
        """Ends requests of this peer by name; returns those that were running or queued."""
        message = request.abort_request(request_ids)
        return tuple(self._unary(self._target.Abort, message, timeout_s).aborted_request_ids)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """Asks gRPC's health service; "" means the whole server. Raises Unavailable where nothing listens."""
        try:
            return parse.health(self._unary(self._health.Check, request.health_request(service), timeout_s))
        except NotFound:
            return Health.UNKNOWN

    def wait_ready(self, timeout_s: float, *, service: str = "") -> None:
        """Returns once the server is SERVING. Raises Unavailable (NOT_READY) after timeout_s with what was seen last."""
        deadline = time.monotonic() + timeout_s
        seen = "no answer"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                health = self.health(service, timeout_s=min(left_s, 1.0))
            except (Unavailable, DeadlineExceeded) as error:
                seen = error.message
            else:
                if health is Health.SERVING:
                    return
                seen = health.value
            time.sleep(min(READY_POLL_S, max(0.0, deadline - time.monotonic())))
        raise not_ready(self.address, timeout_s, seen)

    def close(self) -> None:
        """Ends all calls. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._endpoint.describe("Client")

    def _start(self, method: Callable[..., T], message: object, timeout_s: float | None) -> T:
        if self._closed:
            raise closed_client()
        return method(message, timeout=timeout_s, metadata=self._endpoint.metadata)

    def _unary(self, method: Callable[..., T], message: object, timeout_s: float | None) -> T:
        timeout = self._endpoint.timeout(timeout_s, DEFAULT_UNARY_TIMEOUT_S)
        try:
            return self._start(method, message, timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
