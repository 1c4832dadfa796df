"""The one place where errors become statuses, and where a call is refused before any handler sees it."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import grpc

from draftwire.access import HEALTH_PREFIX, remember
from draftwire.errors import (
    DeadlineExceeded,
    DraftwireError,
    InternalError,
    InvalidRequest,
    PermissionDenied,
    Unauthenticated,
)
from draftwire.guard import Guard
from draftwire.logs import get_logger
from draftwire.refusals import Refusals
from draftwire.wire import to_status

_log = get_logger("rpc")
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]


class Gate(Protocol):
    """Decides whether a method may be called now."""

    def check(self, method: str) -> None:
        """Raises `Unavailable` while the service is loading, or draining and `method` starts new work."""


class _Unreadable:
    """Stands for a message whose bytes are not one."""


_UNREADABLE: Final = _Unreadable()


@dataclass(frozen=True, slots=True)
class _Call:
    """What is to be known of a method."""

    method: str
    behaviour: Callable[..., Any]
    streams_in: bool
    streams_out: bool
    writes: bool
    """Whether it writes its stream itself instead of yielding messages."""

    @property
    def ours(self) -> bool:
        """Whether it is a method of draftwire, not of health or reflection."""
        return not self.method.startswith("/grpc.")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets callers in, ends what runs too long, and maps `DraftwireError` to its status, anything else to INTERNAL with an
    id that only the log explains.

    Without it, grpc would send the text of an unexpected exception to the client: of a handler, and of a message that
    cannot be read.
    """

    def __init__(self, gate: Gate, guard: Guard | None = None, refusals: Refusals | None = None) -> None:
        self._gate = gate
        self._guard = guard or Guard()
        self._refusals = refusals or Refusals()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        call = _Call(
            handler_call_details.method,
            behaviour,
            handler.request_streaming,
            handler.response_streaming,
            handler.response_streaming and not inspect.isasyncgenfunction(behaviour),
        )
        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]

        # Not a generator, also for streams: only what writes by itself can give up a write that nobody reads.
        async def wrapped(request: Any, context: Context) -> Any:
            return await self._guarded(call, request, context)

        return kind(
            wrapped,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _guarded(self, call: _Call, request: Any, context: Context) -> Any:
        try:
            self._admit(call.method, context)
            if call.ours:
                self._gate.check(call.method)
            given = _readable_stream(request) if call.streams_in else _readable(request)
            # Health checks may be watched for as long as a service lives.
            health = call.method.startswith(HEALTH_PREFIX)
            return await self._within(self._run(call, given, context), None if health else self._guard.max_deadline_s)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await self._refuse(context, error, call.method)

    def _admit(self, method: str, context: Context) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        if method.startswith(HEALTH_PREFIX):
            return
        try:
            caller = self._guard.access.admit(method, context.invocation_metadata(), context)
        except (Unauthenticated, PermissionDenied) as error:
            _log.info("not_admitted", method=method, peer=context.peer(), reason=error.reason)
            raise
        remember(caller)

    async def _run(self, call: _Call, request: Any, context: Context) -> Any:
        if not call.streams_out or call.writes:
            return await call.behaviour(request, context)
        async with aclosing(call.behaviour(request, context)) as messages:
            async for message in messages:
                await self._write(context, message)
        return None

    async def _write(self, context: Context, message: Any) -> None:
        limit_s = self._guard.stalled_reader_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"nothing was read for {limit_s:g} s", reason="READER_STALLED") from None

    async def _within(self, work: Awaitable[Any], limit_s: float | None) -> Any:
        timeout = asyncio.timeout(limit_s)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"a call may run for {limit_s:g} s here; ask for less at once", reason="DEADLINE_CAP"
            ) from None

    async def _refuse(self, context: Context, error: Exception, method: str) -> NoReturn:
        shown = disclosed(error, "unexpected_error", method=method)
        self._refusals.count(shown)
        await abort(context, shown, method)


async def abort(context: Context, error: Exception, method: str) -> NoReturn:
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


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that never raises: grpc would send the text of the exception to the client, as UNKNOWN."""

    def read(raw: bytes) -> Any:
        try:
            return raw if deserialize is None else deserialize(raw)
        except Exception:
            return _UNREADABLE

    return read


def _readable(message: Any) -> Any:
    if isinstance(message, _Unreadable):
        raise InvalidRequest("the message cannot be read: it is not one of this method", reason="MALFORMED_MESSAGE")
    return message


async def _readable_stream(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _readable(message)
