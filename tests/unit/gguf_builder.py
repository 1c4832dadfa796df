"""Writes small GGUF files by hand, field by field, independent of the reader under test."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """A metadata value behind its type code."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + string(value)
        case list():
            items = [typed(item) for item in value]
            code = items[0][:4] if items else struct.pack("<I", 4)
            return struct.pack("<I", 9) + code + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    raise TypeError(value)


def gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[Sequence[int], int, bytes]],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
) -> bytes:
    """tensors: name -> (shape with rows first, type code, stored bytes)."""
    out = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += string(key) + typed(value)
    data = b""
    for name, (shape, code, raw) in tensors.items():
        out += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", code, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return out + b"\0" * (-len(out) % 32) + data
