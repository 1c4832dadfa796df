"""Filters and draws: the search without a sort keeps what a sort would keep, and draws the best of it."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from draftwire.noise import gumbel, step_keys
from draftwire.sampling import Draw, Sampler, draw, draw_ids, host_ids, log_softmax, settle

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def random_rows(seed: int, count: int, width: int, scale: float = 2.0) -> Row:
    return (np.random.default_rng(seed).standard_normal((count, width)) * scale).astype(np.float32)


def kept_by_sorting(row: Row, sampler: Sampler) -> Mask:
    """The definition of the page on noise, with a sort and float64."""
    logprobs = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    order = np.argsort(-logprobs)
    kept = np.zeros(len(row), dtype=bool)
    mass = 0.0
    most = sampler.top_p if sampler.top_p < 1.0 else math.inf
    floor = logprobs.max() + (math.log(sampler.min_p) if sampler.min_p > 0 else -math.inf)
    for rank, token in enumerate(order):
        allowed = mass < most and logprobs[token] >= floor and (rank < sampler.top_k or sampler.top_k == 0)
        kept[token] = rank == 0 or allowed
        mass += math.exp(logprobs[token])
    return kept & np.isfinite(row)


def kept_by_mlx_lm(row: Row, sampler: Sampler) -> Mask:
    logprobs: Any = log_softmax(mx.array(row[None]))
    if sampler.top_p < 1.0:
        logprobs = apply_top_p(logprobs, sampler.top_p)
    if sampler.min_p > 0.0:
        logprobs = apply_min_p(logprobs, sampler.min_p)
    if 0 < sampler.top_k < len(row):
        logprobs = apply_top_k(logprobs, sampler.top_k)
    kept: Mask = np.isfinite(np.array(logprobs)[0])
    return kept


def best_of(row: Row, kept: Mask, sampler: Sampler, step: int) -> int:
    """The perturbed argmax over the kept tokens."""
    noise = gumbel([step_keys(sampler.seed, step)], len(row))
    perturbed = log_softmax(mx.array(row[None])) / sampler.temperature + noise
    return host_ids(mx.argmax(mx.where(mx.array(kept[None]), perturbed, -math.inf), axis=-1))[0]


SAMPLERS = [
    Sampler(temperature=1.0, top_p=1e-6, seed=1),
    Sampler(temperature=1.0, top_p=0.1, seed=1),
    Sampler(temperature=0.7, top_p=0.9, seed=2),
    Sampler(temperature=2.0, top_p=0.999, seed=3),
    Sampler(temperature=1.0, top_k=1, seed=4),
    Sampler(temperature=5.0, top_k=2, seed=4),
    Sampler(temperature=1.0, top_k=40, seed=4),
    Sampler(temperature=1.0, top_k=1_000_000, seed=4),
    Sampler(temperature=1.0, min_p=1.0, seed=5),
    Sampler(temperature=1.0, min_p=0.05, seed=5),
    Sampler(temperature=1.0, min_p=1e-30, seed=5),
    Sampler(temperature=1.0, top_p=0.9, top_k=5, min_p=0.02, seed=6),
    Sampler(temperature=100.0, top_p=0.5, top_k=50, min_p=0.5, seed=6),
    Sampler(temperature=1e-3, top_p=0.9, top_k=50, min_p=0.01, seed=7),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("width", [2, 300, 5000])
def test_a_filtered_draw_is_the_best_of_what_mlx_lm_keeps(sampler: Sampler, width: int) -> None:
    rows = random_rows(width, 6, width)
    ids = draw_ids(mx.array(rows), sampler, range(10, 16))
    for row, token, step in zip(rows, ids, range(10, 16), strict=True):
        kept, by_sorting = kept_by_mlx_lm(row, sampler), kept_by_sorting(row, sampler)
        # Rounding may decide on one token at the border where thousands of masses were added up.
        assert (kept != by_sorting).sum() <= (width > 1000)
        assert token in {best_of(row, kept, sampler, step), best_of(row, by_sorting, sampler, step)}


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(temperature=100.0, top_p=0.6, seed=1),
        Sampler(temperature=100.0, top_k=5, seed=1),
        Sampler(temperature=100.0, min_p=0.3, seed=1),
        Sampler(temperature=100.0, top_p=0.8, top_k=7, min_p=0.1, seed=1),
    ],
)
def test_everything_that_is_kept_is_drawn_and_nothing_else(sampler: Sampler) -> None:
    """Filters come before the temperature: a hot draw is nearly uniform over what was kept without it."""
    row = random_rows(9, 1, 24, scale=1.0)[0]
    drawn = set(draw_ids(mx.array(np.repeat(row[None], 2000, axis=0)), sampler, range(2000)))
    assert drawn == set(np.flatnonzero(kept_by_sorting(row, sampler)).tolist())


@pytest.mark.parametrize("count", range(1, 13))
def test_the_borders_of_every_filter_are_sharp(count: int) -> None:
    """A little less, and `count` tokens are kept; a little more, and so is the next one."""
    row = random_rows(31, 1, 24, scale=1.0)[0]
    logprobs = np.sort(row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64)))[::-1]
    mass, share = np.exp(logprobs).cumsum()[count - 1], np.exp(logprobs[count] - logprobs[0])
    tight = [{"top_p": mass - 1e-4}, {"top_k": count}, {"min_p": share * 1.001}]
    loose = [{"top_p": mass + 1e-4}, {"top_k": count + 1}, {"min_p": share * 0.999}]
    rows = mx.array(np.repeat(row[None], 400, axis=0))
    for expected, filters in [*((count, each) for each in tight), *((count + 1, each) for each in loose)]:
        drawn = set(draw_ids(rows, Sampler(temperature=100.0, seed=1, **filters), range(400)))
        assert drawn == set(np.argsort(-row)[:expected].tolist())


@settings(deadline=None, max_examples=120)
@given(
    sampler=st.builds(
        Sampler,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.floats(0.01, 50.0),
        top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_min=True)),
        top_k=st.integers(0, 70),
        min_p=st.one_of(st.just(0.0), st.floats(1e-9, 1.0)),
    ),
    step=st.integers(0, 2**31),
    values=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=60, unique=True),
    hidden=st.sets(st.integers(0, 59), max_size=30),
)
@example(sampler=Sampler(temperature=8.0, min_p=1e-20), step=0, values=[-18.0, 16.0], hidden=set())
@example(sampler=Sampler(temperature=4.0, top_k=2), step=0, values=[-11.0, 5.0], hidden=set())
def test_any_filtered_draw_is_the_best_of_what_sorting_keeps(
    sampler: Sampler, step: int, values: list[float], hidden: set[int]
) -> None:
    """Also where the mass of one token rounds to 1 and top_p is 1, which must mean off."""
    row = np.array(values, dtype=np.float32)
    row[[index for index in hidden if 0 < index < len(values)]] = -np.inf
    # Borders that rounding decides are nobody's promise.
    finite = np.sort(row[np.isfinite(row)].astype(np.float64))[::-1]
    logprobs = finite - np.logaddexp.reduce(finite)
    assume(sampler.top_p == 1.0 or np.abs(np.cumsum(np.exp(logprobs)) - sampler.top_p).min() > 1e-5)
    gaps = logprobs[1:] - logprobs[0]
    assume(sampler.min_p == 0 or np.abs(gaps - math.log(sampler.min_p)).min(initial=1.0) > 1e-4)
    assume(np.abs(np.diff(logprobs)).min(initial=1.0) > 1e-4)
    kept = kept_by_sorting(row, sampler)
    (token,) = draw_ids(mx.array(row[None]), sampler, [step])
    assert kept[token]
    if sampler.filters:
        assert token == best_of(row, kept, sampler, step)


def test_without_filters_the_draw_is_the_perturbed_argmax() -> None:
    rows, sampler = random_rows(3, 5, 1000), Sampler(temperature=0.8, seed=11)
    noise = np.array(gumbel([step_keys(11, step) for step in range(5)], 1000))
    expected = np.argmax(rows / np.float32(0.8) + noise, axis=-1)
    assert draw_ids(mx.array(rows), sampler, range(5)) == expected.tolist()


def test_greedy_draws_ignore_everything_else() -> None:
    rows = random_rows(4, 5, 1000)
    sampler = Sampler(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, seed=9)
    assert draw_ids(mx.array(rows), sampler, range(5)) == np.argmax(rows, axis=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-9, 1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_a_tiny_temperature_is_greedy_and_never_overflows(temperature: float, filters: dict[str, Any]) -> None:
    """Kind of fault: logits / 1e-38 are all infinite, and argmax then answers the first of them."""
    rows = np.stack([np.arange(64, dtype=np.float32), np.linspace(-90, -1, 64, dtype=np.float32)])
    sampler = Sampler(temperature=temperature, seed=3, **filters)
    assert draw_ids(mx.array(rows), sampler, [0, 1]) == [63, 63]


def test_a_hot_draw_from_a_narrow_set_needs_and_gets_more_passes() -> None:
    """At temperature 100 nearly any of 20,000 tokens wins at first; each pass leaves only tokens more likely than it."""
    rows = random_rows(5, 8, 20_000, scale=0.5)
    sampler = Sampler(temperature=100.0, top_k=1, seed=2)
    pending = draw(mx.array(rows), sampler, range(8))
    assert isinstance(pending, Draw)
    assert not mx.all(pending.done).item()
    assert settle(pending, sampler) == np.argmax(rows, axis=-1).tolist()


def test_settling_again_changes_nothing() -> None:
    rows, sampler = random_rows(6, 8, 500), Sampler(temperature=1.0, top_p=0.8, seed=2)
    pending = draw(mx.array(rows), sampler, range(8))
    assert isinstance(pending, Draw)
    ids = settle(pending, sampler)
    assert settle(pending, sampler) == ids
    done = np.array(pending.done)
    assert np.array(pending.ids)[done].tolist() == np.array(ids)[done].tolist()


@pytest.mark.parametrize(
    "sampler", [SAMPLERS[2], SAMPLERS[5], SAMPLERS[11], SAMPLERS[12], Sampler(temperature=0.9, seed=1)]
)
def test_a_row_is_drawn_alike_alone_and_among_others(sampler: Sampler) -> None:
    """Kind of fault: a seed that gives other tokens when other rows run beside it."""
    rows = random_rows(7, 9, 3000)
    together = draw_ids(mx.array(rows), sampler, range(100, 109))
    alone = [draw_ids(mx.array(rows[i : i + 1]), sampler, [100 + i])[0] for i in range(9)]
    assert together == alone


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_impossible_tokens_are_never_drawn(sampler: Sampler) -> None:
    rows = random_rows(8, 6, 50)
    rows[:, 10:] = -np.inf
    rows[5, 1:] = -np.inf
    ids = draw_ids(mx.array(rows), sampler, range(6))
    assert all(token < 10 for token in ids)
    assert ids[5] == 0


def test_equally_likely_tokens_are_kept_together() -> None:
    rows = np.zeros((400, 6), dtype=np.float32)
    rows[:, 4:] = -3.0
    drawn = draw_ids(mx.array(rows), Sampler(temperature=1.0, top_k=1, seed=1), range(400))
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLERS[2], SAMPLERS[4], Sampler(temperature=1.0)])
def test_a_search_over_a_row_without_numbers_ends(sampler: Sampler, value: float) -> None:
    """What such a row means is for the caller to say; the search must not go on for ever."""
    assert len(draw_ids(mx.full((2, 30), value), sampler, [0, 1])) == 2


def test_wider_heads_draw_the_same_where_the_padding_is_impossible() -> None:
    """A drafter whose head is padded to another width guesses the sampled token all the same."""
    rows = random_rows(12, 6, 49_152)
    padded = np.concatenate([rows, np.full((6, 128), -np.inf, dtype=np.float32)], axis=1)
    for sampler in (Sampler(temperature=1.0, seed=8), Sampler(temperature=1.0, top_p=0.9, seed=8)):
        assert draw_ids(mx.array(rows), sampler, range(6)) == draw_ids(mx.array(padded), sampler, range(6))


def test_half_precision_logits_are_drawn_in_float32() -> None:
    rows = mx.array(random_rows(13, 4, 500)).astype(mx.bfloat16)
    sampler = Sampler(temperature=0.5, top_p=0.9, seed=8)
    assert draw_ids(rows, sampler, range(4)) == draw_ids(rows.astype(mx.float32), sampler, range(4))


def test_the_log_softmax_is_normalised_in_float32() -> None:
    values = log_softmax(mx.array(random_rows(14, 3, 1000) + 80.0))
    assert values.dtype == mx.float32
    assert np.exp(np.array(values, dtype=np.float64)).sum(axis=-1).tolist() == pytest.approx([1.0] * 3, abs=1e-4)


def test_ids_come_back_as_python_integers() -> None:
    ids = host_ids(mx.array([3, 1], dtype=mx.uint32))
    assert ids == [3, 1]
    assert all(type(token) is int for token in ids)
