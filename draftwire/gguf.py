"""A small reader of GGUF files: metadata, tensor list, and weights as float32.

Layout (GGUF versions 2 and 3, little-endian): the magic, a version, two counts, the metadata pairs, one
record for each tensor, padding up to `general.alignment`, then the tensor data. Quantised kinds store blocks
of 32 weights; the formulas stand beside each decoder. The file is memory-mapped.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Value: TypeAlias = "bool | int | float | str | list[Value]"
Floats: TypeAlias = NDArray[np.float32]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_ARRAY_DEPTH: Final = 4
_MAX_DIMENSIONS: Final = 8
_SCALARS: Final[Mapping[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class GgufError(ValueError):
    """The file is not a GGUF file that this reader understands; the message names the file and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy has it; the file lists the fastest dimension first."""
    kind: str
    """Name of the storage type, for example "Q4_1"."""
    start: int
    """First byte, counted from the beginning of the file; the data is [start, start + stored_bytes)."""
    stored_bytes: int


def _f32(raw: NDArray[np.uint8]) -> Floats:
    return raw.view("<f4").reshape(-1).astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> Floats:
    return raw.view("<f2").reshape(-1).astype(np.float32)


def _bf16(raw: NDArray[np.uint8]) -> Floats:
    # bfloat16 is the upper half of a float32.
    return (raw.view("<u2").reshape(-1).astype(np.uint32) << 16).view(np.float32)


def _halves(column: NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> Floats:
    # Low nibbles are weights [0, 16) of the block, high nibbles are [16, 32).
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q4_0(raw: NDArray[np.uint8]) -> Floats:
    """w = scale * (q - 8); block: half scale, 16 bytes of nibbles."""
    return _halves(raw[:, :2]) * (_nibbles(raw[:, 2:]) - np.float32(8))


def _q4_1(raw: NDArray[np.uint8]) -> Floats:
    """w = scale * q + minimum; block: half scale, half minimum, 16 bytes of nibbles."""
    return _halves(raw[:, :2]) * _nibbles(raw[:, 4:]) + _halves(raw[:, 2:4])


def _q8_0(raw: NDArray[np.uint8]) -> Floats:
    """w = scale * q; block: half scale, 32 signed bytes."""
    return _halves(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    name: str
    block_weights: int
    block_bytes: int
    decode: Callable[[NDArray[np.uint8]], Floats]


_KINDS: Final[Mapping[int, _Kind]] = {
    0: _Kind(name="F32", block_weights=1, block_bytes=4, decode=_f32),
    1: _Kind(name="F16", block_weights=1, block_bytes=2, decode=_f16),
    2: _Kind(name="Q4_0", block_weights=32, block_bytes=18, decode=_q4_0),
    3: _Kind(name="Q4_1", block_weights=32, block_bytes=20, decode=_q4_1),
    8: _Kind(name="Q8_0", block_weights=32, block_bytes=34, decode=_q8_0),
    30: _Kind(name="BF16", block_weights=1, block_bytes=2, decode=_bf16),
}
_KIND_BY_NAME: Final[Mapping[str, _Kind]] = {kind.name: kind for kind in _KINDS.values()}


class _Cursor:
    """Reads forward through the bytes; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0
        self.size = len(data)

    def fail(self, fault: str) -> GgufError:
        return GgufError(f"{self._path}: {fault}")

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise self.fail(f"file is truncated: byte {end} is needed, {self.size} are there")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> int | float | bool:
        unpacked: int | float | bool = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]
        return unpacked

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        raw = self.take(self.integer("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, depth: int = 0) -> Value:
        return self._typed(self.integer("I"), depth)

    def _typed(self, code: int, depth: int) -> Value:
        if code == _STRING:
            return self.string()
        if code in _SCALARS:
            return self.scalar(_SCALARS[code])
        if code != _ARRAY:
            raise self.fail(f"unknown metadata type {code}")
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.fail("metadata arrays are nested too deeply")
        element, count = self.integer("I"), self.integer("Q")
        return [self._typed(element, depth + 1) for _ in range(count)]


class GgufFile:
    """An open GGUF file. Use it as a context manager, or call `close`. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError for a bad magic, version, type or a truncated file; OSError as `open` does."""
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC):
                raise GgufError(f"{path}: file is truncated: no room for the magic")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header(_Cursor(self._map, path))
        except BaseException:
            self._map.close()
            raise

    def _read_header(self, cursor: _Cursor) -> None:
        magic = cursor.take(4)
        if magic != _MAGIC:
            raise cursor.fail(f"not a GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
        version = cursor.integer("I")
        if version not in _VERSIONS:
            raise cursor.fail(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        tensor_count, pair_count = cursor.integer("Q"), cursor.integer("Q")
        self.version = version
        self.metadata: dict[str, Value] = {}
        for _ in range(pair_count):
            key = cursor.string()
            self.metadata[key] = cursor.value()
        records = [_read_record(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.fail(f"general.alignment is {alignment!r}, expected a positive integer")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {record[0]: _place(cursor, data_start, record) for record in records}

    def tensor(self, name: str) -> Floats:
        """The weights of one tensor: float32 of `tensors[name].shape`. Raises GgufError if there is none."""
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"{self.path}: there is no tensor {name!r}")
        kind = _KIND_BY_NAME[info.kind]
        raw = np.frombuffer(self._map[info.start : info.start + info.stored_bytes], dtype=np.uint8)
        return kind.decode(raw.reshape(-1, kind.block_bytes)).reshape(info.shape)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Record: TypeAlias = tuple[str, tuple[int, ...], int, int]
"""Name, shape, code of the storage type, offset from the start of the data."""


def _read_record(cursor: _Cursor) -> _Record:
    name = cursor.string()
    dimensions = cursor.integer("I")
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions, at most {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.integer("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.integer("I"), cursor.integer("Q")


def _place(cursor: _Cursor, data_start: int, record: _Record) -> TensorInfo:
    name, shape, code, offset = record
    kind = _KINDS.get(code)
    if kind is None:
        known = ", ".join(sorted(_KIND_BY_NAME))
        raise cursor.fail(f"tensor {name!r} has the unknown type {code}; known are {known}")
    columns = shape[-1] if shape else 1
    if columns % kind.block_weights:
        raise cursor.fail(f"tensor {name!r} has rows of {columns}, not a multiple of {kind.block_weights}")
    stored_bytes = math.prod(shape) // kind.block_weights * kind.block_bytes
    start = data_start + offset
    if start + stored_bytes > cursor.size:
        raise cursor.fail(f"file is truncated: tensor {name!r} ends at byte {start + stored_bytes}")
    return TensorInfo(name=name, shape=shape, kind=kind.name, start=start, stored_bytes=stored_bytes)
