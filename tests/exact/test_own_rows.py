"""A sequence too long for the pool decodes beside it, in caches of its own, and is the sequence alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_beside import PROMPTS, beside
from test_ragged import FAMILIES, alone, make, prompt, thread, together

from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.own_row import OwnRow, grow_in_turn
from draftwire.ragged import CAPACITY_STEP, RaggedPool, flat, prefill_caches
from target_service import batch_engine
from target_service.batch_engine import BatchEngine
from target_service.batch_probe import make_engine
from target_service.params import Choosing
from target_service.window import Window

pytestmark = pytest.mark.exact


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A pool that nobody longer than a few tokens joins. Gives the lengths of those who stayed beside it."""
    lengths: list[int] = []

    def own_row(cache: Any) -> OwnRow:
        lengths.append(cache.length)
        return OwnRow(cache)

    monkeypatch.setattr(batch_engine, "_MOST_COPIED", 30)
    monkeypatch.setattr("draftwire.ragged.CAPACITY_STEP", 16)
    monkeypatch.setattr(batch_engine, "OwnRow", own_row)
    return lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_beside_the_pool_is_the_family_alone(family: str, narrow: list[int]) -> None:
    """With right and wrong drafts, joining and leaving, prompts read beside both, and forwards begun ahead."""
    module_name, extra = FAMILIES[family]

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make(module_name, extra))
        truths = await compute.run(
            lambda: [alone(loaded.model, ids, 24 - number) for number, ids in enumerate(PROMPTS)]
        )
        engine = await make_engine(compute, loaded, "auto")
        loaded = replace(loaded, model=None)
        await engine.prepare((1, 3))
        narrow.clear()
        assert await beside(engine, truths) == truths
        assert {89, 39} <= set(narrow)
        assert await together(engine, PROMPTS, truths) == truths
        assert engine.slots == 0
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_rows_beside_the_pool_are_those_of_the_sequence_alone(narrow: list[int]) -> None:
    """L3: after right and wrong drafts, before and after a forward that was begun ahead, and for who keeps them."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {"num_hidden_layers": 3}))
        text, steps = prompt(4, 70), 9
        truth = await compute.run(lambda: alone(loaded.model, text, 3 * steps))
        expected = await compute.run(lambda: _rows(_read(loaded.model, [*text, *truth])))
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        narrow.clear()
        short, long = await engine.open(Choosing()), await engine.open(Choosing())
        await engine.prefill(short, prompt(0, 9))
        await engine.prefill(long, text[:-1])
        made: list[int] = []
        for step in range(steps):
            drafts = ((), tuple(truth[len(made) : len(made) + 2]), (1, 2))[step % 3]
            windows = [
                Window(slot=short, pending=7, first_step=step, ahead=not drafts),
                Window(
                    slot=long,
                    pending=[*text, *made][-1],
                    first_step=len(made),
                    drafts=drafts,
                    ahead=not drafts,
                ),
            ]
            choices = await engine.forward(windows)
            right = 0
            while right < len(drafts) and drafts[right] == choices[1].ids[right]:
                right += 1
            made += choices[1].ids[: right + 1]
            assert made == truth[: len(made)]
            length = len(text) - 1 + len(made)
            engine.truncate(short, 10 + step)
            engine.truncate(long, length)
            assert (long in engine.begun) is (not drafts)
            taken = await asyncio.wrap_future(engine.take(long, 0, length, block=length, state=False))
            assert taken is not None
            for array, rows in zip(taken.blocks[0], expected, strict=True):
                np.testing.assert_allclose(np.array(array), rows[:, :, :length], rtol=0, atol=1e-4)
            if step % 2:
                kept = await engine.cached_rows(long)
                found = await compute.run(partial(_rows, kept.layers))
                for array, rows in zip(found, expected, strict=True):
                    np.testing.assert_allclose(array, rows[:, :, :length], rtol=0, atol=1e-4)
        assert narrow == [69]
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def _read(model: Any, ids: list[int]) -> list[Any]:
    caches = make_prompt_cache(model)
    model(mx.array([ids]), cache=caches)
    return caches


def _rows(layers: list[Any]) -> list[Any]:
    return [np.array(array[..., : layer.offset, :]) for layer in flat(layers) for array in (layer.keys, layer.values)]


def test_a_long_sequence_makes_nobody_s_row_longer() -> None:
    """Neither while it is read, nor when it decodes, nor for who joins or is left alone with it."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {"num_hidden_layers": 3}))
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        shorts = [await engine.open(Choosing()) for _ in range(7)]
        for number, slot in enumerate(shorts):
            await engine.prefill(slot, prompt(number, 9))
        long = await engine.open(Choosing(), positions=900)
        extents: list[tuple[int, int]] = []

        async def tick(step: int, who: list[int], chunks: dict[int, list[int]]) -> None:
            windows = [Window(slot=slot, pending=7, first_step=step, drafts=(), ahead=not chunks) for slot in who]
            await engine.forward(windows, chunks)
            for slot in who:
                engine.truncate(slot, engine._slots[slot].keep + 1)
            extents.append(await compute.run(lambda: (engine._pool.slots, engine._pool.capacity)))

        for step in range(9):
            await tick(step, shorts, {long: [5] * 100})
        for step in range(9, 12):
            await tick(step, [*shorts, long], {})
        assert set(extents) == {(7, CAPACITY_STEP)}
        for slot in shorts:
            engine.close(slot)
        extents.clear()
        for step in range(12, 14):
            await tick(step, [long], {})
        assert set(extents) == {(0, 0)}
        assert long in engine.begun
        newcomer = await engine.open(Choosing())
        await engine.prefill(newcomer, prompt(3, 9))
        await tick(14, [newcomer, long], {})
        assert extents[-1] == (1, CAPACITY_STEP)
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_who_fits_into_the_pool_or_makes_a_small_one_joins_it() -> None:
    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        seats = []
        for length in (2000, 2100, 2040, 300, 4200):
            slot = await engine.open(Choosing())
            await engine.prefill(slot, prompt(1, length))
            await engine.forward([Window(slot=slot, pending=3, first_step=0)])
            seats.append(engine._slots[slot].own is None)
            engine.truncate(slot, length + 1)
        # 2,000 alone are few, and make 2,048, into which 2,040 and 300 fit; 2 x 2,100 would be too many to copy.
        assert seats == [True, False, True, True, False]
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_a_model_that_reads_nothing_beside_has_all_rows_in_the_pool() -> None:
    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = BatchEngine(compute, loaded)
        await engine.prepare((1,))
        slot = await engine.open(Choosing())
        await engine.prefill(slot, prompt(1, 5000))
        await engine.forward([Window(slot=slot, pending=3, first_step=0)])
        assert engine._slots[slot].own is None
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_a_forward_that_fails_loses_who_lies_beside_the_pool_too(
    narrow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on from arrays that a failed forward may have written, nor keeps them for later prompts."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = await make_engine(compute, loaded, "auto")
        await engine.prepare((1,))
        long = await engine.open(Choosing())
        await engine.prefill(long, prompt(1, 60))
        window = Window(slot=long, pending=3, first_step=0)
        await engine.forward([window])
        engine.truncate(long, 61)
        assert narrow[-1:] == [60]

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("a kernel")

        with monkeypatch.context() as patch:
            patch.setattr(batch_engine, "forward_beside", fails)
            with pytest.raises(RuntimeError, match="a kernel"):
                await engine.forward([replace(window, first_step=1)])
        assert not engine.intact(long)
        assert await asyncio.wrap_future(engine.take(long, 0, 60, block=60, state=False)) is None
        await engine.reopen(long)
        await engine.prefill(long, prompt(1, 60))
        assert len(await engine.forward([window])) == 1
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_more_than_it_has_cannot_be_kept(narrow: list[int]) -> None:
    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = await make_engine(compute, loaded, "auto")
        await engine.prepare((1,))
        long = await engine.open(Choosing())
        await engine.prefill(long, prompt(1, 60))
        await engine.forward([Window(slot=long, pending=3, first_step=0)])
        engine.truncate(long, 62)
        with pytest.raises(InternalError, match="cache has 61 positions, cannot keep 62"):
            await engine.forward([Window(slot=long, pending=3, first_step=1)])
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


@pytest.mark.parametrize("known", [0, 200])
@pytest.mark.parametrize("stored", [0, 40])
def test_a_prompt_that_is_read_in_chunks_does_not_copy_all_its_layers_at_once(known: int, stored: int) -> None:
    """Beside rows that wait for each chunk, also behind what was stored; and what is read is the same. Where its length is
    known, no layer is copied twice before its end."""
    loaded = make("llama", {"num_hidden_layers": 8})
    ids = prompt(3, 200)
    own, plain = (prefill_caches(make_prompt_cache(loaded.model)) for _ in range(2))
    if stored:
        for caches in (own, plain):
            loaded.model(mx.array([ids[:stored]]), cache=caches)
        for cache in own:
            # As the prefix cache gives them: no position to spare.
            cache.keys, cache.values = cache.keys[:, :, :stored], cache.values[:, :, :stored]
    grown, copies = [], [0] * len(own)
    for begin in range(stored, len(ids), 8):
        sizes = [0 if cache.keys is None else cache.keys.shape[2] for cache in own]
        grow_in_turn(own, known)
        for caches in (own, plain):
            loaded.model(mx.array([ids[begin : begin + 8]]), cache=caches)
        mx.eval([cache.keys for cache in (*own, *plain)])
        grew = [cache.keys.shape[2] != size for cache, size in zip(own, sizes, strict=True)]
        grown.append(sum(grew))
        copies = [count + one for count, one in zip(copies, grew, strict=True)]
    assert grown[0] == 8
    assert set(grown[1:]) == {0, 1}
    if known:
        assert max(copies) == 2
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


def test_a_pool_grows_before_it_must_and_nobody_notices() -> None:
    """A few layers a forward, where its rows will need it; also in forwards begun ahead, thrown away or not."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {"num_hidden_layers": 40}))
        length, steps = CAPACITY_STEP - 70, 80
        texts = [prompt(number, length - number) for number in range(2)]
        truths = await compute.run(lambda: [alone(loaded.model, text, steps) for text in texts])
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        slots = [await engine.open(Choosing(), positions=length, most=length + steps) for _ in texts]
        for slot, text in zip(slots, texts, strict=True):
            await engine.prefill(slot, text[:-1])
        stretched = []
        for step in range(steps):
            # Each third forward begun ahead is thrown away.
            windows = [
                Window(
                    slot=slot,
                    pending=[*text, *truth[:step]][-1],
                    first_step=step,
                    ahead=step % 3 > 0,
                    drafts=(1,) if step % 3 == 1 else (),
                )
                for slot, text, truth in zip(slots, texts, truths, strict=True)
            ]
            choices = await engine.forward([replace(window, ahead=not window.drafts) for window in windows])
            assert [choice.ids[0] for choice in choices] == [truth[step] for truth in truths]
            for slot, text in zip(slots, texts, strict=True):
                engine.truncate(slot, len(text) + step)
            sizes = await compute.run(lambda: [layer.positions for layer in flat(engine._pool.layers)])
            assert engine._pool.capacity == min(sizes)
            stretched.append(sum(size > CAPACITY_STEP for size in sizes))
        growth = [after - before for before, after in pairwise(stretched)]
        assert stretched[0] == 0
        assert stretched[-1] == 40
        assert max(growth) <= 4
        for slot in slots:
            engine.close(slot)
        short = await engine.open(Choosing(), positions=length, most=CAPACITY_STEP)
        await engine.prefill(short, texts[0])
        for step in range(40):
            await engine.forward([Window(slot=short, pending=3, first_step=step)])
            engine.truncate(short, len(texts[0]) + 1 + step)
        assert await compute.run(lambda: engine._pool.layers[-1].positions) == CAPACITY_STEP
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))
