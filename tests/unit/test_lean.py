"""Lean RoPE and RMSNorm give mlx's bits, and forget nothing that matters."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from draftwire.lean import LeanRMSNorm, LeanRoPE, slim
from draftwire.testing_models import TinyKind, make_tiny_model

layers: Any = nn


def holder(**modules: Any) -> Any:
    """A model of these modules, lean."""
    model = layers.Module()
    for name, module in modules.items():
        setattr(model, name, module)
    assert slim(model) == len(modules)
    return model


def draw(*shape: int, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


OFFSETS: dict[str, Any] = {
    "none": 0,
    "a number": 1234,
    "an array of one": mx.array([7]),
    "an offset a row": mx.array([0, 5, 300]),
}


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    ("dims", "base", "scale"), [(64, 10_000, 1.0), (64, 100_000, 0.25), (32, 1e6, 1.0), (2, 10, 1.0)]
)
@pytest.mark.parametrize("length", [1, 4, 70])
def test_rope_has_the_same_bits(offset: str, dims: int, base: float, scale: float, length: int) -> None:
    """Also where only the first dims are turned."""
    x = draw(3, 5, length, 64)
    lean = holder(rope=layers.RoPE(dims, base=base, scale=scale)).rope
    assert type(lean) is LeanRoPE
    expected = mx.fast.rope(x, dims, traditional=False, base=base, scale=scale, offset=OFFSETS[offset])
    assert mx.array_equal(lean(x, offset=OFFSETS[offset]), expected).item()


def test_rope_tells_offsets_lengths_and_bases_apart() -> None:
    """Asked in turn, with more of them than it remembers."""
    model = holder(a=layers.RoPE(16, base=100), b=layers.RoPE(16, base=1000))
    arrays = [mx.array([number, number + 1]) for number in range(6)]
    for _ in range(2):
        for offset in [0, 1, 1000, 1001, *arrays]:
            for length in (1, 3):
                for rope in (model.a, model.b):
                    x = draw(2, 2, length, 16)
                    expected = mx.fast.rope(x, 16, traditional=False, base=rope.base, scale=1.0, offset=offset)
                    assert mx.array_equal(rope(x, offset=offset), expected).item()


def test_rope_does_not_take_a_new_array_for_one_that_is_gone() -> None:
    rope = holder(rope=layers.RoPE(16)).rope
    x = draw(2, 2, 1, 16)
    for number in range(200):
        # Each may lie where the one before it lay.
        found = rope(x, offset=mx.array([number, 2 * number]))
        expected = mx.fast.rope(x, 16, traditional=False, base=10_000, scale=1.0, offset=mx.array([number, 2 * number]))
        assert mx.array_equal(found, expected).item()


@pytest.mark.parametrize("case", ["traditional", "half precision"])
def test_other_ropes_go_mlx_s_own_way(case: str) -> None:
    plain = layers.RoPE(16, traditional=case == "traditional")
    x = draw(2, 2, 3, 16).astype(mx.float16 if case == "half precision" else mx.float32)
    expected = plain(x, offset=3)
    assert mx.array_equal(holder(rope=plain).rope(x, offset=3), expected).item()


@pytest.mark.parametrize("shape", [(1, 1, 576), (8, 4, 576), (2, 3, 5, 64), (1, 200, 63)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rms_norm_has_the_same_bits(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    norm = layers.RMSNorm(shape[-1], eps=1e-5)
    norm.weight = draw(shape[-1], seed=2).astype(dtype)
    x = (draw(*shape) * 5).astype(dtype)
    expected = mx.fast.rms_norm(x, norm.weight, 1e-5)
    lean = holder(norm=norm).norm
    assert type(lean) is LeanRMSNorm
    assert mx.array_equal(lean(x), expected).item()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_a_lean_model_says_the_same(kind: TinyKind) -> None:
    """To the bit; norms and rotations of other kinds stay as they are. Its parameters are what they were."""
    plain, lean = make_tiny_model(kind, seed=3).model, make_tiny_model(kind, seed=3).model
    assert slim(lean) == sum(type(one) in (layers.RoPE, layers.RMSNorm) for one in plain.modules()) > 0
    ids = mx.array([[number * 7 % 250 for number in range(50)]] * 2)
    assert mx.array_equal(lean(ids), plain(ids)).item()
    assert lean.parameters().keys() == plain.parameters().keys()
    assert len(lean.modules()) == len(plain.modules())
