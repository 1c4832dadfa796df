"""Conversions at the edge: errors to statuses and back, durations, and the prefix hash of the draft contract."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from sys import byteorder

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwire.errors import DraftwireError, FieldViolation, InvalidRequest, error_class

PROTOCOL_VERSION = 1
ERROR_DOMAIN = "draftwire.v1"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

# gRPC's metadata limit is 8 KiB: above it, the client sees RESOURCE_EXHAUSTED instead of the error itself. The message
# counts up to four times: percent-encoded, where a byte may take three, and once more in the details.
_MAX_VIOLATIONS = 16
_MAX_DETAIL_BYTES = 2048
_MAX_MESSAGE_BYTES = 768
_MAX_FIELD_BYTES = 200
_MAX_DESCRIPTION_BYTES = 500


def prefix_hash(ids: Sequence[int], so_far: int = 0) -> int:
    """CRC-32 of ids as little-endian uint32, continuing `so_far` (the hash of all ids before these)."""
    words = array("I", ids)
    if byteorder == "big":
        words.byteswap()
    return zlib.crc32(words.tobytes(), so_far)


def to_duration(seconds: float) -> Duration:
    """Seconds (>= 0) as a protobuf Duration."""
    whole = math.floor(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def to_seconds(duration: Duration) -> float:
    """A protobuf Duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def shortened(violations: Sequence[FieldViolation]) -> list[FieldViolation]:
    """At most 16 violations and 2 KiB of text; the last one then says how many were left out."""
    kept: list[FieldViolation] = []
    size = 0
    for index, violation in enumerate(violations):
        short = FieldViolation(
            _cut(violation.field, _MAX_FIELD_BYTES), _cut(violation.description, _MAX_DESCRIPTION_BYTES)
        )
        size += len(short.field.encode()) + len(short.description.encode())
        if index == _MAX_VIOLATIONS or size > _MAX_DETAIL_BYTES:
            kept.append(FieldViolation("", f"and {len(violations) - index} more"))
            break
        kept.append(short)
    return kept


def to_status(error: DraftwireError) -> rpc_status._Status:
    """The gRPC status of an error, with ErrorInfo, BadRequest and RetryInfo as they apply."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata={key: _cut(value, _MAX_FIELD_BYTES) for key, value in error.metadata.items()},
    )
    details = [_packed(info)]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in shortened(error.violations):
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(_packed(bad))
    if error.retry_after_s is not None:
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=to_duration(error.retry_after_s))))
    number = code_pb2.Code.Value(error.code.name)
    status = status_pb2.Status(code=number, message=_cut(error.message, _MAX_MESSAGE_BYTES), details=details)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> DraftwireError:
    """The typed error behind a failed call, with whatever details arrived."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    text = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or str(code.name)
    reason: str | None = None
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    violations: list[FieldViolation] = []
    for detail in _details(error):
        # One that cannot be read is left out: the code still tells.
        with suppress(DecodeError):
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest()
                detail.Unpack(bad)
                violations = [FieldViolation(v.field, v.description) for v in bad.field_violations]
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after_s = to_seconds(retry.retry_delay)
    cls = error_class(code)
    if cls is DraftwireError:
        reason = reason or code.name
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and reason is None:
        # gRPC itself refuses a message by its size, on either side, before any code of ours; it has no details.
        reason = "MESSAGE_TOO_LARGE" if "message larger than max" in text else "RESOURCE_EXHAUSTED"
    return cls(text, reason=reason, metadata=metadata, retry_after_s=retry_after_s, violations=violations)


def invalid(field: str, description: str, *, reason: str | None = None) -> InvalidRequest:
    """The error for a single bad field."""
    return InvalidRequest(f"{field}: {description}", reason=reason, violations=[FieldViolation(field, description)])


def _cut(text: str, most: int) -> str:
    """The text's beginning of at most so many bytes of UTF-8, without a part of a character."""
    return text.encode("utf-8", errors="replace")[:most].decode("utf-8", errors="ignore")


def _packed(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> AnyProto:
    packed = AnyProto()
    packed.Pack(message)
    return packed


def _details(error: grpc.RpcError) -> Sequence[AnyProto]:
    """The google.rpc details of a failed call. A status that a proxy mangled has none: the code still tells."""
    for key, value in _trailing_metadata(error):
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []


def _trailing_metadata(error: grpc.RpcError) -> list[tuple[str, str | bytes]]:
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return []
    return [(str(key), value) for key, value in (error.trailing_metadata() or ())]
