"""A block or a state as a safetensors file: everything in it is covered by a checksum. No mlx, for any thread.

Tensors are named r0, r1, ... (rows), s<leaf>.<array> (state) and ids; the metadata says what they are.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from target_service.prefix.layout import Array, LeafState
from target_service.prefix.memory import Block, Item, State

_FORMAT: Final = "draftwire-prefix-1"
_MARK: Final = b'"crc32":"'
_BLANK: Final = b"00000000"


class DamagedFile(ValueError):
    """The file is not what its name says; the message says how."""


def encode(item: Item) -> bytes:
    """The file's content."""
    about: dict[str, str] = {"format": _FORMAT, "key": item.key.hex(), "parent": item.parent.hex()}
    tensors: dict[str, Array]
    if isinstance(item, Block):
        about |= {"kind": "block", "begin": str(item.begin)}
        tensors = {f"r{index}": array for index, array in enumerate(item.rows)}
        tensors["ids"] = np.array(item.ids, np.uint32)
    else:
        leaves = [{"dtypes": leaf.dtypes, "numbers": leaf.numbers} for leaf in item.leaves]
        about |= {"kind": "state", "length": str(item.length), "lowest": str(item.lowest), "leaves": json.dumps(leaves)}
        tensors = {
            f"s{place}.{index}": np.ascontiguousarray(array)
            for place, leaf in enumerate(item.leaves)
            for index, array in enumerate(leaf.arrays)
            if array is not None
        }
        tensors["ids"] = np.zeros(0, np.uint32)
    content = bytearray(save(tensors, about | {"crc32": _BLANK.decode()}))
    at = _mark(content)
    content[at : at + len(_BLANK)] = f"{zlib.crc32(content):08x}".encode()
    return bytes(content)


def decode(content: bytes, key: bytes) -> Item:
    """The item with this key. Raises DamagedFile."""
    at = _mark(content)
    end = at + len(_BLANK)
    view = memoryview(content)
    found = zlib.crc32(view[end:], zlib.crc32(_BLANK, zlib.crc32(view[:at])))
    if content[at:end] != f"{found:08x}".encode():
        raise DamagedFile("its checksum does not agree")
    try:
        size = int.from_bytes(content[:8], "little")
        about: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
        if about["format"] != _FORMAT:
            raise DamagedFile(f"its format is {about['format']!r}")
        if about["key"] != key.hex():
            raise DamagedFile("it belongs to another prefix")
        return _item(about, load(content), key)
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(f"it cannot be read ({type(error).__name__})") from error


def _item(about: dict[str, str], tensors: dict[str, Array], key: bytes) -> Item:
    parent = bytes.fromhex(about["parent"])
    if about["kind"] == "block":
        ids = tuple(int(token) for token in tensors.pop("ids"))
        rows = tuple(tensors[f"r{index}"] for index in range(len(tensors)))
        return Block(key=key, parent=parent, begin=int(about["begin"]), ids=ids, rows=rows)
    described: list[dict[str, Any]] = json.loads(about["leaves"])
    leaves = tuple(
        LeafState(
            arrays=tuple(tensors[f"s{place}.{index}"] if dtype else None for index, dtype in enumerate(leaf["dtypes"])),
            dtypes=tuple(leaf["dtypes"]),
            numbers=tuple(leaf["numbers"]),
        )
        for place, leaf in enumerate(described)
    )
    return State(key=key, parent=parent, length=int(about["length"]), lowest=int(about["lowest"]), leaves=leaves)


def _mark(content: bytes | bytearray) -> int:
    """Where the checksum stands in the header. Raises DamagedFile."""
    size = int.from_bytes(content[:8], "little")
    at = content.find(_MARK, 8, min(len(content), 8 + size))
    if at < 0:
        raise DamagedFile("it is no file of the prefix cache")
    return at + len(_MARK)
