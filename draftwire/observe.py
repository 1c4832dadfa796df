"""Watches the calls of a server, for whoever counts or traces them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

Handler = Any

_TYPES = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True, order=True)
class Method:
    """A method that exists: callers cannot make up names."""

    type: str
    """"unary", "client_stream", "server_stream" or "bidi_stream"."""
    service: str
    name: str


class CallWatch(Protocol):
    """Watches one call."""

    def received(self) -> None:
        """A message came."""

    def sent(self) -> None:
        """A message goes."""

    def ended(self, code: grpc.StatusCode, reason: str) -> None:
        """The call has ended. reason: that of its ErrorInfo, a constant of ours, or "" without one."""


class Observer(Protocol):
    """Wants to know of calls. Cheap, and never raises."""

    def began(self, method: Method, metadata: Mapping[str, str | bytes]) -> CallWatch:
        """A call begins; runs in the task of its handler."""


class ObservingInterceptor(grpc.aio.ServerInterceptor):
    """Goes first of all interceptors, to see what the others refuse. Leaves health and reflection alone."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or path.startswith("/grpc."):
            return handler
        _, service, name = path.split("/", 2)
        method = Method(_TYPES[handler.request_streaming, handler.response_streaming], service, name)
        metadata = {str(key): value for key, value in handler_call_details.invocation_metadata or ()}

        def begin() -> _Watches:
            return _Watches([observer.began(method, metadata) for observer in self._observers])

        kind: Any
        wrapped: Any
        match handler.request_streaming, handler.response_streaming:
            case (False, False):
                kind, wrapped = grpc.unary_unary_rpc_method_handler, _single(begin, handler.unary_unary)
            case (True, False):
                kind, wrapped = grpc.stream_unary_rpc_method_handler, _single(begin, handler.stream_unary)
            case (False, True):
                kind, wrapped = grpc.unary_stream_rpc_method_handler, _stream(begin, handler.unary_stream)
            case _:
                kind, wrapped = grpc.stream_stream_rpc_method_handler, _stream(begin, handler.stream_stream)
        return kind(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class _Watches:
    """All watches of a call."""

    def __init__(self, watches: list[CallWatch]) -> None:
        self._watches = watches

    def received(self) -> None:
        for watch in self._watches:
            watch.received()

    def sent(self) -> None:
        for watch in self._watches:
            watch.sent()

    def ended(self, code: grpc.StatusCode, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        reason = "" if code is grpc.StatusCode.OK else _reason(context)
        for watch in self._watches:
            watch.ended(code, reason)


def _single(begin: Callable[[], _Watches], behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        watches, code = begin(), grpc.StatusCode.CANCELLED
        try:
            reply = await behaviour(_received(watches, request), context)
            code = _code(context)
            watches.sent()
            return reply
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except Exception:
            code = grpc.StatusCode.UNKNOWN
            raise
        finally:
            watches.ended(code, context)

    return call


def _stream(begin: Callable[[], _Watches], behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
    """behaviour: yields messages, or writes them itself."""

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        watches, code = begin(), grpc.StatusCode.CANCELLED
        try:
            watched = _Writing(context, watches)
            messages = behaviour(_received(watches, request), watched)
            if hasattr(messages, "__aiter__"):
                async for message in messages:
                    await watched.write(message)
            else:
                await messages
            code = _code(context)
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except Exception:
            code = grpc.StatusCode.UNKNOWN
            raise
        finally:
            watches.ended(code, context)

    return call


class _Writing:
    """The context of a call, with its messages counted."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], watches: _Watches) -> None:
        self._context = context
        self._watches = watches

    async def write(self, message: Any) -> None:
        await self._context.write(message)
        self._watches.sent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _received(watches: _Watches, request: Any) -> Any:
    if hasattr(request, "__aiter__"):
        return _each(watches, request)
    watches.received()
    return request


async def _each(watches: _Watches, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        watches.received()
        yield message


def _code(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """The status that the handler has set; OK where it set none. grpc.aio answers a number or a member."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code or 0, grpc.StatusCode.UNKNOWN)


def _reason(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The reason in the status that goes out."""
    for key, value in context.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
        except DecodeError:
            break
    return ""
