"""Sequences of different lengths in one forward, family by family: in the pool where the probe agrees, right in any case."""

from __future__ import annotations

import asyncio
import importlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from draftwire.compute import ComputeThread
from draftwire.errors import InternalError
from draftwire.loaded import LoadedModel, describe
from draftwire.ragged import CAPACITY_STEP, RaggedPool, flat, prefill_caches, slot_class
from draftwire.ragged_probe import why_not
from draftwire.testing_models import make_tiny_model
from target_service.accept import accept
from target_service.batch_engine import BatchEngine
from target_service.batch_probe import make_engine
from target_service.engine import Engine
from target_service.params import Choosing
from target_service.window import Choice, Window

pytestmark = pytest.mark.exact

VOCAB = 199
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "num_key_value_heads": 4}
SLIDING = {"sliding_window": 64, "sliding_window_pattern": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with sliding layers": (
        "llama",
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_theta": 1e4}),
    "phi3": ("phi3", {"original_max_position_embeddings": 256}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING}),
    "cohere2": ("cohere2", {"head_dim": 16, "logit_scale": 1.0, **SLIDING}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **MLA,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            **MLA,
            "dim_model_base": 64,
            "scale_depth": 1.4,
            "scale_emb": 1.0,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.0] * 4,
                "short_factor": [1.0] * 4,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}
# It writes to fixed ids above 100,000, so its vocabulary cannot be tiny.
PHI3SMALL = {
    "vocab_size": 100_352,
    "ff_intermediate_size": 96,
    "dense_attention_every_n_layers": 2,
    "gegelu_limit": 20.0,
    "layer_norm_epsilon": 1e-5,
}


def make(module_name: str, extra: dict[str, Any]) -> LoadedModel:
    """A random model of one of mlx-lm's classes. The same for the same name."""
    config = {"model_type": module_name, **BASE, **extra}
    classes = importlib.import_module(f"mlx_lm.models.{module_name}")
    module = classes.Model(classes.ModelArgs.from_dict(config))
    drawn: dict[str, Any] = dict(tree_flatten(module.parameters()))
    module.load_weights([(name, mx.array(_weight(name, old))) for name, old in drawn.items()])
    module.eval()
    mx.eval(module.parameters())
    return describe(module, config, model_id=module_name)


def _weight(name: str, old: mx.array) -> Any:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(old.shape)
    if "norm" in name:
        values = 0.1 * values + np.array(old)
    elif "embed" not in name and len(old.shape) > 1:
        values = values * (3.0 if "lm_head" in name else 1.0) / old.shape[-1] ** 0.5
    return values.astype(np.float32)


@contextmanager
def thread() -> Iterator[ComputeThread]:
    compute = ComputeThread()
    try:
        yield compute
    finally:
        compute.close()


def prompt(number: int, length: int) -> list[int]:
    return [(37 * number + 11 * position * position + position) % VOCAB for position in range(length)]


def alone(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """Greedy decoding by mlx-lm's model over its own cache, a token at a time."""
    cache = make_prompt_cache(model)
    if len(ids) > 1:
        model(mx.array([list(ids[:-1])]), cache=cache)
    pending, made = ids[-1], []
    for _ in range(count):
        pending = int(mx.argmax(model(mx.array([[pending]]), cache=cache)[0, -1]).item())
        made.append(pending)
    return made


async def together(
    engine: Engine, prompts: Sequence[Sequence[int]], truths: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Decodes all at once; number n joins at tick n, and its drafts are right, half right, wrong or missing in turn."""
    made: list[list[int]] = [[] for _ in prompts]
    slots: dict[int, int] = {}
    tick = 0
    while any(len(own) < len(truth) for own, truth in zip(made, truths, strict=True)):
        if tick < len(prompts):
            slots[tick] = await engine.open(Choosing())
            if len(prompts[tick]) > 1:
                await engine.prefill(slots[tick], prompts[tick][:-1])
        windows = []
        for number, slot in slots.items():
            own, truth = made[number], truths[number]
            right = list(truth[len(own) : len(own) + 4])[: len(truth) - len(own) - 1]
            drafts = (
                right,
                right[:2] + [(one + 1) % VOCAB for one in right[2:]],
                [(one + 1) % VOCAB for one in right],
                [],
            )
            pending = own[-1] if own else prompts[number][-1]
            windows.append(
                Window(slot=slot, pending=pending, drafts=tuple(drafts[(tick + number) % 4]), first_step=len(own))
            )
        choices = await engine.forward(windows)
        for number, window, choice in zip(list(slots), windows, choices, strict=True):
            made[number] += accept(window.drafts, choice.ids).ids
            engine.truncate(window.slot, len(prompts[number]) - 1 + len(made[number]))
            if len(made[number]) >= len(truths[number]):
                engine.close(slots.pop(number))
        tick += 1
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_one_forward_is_the_family_alone(family: str) -> None:
    """Prompts of 1 to 90 tokens (past a sliding window), joining and leaving, with right and wrong drafts."""
    module_name, extra = FAMILIES[family]

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make(module_name, extra))
        prompts = [prompt(number, length) for number, length in enumerate((1, 12, 90, 5, 40))]
        truths = await compute.run(
            lambda: [alone(loaded.model, ids, 24 - number) for number, ids in enumerate(prompts)]
        )
        engine = await make_engine(compute, loaded, "auto")
        assert engine.batching == "ragged"
        await engine.prepare((1, 3))
        assert await together(engine, prompts, truths) == truths
        assert engine.slots == 0
        await engine.unload()
        loaded = replace(loaded, model=None)

    with thread() as compute:
        asyncio.run(check(compute))


@pytest.mark.parametrize(
    ("module_name", "extra", "reason"),
    [
        ("phi3small", PHI3SMALL, "differ from the same rows alone"),
        (
            "mamba",
            {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
            "Cache",
        ),
        ("gemma3_text", FAMILIES["gemma3"][1] | {"sliding_window": 16}, "more than 4 sliding windows of 16"),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "does not take rows of different lengths"),
    ],
)
def test_what_cannot_be_batched_runs_one_by_one_and_says_why(
    module_name: str, extra: dict[str, Any], reason: str
) -> None:
    """A family whose positions come from the keys' number, recurrent state, a window too small; never a wrong batch."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make(module_name, extra))
        engine = await make_engine(compute, loaded, "auto")
        assert not isinstance(engine, BatchEngine)
        assert engine.batching.startswith("one by one: ")
        assert reason in engine.batching
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_batching_can_be_switched_off() -> None:
    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        engine = await make_engine(compute, loaded, "off")
        assert engine.batching == "one by one: switched off"
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_a_probe_that_raises_means_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make("llama", {})

    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(RaggedPool, "begin", fails)
    assert why_not(loaded) == "the model does not take rows of different lengths (RuntimeError)"


# The pool itself.


def joined(model: Any, pool: RaggedPool, ids: Sequence[int]) -> Any:
    caches = prefill_caches(make_prompt_cache(model))
    if ids:
        model(mx.array([list(ids)]), cache=caches)
    return pool.join(caches, len(ids))


def step(model: Any, pool: RaggedPool, windows: dict[Any, list[int]]) -> dict[Any, mx.array]:
    """A forward; returns each row's logits and books its window."""
    width = max(len(window) for window in windows.values())
    pool.begin(width)
    ids = [[0] * width for _ in range(pool.slots)]
    for row, window in windows.items():
        ids[row.index] = window + [0] * (width - len(window))
    logits = model(mx.array(ids), cache=pool.layers)
    mx.eval(logits)
    for row, window in windows.items():
        pool.written(row, len(window))
    return {row: logits[row.index, : len(window)] for row, window in windows.items()}


def one_shot(model: Any, ids: Sequence[int], rows: int) -> mx.array:
    return model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0, -rows:]


def test_slots_are_as_many_as_rows_or_few_more() -> None:
    assert [slot_class(rows) for rows in (1, 2, 3, 5, 8, 15, 16, 17, 18, 33)] == [1, 2, 3, 5, 8, 15, 16, 18, 18, 34]


@pytest.mark.parametrize("count", range(1, 17))
def test_a_pool_stays_within_a_fifth_of_the_keys_and_values_that_it_must_hold(count: int) -> None:
    """1 to 16 sequences of 2,047 tokens, one after the other, then one token more: peaks of joining and of growing included."""
    layers, length = 30, 8 * CAPACITY_STEP - 1
    each = 2 * layers * 2 * 8 * 4 * length
    pool = RaggedPool([KVCache() for _ in range(layers)])
    mx.clear_cache()
    before = mx.get_active_memory()
    rows = []
    for number in range(1, count + 1):
        caches = [KVCache() for _ in range(layers)]
        for cache in caches:
            cache.state = (mx.ones((1, 2, length, 8)), mx.ones((1, 2, length, 8)), length)
            mx.eval(cache.keys, cache.values)
        mx.reset_peak_memory()
        rows += pool.join_all([(caches, length)], length + 1)
        assert mx.get_peak_memory() - before <= 1.2 * number * each
    mx.reset_peak_memory()
    for row in rows:
        pool.written(row, 1)
    pool.begin(1)
    assert pool.capacity == 9 * CAPACITY_STEP
    assert mx.get_peak_memory() - before <= 1.2 * count * each
    assert pool.nbytes <= 1.2 * count * each


def test_rows_survive_growth_shrinking_and_neighbours_that_leave() -> None:
    """Five classes up and down again, a capacity step on the way: each row goes on as if it were alone."""
    model = make_tiny_model("llama", seed=3, context_length=1024).model
    pool = RaggedPool(make_prompt_cache(model))
    texts: dict[Any, list[int]] = {}
    for number, length in enumerate((3, CAPACITY_STEP - 4, 17, 0, 60)):
        ids = prompt(number, length)
        texts[joined(model, pool, ids)] = ids
        windows = {row: prompt(7 * number + row.index, 2 + row.index % 2) for row in texts}
        for row, logits in step(model, pool, windows).items():
            texts[row] += windows[row]
            assert mx.allclose(logits, one_shot(model, texts[row], len(windows[row])), atol=1e-4).item()
    assert (pool.slots, pool.capacity) == (5, 2 * CAPACITY_STEP)
    assert [row.length for row in texts] == [len(ids) for ids in texts.values()]
    large = pool.nbytes
    longest = max(texts, key=lambda row: row.length)
    for row in [*[row for row in texts if row is not longest][1:], longest]:
        pool.leave(row)
        del texts[row]
    (row,) = texts
    for number in range(40):
        pool.fit(1)
        logits = step(model, pool, {row: [number]})[row]
        texts[row].append(number)
    assert mx.allclose(logits, one_shot(model, texts[row], 1), atol=1e-4).item()
    assert (pool.slots, pool.capacity, row.index) == (1, CAPACITY_STEP, 0)
    assert pool.nbytes * 10 == large
    pool.leave(row)
    assert (pool.nbytes, pool.slots, pool.rows) == (0, 0, [])


def test_a_forward_of_some_rows_leaves_the_others_alone() -> None:
    """Rows that lie together, rows that do not, one row alone: each is right, and nobody else's keys move."""
    model = make_tiny_model("gemma3", seed=3, context_length=128, sliding_window=16).model
    pool = RaggedPool(make_prompt_cache(model))
    texts = {joined(model, pool, ids): ids for ids in (prompt(number, 5 + 9 * number) for number in range(5))}
    rows = list(texts)
    for number, chosen in enumerate([(1, 2), (0, 3), (4,), (0, 1, 2, 3, 4), (4, 1), (2,)]):
        group = [rows[index] for index in chosen]
        width = 1 + number % 3
        kept = {row: pool.rows_of(row) for row in rows if row not in group}
        places = pool.begin(width, group)
        assert places == sorted(chosen)
        windows = {row: prompt(11 * number + row.index, width) for row in group}
        logits = model(mx.array([windows[rows[place]] for place in places]), cache=pool.layers)
        mx.eval(logits)
        for row, window in windows.items():
            pool.written(row, width)
            texts[row] = texts[row] + window
            found = logits[places.index(row.index)]
            assert mx.allclose(found, one_shot(model, texts[row], width), atol=1e-4).item()
        for row, caches in kept.items():
            for before, after in zip(caches, pool.rows_of(row), strict=True):
                assert mx.array_equal(before.keys, after.keys).item()
                assert mx.array_equal(before.values, after.values).item()
    pool.leave(rows[2])
    assert pool.begin(1, [rows[1], rows[3]]) == [1, 2, 3], "a free row between two is cheaper than a copy of both"


def test_taking_back_is_a_subtraction() -> None:
    model = make_tiny_model("gemma3", seed=3, context_length=64, sliding_window=16).model
    pool = RaggedPool(make_prompt_cache(model))
    ids = prompt(1, 30)
    row = joined(model, pool, ids)
    step(model, pool, {row: [5, 6, 7, 8]})
    pool.truncate(row, 31)
    logits = step(model, pool, {row: [9, 10]})[row]
    assert mx.allclose(logits, one_shot(model, [*ids, 5, 9, 10], 2), atol=1e-4).item()
    with pytest.raises(InternalError, match="has 33 positions, cannot keep 34"):
        pool.truncate(row, 34)


def test_what_a_former_row_left_behind_poisons_nobody() -> None:
    """A NaN past the length would survive any mask: 0 * NaN is NaN."""
    model = make_tiny_model("llama", seed=3).model
    pool = RaggedPool(make_prompt_cache(model))
    stays, goes = joined(model, pool, prompt(1, 9)), joined(model, pool, prompt(2, 40))
    for layer in flat(pool.layers):
        layer.values[goes.index, :, :40] = float("nan")
    pool.leave(goes)
    ids = prompt(3, 5)
    comes = joined(model, pool, ids)
    assert comes.index == goes.index
    found = step(model, pool, {stays: [4], comes: [4]})
    assert mx.allclose(found[comes], one_shot(model, [*ids, 4], 1), atol=1e-4).item()
    assert mx.allclose(found[stays], one_shot(model, [*prompt(1, 9), 4], 1), atol=1e-4).item()


def test_a_window_never_ends_past_the_capacity() -> None:
    """Every forward makes room first; a pool whose room is gone refuses instead of writing elsewhere."""
    model = make_tiny_model("llama", seed=3).model
    pool = RaggedPool(make_prompt_cache(model))
    row = joined(model, pool, prompt(1, CAPACITY_STEP - 2))
    assert pool.capacity == CAPACITY_STEP
    pool.begin(2)
    assert pool.capacity == CAPACITY_STEP
    pool.begin(3)
    assert pool.capacity == 2 * CAPACITY_STEP
    pool.capacity = 10
    pool.reserve = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="would end at 257 of 10 positions"):
        pool.begin(3)
    pool.leave(row)
    with pytest.raises(InternalError, match="would end at 1 of"):
        pool.begin(1)


def test_forwards_built_and_forgotten_leave_the_arrays_as_they_were() -> None:
    model = make_tiny_model("llama", seed=3).model
    pool = RaggedPool(make_prompt_cache(model))
    ids = prompt(1, 9)
    row = joined(model, pool, ids)
    step(model, pool, {row: [3]})
    before = pool.checkpoint()
    pool.begin(1)
    model(mx.array([[8]]), cache=pool.layers)
    pool.restore(before)
    assert all(layer.keys is keys for layer, (keys, _) in zip(flat(pool.layers), before, strict=True))
    del before
    logits = step(model, pool, {row: [9]})[row]
    assert mx.allclose(logits, one_shot(model, [*ids, 3, 9], 1), atol=1e-4).item()


def test_caches_that_no_pool_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="keep their first tokens"):
        RaggedPool([KVCache(), RotatingKVCache(8, keep=4)])
    with pytest.raises(ValueError, match="Quantized"):
        RaggedPool([KVCache().to_quantized()])


def test_a_bad_row_ends_its_own_sequence_only() -> None:
    """Logits that are not finite are an error in that sequence's choice; the neighbour's choice stands."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        bad_id = VOCAB - 1

        def poison() -> list[int]:
            truth = alone(loaded.model, [3, 4, 5], 1)
            table = loaded.model.model.embed_tokens.weight
            table[bad_id] = float("nan")
            return truth

        truth = await compute.run(poison)
        engine = BatchEngine(compute, loaded)
        await engine.prepare((1,))
        good, bad = await engine.open(Choosing()), await engine.open(Choosing())
        await engine.prefill(good, [3, 4])
        await engine.prefill(bad, [3, 4])
        windows = [
            Window(slot=good, pending=5, first_step=0),
            Window(slot=bad, pending=bad_id, first_step=0),
        ]
        choices: list[Choice] = await engine.forward(windows)
        assert (list(choices[0].ids), choices[0].error) == (truth, None)
        assert choices[1].error is not None
        assert choices[1].error.reason == "LOGITS_NOT_FINITE"
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))


def test_a_forward_begun_ahead_is_used_only_where_it_is_what_comes_next() -> None:
    """After it: the expected windows, one sequence less, drafts, a step back, a newcomer. Each time everybody is right."""

    async def check(compute: ComputeThread) -> None:
        loaded = await compute.run(lambda: make("llama", {}))
        prompts = [prompt(number, 4 + 9 * number) for number in range(4)]
        truths = await compute.run(lambda: [alone(loaded.model, ids, 20) for ids in prompts])
        engine = await make_engine(compute, loaded, "auto")
        assert isinstance(engine, BatchEngine)
        await engine.prepare((1,))
        slots: dict[int, int] = {}
        done = [0] * len(prompts)

        async def join(number: int) -> None:
            slots[number] = await engine.open(Choosing())
            await engine.prefill(slots[number], prompts[number][:-1])

        async def tick(*, drafts: dict[int, int] | None = None, back: int = 0) -> bool:
            """A forward of everybody, `back` steps before where they stand. Whether one was begun ahead after it."""
            windows = []
            for number, slot in slots.items():
                done[number] -= back
                at, truth = done[number], truths[number]
                engine.truncate(slot, len(prompts[number]) - 1 + at)
                given = tuple(truth[at : at + (drafts or {}).get(number, 0)])
                pending = truth[at - 1] if at else prompts[number][-1]
                windows.append(Window(slot=slot, pending=pending, drafts=given, first_step=at, ahead=not given))
            choices = await engine.forward(windows)
            for number, window, choice in zip(list(slots), windows, choices, strict=True):
                assert list(choice.ids) == truths[number][done[number] : done[number] + window.rows]
                done[number] += window.rows
            return engine._ahead is not None

        for number in range(3):
            await join(number)
        assert await tick()
        assert await tick()
        engine.close(slots.pop(1))
        assert await tick()
        assert not await tick(drafts={0: 2})
        assert await tick()
        assert await tick(back=1)
        await join(3)
        assert await tick()
        assert await tick()
        assert await tick(back=2)
        engine.close(slots.pop(0))
        engine.close(slots.pop(2))
        # The one begun ahead is used; its ids are of more rows than are left, so that none is begun from them.
        assert not await tick()
        assert await tick()
        engine.close(slots.pop(3))
        await join(1)
        done[1] = 0
        assert await tick()
        await engine.unload()

    with thread() as compute:
        asyncio.run(check(compute))
