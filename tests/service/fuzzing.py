"""Random messages of any type, made from their descriptors, and bytes that are nearly one."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_DEPTH = 4
_FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e38, float("inf"), float("-inf"), float("nan")]),
    st.floats(width=32),
)
_TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "\x00", "a" * 300, "\ud7ff", "\U0001f600" * 40, "é\u0301", "<|im_end|>", "{", "[0-9]+", "%s%n{0}"]
    ),
    st.text(max_size=24),
)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = sorted(
        {
            value
            for value in (low, low + 1, -1, 0, 1, 2, 64, 255, 256, 259, 1024, high - 1, high)
            if low <= value <= high
        }
    )
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integers(0, 2**64 - 1),
}


def message_class(descriptor: Descriptor) -> type[Message]:
    """The generated class of a message type."""
    found: type[Message] = message_factory.GetMessageClass(descriptor)
    return found


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = _DEPTH) -> Message:
    """A message of this type with some of its fields set, in range of their types and of nothing else."""
    message = message_class(descriptor)()
    names = [field.name for field in descriptor.fields]
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=6)) if names else ():
        _set(draw, message, descriptor.fields_by_name[name], depth)
    return message


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        _fill_map(draw, getattr(message, field.name), entry, depth)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(draw(st.sampled_from([1, 2, 5, 20]))):
            if entry is None:
                values.append(draw(_scalar(field)))
            elif depth:
                values.append(draw(messages(entry, depth - 1)))
    elif entry is not None:
        if depth:
            getattr(message, field.name).CopyFrom(draw(messages(entry, depth - 1)))
    else:
        setattr(message, field.name, draw(_scalar(field)))


def _fill_map(draw: st.DrawFn, values: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(draw(st.sampled_from([1, 3]))):
        if value.message_type is None:
            values[draw(_scalar(key))] = draw(_scalar(value))
        elif depth:
            values[draw(_scalar(key))].CopyFrom(draw(messages(value.message_type, depth - 1)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        return _INTEGERS[kind]
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return _FLOATS
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, 99, -1])
    return st.binary(max_size=16) if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS


@st.composite
def mutations(draw: st.DrawFn, valid: bytes) -> bytes:
    """The bytes of a valid message with a few of them changed, cut out, put in, or the end cut off."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "end"])):
            case "flip" if data:
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[place : place + draw(st.integers(1, 4))]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=4))
            case _:
                del data[place:]
    return bytes(data)
