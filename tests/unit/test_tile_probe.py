"""The start-up probe of exact mode finds a row whose bits depend on where it stands, on its neighbours or on the keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.models import ModelError
from draftwire.testing_models import TinyKind, make_tiny_model
from draftwire.tile_probe import Probed, explain, probe, tile_fault
from target_service.config import TargetSettings
from target_service.exact_engine import ExactEngine
from target_service.exact_probe import make_exact_engine

TINY = 1e-6
"""Some last bits of a float32."""


class Uneven(nn.Linear):  # type: ignore[name-defined, misc]
    """A linear layer as a BLAS might compute it: the rows of a last, incomplete block get other bits."""

    least = 2

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x)
        rows = mx.arange(out.size // out.shape[-1]).reshape(*out.shape[:-1], 1)
        return mx.where((rows >= self.least) & (rows >= rows.size // 4 * 4 - 1), out * (1 + TINY), out)


class Wrapped(nn.Module):  # type: ignore[name-defined, misc]
    """A layer whose output is changed by a function of the input, the output and the mask."""

    def __init__(self, inner: Any, change: Callable[[mx.array, mx.array, Any], mx.array]) -> None:
        super().__init__()
        self.inner = inner
        self._change = change
        self.use_sliding = False

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self._change(x, self.inner(x, mask, cache), mask)


def tiny(kind: TinyKind = "llama") -> LoadedModel:
    return make_tiny_model(kind, seed=5, context_length=2048)


def changed(change: Callable[[mx.array, mx.array, Any], mx.array]) -> LoadedModel:
    loaded = tiny()
    layers = loaded.model.model.layers
    layers[0] = Wrapped(layers[0], change)
    return loaded


def uneven(least: int) -> LoadedModel:
    """From how many rows on a linear layer is uneven."""
    loaded = tiny()
    mlp = loaded.model.model.layers[1].mlp
    crooked = Uneven(128, 64, bias=False)
    crooked.weight = mlp.down_proj.weight
    crooked.least = least
    mlp.down_proj = crooked
    return loaded


def fault_of(loaded: LoadedModel) -> str:
    return tile_fault(loaded.model, loaded.head_width, 8)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "cohere2", "longcat_flash"])
def test_a_model_on_this_machine_passes(kind: TinyKind) -> None:
    """Sliding windows, latent attention and experts included, with whatever BLAS computes here."""
    loaded = tiny(kind)
    found = probe(loaded.model, loaded.head_width, loaded.context_length, all_sizes=True)
    assert [one.rows for one in found.found] == [8, 4]
    assert found.tile is not None, found.faults
    assert found.tile.rows == next(one.rows for one in found.found if not one.fault)


def test_a_linear_layer_that_depends_on_the_place_in_the_tile_is_found() -> None:
    assert (
        fault_of(uneven(2))
        == "model.layers.1.mlp.down_proj (128 to 64) gives a row other bits at another place of the tile"
    )


def test_a_layer_that_depends_on_its_neighbours_is_found() -> None:
    fault = fault_of(changed(lambda x, out, mask: out + TINY * mx.mean(x, axis=0, keepdims=True)))
    assert fault == "a row of a whole forward gets other bits together with its window than alone"


def test_a_row_that_depends_on_its_place_outside_of_linear_layers_is_found() -> None:
    """Only between the last row and the others, as at the edge of a block."""

    def last(x: mx.array, out: mx.array, mask: Any) -> mx.array:
        rows = mx.arange(out.shape[0])[:, None, None]
        return mx.where(rows == 7, out * (1 + TINY), out) if out.shape[0] == 8 else out

    assert "gets other bits" in fault_of(changed(last))


def test_rows_of_one_position_that_are_wrong_are_found() -> None:
    """All alike, so no comparison among themselves can tell."""
    fault = fault_of(changed(lambda x, out, mask: out + 0.5 if x.shape[0] > 1 else out))
    assert fault.startswith("rows of one position differ from mlx-lm's by ")


def test_numbers_of_keys_with_other_bits_are_kept_apart() -> None:
    def long(x: mx.array, out: mx.array, mask: Any) -> mx.array:
        return out * (1 + TINY) if isinstance(mask, mx.array) and mask.shape[-1] > 768 else out

    loaded = changed(long)
    found = probe(loaded.model, loaded.head_width, loaded.context_length)
    plain = probe(tiny().model, loaded.head_width, loaded.context_length)
    assert found.tile is not None
    assert plain.tile is not None
    assert not any({768, 1024} <= set(run) for run in found.tile.runs)
    joined = {keys for run in plain.tile.runs for keys in run}
    assert {keys for run in found.tile.runs for keys in run} <= joined


def test_recurrent_state_has_no_tiles() -> None:
    assert explain(tiny("lfm2").model) == "its cache (ArraysCache) is not plain keys and values"
    assert explain(tiny("gpt_oss").model) == ""


async def made(loaded: LoadedModel, **settings: Any) -> ExactEngine:
    compute = ComputeThread()
    chosen = TargetSettings(model="tiny", numerics="exact", _cli_parse_args=False, **settings)  # type: ignore[call-arg]
    try:
        return await make_exact_engine(compute, loaded, chosen)
    finally:
        await asyncio.to_thread(compute.close)


async def test_a_tile_that_fails_leaves_a_smaller_one() -> None:
    """Uneven from the fifth row on: 8 rows fail, 4 pass."""
    engine = await made(uneven(4))
    assert engine.tile is not None
    assert engine.tile.rows == 4
    assert [engine.room(live) for live in (1, 2, 3, 4, 9)] == [3, 1, 0, 0, 0]


async def test_without_a_tile_the_model_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(ModelError) as refused:
        await made(uneven(2))
    message = str(refused.value)
    for word in (
        "tiny-llama-5 cannot be served with --numerics exact: no tile keeps the bits of a row",
        "8 rows: model.layers.1.mlp.down_proj (128 to 64) gives a row other bits",
        "4 rows: ",
        "another --blas may, or --numerics fast serves it",
    ):
        assert word in message


async def test_a_tile_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(ModelError, match="another --exact-rows or another --blas may"):
        await made(uneven(4), exact_rows=8)


async def test_a_model_that_raises_is_refused() -> None:
    def fail(x: mx.array, out: mx.array, mask: Any) -> mx.array:
        if x.shape[0] > 1:
            raise ValueError("one at a time")
        return out

    with pytest.raises(ModelError, match=r"does not take rows of one position each \(ValueError\)"):
        await made(changed(fail))


def test_nothing_passed_lists_every_fault() -> None:
    loaded = uneven(2)
    found: Probed = probe(loaded.model, loaded.head_width, loaded.context_length)
    assert found.tile is None
    assert [bool(one.fault) for one in found.found] == [True, True]
    assert "8 rows: " in found.faults
    assert "4 rows: " in found.faults
