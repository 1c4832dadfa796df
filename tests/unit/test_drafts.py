"""Offers: an answer held against what was committed since it was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.drafts import NoDrafts, Offer, SourceReport

IDS = st.integers(0, 2)


def updated(base_length: int, ids: tuple[int, ...], committed: list[int]) -> Offer:
    offer = Offer(base_length, ids)
    offer.update(committed)
    return offer


def test_an_answer_in_time_is_all_drafts() -> None:
    offer = updated(3, (7, 8, 9), [1, 2, 3])
    assert (offer.agreed, offer.rest, offer.resolved) == (0, (7, 8, 9), False)


def test_a_late_answer_that_still_fits_gives_its_rest() -> None:
    offer = updated(3, (7, 8, 9), [1, 2, 3, 7])
    assert (offer.agreed, offer.rest, offer.resolved) == (1, (8, 9), False)


def test_a_late_answer_that_disagrees_gives_nothing_ever_again() -> None:
    """Drafts for an old position are dropped by position, not by luck: agreeing later does not bring them back."""
    offer = updated(3, (7, 8, 9), [1, 2, 3, 7, 5])
    assert (offer.agreed, offer.rest, offer.resolved) == (1, (), True)
    offer.update([1, 2, 3, 7, 5, 9])
    assert (offer.agreed, offer.rest, offer.resolved) == (1, (), True)


def test_an_answer_that_came_true_to_its_end_is_resolved() -> None:
    offer = updated(3, (7, 8), [1, 2, 3, 7, 8, 4])
    assert (offer.agreed, offer.rest, offer.resolved, offer.refuted) == (2, (), True, False)


def test_an_empty_answer_is_resolved_at_once() -> None:
    offer = updated(3, (), [1, 2, 3])
    assert (offer.agreed, offer.rest, offer.resolved) == (0, (), True)


@pytest.mark.parametrize("base_length", [4, 100])
def test_an_answer_about_the_future_is_never_compared_with_the_past(base_length: int) -> None:
    offer = updated(base_length, (1,), [1, 1, 1, 1])
    assert (offer.agreed, offer.resolved) == (0, False)


@given(st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, max_size=6), st.lists(IDS, max_size=9), st.data())
def test_updating_in_steps_is_updating_once(
    prompt: list[int], ids: list[int], output: list[int], data: st.DataObject
) -> None:
    offer = Offer(len(prompt), tuple(ids))
    for end in sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=4))):
        offer.update([*prompt, *output[:end]])
    offer.update([*prompt, *output])
    assert offer == updated(len(prompt), tuple(ids), [*prompt, *output])
    assert ids[: offer.agreed] == output[: offer.agreed]
    if offer.rest:
        # What is left continues exactly where the committed ids end.
        assert len(prompt) + offer.agreed == len(prompt) + len(output)
    if offer.refuted:
        assert ids[offer.agreed] != output[offer.agreed]


async def test_no_drafts_has_nothing_and_needs_nothing() -> None:
    source = NoDrafts()
    assert (source.ready, source.asking, source.limit, source.take()) == (False, False, 0, None)
    await source.arrival()
    source.scored(0, 0)
    assert source.report() == SourceReport()
    source.close()
