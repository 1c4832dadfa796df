"""Choosing under a constraint: the mask comes after penalties, before logprobs, filters and the draw."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftwire.errors import InternalError
from draftwire.sampling import Sampler
from target_service.batch_choose import Part, PendingBatch
from target_service.choose import Chosen, choose, read
from target_service.params import Choosing, Penalties
from target_service.window import Window

VOCAB = 24
SAMPLERS = [Sampler(), Sampler(temperature=1.0, seed=3), Sampler(temperature=0.9, top_p=0.8, top_k=5, seed=4)]


def limits_of(*rows: set[int]) -> np.ndarray[Any, Any]:
    found = np.full((len(rows), VOCAB), -np.inf, np.float32)
    for row, ids in enumerate(rows):
        found[row, sorted(ids)] = np.inf
    return found


def window(*rows: set[int], drafts: tuple[int, ...] = (), history: tuple[int, ...] = (1,)) -> Window:
    return Window(slot=0, pending=1, drafts=drafts, first_step=0, history=history, limits=lambda: limits_of(*rows))


def logits(seed: int, rows: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * 3)


def chosen(values: mx.array, choosing: Choosing, seen: Window) -> Chosen:
    return read(choose(values, choosing, seen))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_chooses_what_it_would_if_nothing_else_existed(sampler: Sampler) -> None:
    """The same as with all other logits at -inf, whatever the sampler."""
    for seed in range(20):
        rows = [set(np.random.default_rng(seed + row).choice(VOCAB, 4).tolist()) for row in range(3)]
        values = logits(seed, 3)
        found = chosen(values, Choosing(sampler=sampler), window(*rows, drafts=(2, 3)))
        assert all(token in allowed for token, allowed in zip(found.ids, rows, strict=True))
        alone = mx.where(mx.array(limits_of(*rows)) > 0, values, -math.inf)
        plain = Window(slot=0, pending=1, drafts=(2, 3), first_step=0)
        assert found.ids == chosen(alone, Choosing(sampler=sampler), plain).ids
        assert found.dead_row is None


def test_penalties_and_bias_come_before_the_mask() -> None:
    """A bias decides among what is allowed and can neither allow nor ban by itself."""
    values = mx.zeros((1, VOCAB))
    assert chosen(values, Choosing(logit_bias={5: 100.0, 7: 1.0}), window({7, 8})).ids == (7,)
    assert chosen(values, Choosing(logit_bias={7: -100.0, 8: -100.0}), window({7, 8})).ids == (7,)
    penalties = Penalties(presence=2.0)
    assert chosen(values, Choosing(penalties=penalties), window({7, 8}, history=(7,))).ids == (8,)


def test_logprobs_are_those_of_what_is_allowed() -> None:
    """They add up to one over the allowed ids, and the list of the likeliest ends where those do."""
    found = chosen(logits(1, 2), Choosing(top_logprobs=5), window({2, 4, 9}, {3}, drafts=(2,)))
    assert found.logprobs is not None
    first, second = found.logprobs
    assert set(first.top_ids) == {2, 4, 9}
    assert math.isclose(sum(math.exp(value) for value in first.top_logprobs), 1.0, rel_tol=1e-5)
    assert (second.top_ids, second.logprob) == ((3,), 0.0)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_with_nothing_left_is_dead_and_the_rows_before_it_are_not(sampler: Sampler) -> None:
    """Nothing allowed, or everything allowed banned by min_tokens: argmax would say id 0 in silence."""
    found = chosen(logits(2, 3), Choosing(sampler=sampler), window({2}, set(), {3}, drafts=(2, 2)))
    assert (found.dead_row, found.ids[0]) == (1, 2)
    banned = Choosing(sampler=sampler, banned=frozenset({6}), min_tokens=4)
    assert chosen(logits(2, 1), banned, window({6})).dead_row == 0
    assert chosen(logits(2, 1), banned, window({6, 7})).ids == (7,)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("place", [2, 11])
def test_nan_is_a_fault_of_the_model_also_where_it_is_masked(sampler: Sampler, place: int) -> None:
    values = np.zeros((1, VOCAB), np.float32)
    values[0, place] = np.nan
    with pytest.raises(InternalError, match="not finite"):
        chosen(mx.array(values), Choosing(sampler=sampler), window({2, 3}))


def test_constrained_and_free_rows_of_a_batch_do_not_touch_each_other() -> None:
    """The free one keeps the short way, the constrained one is masked, padding is nobody's."""
    values = mx.stack([logits(4, 3), logits(5, 3)])
    free = Window(slot=0, pending=1, drafts=(2, 3), first_step=0)
    bound = window({4, 5}, set(), drafts=(4,))
    parts = [Part(0, Choosing(), free), Part(1, Choosing(), bound)]
    assert [part.plain for part in parts] == [True, False]
    one, other = PendingBatch(values, parts).read()
    assert isinstance(one, Chosen)
    assert isinstance(other, Chosen)
    assert one.ids == tuple(mx.argmax(values[0], axis=-1).tolist())
    assert (other.ids, other.dead_row) == (chosen(values[1, :2], Choosing(), bound).ids, 1)
