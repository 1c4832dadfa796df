"""Lookup: the automaton finds what a search through the whole text finds, and drafts go on from there."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.sources.automaton import Match, SuffixAutomaton
from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, SessionSpec
from draft_service.sources.lookup import LookupDrafter, LookupSource
from draftwire.sampling import Sampler

texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 4), max_size=60),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.builds(lambda unit, times, rest: unit * times + rest, st.lists(st.integers(0, 2), max_size=5),
              st.integers(0, 8), st.lists(st.integers(0, 2), max_size=6)),
)  # fmt: skip


def spec(*end_ids: int) -> SessionSpec:
    return SessionSpec(prompt_length=1, max_length=10_000, sampler=Sampler(), end_ids=frozenset(end_ids))


def opened(ids: Sequence[int], *end_ids: int, min_match: int = 2, context_length: int = 0) -> Drafter:
    drafter = LookupDrafter(spec(*end_ids), min_match=min_match, context_length=context_length)
    drafter.advance(ids)
    return drafter


def draft(drafter: Drafter, limit: int, assumed: Sequence[int] = ()) -> Guess:
    return drafter.draft(Ask(assumed=tuple(assumed), limit=limit, want_confidences=True), lambda: False)


def searched(text: Sequence[int], assumed: Sequence[int] = ()) -> Match:
    """The longest suffix of text + assumed that ends in the text, before its own place; the most recent one."""
    path = [*text, *assumed]
    last_end = len(text) if assumed else len(text) - 1
    for length in range(min(len(path) - (0 if assumed else 1), last_end), 0, -1):
        suffix = path[len(path) - length :]
        for end in range(last_end, length - 1, -1):
            if text[end - length : end] == suffix:
                return Match(length, end)
    return Match(0, 0)


@given(texts)
def test_the_match_is_the_longest_most_recent_earlier_occurrence_after_every_id(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length, token_id in enumerate(text, 1):
        automaton.extend([token_id])
        assert automaton.match == searched(text[:length])
    assert automaton.text == text


@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_assumed_ids_are_followed_without_a_trace(text: list[int], assumed: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    before = automaton.match
    assert automaton.follow(assumed) == searched(text, assumed)
    assert (automaton.match, automaton.text) == (before, text)
    assert automaton.follow([]) == before


@given(texts, st.lists(st.integers(0, 4), max_size=5))
def test_appending_after_a_look_ahead_is_as_if_it_had_never_been(text: list[int], more: list[int]) -> None:
    looked, plain = SuffixAutomaton(text), SuffixAutomaton([*text, *more])
    looked.follow([1, 0, 1])
    looked.extend(more)
    assert looked.match == plain.match


class CountingDict(dict[int, int]):
    """Counts look-ups: the work of the automaton without a clock."""

    lookups = 0

    def __contains__(self, key: object) -> bool:
        CountingDict.lookups += 1
        return super().__contains__(key)


class CountingList(list[int]):
    """Counts changes of entries."""

    changes = 0

    def __setitem__(self, *entry: Any) -> None:
        CountingList.changes += 1
        super().__setitem__(*entry)


@pytest.mark.parametrize("unit", [[5], [1, 2], [1, 2, 3, 4, 5, 6, 7]], ids=["aaaa", "abab", "period 7"])
def test_a_repetition_costs_a_constant_number_of_steps_an_id(unit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = SuffixAutomaton()
    add = automaton._add_state
    monkeypatch.setattr(automaton, "_add_state", lambda edges, *rest: add(CountingDict(edges), *rest))
    automaton._recent = CountingList(automaton._recent)
    CountingList.changes = 0
    counts = []
    for _ in range(3):
        CountingDict.lookups = 0
        automaton.extend((unit * 2800)[:2800])
        counts.append(CountingDict.lookups)
    assert CountingList.changes <= 64 * 8400
    assert max(counts) <= 4 * 2800
    assert all(later <= earlier + 100 for earlier, later in pairwise(counts))
    assert automaton.match.length == 8400 - len(unit)


@pytest.mark.parametrize(
    ("text", "limit", "expected", "end"),
    [
        ([], 4, (), DraftEnd.NO_MATCH),
        ([7], 4, (), DraftEnd.NO_MATCH),
        ([1, 2, 3, 4], 4, (), DraftEnd.NO_MATCH),
        ([1, 2, 9, 1], 4, (), DraftEnd.NO_MATCH),
        ([1, 2, 3, 4, 9, 1, 2], 2, (3, 4), DraftEnd.MAX_DRAFT_TOKENS),
        ([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], 8, (3, 4, 5, 6), DraftEnd.LOW_CONFIDENCE),
        ([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], 2, (4, 0), DraftEnd.MAX_DRAFT_TOKENS),
        ([1, 2, 1, 2, 1, 2], 7, (1, 2, 1, 2, 1, 2, 1), DraftEnd.MAX_DRAFT_TOKENS),
        ([5, 5, 5, 5], 6, (5, 5, 5, 5, 5, 5), DraftEnd.MAX_DRAFT_TOKENS),
        ([1, 2, 3, 8, 4, 1, 2], 4, (3, 8), DraftEnd.END_TOKEN),
    ],
    ids=["empty", "one id", "no repeat", "match too short", "limit", "twice the match", "most recent", "past the end",
         "aaaa", "end id"],
)  # fmt: skip
def test_a_draft_copies_what_followed(text: list[int], limit: int, expected: tuple[int, ...], end: DraftEnd) -> None:
    guess = draft(opened(text, 8), limit)
    assert (guess.ids, guess.end) == (expected, end)


def test_assumed_ids_are_continued_and_then_forgotten() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6, 9])
    assert draft(drafter, 2, [2, 3]).ids == (4, 5)
    assert draft(drafter, 2).ids == ()
    assert drafter.length == 7


def test_a_copy_runs_on_through_assumed_ids() -> None:
    assert draft(opened([1, 2, 3]), 4, [1, 2, 3]).ids == (1, 2, 3, 1)


def test_the_context_bounds_committed_assumed_and_drafted_ids_together() -> None:
    drafter = opened([1, 2, 1, 2, 1, 2], context_length=9)
    guess = draft(drafter, 8, [1])
    assert (guess.ids, guess.end) == ((2, 1), DraftEnd.CONTEXT_FULL)


@given(texts, st.integers(1, 20))
def test_confidences_fall_and_are_probabilities(text: list[int], limit: int) -> None:
    guess = draft(opened(text), limit)
    assert len(guess.confidences) == len(guess.ids) <= limit
    assert all(1 > left > right > 0 for left, right in pairwise(guess.confidences))


def test_a_match_of_m_tokens_is_believed_with_m_over_m_plus_two() -> None:
    guess = draft(opened([1, 2, 3, 4, 9, 1, 2]), 2)
    assert guess.confidences == pytest.approx((2 / 4, 2 / 4 * 3 / 5))


@given(texts, texts, st.integers(0, 60))
def test_a_rewritten_session_drafts_like_a_new_one(old: list[int], new: list[int], common: int) -> None:
    wanted = [*old[:common], *new]
    drafter = opened(old)
    draft(drafter, 4)
    kept = drafter.rewrite(wanted)
    assert kept == (len(old) if wanted[: len(old)] == old else 0)
    assert drafter.length == len(wanted)
    assert draft(drafter, 8) == draft(opened(wanted), 8)


def test_feeding_goes_in_chunks_and_changes_no_draft() -> None:
    text = [i % 97 for i in range(1000)]
    drafter = opened(text)
    behind = []
    while drafter.behind:
        behind.append(drafter.behind)
        drafter.feed(lambda: False)
    assert behind == [1000, 744, 488, 232]
    assert draft(drafter, 5) == draft(opened(text), 5)


def test_what_is_charged_covers_what_is_held() -> None:
    ids = [(i * 2654435761 >> 7) & 1 for i in range(4000)]
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton(ids)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(automaton) == 4000
    assert held <= LookupSource().bytes_for(4000)


def test_lookup_needs_no_mlx() -> None:
    code = "import sys, draft_service.program, draft_service.sources.lookup; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
