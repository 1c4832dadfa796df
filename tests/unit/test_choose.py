"""Choosing from logits: processors as mlx-lm has them, row by row as if the drafts before a row were committed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from draftwire.errors import InternalError
from draftwire.sampling import Sampler, log_softmax
from target_service.choose import Chosen, choose, process, read
from target_service.params import Choosing, Penalties
from target_service.window import Window

VOCAB = 61
Rows = npt.NDArray[np.float32]


def random_logits(seed: int, rows: int, vocab: int = VOCAB) -> Rows:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def random_ids(seed: int, count: int, vocab: int = VOCAB) -> tuple[int, ...]:
    luck = random.Random(seed)
    return tuple(luck.randrange(vocab // 3) for _ in range(count))


def window_of(committed: tuple[int, ...], drafts: tuple[int, ...], penalties: Penalties, first_step: int = 0) -> Window:
    """As a sequence makes it: only as much history as the penalties look at."""
    history = committed[-penalties.window :] if penalties.on else ()
    return Window(slot=0, pending=committed[-1], drafts=drafts, first_step=first_step, history=history)


def mlx_lm_row(logits: Rows, committed: tuple[int, ...], choosing: Choosing) -> Rows:
    """One row, processed by mlx-lm with all ids that precede it."""
    penalties = choosing.penalties
    size = penalties.window or len(committed)
    processors = make_logits_processors(
        logit_bias=dict(choosing.logit_bias) or None,
        repetition_penalty=penalties.repetition if penalties.repetition != 1.0 else None,
        repetition_context_size=size,
        presence_penalty=penalties.presence or None,
        presence_context_size=size,
        frequency_penalty=penalties.frequency or None,
        frequency_context_size=size,
    )
    row: Any = mx.array(logits[None])
    for processor in processors:
        row = processor(mx.array(committed), row)
    processed: Rows = np.array(row)[0]
    return processed


PENALTIES = [
    Penalties(),
    Penalties(repetition=1.3),
    Penalties(repetition=0.5, window=0),
    Penalties(repetition=100.0, window=3),
    Penalties(presence=1.5),
    Penalties(presence=-2.0, window=0),
    Penalties(frequency=0.7, window=5),
    Penalties(frequency=-0.3, window=1),
    Penalties(repetition=1.2, presence=0.4, frequency=0.9),
    Penalties(repetition=1.2, presence=0.4, frequency=0.9, window=1000),
]


@pytest.mark.parametrize("bias", [{}, {3: 5.0, 60: -100.0, 0: 0.25}])
@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("history", [1, 7, 60])
def test_every_row_is_processed_as_mlx_lm_does_after_its_drafts(
    penalties: Penalties, history: int, bias: dict[int, float]
) -> None:
    """Kind of fault: penalties and bias are accepted and silently not applied where drafts are on."""
    choosing = Choosing(penalties=penalties, logit_bias=bias)
    committed, drafts, logits = random_ids(1, history), random_ids(2, 5), random_logits(3, 6)
    found = np.array(process(mx.array(logits), choosing, window_of(committed, drafts, penalties)))
    assert found.shape == logits.shape
    for row in range(6):
        expected = mlx_lm_row(logits[row].copy(), committed + drafts[:row], choosing)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.5, seed=1), Sampler(temperature=0.5, top_p=0.9)])
def test_the_smallest_allowed_repetition_penalty_is_no_internal_error(sampler: Sampler) -> None:
    """Kind of fault: a legal request is blamed on the model, because dividing by 1e-38 overflows."""
    logits = random_logits(4, 1)
    logits[0, 7] = 5.0
    choosing = Choosing(penalties=Penalties(repetition=1e-38), sampler=sampler, top_logprobs=1)
    assert read(choose(mx.array(logits), choosing, window_of((7,), (), choosing.penalties))).ids == (7,)


SAMPLERS = [
    Sampler(),
    Sampler(temperature=0.9, seed=77),
    Sampler(temperature=1.5, top_p=0.8, top_k=20, min_p=0.01, seed=77),
    Sampler(temperature=60.0, top_k=1, seed=77),
]


def rows_of(logits: Rows, choosing: Choosing, committed: tuple[int, ...], drafts: tuple[int, ...], step: int) -> Chosen:
    return read(choose(mx.array(logits), choosing, window_of(committed, drafts, choosing.penalties, step)))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled", "filtered", "narrow"])
@pytest.mark.parametrize("penalties", [PENALTIES[0], PENALTIES[6], PENALTIES[8]])
@pytest.mark.parametrize("min_tokens", [0, 13, 99])
def test_a_row_of_a_window_is_the_one_row_window_after_its_drafts(
    sampler: Sampler, penalties: Penalties, min_tokens: int
) -> None:
    """Kind of fault: a seed, a penalty or a ban that works out otherwise with drafts than without. Bit for bit."""
    choosing = Choosing(
        sampler=sampler,
        penalties=penalties,
        logit_bias={1: 2.0, 9: -100.0},
        banned=frozenset({4, 5}),
        min_tokens=min_tokens,
        top_logprobs=3,
    )
    committed, drafts, logits = random_ids(5, 30), random_ids(6, 7), random_logits(7, 8)
    together = rows_of(logits, choosing, committed, drafts, 10)
    assert together.logprobs is not None
    for row in range(8):
        alone = rows_of(logits[row : row + 1], choosing, committed + drafts[:row], (), 10 + row)
        assert alone.ids == together.ids[row : row + 1]
        assert alone.logprobs == together.logprobs[row : row + 1]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_processed_rows_do_not_depend_on_later_drafts(data: st.DataObject) -> None:
    """Rows after a disagreement may hold anything: what stands before them keeps its bits."""
    ids = st.integers(0, VOCAB - 1)
    committed = tuple(data.draw(st.lists(ids, min_size=1, max_size=30)))
    drafts = tuple(data.draw(st.lists(ids, min_size=1, max_size=8)))
    kept = data.draw(st.integers(0, len(drafts)))
    other = (*drafts[:kept], *data.draw(st.lists(ids, min_size=len(drafts) - kept, max_size=len(drafts) - kept)))
    penalties = data.draw(st.sampled_from(PENALTIES))
    choosing = Choosing(penalties=penalties, logit_bias={2: 1.0})
    logits = mx.array(random_logits(8, len(drafts) + 1))
    one = np.array(process(logits, choosing, window_of(committed, drafts, penalties)))
    two = np.array(process(logits, choosing, window_of(committed, other, penalties)))
    assert one[: kept + 1].tobytes() == two[: kept + 1].tobytes()


def test_processing_leaves_the_logits_of_the_forward_alone() -> None:
    logits = mx.array(random_logits(9, 4))
    before = np.array(logits).tobytes()
    choosing = Choosing(penalties=PENALTIES[8], logit_bias={1: 9.0}, banned=frozenset({2}), min_tokens=2)
    mx.eval(process(logits, choosing, window_of((1, 2), (3, 4, 5), PENALTIES[8])))
    assert np.array(logits).tobytes() == before


@pytest.mark.parametrize(
    ("first_step", "min_tokens", "banned"), [(0, 0, 0), (0, 2, 2), (3, 5, 2), (5, 5, 0), (0, 99, 4)]
)
def test_min_tokens_bans_end_and_stop_ids_before_their_step_only(first_step: int, min_tokens: int, banned: int) -> None:
    logits = random_logits(10, 4)
    logits[:, 7] = 50.0
    logits[:, 8] = 40.0
    choosing = Choosing(banned=frozenset({7, 8}), min_tokens=min_tokens)
    window = window_of((1,), (2, 3, 4), Penalties(), first_step)
    ids = read(choose(mx.array(logits), choosing, window)).ids
    assert [token == 7 for token in ids] == [row >= banned for row in range(4)]
    processed = np.array(process(mx.array(logits), choosing, window))
    assert np.isneginf(processed[:banned][:, [7, 8]]).all()
    assert processed[banned:].tobytes() == logits[banned:].tobytes()


def test_a_bias_cannot_bring_a_banned_id_back() -> None:
    choosing = Choosing(banned=frozenset({7}), min_tokens=1, logit_bias={7: 100.0})
    assert 7 not in read(choose(mx.array(random_logits(11, 1)), choosing, window_of((1,), (), Penalties()))).ids


def test_a_biased_away_token_is_not_chosen_though_it_was_drafted() -> None:
    logits = random_logits(12, 3)
    logits[:, 20] = 30.0
    choosing = Choosing(logit_bias={20: -100.0})
    assert 20 not in read(choose(mx.array(logits), choosing, window_of((1,), (20, 20), Penalties()))).ids


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_are_those_after_processors_and_before_filters(sampler: Sampler, top: int) -> None:
    """Kind of fault: a token of a speculative round has logprob 0 or none. One entry a row, whatever was drafted."""
    penalties = PENALTIES[8]
    choosing = Choosing(sampler=sampler, penalties=penalties, logit_bias={3: 2.0}, top_logprobs=top)
    committed, drafts, logits = random_ids(13, 9), random_ids(14, 4), random_logits(15, 5)
    window = window_of(committed, drafts, penalties)
    chosen = read(choose(mx.array(logits), choosing, window))
    expected = np.array(log_softmax(process(mx.array(logits), choosing, window)))
    assert chosen.logprobs is not None
    assert len(chosen.logprobs) == len(chosen.ids) == 5
    for row, (token, entry) in enumerate(zip(chosen.ids, chosen.logprobs, strict=True)):
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        best = np.argsort(-expected[row])[:top]
        assert entry.top_ids == tuple(best.tolist())
        assert entry.top_logprobs == pytest.approx(expected[row][best].tolist(), abs=1e-6)
        assert len(entry.top_ids) == len(entry.top_logprobs) == top


def test_logprobs_are_absent_where_nobody_asked() -> None:
    chosen = read(choose(mx.array(random_logits(16, 2)), Choosing(), window_of((1,), (2,), Penalties())))
    assert chosen.logprobs is None


def test_a_search_that_needs_more_passes_says_that_the_first_ids_did_not_stand() -> None:
    logits = random_logits(17, 3, 5000) * 0.2
    choosing = Choosing(sampler=Sampler(temperature=100.0, top_k=1, seed=2), top_logprobs=1)
    pending = choose(mx.array(logits), choosing, window_of((1,), (2, 3), Penalties()))
    chosen = read(pending)
    assert not chosen.settled
    assert list(chosen.ids) == np.argmax(logits, axis=-1).tolist()
    assert chosen.logprobs is not None
    assert [entry.top_ids[0] for entry in chosen.logprobs] == list(chosen.ids)
    greedy = read(choose(mx.array(logits), replace(choosing, sampler=Sampler()), window_of((1,), (2, 3), Penalties())))
    assert greedy.settled
    assert greedy.logprobs == chosen.logprobs


BAD_SAMPLERS = [*SAMPLERS, Sampler(temperature=1.0, min_p=0.1), Sampler(temperature=1.0, top_p=0.5)]


@pytest.mark.parametrize("sampler", BAD_SAMPLERS)
@pytest.mark.parametrize("place", [0, 1, 30, VOCAB - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_logit_that_is_no_number_is_loud(sampler: Sampler, place: int, value: float) -> None:
    """Kind of fault: filters turn a row with one NaN into a row of NaN, whose argmax is an innocent id 0."""
    logits = random_logits(18, 3)
    logits[1, place] = value
    with pytest.raises(InternalError) as caught:
        read(choose(mx.array(logits), Choosing(sampler=sampler), window_of((1,), (2, 3), Penalties())))
    assert caught.value.reason == "LOGITS_NOT_FINITE"


@pytest.mark.parametrize("sampler", BAD_SAMPLERS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("top", [None, 0, 5])
def test_a_row_without_any_number_is_loud(sampler: Sampler, value: float, top: int | None) -> None:
    """Kind of fault: argmax of a row of -inf is id 0, in silence."""
    logits = random_logits(19, 3)
    logits[2] = value
    choosing = Choosing(sampler=sampler, top_logprobs=top)
    with pytest.raises(InternalError):
        read(choose(mx.array(logits), choosing, window_of((1,), (2, 3), Penalties())))


@pytest.mark.parametrize("sampler", BAD_SAMPLERS)
def test_impossible_tokens_in_a_good_row_are_not_an_error(sampler: Sampler) -> None:
    logits = random_logits(20, 2)
    logits[:, 5:] = -np.inf
    chosen = read(
        choose(mx.array(logits), Choosing(sampler=sampler, top_logprobs=3), window_of((1,), (2,), Penalties()))
    )
    assert all(token < 5 for token in chosen.ids)
    assert chosen.logprobs is not None
    assert all(math.isfinite(entry.logprob) for entry in chosen.logprobs)


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = mx.array(random_logits(21, 2)).astype(mx.bfloat16)
    choosing = Choosing(sampler=SAMPLERS[2], penalties=PENALTIES[8], top_logprobs=2)
    window = window_of((1, 2), (3,), PENALTIES[8])
    assert read(choose(logits, choosing, window)) == read(choose(logits.astype(mx.float32), choosing, window))
