"""Items of the prefix cache for tests, without a model."""

from __future__ import annotations

import numpy as np

from target_service.prefix.keys import BLOCK, block_key, namespace, root_key
from target_service.prefix.memory import Block

ROOT = root_key(namespace({"model": "m"}), owner="", salt="")


def blocks_of(ids: list[int], root: bytes = ROOT, dim: int = 4) -> list[Block]:
    """The path of a text; a row's values are its ids."""
    path: list[Block] = []
    key = root
    for at in range(0, len(ids), BLOCK):
        part = tuple(ids[at : at + BLOCK])
        parent, key = key, block_key(key, part)
        rows = np.broadcast_to(np.array(part, np.float32)[None, None, :, None], (1, 2, len(part), dim)).copy()
        path.append(Block(key=key, parent=parent, begin=at, ids=part, rows=(rows, -rows)))
    return path
