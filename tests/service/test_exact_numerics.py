"""L1 and L3 with --numerics exact: bit for bit, with a BLAS that sums another way for another number of rows.

Log-probabilities of the best ids are compared as they are: the last bit of a logit shows in some of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from harness import Result, Script, ScriptedSource, complete, drain, fixed, generation, loaded_target
from target_fixture import target_service

from client.render import statistics
from draftwire.caches import SequenceCache, flat
from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.models import ModelError
from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_END_IDS, TinyKind, make_tiny_model, save_tiny_model
from draftwire.tiles import Tile
from target_service.core import Target
from target_service.drafts import DraftSource, Lost, NoDrafts
from target_service.exact_engine import ExactEngine
from target_service.params import Choosing, Generation, Penalties
from target_service.window import Choice, Window

WIDTH = 259
CHOOSINGS = (
    Choosing(top_logprobs=20),
    Choosing(top_logprobs=20),
    Choosing(),
    Choosing(sampler=Sampler(temperature=0.8, top_p=0.9, seed=21), top_logprobs=20),
    Choosing(sampler=Sampler(temperature=1.0, seed=3), top_logprobs=20),
    Choosing(penalties=Penalties(repetition=1.2, presence=0.4), logit_bias={5: 2.0}, top_logprobs=20),
    Choosing(min_tokens=6, banned=frozenset(TINY_END_IDS), top_logprobs=20),
)
PROMPTS = (1, 2, 9, 44, 70, 240, 251)
"""Shorter and longer than a sliding window and a chunk; the last ones pass 256 positions on their way."""


def saved(folder: Path, kind: TinyKind, dtype: str, **sizes: Any) -> Path:
    """A model on disk in this number format."""
    path = save_tiny_model(folder / f"{kind}-{dtype}", kind, 7, context_length=512, sliding_window=32, **sizes)
    weights = path / "model.safetensors"
    arrays: Any = mx.load(str(weights))
    mx.save_safetensors(
        str(weights), {name: array.astype(getattr(mx, dtype)) for name, array in arrays.items()}, {"format": "mlx"}
    )
    return path


def exactly(model: Path, **settings: Any) -> Any:
    """A target in exact mode that keeps the number format."""
    settings = {"numerics": "exact", "dtype": "as-stored", "prefill_step_size": 48, "max_running": 12} | settings
    return loaded_target(model, **settings)


def requests(dice: random.Random) -> list[Generation]:
    lengths = list(PROMPTS)
    dice.shuffle(lengths)
    return [
        generation(
            [dice.randrange(256) for _ in range(length)],
            choosing=choosing,
            max_tokens=dice.randrange(16, 40),
            end_ids=frozenset(TINY_END_IDS if length % 3 == 0 else ()),
        )
        for length, choosing in zip(lengths, CHOOSINGS, strict=True)
    ]


def script(name: str, truth: list[int], dice: random.Random) -> Script:
    """What a drafter that knows the answer does with it."""

    def right(ids: list[int], drafts: int) -> list[int]:
        return truth[len(ids) : len(ids) + drafts]

    def wrong(ids: list[int], drafts: int) -> list[int]:
        return [(token + 1) % WIDTH for token in right(ids, drafts)]

    def half(ids: list[int], drafts: int) -> list[int]:
        return right(ids, drafts // 2) + [dice.randrange(WIDTH) for _ in range(drafts - drafts // 2)]

    def late(ids: list[int], drafts: int) -> list[int] | None:
        return None if drafts > 0 else right(ids, -drafts)

    def anything(ids: list[int], drafts: int) -> list[int] | Lost | None:
        if drafts < 0:
            return right(ids, -drafts)
        return dice.choice([right, wrong, half, late, lambda *_: Lost("script"), lambda *_: []])(ids, drafts)

    scripts: dict[str, Script] = {"right": right, "wrong": wrong, "half": half, "late": late, "anything": anything}
    return scripts[name]


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it gets alone, without drafts."""

    wanted: Generation
    plain: Result


class Company:
    """Runs mixes of cases that begin and leave at any tick."""

    def __init__(self, target: Target, dice: random.Random) -> None:
        self.target = target
        self.dice = dice
        self.ticks = 0
        self.most = 0
        self.drafted = 0
        self.reasons: set[str] = set()
        self._ticked = asyncio.Condition()
        self._sources: dict[str, DraftSource] = {}
        self._forward = target.engine.forward
        target.scheduler.open_source = lambda sequence: self._sources[sequence.generation.request_id]
        target.engine.forward = self.forward  # type: ignore[method-assign]

    async def forward(self, windows: Sequence[Window], chunks: Any = None) -> list[Choice]:
        """The engine's, counted."""
        choices = await self._forward(windows, chunks)
        self.ticks += 1
        self.most = max(self.most, len(windows))
        async with self._ticked:
            self._ticked.notify_all()
        return choices

    async def run(self, cases: Sequence[Case]) -> None:
        """Every case begins at a tick of its own."""
        spread = self.dice.choice([1, 12])
        async with asyncio.TaskGroup() as group:
            for number, case in enumerate(cases):
                begins = self.ticks + (number and self.dice.randrange(spread))
                group.create_task(self._one(f"{number}", case, begins))

    async def _until(self, tick: int) -> None:
        async with self._ticked:
            # Nobody may be left to tick: then it is time as well.
            await self._ticked.wait_for(lambda: self.ticks >= tick or not self.target.scheduler.running)

    async def _one(self, name: str, case: Case, begins: int) -> None:
        await self._until(begins)
        wanted = replace(case.wanted, request_id=name)
        drafter = self.dice.choice(["none", "right", "wrong", "half", "late", "anything"])
        if drafter == "none":
            self._sources[name] = NoDrafts()
        else:
            truth = [*wanted.prompt, *case.plain.ids]
            self._sources[name] = ScriptedSource(script(drafter, truth, self.dice))
            wanted = fixed(wanted, self.dice.choice([1, 2, 3, 7, 12]))
        sequence = self.target.submit(wanted)
        if self.dice.random() < 0.15:
            await self._until(self.ticks + self.dice.randrange(8))
            self.target.scheduler.cancel(sequence)
            return
        result = await drain(sequence)
        async with self._ticked:
            self._ticked.notify_all()
        assert result.visible == case.plain.visible, f"{drafter} with {wanted.drafting}"
        assert result.counts.near_ties == 0
        self.drafted += result.counts.drafted
        self.reasons |= set(result.counts.without_draft)


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("llama", "float32", {}),
        ("llama", "bfloat16", {}),
        ("gemma3", "float32", {"exact_rows": 4}),
        ("qwen3", "float32", {"batching": "off"}),
    ],
)
async def test_drafts_and_company_change_no_bit(
    kind: TinyKind, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Random mixes of 1 to 12 sequences: ids, text and log-probabilities are those of the same request alone, undrafted."""
    dice = random.Random(f"{kind} in {dtype}")
    async with exactly(saved(tmp_path, kind, dtype), **settings) as target:
        assert isinstance(target.engine, ExactEngine)
        cases = [Case(wanted, await complete(target, wanted)) for wanted in requests(dice)]
        company = Company(target, dice)
        mixes = 0
        while mixes < 5 or company.most < 9 or company.drafted < 60:
            mixes += 1
            assert mixes <= 60, "the mixes do not test what they are for"
            await company.run(dice.choices(cases, k=dice.choice([1, 2, 5, 12])))
            while target.scheduler.running or target.scheduler.queued:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
        # With more than half as many sequences as rows, a forward has no room for drafts.
        assert ("no_room" in company.reasons) == (settings.get("batching") != "off")
        await target.engine._compute.run(lambda: None)
        assert (target.engine.slots, target.engine.pool_bytes) == (0, 0)


@pytest.fixture(autouse=True)
def whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in blocks sum alike for any number of rows: nothing here could fail with them."""
    monkeypatch.setattr("draftwire.lm.multiplies_small", lambda: False)


async def test_fast_numerics_do_change_bits_here(tmp_path: Path) -> None:
    """The tests above could not fail with a BLAS that sums alike for any number of rows."""
    if _sums_alike():
        pytest.skip("this BLAS sums alike for any number of rows")
    dice = random.Random(2)
    async with loaded_target(saved(tmp_path, "llama", "float32")) as target:
        wanted = generation([dice.randrange(256) for _ in range(70)], choosing=Choosing(top_logprobs=20), max_tokens=30)
        plain = await complete(target, wanted)
        truth = [*wanted.prompt, *plain.ids]
        drafted = await complete(target, fixed(wanted, 8), script("right", truth, dice))
        assert drafted.logprobs != plain.logprobs


def _sums_alike() -> bool:
    rows = mx.random.normal((9, 128), key=mx.random.key(1))
    weights = [mx.random.normal((128, width), key=mx.random.key(width)) for width in (64, 128, WIDTH)]
    return all(
        mx.array_equal((rows @ weight)[:count], rows[:count] @ weight).item()
        for weight in weights
        for count in (1, 2, 4, 5)
    )


@asynccontextmanager
async def engine_of(
    kind: TinyKind, tile: Tile, *, chunk: int = 16, dtype: str = "float32"
) -> AsyncIterator[ExactEngine]:
    compute = ComputeThread()

    def load() -> Any:
        loaded = make_tiny_model(kind, seed=7, context_length=2048, sliding_window=32)
        loaded.model.set_dtype(getattr(mx, dtype))
        return loaded

    try:
        loaded = await compute.run(load)
        engine = ExactEngine(compute, loaded, tile, chunk)
        del loaded
        await engine.prepare(())
        yield engine
        await engine.unload()
    finally:
        await asyncio.to_thread(compute.close)


async def stored(engine: ExactEngine, slot: int) -> list[np.ndarray[Any, Any]]:
    """Bits of all keys and values that stand, layer by layer: (heads, positions, dim)."""

    def read(cache: SequenceCache) -> list[np.ndarray[Any, Any]]:
        layers: list[Any] = list(flat(cache.layers))
        arrays = [array[0, :, : cache.length] for layer in layers for array in (layer.keys, layer.values)]
        # Wide enough for every format, and exact.
        return [np.array(array.astype(mx.float32)) for array in arrays]

    cache = await engine.cached_rows(slot)
    return await engine._compute.run(lambda: read(cache))


async def opened(engine: ExactEngine, prompt: Sequence[int], pieces: Sequence[int] = ()) -> int:
    """A slot that has read all but the last id, in pieces of these lengths and the rest at once."""
    slot = await engine.open(Choosing(top_logprobs=20))
    begin, last = 0, len(prompt) - 1
    for length in [*pieces, last]:
        if begin < last:
            await engine.prefill(slot, prompt[begin : min(last, begin + length)])
            begin = min(last, begin + length)
    return slot


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
async def test_the_cache_is_that_of_plain_decoding_after_every_round(kind: TinyKind, dtype: str) -> None:
    """L3, bit for bit, over a step in the number of keys, and near a fresh prefill.

    A prefill sums in other shapes, so it is only near; what matters is that no round leaves another bit than plain rounds.
    """
    if kind == "gpt_oss" and dtype != "float32":
        pytest.skip("mlx multiplies by experts in float32 only, on a CPU")
    dice = random.Random(kind)
    prompt = [dice.randrange(256) for _ in range(247)]
    async with engine_of(kind, Tile(rows=8), dtype=dtype) as engine:
        ids, logprobs, truth = await _plainly(engine, prompt, 24)
        slot, other = await opened(engine, prompt), await opened(engine, prompt[:40])
        committed = list(prompt)
        other_length = 39
        while len(committed) < len(ids):
            width = dice.randint(0, 7)
            right = dice.randint(0, width)
            drafts = [
                *ids[len(committed) : len(committed) + right],
                *(dice.randrange(256) for _ in range(width - right)),
            ]
            step = len(committed) - len(prompt)
            windows = [Window(slot=slot, pending=committed[-1], drafts=tuple(drafts), first_step=step)]
            if dice.random() < 0.7:
                wide = tuple(dice.randrange(256) for _ in range(dice.randint(0, 9)))
                windows.append(Window(slot=other, pending=dice.randrange(256), drafts=wide, first_step=0))
                dice.shuffle(windows)
            choices = await engine.forward(windows)
            choice = choices[[window.slot for window in windows].index(slot)]
            agreed = 0
            while agreed < len(drafts) and drafts[agreed] == choice.ids[agreed]:
                agreed += 1
            assert choice.logprobs is not None
            new = choice.ids[: agreed + 1][: len(ids) - len(committed)]
            assert list(choice.logprobs[: len(new)]) == logprobs[step : step + len(new)]
            committed.extend(new)
            engine.truncate(slot, len(committed) - 1)
            engine.truncate(other, other_length)
            for found, plain in zip(await stored(engine, slot), truth, strict=True):
                np.testing.assert_array_equal(found, plain[:, : len(committed) - 1])
        assert committed == ids
        fresh = await opened(engine, ids)
        tolerance = 1e-4 if dtype == "float32" else 0.1
        for found, near in zip(await stored(engine, slot), await stored(engine, fresh), strict=True):
            np.testing.assert_allclose(found, near, rtol=tolerance, atol=tolerance)


async def _plainly(
    engine: ExactEngine, prompt: list[int], tokens: int
) -> tuple[list[int], list[Any], list[np.ndarray[Any, Any]]]:
    """Ids, log-probabilities and cache of so many plain rounds alone."""
    slot = await opened(engine, prompt)
    ids, logprobs = list(prompt), []
    for step in range(tokens):
        window = Window(slot=slot, pending=ids[-1], first_step=step, ahead=step % 3 > 0)
        (choice,) = await engine.forward([window])
        assert choice.logprobs is not None
        ids.append(choice.ids[0])
        logprobs.append(choice.logprobs[0])
        engine.truncate(slot, len(ids) - 1)
    truth = await stored(engine, slot)
    engine.close(slot)
    return ids, logprobs, truth


async def test_a_prompt_takes_the_same_forwards_whatever_pieces_it_comes_in() -> None:
    dice = random.Random(5)
    prompt = [dice.randrange(256) for _ in range(61)]
    async with engine_of("llama", Tile(rows=8)) as engine:
        whole = await stored(engine, await opened(engine, prompt))
        for pieces in ([16, 16, 16], [1, 1, 30], [40], [15, 2, 7, 7, 7], [5] * 12):
            found = await stored(engine, await opened(engine, prompt, pieces))
            for one, other in zip(found, whole, strict=True):
                np.testing.assert_array_equal(one, other)


async def test_whole_chunks_of_a_longer_prompt_are_those_of_a_shorter_one() -> None:
    """What a prefix cache may reuse: rows up to a multiple of `chunk`."""
    dice = random.Random(6)
    prompt = [dice.randrange(256) for _ in range(61)]
    async with engine_of("llama", Tile(rows=8)) as engine:
        assert engine.chunk == 16
        long = await stored(engine, await opened(engine, prompt))
        short = await stored(engine, await opened(engine, prompt[:40]))
        for one, other in zip(long, short, strict=True):
            np.testing.assert_array_equal(one[:, :32], other[:, :32])


async def test_a_window_beyond_the_pool_is_an_error_not_a_write_elsewhere() -> None:
    async with engine_of("llama", Tile(rows=8)) as engine:
        slot = await opened(engine, list(range(20)))
        (choice,) = await engine.forward([Window(slot=slot, pending=19, first_step=0)])
        assert choice.error is None
        engine.truncate(slot, 25)
        with pytest.raises(InternalError, match="cannot keep 25"):
            await engine.forward([Window(slot=slot, pending=1, first_step=1)])


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("lfm2", {}, r"its cache \(ArraysCache\) is not plain keys and values.*--numerics fast"),
        ("llama", {"kv_bits": 8, "kv_group_size": 32}, "leave --kv-bits out, or --numerics fast"),
    ],
)
async def test_a_model_that_cannot_be_exact_is_refused_at_load(
    kind: TinyKind, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        async with exactly(saved(tmp_path, kind, "float32"), **settings):
            pass


async def test_a_reply_says_which_numerics_it_has(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama", "float32")
    async with target_service(path, numerics="exact", exact_rows=4) as running:
        info = await running.client.model_info()
        answer = await running.client.complete("abc", max_tokens=5)
    assert (info.numerics, info.exact_rows, info.near_tie_gap) == ("exact", 4, 0.0)
    assert (answer.started.numerics, answer.speculation.near_ties) == ("exact", 0)


async def test_fast_numerics_count_near_ties(tmp_path: Path) -> None:
    """With two equal halves of the head, every id has a twin: every delivered token is a near tie, and none otherwise."""
    path = saved(tmp_path, "llama", "float32")
    for twins in (False, True):
        if twins:
            weights: Any = mx.load(str(path / "model.safetensors"))
            head = weights["lm_head.weight"]
            weights["lm_head.weight"] = mx.concatenate([head[:128], head[:128], mx.zeros_like(head[256:])])
            mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
        async with target_service(path) as running:
            info = await running.client.model_info()
            assert (info.numerics, info.exact_rows, info.near_tie_gap) == ("fast", 0, 1e-4)
            for sampling in ({}, {"temperature": 0.7, "seed": 3}):
                answer = await running.client.complete("abc", max_tokens=12, ignore_eos=True, **sampling)
                # With noise, twins are drawn apart.
                expected = 12 if twins and not sampling else 0
                assert answer.speculation.near_ties == expected
                assert ("12 near ties" in statistics(answer.finished)) == (expected == 12)
