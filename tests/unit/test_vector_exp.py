"""Attention and SwiGLU with our exponential are mlx's, up to rounding, whatever the mask and the shape."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as plain_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as plain_attention
from mlx_lm.models.cache import QuantizedKVCache

from draftwire import vector_exp
from draftwire.testing_models import make_tiny_model
from draftwire.vector_exp import attention, exp2, swiglu, teach

SHAPES = {
    "one row a sequence": (8, 9, 3, 1, 288, 64, 64),
    "windows": (8, 9, 3, 4, 288, 64, 64),
    "a chunk": (1, 9, 3, 64, 300, 64, 64),
    "blocks of rows": (1, 9, 3, 256, 700, 64, 64),
    "blocks of heads": (1, 9, 3, 40, 2000, 24, 16),
    "blocks of sequences": (40, 4, 2, 2, 2000, 24, 16),
    "blocks of one": (2, 4, 4, 40, 2000, 24, 16),
    "as many keys as rows": (1, 4, 4, 300, 300, 24, 16),
}


def truth(q: mx.array, k: mx.array, v: mx.array, seen: Any, added: Any) -> np.ndarray[Any, Any]:
    """Attention in float64."""
    heads = q.shape[1] // k.shape[1]
    queries, keys, values = (np.array(a).astype(np.float64) for a in (q, k, v))
    scores = queries @ np.repeat(keys, heads, 1).swapaxes(-1, -2) * q.shape[-1] ** -0.5 + np.array(added).astype(
        np.float64
    )
    scores = np.where(np.array(seen), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray[Any, Any] = weights / weights.sum(-1, keepdims=True) @ np.repeat(values, heads, 1)
    return found


def draw(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bool of two axes", "per head", "one row", "added", "-inf"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_as_near_to_the_truth_as_mlx_is(shape: str, mask: str) -> None:
    batch, heads, kv_heads, length, seen, dim, out_dim = SHAPES[shape]
    q, k = draw(batch, heads, length, dim, seed=1), draw(batch, kv_heads, seen, dim, seed=2)
    v = draw(batch, kv_heads, seen, out_dim, seed=3)
    allowed = mx.random.uniform(shape=(batch, 1, length, seen), key=mx.random.key(4)) > 0.4
    allowed[..., 0] = True
    given: Any = None
    sees, added = mx.array(True), mx.array(0.0)
    match mask:
        case "causal":
            given = "causal"
            sees = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
        case "bool":
            given = sees = allowed
        case "bool of two axes":
            given = sees = allowed[0, 0]
        case "per head":
            given = sees = mx.random.uniform(shape=(batch, heads, length, seen), key=mx.random.key(5)) > 0.4
        case "one row":
            given = sees = allowed[:, :, :1]
        case "added":
            given = added = draw(batch, heads, length, seen, seed=6)
        case "-inf":
            sees, given = allowed, mx.where(allowed, 0.0, -math.inf)
    expected = truth(q, k, v, sees, added)
    ours, mlx = (
        np.abs(np.array(call(q, k, v, None, dim**-0.5, given)) - expected).max()
        for call in (attention, plain_attention)
    )
    assert ours <= max(3 * mlx, 2e-6)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "scores", "length", "expected"),
    [
        (8, 3, 3 * 500, 1, (8, 3, 1)),  # decoding: all at once
        (400, 3, 3 * 500, 1, (116, 3, 1)),
        (1, 3, 3 * 8 * 4000, 8, (1, 3, 8)),
        (1, 3, 3 * 16 * 4000, 16, (1, 2, 16)),  # two heads, then one
        (1, 32, 40 * 4000, 40, (1, 3, 40)),  # 11 blocks, the last of two heads
        (1, 3, 3 * 512 * 4000, 512, (1, 1, 43)),  # 12 blocks a head
        (1, 1, 10**9, 4, (1, 1, 1)),
    ],
)
def test_heads_are_split_before_queries_are(
    batch: int, kv_heads: int, scores: int, length: int, expected: tuple[int, int, int]
) -> None:
    """Keys and values are read once for all queries of a block; no block has more scores than fit, where one query has not."""
    rows, heads, columns = vector_exp._block(batch, kv_heads, scores, length)
    assert (min(rows, batch), heads, columns) == expected
    assert rows * heads * scores // length * columns <= vector_exp._BLOCK or (rows, heads, columns) == (1, 1, 1)


def test_what_is_masked_leaves_no_trace() -> None:
    """Not even of numbers as large as float32 has in a row that is masked."""
    q, k, v = draw(8, 4, 4, 16, seed=1), draw(8, 2, 300, 16, seed=2), draw(8, 2, 300, 16, seed=3)
    mask = mx.broadcast_to(mx.arange(300) < 200, (4, 300))
    other_k, other_v = mx.array(k), mx.array(v)
    other_k[:, :, 200:] = 1e3
    other_v[:, :, 200:] = -1e20
    assert mx.array_equal(attention(q, k, v, None, 0.25, mask), attention(q, other_k, other_v, None, 0.25, mask)).item()


def test_a_row_that_sees_nothing_is_finite() -> None:
    """Padding rows are dropped later; a NaN of theirs must not reach the cache."""
    q, k = draw(8, 4, 4, 16, seed=1), draw(8, 2, 300, 16, seed=2)
    assert mx.all(mx.isfinite(attention(q, k, k, None, 0.25, mx.zeros((4, 300), dtype=mx.bool_)))).item()


def test_exp2_is_a_power_of_two_to_the_last_bits() -> None:
    """mlx's own exponential is off by 1.8e-6 at worst."""
    x = mx.concatenate([mx.linspace(-126, 127, 200_001), mx.arange(-126, 128).astype(mx.float32)])
    found = np.array(exp2(x)).astype(np.float64) / np.exp2(np.array(x).astype(np.float64))
    assert np.abs(found - 1).max() < 3e-7


def test_exp2_s_ends_hold() -> None:
    """What is masked weighs nothing, whatever was added to it."""
    masked = [-127.0, -128.5, -150.0, -254.9, -255.0, -256.0, -300.0, -1e9, -1e30, -math.inf]
    found = np.array(exp2(mx.array([*masked, 127.0, 1e30, math.inf])))
    assert (found[:-3] == 0).all()
    assert found[-3:] == pytest.approx(2.0**127)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_shows_in_its_row_and_no_other(value: float) -> None:
    q, k = draw(2, 4, 4, 16, seed=1), draw(2, 2, 300, 16, seed=2)
    q[1, 2, 3] = value
    bad = np.isnan(np.array(attention(q, k, k, None, 0.25, None))).all(-1)
    assert bad[1, 2, 3]
    assert bad.sum() == 1


def test_swiglu_of_no_number_is_none() -> None:
    assert np.isnan(np.array(swiglu(mx.array([math.nan]), mx.array([2.0])))).all()


@pytest.mark.parametrize("seen", [7, 31, 32, 33, 200, 1001])
def test_keys_that_nobody_sees_change_no_bit_of_a_sum(seen: int) -> None:
    """A sequence beside a longer one gives the same weights as alone."""
    weights = mx.abs(draw(3, seen, seed=1))
    wider = mx.pad(weights, [(0, 0), (0, 1312 - seen)])
    alone, beside = (vector_exp._total(one, axis=-1, keepdims=True) for one in (weights, wider))
    assert mx.array_equal(alone, beside).item()


def test_swiglu_is_as_near_to_the_truth_as_mlx_is() -> None:
    gate, x = draw(32, 512, seed=1) * 20, draw(32, 512, seed=2)
    wide = np.array(gate).astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * np.array(x).astype(np.float64)
    ours, mlx = (np.abs(np.array(call(gate, x)) - expected).max() for call in (swiglu, plain_swiglu))
    assert ours <= max(3 * mlx, 2e-6)


@pytest.mark.parametrize("what", ["16 bits", "sinks", "quantised"])
def test_anything_else_goes_mlx_s_own_way(what: str) -> None:
    """To the bit."""
    q, k, v = draw(2, 4, 64, 64, seed=1), draw(2, 2, 128, 64, seed=2), draw(2, 2, 128, 64, seed=3)
    cache: Any = None
    more: dict[str, Any] = {}
    keys: Any = k
    values: Any = v
    match what:
        case "16 bits":
            q, keys, values = (a.astype(mx.float16) for a in (q, k, v))
        case "sinks":
            more = {"sinks": mx.zeros((4,))}
        case "quantised":
            cache = QuantizedKVCache(bits=8)
            keys, values = cache.update_and_fetch(k, v)
    # A copy for each: the quantised one scales its queries in place.
    ours, mlx = (call(mx.array(q), keys, values, cache, 0.125, None, **more) for call in (attention, plain_attention))
    assert mx.array_equal(ours, mlx).item()
    assert ours.dtype == q.dtype


def test_half_precision_swiglu_goes_mlx_s_own_way() -> None:
    gate, x = draw(32, 512, seed=1).astype(mx.bfloat16), draw(32, 512, seed=2).astype(mx.bfloat16)
    assert mx.array_equal(swiglu(gate, x), plain_swiglu(gate, x)).item()


def test_only_the_model_that_is_taught_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another of the same class, in the same process, calls mlx-lm's functions as before."""
    monkeypatch.setattr("draftwire.vector_exp.sys.platform", "linux")
    taught, other = make_tiny_model("llama", seed=3).model, make_tiny_model("llama", seed=3).model
    ids = mx.array([[number % 250 for number in range(80)]])
    before = other(ids)
    assert teach(taught) == 4  # attention and MLP of two layers
    ours, after = taught(ids), other(ids)
    assert mx.array_equal(before, after).item()
    assert not mx.array_equal(ours, after).item()
    assert mx.allclose(ours, after, rtol=0, atol=1e-4).item()
    assert type(taught.layers[0].self_attn).__name__ == type(other.layers[0].self_attn).__name__


@pytest.mark.parametrize("fault", ["wrong", "no kernel", "no compiler"])
def test_a_broken_exponential_is_not_taught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: mx.array) -> mx.array:
        if fault == "no kernel":
            raise RuntimeError("[Compile] it cannot be loaded")
        return mx.exp(x)

    monkeypatch.setattr("draftwire.vector_exp.sys.platform", "linux")
    if fault == "no compiler":
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(vector_exp, "exp2", broken)
    assert teach(make_tiny_model("llama", seed=3).model) == 0


def test_macos_keeps_its_own_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.vector_exp.sys.platform", "darwin")
    assert teach(make_tiny_model("llama", seed=3).model) == 0
