"""The table of what forwards cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.costs import Costs

TABLES = st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), min_size=1, max_size=8)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Costs({})


def test_measured_rows_are_answered_as_measured_and_the_rest_interpolated() -> None:
    costs = Costs({1: 0.04, 4: 0.07, 8: 0.05})
    assert costs.forward_s(1) == 0.04
    assert costs.forward_s(2) == pytest.approx(0.05)
    assert costs.forward_s(6) == pytest.approx(0.06)
    assert costs.forward_s(8) == 0.05


def test_beyond_a_table_that_falls_at_its_end_costs_do_not_fall_on() -> None:
    assert Costs({4: 0.07, 8: 0.05}).forward_s(100) == 0.05
    assert Costs({4: 0.05, 8: 0.07}).forward_s(12) == pytest.approx(0.09)


def test_one_measured_number_of_rows_is_enough() -> None:
    assert Costs({4: 0.08}).forward_s(8) == pytest.approx(0.16)
    assert Costs({4: 0.08}).forward_s(1) == 0.08


def test_a_shape_that_was_not_seen_for_long_is_followed_closely() -> None:
    """Kind of fault: a plain step that was last measured in worse times makes drafts look better than they are."""
    costs = Costs({1: 0.10, 4: 0.12}, shapes={(8, 1): 0.10, (8, 2): 0.12})
    for _ in range(64):
        costs.observe(2, 0.08, sequences=8)
    assert costs.plain_age(8) == 64
    costs.observe(1, 0.06, sequences=8)
    assert costs.plain_age(8) == 0
    assert costs.plain_batch_s(8) == pytest.approx(0.10 - 0.4 * 0.04)
    before = costs.plain_batch_s(8)
    costs.observe(1, 0.06, sequences=8)
    assert costs.plain_batch_s(8) == pytest.approx(before - 0.1 * (before - 0.06))


def test_the_gap_of_a_round_is_followed_and_outliers_count_little() -> None:
    costs = Costs({1: 0.04})
    assert costs.gap_s == 0.0
    for _ in range(100):
        costs.observe_gap(0.005)
    assert costs.gap_s == pytest.approx(0.005, rel=1e-3)
    costs.observe_gap(3.0)
    assert costs.gap_s < 0.007
    for _ in range(200):
        costs.observe_gap(-1.0)
    assert costs.gap_s == pytest.approx(0.0, abs=1e-6)


def test_observing_does_not_change_the_callers_table() -> None:
    measured = {1: 0.04}
    Costs(measured).observe(1, 1.0)
    assert measured == {1: 0.04}


def test_an_outlier_counts_as_twice_the_usual() -> None:
    costs = Costs({1: 0.04})
    costs.observe(1, 3600.0)
    assert costs.forward_s(1) == pytest.approx(0.04 + 0.1 * 0.04)


def test_a_number_of_rows_that_was_never_measured_joins_the_table() -> None:
    costs = Costs({1: 0.04, 8: 0.08})
    before = costs.forward_s(5)
    costs.observe(5, 0.05)
    assert costs.forward_s(5) == pytest.approx(before + 0.1 * (0.05 - before))
    assert costs.forward_s(1) == 0.04
    assert costs.forward_s(8) == 0.08


@given(TABLES, st.integers(1, 256), st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 100.0)), max_size=20))
def test_costs_are_always_finite_and_never_negative(
    table: dict[int, float], rows: int, seen: list[tuple[int, float]]
) -> None:
    costs = Costs(table)
    for count, seconds in seen:
        costs.observe(count, seconds)
    assert math.isfinite(costs.forward_s(rows))
    assert costs.forward_s(rows) >= 0.0
    assert costs.plain_batch_s(1) >= 0.0
