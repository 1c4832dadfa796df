"""Errors through a real server and back, durations, and the prefix hash."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from draftwire.errors import (
    ERROR_CLASSES,
    DraftwireError,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from draftwire.interceptor import abort
from draftwire.wire import from_rpc_error, invalid, prefix_hash, shortened, to_duration, to_seconds, to_status

GOLDEN_123 = 0xB0E02293
METHOD = "/test.Test/Fail"
OPTIONS = [("grpc.enable_http_proxy", 0)]


def call_of(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The method as it is called without generated stubs: bytes in, bytes out."""
    return channel.unary_unary(METHOD)


class Failing:
    """A server whose one method ends with the error that stands in `error`."""

    def __init__(self) -> None:
        self.error: Exception = DraftwireError("nothing set")
        self.address = ""

    async def fail(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, self.error, METHOD)

    async def caught(self, error: Exception) -> DraftwireError:
        """The error as an asyncio client gets it."""
        self.error = error
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await call_of(channel)(b"")
        return from_rpc_error(caught.value)

    async def caught_blocking(self, error: Exception) -> DraftwireError:
        """The error as a blocking client gets it."""
        self.error = error

        def call() -> grpc.RpcError:
            with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    call_of(channel)(b"")
                return caught.value

        return from_rpc_error(await asyncio.to_thread(call))


@pytest.fixture
async def failing() -> AsyncIterator[Failing]:
    behaviour = Failing()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers: dict[str, Any] = {"Fail": grpc.unary_unary_rpc_method_handler(behaviour.fail)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    behaviour.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield behaviour
    await server.stop(None)


def same(found: DraftwireError, sent: DraftwireError) -> None:
    assert type(found) is type(sent)
    assert found.message == sent.message
    assert found.reason == sent.reason
    assert found.metadata == sent.metadata
    assert found.retry_after_s == sent.retry_after_s
    assert found.violations == sent.violations


@pytest.mark.parametrize("cls", [*ERROR_CLASSES, DraftwireError])
async def test_each_class_comes_back_with_all_it_carries(failing: Failing, cls: type[DraftwireError]) -> None:
    violations = [FieldViolation("sampling.top_p", "is 2, must lie in (0, 1]"), FieldViolation("chat", "naïve 你好")]
    # A fault of ours goes out as it is only with the id under which the log explains it.
    metadata = {"a": "1", "error_id": "7"}
    full = cls("two\nlines, ü", reason="SPECIAL", metadata=metadata, retry_after_s=1.25, violations=violations)
    for sent in (full, cls("short", metadata={"error_id": "8"})):
        same(await failing.caught(sent), sent)
        same(await failing.caught_blocking(sent), sent)


async def test_many_violations_arrive_shortened_and_keep_their_code(failing: Failing) -> None:
    """Kind of fault: details beyond 8 KiB of metadata turn INVALID_ARGUMENT into RESOURCE_EXHAUSTED."""
    sent = InvalidRequest("bad", violations=[FieldViolation(f"token_ids.ids[{i}]", "x" * 90) for i in range(150)])
    found = await failing.caught(sent)
    assert isinstance(found, InvalidRequest)
    assert found.violations[:16] == sent.violations[:16]
    assert found.violations[16:] == (FieldViolation("", "and 134 more"),)


@pytest.mark.parametrize("char", ["x", "ü", "模", "😀", "\n", "\x00"])
@pytest.mark.parametrize("count", [1, 150])
async def test_no_text_is_long_enough_to_lose_the_code(failing: Failing, char: str, count: int) -> None:
    """Kind of fault: a long message is percent-encoded to three bytes a byte, and again does not fit."""
    text = char * 10_000
    sent = NotFound(
        text, reason="MODEL_UNKNOWN", metadata={"name": text}, violations=[FieldViolation(text, text)] * count
    )
    found = await failing.caught(sent)
    assert isinstance(found, NotFound)
    assert found.reason == "MODEL_UNKNOWN"
    assert text.startswith(found.message)
    assert len(found.message) > 100
    assert len(found.violations[0].description) > 100


async def test_unexpected_errors_say_nothing_but_an_id(failing: Failing) -> None:
    found = await failing.caught(KeyError("secret path"))
    assert isinstance(found, InternalError)
    assert "secret" not in str(found)
    assert found.metadata["error_id"] in found.message


async def test_our_own_faults_say_nothing_but_an_id_and_a_reason(failing: Failing) -> None:
    found = await failing.caught(InternalError("secret path", reason="LOGITS_NOT_FINITE"))
    assert isinstance(found, InternalError)
    assert found.reason == "LOGITS_NOT_FINITE"
    assert "secret" not in str(found)
    assert found.metadata["error_id"] in found.message


async def test_an_unreachable_server_is_a_typed_error_too() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=OPTIONS) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await call_of(channel)(b"", timeout=10)
    found = from_rpc_error(caught.value)
    assert found.code is grpc.StatusCode.UNAVAILABLE
    assert found.reason == found.default_reason
    assert found.message


def test_an_error_that_is_no_call_is_unknown() -> None:
    found = from_rpc_error(grpc.RpcError())
    assert type(found) is DraftwireError
    assert found.reason == "UNKNOWN"


class Mangled(grpc.RpcError, grpc.Call):
    """What is left of a status after a proxy has damaged its details."""

    def __init__(self, details: bytes | str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> Any:
        return None

    def trailing_metadata(self) -> Any:
        return (("other", "x"), ("grpc-status-details-bin", self._details))

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> Any:
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Any) -> bool:
        return False


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b"", "text"])
def test_damaged_details_leave_the_code(details: bytes | str) -> None:
    found = from_rpc_error(Mangled(details))
    assert isinstance(found, Overloaded)
    assert found.message == "RESOURCE_EXHAUSTED"
    assert found.violations == ()


def test_statuses_carry_a_retry_delay_only_where_there_is_one() -> None:
    def size(error: DraftwireError) -> int:
        return len(dict(to_status(error).trailing_metadata or ())["grpc-status-details-bin"])

    assert size(Overloaded("full", retry_after_s=1.0)) > size(Overloaded("full"))


def test_invalid_names_its_one_field() -> None:
    error = invalid("stopping.max_tokens", "is 0, must be at least 1")
    assert error.violations == (FieldViolation("stopping.max_tokens", "is 0, must be at least 1"),)
    assert "stopping.max_tokens" in error.message


@given(st.lists(st.builds(FieldViolation, st.text(max_size=300), st.text(max_size=700)), max_size=40))
def test_shortened_is_small_and_says_what_is_missing(violations: list[FieldViolation]) -> None:
    kept = shortened(violations)
    assert len(kept) <= 17
    assert sum(len(v.field.encode()) + len(v.description.encode()) for v in kept) <= 2048 + 20
    if violations:
        assert kept[0].field == "" or violations[0].field.startswith(kept[0].field)
        assert violations[0].description.startswith(kept[0].description)
    if len(kept) < len(violations):
        assert kept[-1] == FieldViolation("", f"and {len(violations) - len(kept) + 1} more")


@given(st.floats(0, 1e9))
def test_durations_come_back(seconds: float) -> None:
    duration = to_duration(seconds)
    assert 0 <= duration.nanos < 1_000_000_000
    assert to_seconds(duration) == pytest.approx(seconds, abs=2e-9, rel=1e-12)


def test_durations_at_their_edges() -> None:
    assert to_duration(0.0) == Duration()
    assert to_duration(0.9999999999) == Duration(nanos=999_999_999)
    assert to_duration(2.5) == Duration(seconds=2, nanos=500_000_000)


IDS = st.integers(0, 2**32 - 1)


@given(st.lists(IDS, max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_the_prefix_hash_in_parts_is_the_hash_of_the_whole(ids: list[int], places: list[int]) -> None:
    digest, begin = 0, 0
    for end in [*sorted(min(place, len(ids)) for place in places), len(ids)]:
        digest = prefix_hash(ids[begin:end], digest)
        begin = end
    assert digest == prefix_hash(ids) == zlib.crc32(struct.pack(f"<{len(ids)}I", *ids))


def test_the_prefix_hash_has_golden_values_for_other_languages() -> None:
    assert prefix_hash([]) == 0
    assert prefix_hash([0]) == 0x2144DF1C
    assert prefix_hash([1, 2, 3]) == GOLDEN_123
    assert prefix_hash([2**32 - 1]) == 0xFFFFFFFF
    assert prefix_hash([3], prefix_hash([1, 2])) == GOLDEN_123
    assert prefix_hash([3, 2, 1]) != GOLDEN_123


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_are_not_32_bit_are_not_hashed(token: int) -> None:
    with pytest.raises(OverflowError):
        prefix_hash([token])
