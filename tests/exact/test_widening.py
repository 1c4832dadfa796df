"""A pool grows layer by layer while a long prompt is read, and its rows say the same all the while."""

from __future__ import annotations

import asyncio

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_ragged import make, prompt, thread

from draftwire.compute import ComputeThread
from draftwire.ragged import CAPACITY_STEP, PoolRow, RaggedPool, flat, prefill_caches
from target_service.batch_engine import BatchEngine
from target_service.batch_probe import make_engine
from target_service.params import Choosing
from target_service.window import Window

pytestmark = pytest.mark.exact


def test_a_pool_widens_layer_by_layer_and_nobody_notices() -> None:
    """Rows read the same while some layers are wide already, whoever joins or leaves meanwhile; then the capacity is there."""
    loaded = make("llama", {"num_hidden_layers": 4})
    pool = RaggedPool(make_prompt_cache(loaded.model))
    texts = {number: prompt(number, length) for number, length in enumerate((30, 12, 50))}
    rows: dict[int, PoolRow] = {}

    def join(number: int) -> None:
        caches = prefill_caches(make_prompt_cache(loaded.model))
        loaded.model(mx.array([texts[number]]), cache=caches)
        rows[number] = pool.join(caches, len(texts[number]))

    def check(token: int) -> None:
        pool.begin(1)
        logits = loaded.model(mx.array([[token]] * pool.slots), cache=pool.layers)
        for number, row in rows.items():
            alone = make_prompt_cache(loaded.model)
            loaded.model(mx.array([texts[number]]), cache=alone)
            expected = loaded.model(mx.array([[token]]), cache=alone)
            assert mx.allclose(logits[row.index], expected[0], rtol=0, atol=1e-4).item()
            pool.written(row, 1)
            texts[number] = [*texts[number], token]

    join(0)
    join(1)
    check(5)
    pool.coming_positions = 900
    for tick in range(8):
        assert pool.capacity == CAPACITY_STEP
        pool.widen()
        if tick == 0:
            pool.leave(rows.pop(0))
        if tick == 1:
            join(2)  # takes the free row
        if tick == 2:
            pool.compact(1)  # cuts what was wide
            assert {layer.positions for layer in flat(pool.layers)} == {CAPACITY_STEP}
            pool.widen()
            pool.widen()
            pool.widen()
        check(6 + tick)
    assert pool.capacity == 4 * CAPACITY_STEP == pool.layers[0].positions
    arrays = [layer.keys for layer in flat(pool.layers)]
    pool.widen()
    pool.reserve(2, 950)
    assert all(layer.keys is array for layer, array in zip(flat(pool.layers), arrays, strict=True))
    check(11)


def test_a_wide_layer_stays_wide_when_slots_are_added() -> None:
    loaded = make("llama", {"num_hidden_layers": 2})
    pool = RaggedPool(make_prompt_cache(loaded.model))
    for number in range(3):
        caches = prefill_caches(make_prompt_cache(loaded.model))
        loaded.model(mx.array([prompt(number, 9)]), cache=caches)
        pool.join(caches, 9)
        pool.coming_positions = 600
        if number == 0:
            pool.widen()
            pool.widen()
    assert pool.slots > 1
    assert [layer.positions for layer in flat(pool.layers)] == [3 * CAPACITY_STEP, CAPACITY_STEP]


def test_room_for_a_long_prompt_is_made_while_it_is_read() -> None:
    """Half a layer a round: nobody waits for all of them when it joins. A prompt that goes away takes its room along."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {"num_hidden_layers": 3}))
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        short = await engine.open(Choosing())
        await engine.prefill(short, prompt(0, 9))
        long = await engine.open(Choosing(), positions=700)

        async def tick(step: int, chunks: dict[int, list[int]]) -> None:
            # Not ahead, as the scheduler has it while somebody reads.
            window = Window(slot=short, pending=7, first_step=step, drafts=(), ahead=False)
            await engine.forward([window], chunks)
            assert (engine.made_room_s > 0) is bool(chunks)
            engine.truncate(short, 10 + step)

        async def capacity() -> int:
            return await compute.run(lambda: engine._pool.capacity)

        for step in range(6):
            assert await capacity() == (0 if step == 0 else CAPACITY_STEP)
            await tick(step, {long: [5]})
        assert await capacity() == 3 * CAPACITY_STEP
        engine.close(long)
        for step in range(6, 70):
            await tick(step, {})
        assert await capacity() == CAPACITY_STEP
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))
