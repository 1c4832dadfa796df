"""Prompts that are read in the forward of other sequences' windows: neither leaves a trace in the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_ragged import FAMILIES, VOCAB, alone, make, prompt, thread

from draftwire.beside import forward_beside, teach
from draftwire.compute import ComputeThread
from draftwire.ragged import flat, prefill_caches
from draftwire.ragged_probe import learn_beside
from target_service.accept import accept
from target_service.batch_probe import make_engine
from target_service.engine import CacheLost, Engine
from target_service.params import Choosing
from target_service.window import Window

pytestmark = pytest.mark.exact

PROMPTS = [prompt(number, length) for number, length in enumerate((1, 12, 90, 5, 40))]
CHUNK = 9


async def beside(engine: Engine, truths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Decodes all; number n arrives at tick n and reads its prompt beside the windows of those who are further, two at once."""
    made: list[list[int]] = [[] for _ in PROMPTS]
    read = [0] * len(PROMPTS)
    slots: dict[int, int] = {}
    tick = shared = 0
    while any(len(own) < len(truth) for own, truth in zip(made, truths, strict=True)):
        if tick < len(PROMPTS):
            slots[tick] = await engine.open(Choosing())
        chunks: dict[int, list[int]] = {}
        windows: list[tuple[int, Window]] = []
        for number, slot in slots.items():
            own, truth = made[number], truths[number]
            rest = PROMPTS[number][read[number] : -1]
            if rest:
                if len(chunks) < 2:
                    chunks[slot] = rest[:CHUNK]
                    read[number] += len(chunks[slot])
                continue
            right = list(truth[len(own) : len(own) + 3])[: len(truth) - len(own) - 1]
            drafts = ([], right, [(one + 1) % VOCAB for one in right])[(tick + number) % 3]
            pending = own[-1] if own else PROMPTS[number][-1]
            window = Window(slot=slot, pending=pending, drafts=tuple(drafts), first_step=len(own), ahead=not drafts)
            windows.append((number, window))
        if not windows:
            await engine.prefill_together(chunks)
        else:
            shared += bool(chunks)
            choices = await engine.forward([window for _, window in windows], chunks)
            for (number, window), choice in zip(windows, choices, strict=True):
                made[number] += accept(window.drafts, choice.ids).ids
                engine.truncate(window.slot, len(PROMPTS[number]) - 1 + len(made[number]))
                if len(made[number]) >= len(truths[number]):
                    engine.close(slots.pop(number))
        tick += 1
    assert shared > 8
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_beside_windows_change_nothing(family: str) -> None:
    """Every family that batches learns it."""
    module_name, extra = FAMILIES[family]

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make(module_name, extra))
        truths = await compute.run(
            lambda: [alone(loaded.model, ids, 24 - number) for number, ids in enumerate(PROMPTS)]
        )
        engine = await make_engine(compute, loaded, "auto")
        loaded = replace(loaded, model=None)
        await engine.prepare((1, 3))
        assert engine.reads_beside
        assert sorted(engine.beside_costs) == [8, 24, 56]
        assert await beside(engine, truths) == truths
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_a_prompt_read_beside_windows_has_the_rows_of_one_read_alone(family: str) -> None:
    """To the bit with the reference BLAS, after chunks of any size, whether others have drafts or leave."""
    module_name, extra = FAMILIES[family]

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make(module_name, extra))
        engine = await make_engine(compute, loaded, "auto")
        loaded = replace(loaded, model=None)
        await engine.prepare((1,))
        others = []
        for number in range(3):
            others.append(await engine.open(Choosing()))
            await engine.prefill(others[-1], prompt(number, 20))
        text = prompt(9, 80)
        slot = await engine.open(Choosing())
        begin = 0
        for step, size in enumerate((1, 7, 30, 2, 40)):
            windows = [
                Window(slot=other, pending=3, drafts=(5,) * (step % 3), first_step=step)
                for other in others[step // 3 :]
            ]
            await engine.forward(windows, {slot: text[begin : begin + size]})
            for window in windows:
                engine.truncate(window.slot, 20 + step + 1)
            begin += size
        assert begin == len(text)
        reference = await engine.open(Choosing())
        await engine.prefill(reference, text)
        kept = [await engine.cached_rows(slot), await engine.cached_rows(reference)]
        assert [cache.length for cache in kept] == [len(text)] * 2
        found, expected = await compute.run(lambda: [_rows(cache.layers) for cache in kept])
        for one, same in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, same)
        kept.clear()
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def _rows(layers: Sequence[Any]) -> list[Any]:
    return [
        np.array(array[..., : layer.offset, :].astype(mx.float32))
        for layer in flat(layers)
        for array in (layer.keys, layer.values)
    ]


def test_a_forward_that_fails_loses_the_prompts_beside_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on from a cache that may hold anything."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = await make_engine(compute, loaded, "auto")
        loaded = replace(loaded, model=None)
        await engine.prepare((1,))
        decoding, reading = await engine.open(Choosing()), await engine.open(Choosing())
        await engine.prefill(decoding, [1, 2])
        window = Window(slot=decoding, pending=3, first_step=0)

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("a kernel")

        with monkeypatch.context() as patch:
            patch.setattr("target_service.batch_engine.forward_beside", fails)
            with pytest.raises(RuntimeError, match="a kernel"):
                await engine.forward([window], {reading: [4, 5]})
        assert not engine.intact(decoding)
        assert not engine.intact(reading)
        with pytest.raises(CacheLost):
            await engine.forward([window], {reading: [4, 5]})
        for slot in (decoding, reading):
            await engine.reopen(slot)
        await engine.prefill(decoding, [1, 2])
        assert len(await engine.forward([window], {reading: [4, 5]})) == 1
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


@pytest.mark.parametrize(("family", "calls"), [("llama", 1), ("gemma3", 1), ("cohere2", 1), ("deepseek_v3", 3)])
def test_attention_s_weights_are_read_once_for_all_segments(
    family: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention, whose products lie between projections and attention, takes a call a segment."""
    module_name, extra = FAMILIES[family]
    loaded = make(module_name, extra)
    assert learn_beside(loaded) == ""
    attention = loaded.model.layers[0].self_attn
    projection = attention.o_proj
    seen: list[int] = []

    class Counted(type(projection)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> Any:
            seen.append(x.shape[0] * x.shape[1])
            return super().__call__(x)

    monkeypatch.setattr(projection, "__class__", Counted)
    pool, own, chunk = (prefill_caches(make_prompt_cache(loaded.model)) for _ in range(3))
    logits = forward_beside(loaded.model, mx.array([[1, 2], [3, 4]]), [(1, pool), (1, own)], [([5, 6, 7], chunk)])
    mx.eval(logits)
    assert (len(seen), sum(seen)) == (calls, 7)
    assert logits.shape[:2] == (2, 2)


def test_a_model_that_cannot_learn_it_is_left_as_it_was() -> None:
    loaded = make("llama", {})
    kinds = [type(layer.self_attn) for layer in loaded.model.layers]
    untaught = teach(loaded.model, once=True)
    assert [type(layer.self_attn) for layer in loaded.model.layers] != kinds
    untaught()
    assert [type(layer.self_attn) for layer in loaded.model.layers] == kinds

    for layer in loaded.model.layers:
        layer.input_layernorm = _Mean(layer.input_layernorm)
    assert "differs from one alone by" in learn_beside(loaded)
    assert [type(layer.self_attn) for layer in loaded.model.layers] == kinds

    class Blind:
        layers = (object(),)

    assert learn_beside(replace(loaded, model=Blind())) == "its layers have no self_attn"


class _Mean:
    """A norm through which positions of a forward see one another, as no language model's may."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, x: mx.array) -> mx.array:
        return self._norm(x) + 0.1 * mx.mean(x, axis=(0, 1), keepdims=True)  # type: ignore[no-any-return]
