"""A layer in blocks multiplies as it did before, whatever its shape; and a row's bits are the row's own."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten

from draftwire.blas import multiplies_small
from draftwire.blocks import SMALL_PRODUCT, BlockedEmbedding, block, lay_out, multiply, tile_rows, unblock
from draftwire.testing_models import TinyKind, make_tiny_model

layers: Any = nn


def draw(*shape: int, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def error(found: mx.array, x: mx.array, weight: mx.array) -> float:
    """The largest, in units of what summing one term after another may cost."""
    expected = np.array(x).astype(np.float64) @ np.array(weight).astype(np.float64).T
    return float(np.abs(np.array(found) - expected).max() / (6e-8 * (weight.shape[1] + 16)))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 70), st.sampled_from([1, 16, 100, 576, 1954, 4100]), st.integers(1, 200), st.sampled_from([1, 2, 3])
)
def test_blocks_multiply_as_the_matrix_does(rows: int, inputs: int, outputs: int, axes: int) -> None:
    weight, x = draw(outputs, inputs), draw(rows, inputs, seed=2)
    shaped = {1: x[0], 2: x, 3: x[None]}[axes]
    found = multiply(shaped, block(weight), outputs)
    assert found.shape == (*shaped.shape[:-1], outputs)
    assert error(found, shaped, weight) < 4


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 16), (100, 48), (1, 5), (130, 4100), (64, 7919)])
def test_unblock_gives_back_what_block_was_given(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs)
    assert mx.array_equal(unblock(block(weight), outputs), weight).item()


@pytest.mark.parametrize("inputs", [1, 64, 576, 1536, 2048, 2560, 8192, 14_336, 16_384])
def test_every_product_is_small(inputs: int) -> None:
    """Else the BLAS would pack each block for each tile, and be slower than with the whole matrix."""
    *parts, _, own, width = block(mx.zeros((64, inputs))).shape
    assert math.prod(parts) * own == inputs
    rows = tile_rows(own)
    assert 8 <= rows <= 16
    assert rows * own * width <= SMALL_PRODUCT


@pytest.mark.skipif(not multiplies_small(), reason="this process's BLAS packs every product")
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1536, 576), (4096, 128), (100, 70)])
def test_a_row_gets_the_same_bits_in_any_company(inputs: int, outputs: int) -> None:
    """However many rows there are, and wherever it stands."""
    blocks, x = block(draw(outputs, inputs)), draw(90, inputs, seed=2)
    alone = mx.concatenate([multiply(x[row : row + 1], blocks, outputs) for row in range(90)])
    for rows in (2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 90):
        assert mx.array_equal(multiply(x[90 - rows :], blocks, outputs), alone[90 - rows :]).item()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_a_model_in_blocks_says_the_same(kind: TinyKind) -> None:
    """With biases (qwen2) and with merged projections (phi3) too."""
    plain, laid_out = make_tiny_model(kind, seed=3).model, make_tiny_model(kind, seed=3).model
    assert lay_out(laid_out) == sum(type(layer) is layers.Linear for layer in plain.modules())
    assert not any(type(layer) is layers.Linear for layer in laid_out.modules())
    ids = mx.array([[number * 7 % 250 for number in range(50)], [number * 11 % 250 for number in range(50)]])
    assert mx.allclose(laid_out(ids), plain(ids), rtol=0, atol=1e-4).item()


@pytest.mark.parametrize("dim", [80, 4096])
def test_a_table_of_ids_in_blocks_looks_up_the_same_rows(dim: int) -> None:
    plain = layers.Embedding(259, dim)
    holder = layers.Module()
    holder.embed_tokens = layers.Embedding(259, dim)
    holder.embed_tokens.weight = plain.weight
    assert lay_out(holder) == 1
    assert type(holder.embed_tokens) is BlockedEmbedding
    ids = mx.array([[0, 1, 63, 64], [65, 128, 257, 258]])
    assert mx.array_equal(holder.embed_tokens(ids), plain(ids)).item()
    assert mx.array_equal(holder.embed_tokens.weight, plain.weight).item()
    assert mx.allclose(holder.embed_tokens.as_linear(draw(3, dim)), plain.as_linear(draw(3, dim)), atol=1e-4).item()


def test_the_table_of_a_model_with_a_head_stays() -> None:
    model = make_tiny_model("llama", seed=3).model
    lay_out(model)
    assert type(model.model.embed_tokens) is layers.Embedding


def test_weights_are_in_memory_once() -> None:
    """Blocks take the place of the matrix; a width that is no multiple of 64 is padded."""
    plain, model = make_tiny_model("qwen2", seed=3).model, make_tiny_model("qwen2", seed=3).model
    lay_out(model)
    leaves: dict[str, Any] = dict(tree_flatten(model.parameters()))
    before: dict[str, Any] = dict(tree_flatten(plain.parameters()))
    padded = {name.replace("blocks", "weight"): array.nbytes for name, array in leaves.items()}
    assert padded.keys() == before.keys()
    assert sum(padded.values()) < 2 * sum(array.nbytes for array in before.values())


def test_other_types_stay_as_they_are() -> None:
    """Half precision, quantised layers and subclasses that compute in their own way."""
    own = type("Own", (layers.Linear,), {})
    holder = layers.Module()
    holder.half = layers.Linear(64, 64)
    holder.half.set_dtype(mx.float16)
    holder.quantised = layers.QuantizedLinear(64, 64)
    holder.own = own(64, 64)
    holder.lm_head = layers.QuantizedLinear(64, 64)
    assert lay_out(holder) == 0
