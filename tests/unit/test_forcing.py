"""Forced drafts beside a drafter's: which go into a window, how many pay, and what is learned."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from target_service.controller import Acceptance, Fixed, Off
from target_service.costs import Costs
from target_service.forcing import Certainty, Joined, join
from target_service.widths import Bid, share

ROWS = {1: 1.0, 2: 1.04, 4: 1.1, 8: 1.3, 16: 1.8, 17: 2.4}


class Script:
    """A grammar that allows one text, of which it forces what `gaps` leaves."""

    def __init__(self, text: Sequence[int], gaps: frozenset[int] = frozenset()) -> None:
        self._text = tuple(text)
        self._gaps = gaps

    def fitting(self, drafts: Sequence[int]) -> tuple[int, ...]:
        count = next((i for i, pair in enumerate(zip(drafts, self._text, strict=False)) if pair[0] != pair[1]), None)
        return tuple(drafts[: min(len(drafts), len(self._text)) if count is None else count])

    def forced(self, after: Sequence[int], most: int) -> tuple[int, ...]:
        found: list[int] = []
        for place in range(len(after), len(self._text)):
            if place in self._gaps or len(found) == most:
                break
            found.append(self._text[place])
        return tuple(found)


@pytest.mark.parametrize(
    ("forced", "remote", "most", "expected"),
    [
        ((), (), 8, Joined(())),
        ((1, 2), (), 8, Joined((1, 2), 2, 0, (True, True))),
        ((1, 2), (9, 9, 9), 8, Joined((1, 2), 2, 0, (True, True))),
        ((1, 2), (1,), 8, Joined((1, 2), 2, 0, (True, True))),
        ((1, 2), (1, 2, 3), 8, Joined((1, 2, 3, 4, 5), 2, 2, (False,) * 3 + (True,) * 2)),
        ((), (1, 2, 3), 4, Joined((1, 2, 3, 4), 0, 1, (False,) * 3 + (True,))),
        ((), (1, 7, 3), 8, Joined((1,), 0, 0, (False,))),
        ((1, 2), (1, 2, 3), 1, Joined((1,), 1, 0, (False,))),
        ((1, 2), (1, 2, 3), 0, Joined(())),
    ],
)
def test_a_window_is_the_drafters_where_it_agrees_with_what_is_forced(
    forced: tuple[int, ...], remote: tuple[int, ...], most: int, expected: Joined
) -> None:
    """Else what is forced; behind a drafter's that all fit comes what is forced there."""
    assert join(Script([1, 2, 3, 4, 5, 6], frozenset({2, 5})), forced, remote, most) == expected


def test_the_first_of_a_window_keep_their_marks() -> None:
    whole = Joined((1, 2, 3, 4), 2, 1, (False, False, False, True))
    assert whole.first(4) == whole
    assert whole.first(3) == Joined((1, 2, 3), 2, 0, (False,) * 3)
    assert whole.first(1) == Joined((1,), 1, 0, (False,))
    assert whole.first(0) == Joined(())


def test_sure_drafts_are_used_as_far_as_they_pay_whatever_the_drafter_is_worth() -> None:
    worthless = Acceptance(16)
    for _ in range(60):
        worthless.score(16, 0, 16)
    assert used(worthless, 15, 15, 0, 0.98) == 15
    assert used(worthless, 15, 15, 0, 0.01) == 0
    assert used(worthless, 15, 3, 0, 0.98) == 3
    assert used(worthless, 15, 0, 0, 0.98) == 0
    # The step from 16 rows to 17 costs more than one token is worth.
    assert used(worthless, 16, 16, 0, 0.98) == 15


def test_forced_text_behind_a_good_drafters_is_as_likely_as_those() -> None:
    good = Acceptance(16)
    for _ in range(60):
        good.score(4, 4, 4)
    assert used(good, 12, 0, 8, 0.98) == 12
    assert used(good, 12, 0, 8, 0.0) == 4


def test_the_other_controllers_use_all_or_none() -> None:
    costs = Costs(ROWS)
    assert share([Off("off").bid(3, 0, 3, 0, 0.9)], costs).drafts == (0,)
    assert share([Fixed(4, 0.1).bid(3, 0, 2, 1, 0.1)], costs).drafts == (3,)


def used(acceptance: Acceptance, available: int, sure: int, tail: int, chance: float) -> int:
    """Drafts that one sequence verifies alone."""
    bid = Bid(acceptance.tokens(available, 0, sure, tail, chance))
    return share([bid], Costs(ROWS)).drafts[0]


def test_certainty_follows_what_stands() -> None:
    """It begins high, falls with refused tokens and ignores those behind a refusal."""
    certainty = Certainty()
    begin = certainty.chance
    assert 0.95 < begin < 1.0
    certainty.scored(6, 6)
    assert certainty.chance > begin
    for _ in range(40):
        certainty.scored(6, 0)
    assert certainty.chance < 0.6
    low = certainty.chance
    certainty.scored(0, 0)
    assert certainty.chance == low
