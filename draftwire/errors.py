"""The error tree of draftwire, the same on both sides of the wire.

    DraftwireError
    ├── InvalidRequest       INVALID_ARGUMENT     names each bad field and the value that would be right
    ├── Unsupported          UNIMPLEMENTED        the option exists, this server does not have it
    ├── NotFound             NOT_FOUND            a model, request or session that is not here
    ├── AlreadyExists        ALREADY_EXISTS       a request_id in use
    ├── FailedPrecondition   FAILED_PRECONDITION  another tokenizer, prefix or instance
    ├── PositionGap          OUT_OF_RANGE         committed ids are missing in between
    ├── Superseded           ABORTED              a newer call took the session
    ├── Overloaded           RESOURCE_EXHAUSTED   full; retry after `retry_after_s`
    ├── Unavailable          UNAVAILABLE          loading, draining or not reachable
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    the caller's time is over
    ├── Cancelled            CANCELLED            the caller or an Abort ended it
    ├── Unauthenticated      UNAUTHENTICATED      no or bad credentials
    ├── PermissionDenied     PERMISSION_DENIED    not yours
    ├── InternalError        INTERNAL             a fault of the server; carries an id that its log repeats
    └── IncompleteStream     DATA_LOSS            a stream that ended without its last event

Servers raise these, one interceptor turns them into statuses with google.rpc details (`draftwire.wire`), clients get the
same classes back. One more, `UnfinishedOutput`, is made by a client alone and has no status of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request."""

    field: str
    """Path of the field in the request, as "sampling.top_p" or "prompt.chat.messages[2].role"."""
    description: str
    """What is wrong and which values would be right."""


class DraftwireError(Exception):
    """Base of all errors. `reason` is a constant in capitals for programs, `message` is for people."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)

    def __str__(self) -> str:
        fields = "".join(f"\n  {v.field}: {v.description}" for v in self.violations)
        return f"{self.message}{fields}"


class InvalidRequest(DraftwireError):
    """A request that can never succeed as it is; `violations` names the fields."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "FIELD_INVALID"


class Unsupported(DraftwireError):
    """An option that this server does not have. It is refused by name, never ignored."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "FEATURE_UNSUPPORTED"


class NotFound(DraftwireError):
    """A model, request or session that is not here."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(DraftwireError):
    """A name that is in use."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "REQUEST_ID_IN_USE"


class FailedPrecondition(DraftwireError):
    """The states of the two sides do not fit: fix the state, not the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class PositionGap(DraftwireError):
    """Ids between what the session holds and what was sent are missing; metadata `committed_length` says where to resume."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "POSITION_GAP"


class Superseded(DraftwireError):
    """A newer call took the session; the answer to this one is worthless."""

    code = grpc.StatusCode.ABORTED
    default_reason = "SUPERSEDED"


class Overloaded(DraftwireError):
    """No room now; nothing was done. Try again after `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "QUEUE_FULL"


class Unavailable(DraftwireError):
    """Loading, draining or not reachable; nothing was done unless a stream had begun."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(DraftwireError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(DraftwireError):
    """The caller or an Abort ended the request."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class Unauthenticated(DraftwireError):
    """No credentials, or bad ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "AUTH_REQUIRED"


class PermissionDenied(DraftwireError):
    """The thing belongs to somebody else, or the role does not suffice."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "NOT_OWNER"


class InternalError(DraftwireError):
    """A fault of the server. metadata `error_id` is repeated in the server's log."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


class IncompleteStream(DraftwireError):
    """A stream ended OK but without its last event."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "INCOMPLETE_STREAM"


class UnfinishedOutput(DraftwireError):
    """The object that was asked for is not complete: `text` is what there is of it. Never sent by a server."""

    default_reason = "UNFINISHED_OUTPUT"

    def __init__(self, message: str, *, text: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message, metadata=metadata)
        self.text = text


ERROR_CLASSES: tuple[type[DraftwireError], ...] = (
    InvalidRequest,
    Unsupported,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    PositionGap,
    Superseded,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    Cancelled,
    Unauthenticated,
    PermissionDenied,
    InternalError,
    IncompleteStream,
)


def error_class(code: grpc.StatusCode) -> type[DraftwireError]:
    """The class that stands for a status code; `DraftwireError` itself for codes that draftwire never sends."""
    return next((cls for cls in ERROR_CLASSES if cls.code is code), DraftwireError)
