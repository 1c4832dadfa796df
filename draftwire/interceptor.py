"""The one place where errors become statuses, and where a service that is not ready says so."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol

import grpc

from draftwire.errors import DraftwireError, InternalError
from draftwire.logs import get_logger
from draftwire.wire import to_status

_log = get_logger("rpc")
Handler = Any


class Gate(Protocol):
    """Decides whether a method may be called now."""

    def check(self, method: str) -> None:
        """Raises `Unavailable` while the service is loading, or draining and `method` starts new work."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps `DraftwireError` to its status, and anything else to INTERNAL with an id that only the log explains.

    Without it, grpc would send the text of an unexpected exception to the client.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of one call; standard services (health, reflection) pass untouched."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        if handler.response_streaming:
            wrapped: Any = self._streaming(method, handler.unary_stream or handler.stream_stream)
        else:
            wrapped = self._single(method, handler.unary_unary or handler.stream_unary)
        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return kind(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _single(self, method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                self._gate.check(method)
                return await behaviour(request, context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                await abort(context, error, method)

        return call

    def _streaming(
        self, method: str, behaviour: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                self._gate.check(method)
                async for message in behaviour(request, context):
                    yield message
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                await abort(context, error, method)

        return call


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    """Ends a call with the status of `error`."""
    await context.abort_with_status(to_status(disclosed(error, "unexpected_error", method=method)))
    raise AssertionError("abort_with_status returns by raising")


def disclosed(error: Exception, event: str, **where: str) -> DraftwireError:
    """What a caller may see of an error: of a fault of ours, only an id, under which the log has it as `event`."""
    if isinstance(error, DraftwireError) and (not isinstance(error, InternalError) or "error_id" in error.metadata):
        return error
    error_id = uuid.uuid4().hex[:12]
    _log.error(event, error_id=error_id, exc_info=error, **where)
    reason = error.reason if isinstance(error, InternalError) else None
    return InternalError(f"internal error {error_id}", reason=reason, metadata={"error_id": error_id})
