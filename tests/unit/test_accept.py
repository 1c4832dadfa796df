"""Which drafts stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.accept import Verdict, accept

IDS = st.integers(0, 3)


def test_without_drafts_the_one_choice_is_committed() -> None:
    assert accept((), (5,)) == Verdict((5,), 0)


@pytest.mark.parametrize("agreed", [0, 1, 2, 3])
def test_the_first_disagreement_is_corrected_and_nothing_behind_it_counts(agreed: int) -> None:
    """Drafts that would agree again behind a wrong one were chosen after another text: they are rejected."""
    drafts, choices = [7, 8, 9, 10], [7, 8, 9, 10, 11]
    choices[agreed] = 99
    verdict = accept(drafts, choices)
    assert verdict.ids == (*drafts[:agreed], 99)
    assert verdict.accepted == agreed
    assert verdict.proposed == 4


def test_after_all_drafts_the_last_row_is_the_bonus() -> None:
    verdict = accept((7, 8), (7, 8, 9))
    assert verdict.ids == (7, 8, 9)
    assert verdict.accepted == verdict.proposed == 2


@given(st.lists(IDS, max_size=8), st.lists(IDS, min_size=9, max_size=9))
def test_one_more_than_the_agreeing_prefix_is_committed(drafts: list[int], rows: list[int]) -> None:
    choices = rows[: len(drafts) + 1]
    verdict = accept(drafts, choices)
    assert list(verdict.ids) == choices[: verdict.accepted + 1]
    assert drafts[: verdict.accepted] == choices[: verdict.accepted]
    assert verdict.accepted == len(drafts) or drafts[verdict.accepted] != choices[verdict.accepted]
    assert verdict.proposed == len(drafts)


@given(st.lists(IDS, max_size=8), st.lists(IDS, min_size=9, max_size=9), st.lists(IDS, min_size=9, max_size=9))
def test_rows_behind_the_first_disagreement_have_no_say(drafts: list[int], rows: list[int], junk: list[int]) -> None:
    choices = rows[: len(drafts) + 1]
    verdict = accept(drafts, choices)
    changed = [*choices[: verdict.accepted + 1], *junk[verdict.accepted + 1 : len(choices)]]
    assert accept(drafts, changed) == verdict
