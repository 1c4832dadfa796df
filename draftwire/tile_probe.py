"""Looks for a tile in which a row gets the same bits wherever it stands and whoever is beside it. Runs on the compute thread.

A BLAS or a GPU kernel may add up in another order for another number of rows, at the edge of a block, or for another number of
keys. Three looks at a model, all bit for bit: every shape of linear layer with its rows moved around; what is computed from
logits; and whole forwards, in which one sequence's rows stand alone, together, apart, and among changing neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from draftwire.ragged import PoolRow, prefill_caches, unpoolable
from draftwire.rows import Place, RowPool, run_tile
from draftwire.sampling import log_softmax
from draftwire.tiles import TILE_ROWS, Tile, extent_class, extents_up_to

_LENGTHS: Final = (11, 29, 3)
_LONGEST_EXTENT: Final = 2048
_EXTENT_BYTES: Final = 128 << 20
# Relative distance of two rows of logits: rounding stays far below, a wrong position or mask lies far above.
_TOLERANCE: Final = {mx.float32: 1e-3}
_COARSE: Final = 5e-2


@dataclass(frozen=True, slots=True)
class TileFound:
    """What was found about one number of rows."""

    rows: int
    fault: str
    """Where a row's bits depend on more than the row; "" where they do not."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found about a model."""

    tile: Tile | None
    """The first that passed."""
    found: tuple[TileFound, ...]
    """In the order in which they were tried."""

    @property
    def faults(self) -> str:
        """Why none passed, for people."""
        return "; ".join(f"{one.rows} rows: {one.fault}" for one in self.found if one.fault)


def probe(
    model: Any, width: int, context_length: int, *, sizes: Sequence[int] = TILE_ROWS, all_sizes: bool = False
) -> Probed:
    """Tries tiles of these sizes, in order, up to the first that passes, or all of them.

    width: logits of a row. Raises whatever the model raises where it does not take rows of different positions.
    """
    found, tile = [], None
    try:
        for rows in sizes:
            fault = tile_fault(model, width, rows)
            found.append(TileFound(rows, fault))
            if not fault and tile is None:
                tile = Tile(rows=rows, runs=_runs(model, width, rows, context_length))
            if tile is not None and not all_sizes:
                break
    finally:
        mx.clear_cache()
    return Probed(tile, tuple(found))


def tile_fault(model: Any, width: int, rows: int) -> str:
    """Where a row's bits depend on more than the row, in forwards of `rows` rows; "" where nowhere."""
    return _layer_fault(model, rows) or _choice_fault(width, rows) or _forward_fault(model, width, rows)


def _layer_fault(model: Any, rows: int) -> str:
    seen: set[tuple[Any, ...]] = set()
    for name, layer in _linear_layers(model):
        weight = layer.weight
        bits = getattr(layer, "bits", None)
        inputs = weight.shape[1] if bits is None else weight.shape[1] * 32 // bits
        dtype = weight.dtype if bits is None else layer.scales.dtype
        kind = (type(layer), weight.shape, bits, dtype)
        if kind in seen:
            continue
        seen.add(kind)
        apply = layer.as_linear if hasattr(layer, "as_linear") else layer
        ids = mx.random.normal((rows, 1, inputs), key=mx.random.key(len(seen))).astype(dtype)
        straight = apply(ids)
        for shift in range(1, rows):
            order = mx.array([(row + shift) % rows for row in range(rows)])
            if not _same(apply(ids[order]), straight[order]):
                return f"{name} ({inputs} to {straight.shape[-1]}) gives a row other bits at another place of the tile"
    return ""


def _linear_layers(model: Any) -> Iterator[tuple[str, Any]]:
    named = list(model.named_modules())
    tied = not any(name.rpartition(".")[2] == "lm_head" for name, _ in named)
    layers: Any = nn
    kinds = (layers.Linear, layers.QuantizedLinear)
    kinds += (layers.Embedding, layers.QuantizedEmbedding) if tied else ()
    for name, layer in named:
        if isinstance(layer, kinds):
            yield name, layer


def _choice_fault(width: int, rows: int) -> str:
    logits = mx.random.normal((rows, width), key=mx.random.key(3)) * 4
    every, best = log_softmax(logits), mx.argmax(logits, axis=-1)
    for count in range(1, rows):
        if not _same(log_softmax(logits[:count]), every[:count]) or not _same(
            mx.argmax(logits[:count], axis=-1), best[:count]
        ):
            return f"log-probabilities of {count} rows differ from those of the same rows among {rows}"
    return ""


class _Trial:
    """Three sequences in a pool; forwards of the first one's window, in whatever company."""

    def __init__(self, model: Any, width: int, rows: int) -> None:
        self._model = model
        self._width = width
        self.rows = rows
        self.pool = RowPool(make_prompt_cache(model))
        self.prompts = [_ids(number, length, width) for number, length in enumerate(_LENGTHS)]
        self.window = _ids(9, rows, width)
        self._members = []
        for prompt in self.prompts:
            caches = prefill_caches(make_prompt_cache(model))
            model(mx.array([prompt]), cache=caches)
            self._members.append(self.pool.join(caches, len(prompt)))

    def own(self, begin: int, end: int) -> list[Place]:
        """Rows [begin, end) of the first one's window."""
        length = len(self.prompts[0])
        return [Place(self._members[0], length + row, self.window[row]) for row in range(begin, end)]

    def others(self, count: int, salt: int) -> list[Place]:
        """Rows of the other two, of other content for each salt."""
        ids = _ids(salt, count, self._width)
        length = [len(prompt) for prompt in self.prompts]
        return [Place(self._members[1 + row % 2], length[1 + row % 2] + row // 2, ids[row]) for row in range(count)]

    def run(self, places: Sequence[Place]) -> mx.array:
        """Logits (places, width), computed."""
        extent = max(extent_class(place.position + 1) for place in places)
        logits = run_tile(self._model, self.pool, places, self.rows, extent)[: len(places)]
        mx.eval(logits)
        return logits

    def stored(self) -> list[mx.array]:
        """Keys and values of the first one, its window's included."""
        row = PoolRow(self._members[0].index, len(self.prompts[0]) + self.rows)
        caches: list[Any] = self.pool.rows_of(row)
        return [array for cache in caches for array in (cache.keys, cache.values)]


def _forward_fault(model: Any, width: int, rows: int) -> str:
    trial = _Trial(model, width, rows)
    try:
        plain = mx.concatenate([trial.run(trial.own(row, row + 1)) for row in range(rows)])
        mx.eval(plain)
        stored = trial.stored()
        fault = _distance_fault(model, trial, plain)
        for label, found in _variants(trial):
            for row, logits in found.items():
                if not fault and not _same(logits, plain[row]):
                    fault = f"a row of a whole forward gets other bits {label}"
            if not fault and not all(_same(one, other) for one, other in zip(trial.stored(), stored, strict=True)):
                fault = f"keys or values get other bits {label}"
            if fault:
                return fault
    finally:
        trial.pool.clear()
    return ""


def _variants(trial: _Trial) -> Iterator[tuple[str, dict[int, mx.array]]]:
    """The window's rows in other company: (what was done, row -> logits)."""
    rows, half = trial.rows, trial.rows // 2
    together = trial.run(trial.own(0, rows))
    yield "together with its window than alone", {row: together[row] for row in range(rows)}
    front = trial.run([*trial.own(0, half), *trial.others(rows - half, 20)])
    back = trial.run([*trial.others(half, 21), *trial.own(half, rows)])
    split = {row: front[row] for row in range(half)} | {row: back[row] for row in range(half, rows)}
    yield "beside another sequence's window than alone", split
    for row, place in ((0, rows - 1), (1, half), (rows - 1, 0)):
        others = trial.others(rows - 1, 22 + row)
        mixed = trial.run([*others[:place], *trial.own(row, row + 1), *others[place:]])
        yield f"at place {place} among others than alone", {row: mixed[place]}


def _distance_fault(model: Any, trial: _Trial, found: mx.array) -> str:
    """Rows must also be right: those of mlx-lm's own cache, up to rounding."""
    cache = make_prompt_cache(model)
    model(mx.array([trial.prompts[0]]), cache=cache)
    # One by one as well: mlx-lm's ring of a sliding window takes one row at a time in any state.
    steps = [model(mx.array([[token]]), cache=cache)[0] for token in trial.window]
    expected = mx.concatenate(steps).astype(mx.float32)
    found = found.astype(mx.float32)
    distance = mx.max(mx.linalg.norm(found - expected, axis=-1) / mx.linalg.norm(expected, axis=-1))
    error = cast("float", distance.item())
    tolerance = _TOLERANCE.get(steps[0].dtype, _COARSE)
    if math.isfinite(error) and error <= tolerance:
        return ""
    return f"rows of one position differ from mlx-lm's by {error:.1e}, over {tolerance:.0e}"


def _runs(model: Any, width: int, rows: int, context_length: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring numbers of keys that give the same bits, among those that are quickly tried; see `Tile.runs`."""
    pool = RowPool(make_prompt_cache(model))
    caches = prefill_caches(make_prompt_cache(model))
    model(mx.array([[1, 2]]), cache=caches)
    member = pool.join(caches, 2)
    try:
        per_position = pool.nbytes // (pool.slots * pool.capacity)
        limit = min(extent_class(context_length), _LONGEST_EXTENT, _EXTENT_BYTES // max(per_position, 1))
        extents = extents_up_to(limit)
        if len(extents) < 2:
            return ()
        pool.reserve(1, extents[-1])
        pool.scatter_noise()
        runs = [[extents[0]]]
        for extent, longer in pairwise(extents):
            # The last position of the shorter one: every key has a share.
            place = Place(member, extent - 1, 1)
            short, long = (run_tile(model, pool, [place], rows, keys)[0] for keys in (extent, longer))
            if _same(short, long):
                runs[-1].append(longer)
            else:
                runs.append([longer])
    finally:
        pool.clear()
    return tuple(tuple(run) for run in runs if len(run) > 1)


def _same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one, other).item())


def _ids(seed: int, count: int, width: int) -> list[int]:
    return [(seed * 7919 + position * 104729 + 13) % width for position in range(count)]


def explain(model: Any) -> str:
    """Why a model has no tiles at all, whatever the sizes; "" where it may have."""
    return unpoolable(make_prompt_cache(model))
