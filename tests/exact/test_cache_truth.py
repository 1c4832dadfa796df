"""L3: after every round each layer's cache is that of a fresh prefill of all committed ids but the pending one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from draftwire.caches import SequenceCache
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.rollback import Rollback
from draftwire.sampling import Sampler, host_ids
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model
from target_service.engine import Engine
from target_service.params import Choosing, Penalties
from target_service.window import Choice, Window

pytestmark = pytest.mark.exact

KINDS: tuple[TinyKind, ...] = ("llama", "qwen2", "qwen3", "phi3", "gemma3")
WINDOW = 96
CHOOSINGS = {
    "greedy": Choosing(),
    "sampled": Choosing(sampler=Sampler(temperature=0.9, seed=3)),
    "filtered": Choosing(sampler=Sampler(temperature=1.1, top_p=0.8, min_p=0.02, seed=4)),
    "penalised": Choosing(penalties=Penalties(repetition=1.2, frequency=0.1)),
}


@asynccontextmanager
async def engine_of(kind: TinyKind) -> AsyncIterator[tuple[Engine, ComputeThread]]:
    compute = ComputeThread()
    try:
        loaded = await compute.run(lambda: make_tiny_model(kind, seed=7, context_length=256, sliding_window=WINDOW))
        engine = Engine(compute, loaded)
        del loaded
        await engine.prepare((1, 2))
        yield engine, compute
        await engine.unload()
    finally:
        await asyncio.to_thread(compute.close)


@dataclass(slots=True)
class Text:
    """One sequence as the round loop keeps it: its committed ids, of which the last is pending."""

    engine: Engine
    compute: ComputeThread
    slot: int
    ids: list[int]
    prompt_length: int
    choosing: Choosing

    async def round(self, drafts: tuple[int, ...], *, keep: int | None, ahead: bool) -> int:
        """Verifies a window and commits at most `keep` of its ids. Returns how many drafts agreed."""
        history = tuple(self.ids[-self.choosing.penalties.window :]) if self.choosing.penalties.on else ()
        window = Window(
            slot=self.slot,
            pending=self.ids[-1],
            drafts=drafts,
            first_step=len(self.ids) - self.prompt_length,
            history=history,
            # As the sequence does: the history of the next step is not known yet.
            ahead=ahead and not drafts and not history,
        )
        (choice,) = await self.engine.forward([window])
        agreed = self._agreed(drafts, choice)
        new = choice.ids[: agreed + 1]
        self.ids.extend(new if keep is None else new[: max(1, keep)])
        self.engine.truncate(self.slot, len(self.ids) - 1)
        return agreed

    @staticmethod
    def _agreed(drafts: tuple[int, ...], choice: Choice) -> int:
        agreed = 0
        while agreed < len(drafts) and drafts[agreed] == choice.ids[agreed]:
            agreed += 1
        return agreed

    async def rows(self) -> list[np.ndarray[Any, Any]]:
        """Keys and values that stand, layer by layer."""
        cache = await self.engine.cached_rows(self.slot)
        assert cache.length == len(self.ids) - 1
        return await self.compute.run(lambda: standing(cache))

    async def fresh(self) -> list[np.ndarray[Any, Any]]:
        """Those of a sequence that has read the same ids at once."""
        slot = await self.engine.open(self.choosing)
        await self.engine.prefill(slot, self.ids[:-1])
        cache = await self.engine.cached_rows(slot)
        rows = await self.compute.run(lambda: standing(cache))
        self.engine.close(slot)
        return rows


def standing(cache: SequenceCache) -> list[np.ndarray[Any, Any]]:
    """Runs on the compute thread."""
    rows = []
    for layer in cache.layers:
        assert layer.offset == cache.length
        for array in (layer.keys, layer.values):
            rows.append(np.array(array[..., : cache.length, :].astype(mx.float32)))
    return rows


async def opened(engine: Engine, compute: ComputeThread, choosing: Choosing, rng: random.Random, chunk: int) -> Text:
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 24))]
    slot = await engine.open(choosing)
    for begin in range(0, len(prompt) - 1, chunk):
        await engine.prefill(slot, prompt[begin : min(begin + chunk, len(prompt) - 1)])
    return Text(engine, compute, slot, prompt, len(prompt), choosing)


async def plain_ids(engine: Engine, compute: ComputeThread, text: Text, count: int) -> list[int]:
    """What the target says after the text, without drafts."""
    slot = await engine.open(text.choosing)
    if len(text.ids) > 1:
        await engine.prefill(slot, text.ids[:-1])
    twin = Text(engine, compute, slot, list(text.ids), text.prompt_length, text.choosing)
    for _ in range(count):
        await twin.round((), keep=None, ahead=False)
    engine.close(slot)
    return twin.ids[len(text.ids) :]


@pytest.mark.parametrize("name", CHOOSINGS)
@pytest.mark.parametrize("kind", KINDS)
async def test_after_every_round_the_cache_is_that_of_a_fresh_prefill(kind: TinyKind, name: str) -> None:
    """Random windows of right and wrong drafts, cuts before the end of what agreed, steps begun ahead, small chunks."""
    rng = random.Random(f"{kind}/{name}")
    async with engine_of(kind) as (engine, compute):
        for chunk in (2, 64):
            text = await opened(engine, compute, CHOOSINGS[name], rng, chunk)
            truth = await plain_ids(engine, compute, text, 40)
            begin = len(text.ids)
            kinds_seen = set()
            while len(text.ids) - begin < 28:
                done = len(text.ids) - begin
                width = min(rng.choice((0, 0, 0, 1, 2, 4, 7)), engine.rollback.room(len(text.ids) - 1))
                right = rng.randrange(width + 1)
                drafts = truth[done : done + right] + [rng.randrange(TINY_VOCAB) for _ in range(width - right)]
                keep = rng.choice((None, None, 1, 2))
                agreed = await text.round(tuple(drafts), keep=keep, ahead=rng.random() < 0.7)
                assert agreed >= right
                assert text.ids[begin:] == truth[: len(text.ids) - begin], "drafts changed the text"
                kinds_seen.add((bool(width), agreed < width, keep is not None))
                if rng.random() < 0.5:
                    # Looking settles the cache; not looking leaves a step begun ahead to the next window.
                    continue
                for have, want in zip(await text.rows(), await text.fresh(), strict=True):
                    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
            assert len(kinds_seen) >= 3
            for have, want in zip(await text.rows(), await text.fresh(), strict=True):
                np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
            engine.close(text.slot)
        assert engine.slots == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_drafted_and_plain_sequences_end_with_the_same_bits(kind: TinyKind) -> None:
    """With the reference BLAS a row does not depend on how many others were computed with it."""
    rng = random.Random(kind)
    async with engine_of(kind) as (engine, compute):
        text = await opened(engine, compute, Choosing(), rng, 64)
        plain_slot = await engine.open(Choosing())
        if len(text.ids) > 1:
            await engine.prefill(plain_slot, text.ids[:-1])
        plain = Text(engine, compute, plain_slot, list(text.ids), text.prompt_length, Choosing())
        for _ in range(30):
            await plain.round((), keep=None, ahead=True)
        while len(text.ids) < len(plain.ids):
            width = min(rng.randrange(6), len(plain.ids) - len(text.ids) - 1)
            drafts = plain.ids[len(text.ids) : len(text.ids) + width]
            if width and rng.random() < 0.5:
                drafts[rng.randrange(width)] = TINY_VOCAB - 2
            await text.round(tuple(drafts), keep=None, ahead=False)
        assert text.ids == plain.ids
        for have, want in zip(await text.rows(), await plain.rows(), strict=True):
            np.testing.assert_array_equal(have, want)


async def test_two_sequences_in_one_tick_have_the_caches_they_have_alone() -> None:
    async with engine_of("llama") as (engine, compute):
        rng = random.Random(5)
        texts = [await opened(engine, compute, choosing, rng, 64) for choosing in CHOOSINGS.values()]
        truths = [await plain_ids(engine, compute, text, 12) for text in texts]
        begins = [len(text.ids) for text in texts]
        for _ in range(12):
            windows = [
                Window(
                    slot=text.slot,
                    pending=text.ids[-1],
                    first_step=len(text.ids) - text.prompt_length,
                    history=tuple(text.ids[-20:]) if text.choosing.penalties.on else (),
                )
                for text in texts
            ]
            for text, choice in zip(texts, await engine.forward(windows), strict=True):
                text.ids.extend(choice.ids)
                engine.truncate(text.slot, len(text.ids) - 1)
        for text, truth, begin in zip(texts, truths, begins, strict=True):
            assert text.ids[begin:] == truth
            for have, want in zip(await text.rows(), await text.fresh(), strict=True):
                np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


async def test_beyond_a_sliding_window_drafts_go_on_and_the_text_is_that_of_mlx_lm() -> None:
    async with engine_of("gemma3") as (engine, compute):
        assert engine.rollback.kind == "slide"
        text = await opened(engine, compute, Choosing(), random.Random(1), 64)
        while len(text.ids) <= 2 * WINDOW:
            assert engine.rollback.room(len(text.ids) - 1) >= 7
            # Wrong drafts before, at and after the wrap: taking them back is exact everywhere.
            await text.round((1,) * (len(text.ids) % 8), keep=None, ahead=len(text.ids) % 3 == 0)
        whole = await compute.run(lambda: _greedy_by_mlx_lm(engine._model, text.ids[: text.prompt_length], 150))
        assert text.ids[text.prompt_length :][:150] == whole[: len(text.ids) - text.prompt_length]


def _greedy_by_mlx_lm(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by mlx-lm's own cache, one at a time. Runs on the compute thread."""
    cache = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
    ids = [prompt[-1]]
    for _ in range(count):
        ids.extend(host_ids(mx.argmax(model(mx.array([[ids[-1]]]), cache=cache)[0, -1:], axis=-1)))
    return ids[1:]


def test_a_model_that_cannot_roll_back_has_no_room_at_all() -> None:
    assert Rollback("", "recurrent").room(0) == 0


class Stubborn:
    """A layer's cache that says it can trim and does not, or says that it cannot."""

    def __init__(self, can: bool) -> None:
        self.can = can

    def is_trimmable(self) -> bool:
        return self.can

    def trim(self, count: int) -> int:
        return 0


@pytest.mark.parametrize("can", [True, False])
async def test_a_layer_that_does_not_roll_back_is_loud(can: bool) -> None:
    """mlx-lm answers 0 and goes on; here the round fails, before a wrong row is ever read."""
    async with engine_of("llama") as (engine, compute):
        text = await opened(engine, compute, Choosing(), random.Random(2), 64)
        cache = engine._slots[text.slot].cache.cache
        layer = cache.layers[1]
        await text.round((1, 2, 3), keep=None, ahead=False)
        layer.is_trimmable, layer.trim = Stubborn(can).is_trimmable, Stubborn(can).trim
        with pytest.raises(InternalError) as caught:
            await text.round((), keep=None, ahead=False)
        assert caught.value.reason == "CACHE_NOT_TRIMMABLE"


async def test_a_cache_that_is_shorter_than_what_should_stand_is_loud() -> None:
    async with engine_of("llama") as (engine, compute):
        text = await opened(engine, compute, Choosing(), random.Random(3), 64)
        engine.truncate(text.slot, len(text.ids) + 5)
        with pytest.raises(InternalError) as caught:
            await text.round((), keep=None, ahead=False)
        assert caught.value.reason == "CACHE_LENGTH"


@pytest.mark.parametrize("token", [-1, TINY_VOCAB, 2**32])
async def test_an_id_outside_the_embedding_never_reaches_the_model(token: int) -> None:
    async with engine_of("llama") as (engine, compute):
        text = await opened(engine, compute, Choosing(), random.Random(4), 64)
        with pytest.raises(InternalError):
            await text.round((1, token), keep=None, ahead=False)
        with pytest.raises(InternalError):
            await engine.prefill(text.slot, [token])
        await text.round((1, 2), keep=None, ahead=False)
        for have, want in zip(await text.rows(), await text.fresh(), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


async def test_a_row_that_cannot_be_chosen_from_ends_its_own_sequence_only() -> None:
    """Kind of fault: one request's NaN takes down everybody in its tick."""
    async with engine_of("llama") as (engine, compute):
        rng = random.Random(6)
        good = await opened(engine, compute, Choosing(), rng, 64)
        bad = await opened(engine, compute, Choosing(logit_bias={3: float("nan")}), rng, 64)
        truth = await plain_ids(engine, compute, good, 1)
        windows = [Window(slot=text.slot, pending=text.ids[-1], first_step=0) for text in (good, bad)]
        first, second = await engine.forward(windows)
        assert first.error is None
        assert list(first.ids) == truth
        assert second.error is not None
