"""Keys: a block's key names its ids and everything before them, and whose they are. Pure."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

BLOCK: Final = 32
"""Positions of a block. Measured: see docs/adr/0401."""


def namespace(parts: Mapping[str, Any]) -> bytes:
    """The digest of what stored rows depend on beside the ids: model, cache format, numerics."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).digest()


def root_key(base: bytes, *, owner: str, salt: str) -> bytes:
    """Where a tenant's prefixes begin: equal only for equal owner and salt, "" being one of them."""
    return hashlib.sha256(base + json.dumps([owner, salt]).encode()).digest()


def block_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of the block with these ids after the one with key `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(ids)}I", *ids)).digest()


def state_key(block: bytes) -> bytes:
    """The key of the state at a block's end. Its length differs from that of any block's preimage."""
    return hashlib.sha256(block + b"state").digest()
