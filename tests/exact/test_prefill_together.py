"""Short prompts that are read in one forward have the caches, to the bit, that each has alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftwire.caches import SequenceCache
from draftwire.compute import ComputeThread
from draftwire.ragged import flat
from draftwire.testing_models import TinyKind, make_tiny_model
from target_service.batch_engine import BatchEngine
from target_service.params import Choosing
from target_service.scheduler import SHORT_PREFILL, short_rests
from target_service.window import Window

PROMPTS = [[(7 * number + 3 * place) % 256 for place in range(length)] for number, length in enumerate((1, 5, 64, 33))]
pytestmark = pytest.mark.exact


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("before", [0, 20], ids=["fresh", "after a chunk"])
async def test_company_leaves_no_trace_in_a_prompts_cache(kind: TinyKind, before: int) -> None:
    compute = ComputeThread()
    loaded = await compute.run(lambda: make_tiny_model(kind, seed=5, context_length=256, sliding_window=96))
    engine = BatchEngine(compute, loaded)
    del loaded
    await engine.prepare((1,))
    head = [9] * before

    async def caches(groups: Sequence[Sequence[list[int]]]) -> list[Any]:
        slots = []
        for group in groups:
            opened = [await engine.open(Choosing()) for _ in group]
            for slot in opened:
                if head:
                    await engine.prefill(slot, head)
            await engine.prefill_together(dict(zip(opened, group, strict=True)))
            slots += opened
        kept = [await engine.cached_rows(slot) for slot in slots]
        rows = await compute.run(lambda: [_rows(cache) for cache in kept])
        lengths = [cache.length for cache in kept]
        kept.clear()
        # And they still decode: the pool takes them over.
        windows = [Window(slot=slot, pending=1, drafts=(2, 3), first_step=0) for slot in slots]
        chosen = [choice.ids for choice in await engine.forward(windows)]
        for slot in slots:
            engine.close(slot)
        return [lengths, rows, chosen]

    lengths, rows, chosen = await caches([PROMPTS])
    assert lengths == [before + len(prompt) for prompt in PROMPTS]
    alone_lengths, alone_rows, alone_chosen = await caches([[prompt] for prompt in PROMPTS])
    assert (lengths, chosen) == (alone_lengths, alone_chosen)
    for own, other in zip(rows, alone_rows, strict=True):
        for one, two in zip(own, other, strict=True):
            np.testing.assert_array_equal(one, two)
    await engine.unload()
    await asyncio.to_thread(compute.close)


def _rows(cache: SequenceCache) -> list[np.ndarray[Any, Any]]:
    return [
        np.array(array[..., : cache.length, :].astype(mx.float32))
        for layer in flat(cache.layers)
        for array in (layer.keys, layer.values)
    ]


@dataclass(frozen=True, eq=False)
class Unread:
    """A sequence, as far as the choice of company goes."""

    unread: int


def rests(*unread: int, most_rows: int) -> list[int]:
    return list(short_rests([Unread(rows) for rows in unread], most_rows).values())  # type: ignore[arg-type]


def test_only_short_rests_share_a_forward_and_only_as_many_rows_as_a_chunk_may_have() -> None:
    assert rests(30, 20, 40, most_rows=512) == [30, 20, 40]
    assert rests(SHORT_PREFILL + 1, 20, most_rows=512) == []
    assert rests(20, SHORT_PREFILL + 1, 30, most_rows=512) == [20, 30]
    assert rests(100, 100, 10, most_rows=256) == [100, 100]
    assert rests(40, most_rows=32) == []
