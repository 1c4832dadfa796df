"""What drafts did, counted as the field counts it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.stats import SpeculationCounts, Times


def booked(*rounds: tuple[int, int, int]) -> SpeculationCounts:
    """Rounds of (drafted, accepted, cut)."""
    counts = SpeculationCounts()
    for drafted, accepted, cut in rounds:
        counts.book(drafted=drafted, accepted=accepted, cut=cut, emitted=accepted + 1, reason="off")
    return counts


def test_a_request_without_rounds_is_all_zeros_and_no_nan() -> None:
    counts = SpeculationCounts()
    assert (counts.mean_acceptance_length, counts.acceptance_rate, counts.forwards_saved) == (0.0, 0.0, 0)


def test_rounds_without_drafts_are_not_speculative_and_say_why() -> None:
    counts = booked((0, 0, 0), (0, 0, 0))
    counts.book(drafted=0, accepted=0, cut=0, emitted=1, reason="late")
    assert counts.spec_rounds == 0
    assert counts.forwards == 3
    assert counts.without_draft == {"off": 2, "late": 1}
    assert (counts.mean_acceptance_length, counts.acceptance_rate, counts.forwards_saved) == (0.0, 0.0, 0)
    assert counts.histogram == []


def test_mean_length_counts_the_target_s_own_token_and_the_rate_does_not() -> None:
    counts = booked((4, 4, 0), (4, 0, 0), (2, 1, 0))
    assert counts.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert counts.acceptance_rate == pytest.approx(0.5)
    assert counts.histogram == [1, 1, 0, 0, 1]
    assert counts.drafted_by_position == [3, 3, 2, 2]
    assert counts.accepted_by_position == [2, 1, 1, 1]
    assert counts.rejected == 5
    assert counts.forwards_saved == 5


def test_cut_drafts_are_neither_accepted_nor_rejected() -> None:
    counts = booked((5, 3, 2))
    assert (counts.accepted, counts.cut, counts.rejected) == (3, 2, 0)
    assert counts.acceptance_rate == pytest.approx(0.6)


ROUNDS = st.lists(
    st.integers(0, 6).flatmap(
        lambda d: st.integers(0, d).flatmap(lambda a: st.tuples(st.just(d), st.just(a), st.integers(0, d - a)))
    ),
    max_size=30,
)


@given(ROUNDS)
def test_counts_reconcile_for_any_rounds(rounds: list[tuple[int, int, int]]) -> None:
    counts = booked(*rounds)
    assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    assert counts.rejected >= 0
    assert counts.forwards == len(rounds) == counts.spec_rounds + sum(counts.without_draft.values())
    assert sum(counts.histogram) == counts.spec_rounds
    assert sum(counts.drafted_by_position) == counts.drafted
    assert sum(counts.accepted_by_position) == counts.accepted
    assert len(counts.drafted_by_position) == len(counts.accepted_by_position)
    per_position = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
    assert all(accepted <= drafted <= counts.spec_rounds for accepted, drafted in per_position)
    assert 0.0 <= counts.acceptance_rate <= 1.0
    assert math.isfinite(counts.mean_acceptance_length)


def test_times_are_zero_until_their_moments_are_reached_and_never_negative() -> None:
    times = Times(arrived=10.0)
    assert (times.queued_s, times.time_to_first_token_s, times.prefill_s, times.decode_s) == (0.0, 0.0, 0.0, 0.0)
    times.admitted, times.prefilled, times.first_token, times.finished = 11.0, 13.0, 13.5, 17.0
    assert (times.queued_s, times.time_to_first_token_s) == (1.0, 3.5)
    assert (times.prefill_s, times.decode_s) == (2.0, 4.0)
    times.prefilled = 10.0
    assert times.prefill_s == 0.0
