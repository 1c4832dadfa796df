from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import KINDS, gguf, string

from draftwire.gguf import GgufError, GgufFile


def half(value: float) -> bytes:
    return struct.pack("<e", value)


# Nibble i of the low half is i, of the high half 15 - i.
NIBBLES = bytes(i | (15 - i) << 4 for i in range(16))
LOW, HIGH = list(range(16)), list(range(15, -1, -1))


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def read_one(tmp_path: Path, kind: str, shape: tuple[int, ...], raw: bytes) -> list[Any]:
    path = write(tmp_path, gguf({}, {"w": (shape, KINDS[kind], raw)}))
    with GgufFile(path) as file:
        assert file.tensors["w"].kind == kind
        values = file.tensor("w")
    assert values.dtype == np.float32
    assert values.shape == shape
    return values.reshape(-1).tolist()


def test_f32_f16_and_bf16_keep_their_values(tmp_path: Path) -> None:
    values = [1.5, -2.25, 0.0, 1024.0, -0.0078125, 3.0]
    assert read_one(tmp_path, "F32", (2, 3), struct.pack("<6f", *values)) == values
    assert read_one(tmp_path, "F16", (3, 2), struct.pack("<6e", *values)) == values
    upper = b"".join(struct.pack("<f", value)[2:] for value in values)
    assert read_one(tmp_path, "BF16", (6,), upper) == values


def test_q4_0_is_scale_times_nibble_less_eight(tmp_path: Path) -> None:
    found = read_one(tmp_path, "Q4_0", (1, 32), half(0.5) + NIBBLES)
    assert found == [0.5 * (q - 8) for q in LOW + HIGH]


def test_q4_1_is_scale_times_nibble_plus_minimum(tmp_path: Path) -> None:
    raw = half(0.25) + half(-1.5) + NIBBLES + half(2.0) + half(3.0) + NIBBLES
    expected = [0.25 * q - 1.5 for q in LOW + HIGH] + [2.0 * q + 3.0 for q in LOW + HIGH]
    assert read_one(tmp_path, "Q4_1", (1, 64), raw) == expected


def test_q8_0_is_scale_times_signed_byte(tmp_path: Path) -> None:
    signed = [-128, -127, -1, 0, 1, 127, *range(26)]
    raw = half(0.125) + struct.pack("<32b", *signed)
    assert read_one(tmp_path, "Q8_0", (1, 32), raw) == [0.125 * q for q in signed]


def test_every_row_of_a_matrix_has_its_own_blocks(tmp_path: Path) -> None:
    raw = b"".join(half(scale) + struct.pack("<32b", *[1] * 32) for scale in (1.0, 2.0, 4.0))
    assert read_one(tmp_path, "Q8_0", (3, 32), raw) == [1.0] * 32 + [2.0] * 32 + [4.0] * 32


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_comes_back_as_it_was_written(tmp_path: Path, version: int) -> None:
    metadata = {"a": 7, "b": True, "c": 0.5, "d": "h\u00e9", "e": ["x", "", "y"], "f": [1, 2], "g": []}
    with GgufFile(write(tmp_path, gguf(metadata, {}, version=version))) as file:
        assert file.metadata == metadata
        assert file.version == version


def test_tensors_start_at_the_alignment_of_the_file(tmp_path: Path) -> None:
    raw = struct.pack("<2f", 1.0, 2.0)
    tensors = {"first": ((2,), 0, raw), "second": ((2,), 0, raw[::-1])}
    with GgufFile(write(tmp_path, gguf({"general.architecture": "llama"}, tensors))) as file:
        assert file.tensor("first").tolist() == [1.0, 2.0]
        assert file.tensors["second"].start - file.tensors["first"].start == 32


GOOD = gguf({"key": ["value", "other"]}, {"w": ((2, 32), KINDS["Q8_0"], bytes(68))})


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    # The last 28 bytes are padding behind the data.
    for length in range(len(GOOD) - 28):
        with pytest.raises(GgufError, match=r"model\.gguf: .*truncated"):
            GgufFile(write(tmp_path, GOOD[:length]))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (gguf({}, {}, magic=b"GGML"), "not a GGUF file"),
        (gguf({}, {}, version=1), "version 1 is not supported"),
        (gguf({}, {"w": ((1, 32), 14, bytes(64))}), "tensor 'w' has the unknown type 14"),
        (gguf({}, {"w": ((2, 16), KINDS["Q4_0"], bytes(18))}), "not a multiple of 32"),
        (gguf({}, {"w": ([1] * 9, 0, bytes(4))}), "9 dimensions"),
        (gguf({"general.alignment": 0}, {}), "general.alignment is 0"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 99),
            "unknown metadata type 99",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1),
            "not UTF-8",
        ),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(GgufError, match=fault):
        GgufFile(write(tmp_path, content))


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    nested = struct.pack("<I", 9) + (struct.pack("<IQ", 9, 1)) * 50
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + nested
    with pytest.raises(GgufError, match="nested too deeply"):
        GgufFile(write(tmp_path, content))


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path, gguf({}, {}))) as file, pytest.raises(GgufError, match="no tensor 'w'"):
        file.tensor("w")
