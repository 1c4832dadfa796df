"""A pool grows layer by layer while a long prompt is read, and its rows say the same all the while."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_ragged import make, prompt, thread

from draftwire.compute import ComputeThread
from draftwire.ragged import CAPACITY_STEP, PoolRow, RaggedPool, flat, grow_in_turn, prefill_caches
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


def test_slots_for_who_is_coming_are_there_before_layers_widen() -> None:
    """Added later, they would copy every layer that is wide already."""
    loaded = make("llama", {"num_hidden_layers": 2})
    pool = RaggedPool(make_prompt_cache(loaded.model))
    caches = prefill_caches(make_prompt_cache(loaded.model))
    loaded.model(mx.array([prompt(0, 9)]), cache=caches)
    row = pool.join(caches, 9)
    pool.coming, pool.coming_positions = 3, 600
    seen = []
    while pool.widen():
        seen.append((pool.slots, [layer.positions for layer in flat(pool.layers)]))
        assert pool.rows == [row]
    narrow, wide = CAPACITY_STEP, 3 * CAPACITY_STEP
    assert seen == [
        (3, [narrow, narrow]),
        (3, [narrow, narrow]),
        (3, [wide, narrow]),
        (3, [wide, narrow]),
        (3, [wide, wide]),
    ]


def test_a_prompt_that_is_read_in_chunks_does_not_copy_all_its_layers_at_once() -> None:
    """Beside rows that wait for each chunk; and what is read is the same."""
    loaded = make("llama", {"num_hidden_layers": 8})
    ids = prompt(3, 200)
    own, plain = (prefill_caches(make_prompt_cache(loaded.model)) for _ in range(2))
    grown = []
    for begin in range(0, len(ids), 8):
        sizes = [0 if cache.keys is None else cache.keys.shape[2] for cache in own]
        grow_in_turn(own)
        for caches in (own, plain):
            loaded.model(mx.array([ids[begin : begin + 8]]), cache=caches)
        mx.eval([cache.keys for cache in (*own, *plain)])
        grown.append(sum(cache.keys.shape[2] != size for cache, size in zip(own, sizes, strict=True)))
    assert grown[0] == 8
    assert set(grown[1:]) == {0, 1}
    for cache, other in zip(own, plain, strict=True):
        assert mx.array_equal(cache.keys[:, :, :200], other.keys[:, :, :200]).item()
        assert mx.array_equal(cache.values[:, :, :200], other.values[:, :, :200]).item()


def test_a_forward_that_is_computed_while_it_is_built_is_the_same() -> None:
    loaded = make("llama", {"num_hidden_layers": 4})

    def logits(eager: bool) -> mx.array:
        pool = RaggedPool(make_prompt_cache(loaded.model))
        for number in range(3):
            caches = prefill_caches(make_prompt_cache(loaded.model))
            loaded.model(mx.array([prompt(number, 9 + number)]), cache=caches)
            pool.join(caches, 9 + number)
        pool.eager = eager
        pool.begin(4)
        found: mx.array = loaded.model(mx.array([[5, 6, 7, 8]] * pool.slots), cache=pool.layers)
        return found

    assert mx.array_equal(logits(True), logits(False)).item()


def test_a_forward_takes_as_long_as_it_computes_also_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of prompts is reckoned with it."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {"num_hidden_layers": 2}))
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        slot = await engine.open(Choosing())
        await engine.prefill(slot, prompt(1, 9))
        built = engine._logits_beside

        def slowly(*args: Any) -> mx.array:
            time.sleep(0.05)
            return built(*args)

        monkeypatch.setattr(engine, "_logits_beside", slowly)
        (choice,) = await engine.forward([Window(slot=slot, pending=3, first_step=0)])
        assert choice.forward_s >= 0.05
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


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
