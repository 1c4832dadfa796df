"""Near ties: decisions that another number of rows might turn, counted in one pass over the scores that decided."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftwire.sampling import Sampler, log_softmax, perturbed
from target_service.batch_choose import Part, PendingBatch
from target_service.choose import Chosen, choose, read
from target_service.params import Choosing, Penalties
from target_service.window import Window

GAP = 1e-3
VOCAB = 97


def rows_with_gaps(*gaps: float) -> mx.array:
    """(rows, vocab): the two best logits of each row lie so far apart."""
    logits = np.random.default_rng(1).uniform(-5, 5, (len(gaps), VOCAB)).astype(np.float32)
    for row, gap in enumerate(gaps):
        logits[row, 11] = 9.0
        logits[row, 60] = 9.0 - gap
    return mx.array(logits)


def window(rows: int, first_step: int = 0) -> Window:
    return Window(slot=0, pending=1, drafts=(2,) * (rows - 1), first_step=first_step)


def near(logits: mx.array, choosing: Choosing, gap: float = GAP) -> tuple[bool, ...]:
    return read(choose(logits, choosing, window(logits.shape[0]), gap)).near


@pytest.mark.parametrize("choosing", [Choosing(), Choosing(top_logprobs=2), Choosing(logit_bias={5: 1.0})])
def test_greedy_rows_are_near_ties_where_the_two_best_are_close(choosing: Choosing) -> None:
    logits = rows_with_gaps(0.0, GAP / 2, 2 * GAP, 1.0)
    assert near(logits, choosing) == (True, True, False, False)


def test_processed_logits_count() -> None:
    """A penalty that parts a tie, and a bias that makes one."""
    parted = Window(slot=0, pending=60, first_step=0, history=(60,))
    choosing = Choosing(penalties=Penalties(presence=1.0))
    assert read(choose(rows_with_gaps(0.0), choosing, parted, GAP)).near == (False,)
    assert near(rows_with_gaps(1.0), Choosing(logit_bias={60: 1.0})) == (True,)


def test_nobody_looks_without_a_gap() -> None:
    assert near(rows_with_gaps(0.0), Choosing(), 0.0) == ()


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(temperature=0.7, seed=3),
        Sampler(temperature=1.5, seed=4, top_p=0.95),
        Sampler(temperature=0.9, seed=5, top_k=1),
        Sampler(temperature=2.0, seed=6, min_p=0.3),
    ],
)
def test_sampled_rows_are_near_ties_of_perturbed_scores_times_the_temperature(sampler: Sampler) -> None:
    """Against a sort of everything that the filters keep."""
    gap = 0.2
    logits = mx.array(np.random.default_rng(2).normal(0, 2, (64, VOCAB)).astype(np.float32))
    scores = np.array(perturbed(log_softmax(logits), sampler, range(64))) * sampler.temperature
    probabilities = np.exp(np.array(log_softmax(logits), dtype=np.float64))
    expected = []
    for row in range(64):
        order = np.argsort(-probabilities[row])
        before = np.cumsum(probabilities[row][order]) - probabilities[row][order]
        kept = [
            token
            for rank, token in enumerate(order)
            if before[rank] < sampler.top_p
            and (not sampler.top_k or rank < sampler.top_k)
            and probabilities[row][token] >= sampler.min_p * probabilities[row].max()
        ]
        best = sorted(scores[row][kept], reverse=True)
        expected.append(len(best) > 1 and best[0] - best[1] < gap)
    found = near(logits, Choosing(sampler=sampler), gap)
    if sampler.filters:
        # What was not looked at may have been left out: it is counted all the same, never the other way round.
        assert all(one or not other for one, other in zip(found, expected, strict=True))
        assert not all(found)
    else:
        assert list(found) == expected
        assert 0 < sum(found) < 64


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_batch_counts_as_its_sequences_do(dtype: mx.Dtype) -> None:
    logits = mx.stack([rows_with_gaps(0.0, 4.0), rows_with_gaps(3.0, 0.0)]).astype(dtype)
    parts = [Part(0, Choosing(), window(2)), Part(1, Choosing(top_logprobs=1), window(2))]
    batch = PendingBatch(logits, parts, 0.25)
    assert [one.near for one in batch.read() if isinstance(one, Chosen)] == [(True, False), (False, True)]
    assert [one.near for one in PendingBatch(logits, parts).read() if isinstance(one, Chosen)] == [(), ()]


def test_a_row_of_infinities_is_still_an_error_of_its_own() -> None:
    logits = mx.stack([mx.full((1, VOCAB), -math.inf), rows_with_gaps(0.0)])
    batch: list[Any] = PendingBatch(
        logits, [Part(0, Choosing(), window(1)), Part(1, Choosing(), window(1))], GAP
    ).read()
    assert batch[0].reason == "LOGITS_NOT_FINITE"
    assert batch[1].near == (True,)
