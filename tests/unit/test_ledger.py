"""The ledger under every partition into rounds: drafts change how many tokens come at once, and nothing else."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from target_service.accept import Verdict, accept
from target_service.ledger import Finish, FinishReason, Ledger, Released, Token, TokenLogprobs
from target_service.params import Stopping
from target_service.stats import SpeculationCounts

EOS, STOP_ID, HIDDEN = 0, 1, 2
PIECES = {
    EOS: b"<eos>",
    STOP_ID: b"<stop>",
    HIDDEN: b"",
    3: b"a",
    4: b"b",
    5: b"ab",
    6: b"X",
    7: b"Y",
    8: b" the",
    9: b"\xf0\x9f",
    10: b"\x98\x80",
    11: b"e",
    12: b"\xcc\x81",
    13: b"\nUser",
    14: b":",
    15: b"\xff",
    16: "你".encode(),
}
FILLER = 8
PROMPT = (8, 8, 3)


def piece(token: int) -> bytes:
    return PIECES[token]


Drafter = Callable[[int, int], Sequence[int]]
"""(step, most) -> drafts."""


@dataclass
class Outcome:
    """What a client and the engine saw of a request."""

    text: str = ""
    texts: list[str] = field(default_factory=list)
    """Of each token, by the ends of its chunk."""
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    completion_tokens: int = 0
    committed: list[int] = field(default_factory=list)
    chunks: list[Released] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def same_as(self, other: Outcome) -> None:
        """Equal in all that the promise covers: everything but which round and which source a token came from."""
        assert self.text == other.text
        assert self.texts == other.texts
        assert self.ids == other.ids
        assert self.finish == other.finish
        assert self.completion_tokens == other.completion_tokens
        assert self.committed == other.committed
        assert [token.logprobs for token in self.tokens] == [token.logprobs for token in other.tokens]


def logprobs_at(step: int) -> TokenLogprobs:
    """Different at each step, so that a shifted entry shows."""
    return TokenLogprobs(-step / 8, (step,), (-step / 8,))


def drive(script: Sequence[int], stopping: Stopping, drafter: Drafter | None = None, width: int = 8) -> Outcome:
    """As `commit_round` does it. The target says `script`, then fillers."""
    ledger, outcome = Ledger(PROMPT, stopping, piece), Outcome()
    said = [*script, *[FILLER] * (stopping.max_tokens + 2 * width)]
    while outcome.finish is None:
        step, most = ledger.step, min(width, ledger.remaining - 1)
        assert most >= 0
        assert ledger.pending == ([*PROMPT, *said[:step]])[-1]
        assert ledger.cached_length == len(PROMPT) + step - 1
        drafts = tuple(drafter(step, most))[:most] if drafter else ()
        choices = said[step : step + len(drafts) + 1]
        verdict = accept(drafts, choices)
        rows = [logprobs_at(step + row) for row in range(len(choices))]
        committed = ledger.commit(verdict, rows)
        emitted = ledger.step - step + int(ledger.ended_by_token)
        assert committed.accepted + committed.cut == verdict.accepted
        outcome.counts.book(
            drafted=len(drafts), accepted=committed.accepted, cut=committed.cut, emitted=emitted, reason="none"
        )
        if committed.released is not None:
            assert committed.released.first_step == len(outcome.tokens)
            assert committed.released.tokens
            outcome.chunks.append(committed.released)
            outcome.text += committed.released.text
            outcome.texts += texts_of(committed.released)
            outcome.tokens += committed.released.tokens
        outcome.finish = committed.finish
    outcome.completion_tokens = ledger.completion_tokens
    outcome.committed = ledger.ids
    check(outcome, stopping)
    return outcome


def texts_of(released: Released) -> list[str]:
    """The text of each token, cut by the ends."""
    assert len(released.text_ends) == len(released.tokens)
    assert released.text_ends[-1] == len(released.text)
    return [released.text[begin:end] for begin, end in pairwise((0, *released.text_ends))]


def completed_by(ids: Sequence[int], *, ended: bool) -> list[str]:
    """The characters that each id completed; `ended` gives the last id what an unfinished one becomes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = len(ids) - 1
    return [decoder.decode(piece(token_id), final=ended and at == last) for at, token_id in enumerate(ids)]


def check(outcome: Outcome, stopping: Stopping) -> None:
    """Counts reconcile, whatever happened."""
    counts, finish = outcome.counts, outcome.finish
    assert finish is not None
    by_token = finish.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
    assert outcome.completion_tokens == len(outcome.tokens) + by_token <= stopping.max_tokens
    assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    assert min(counts.rejected, counts.cut, counts.accepted) >= 0
    assert counts.drafted == sum(counts.drafted_by_position)
    assert counts.accepted == sum(counts.accepted_by_position)
    assert counts.accepted == sum(index * times for index, times in enumerate(counts.histogram))
    assert counts.spec_rounds == sum(counts.histogram)
    assert 0.0 <= counts.acceptance_rate <= 1.0
    # Committed beyond what was delivered: only text that a stop string swallowed.
    emitted = len(outcome.committed) - len(PROMPT)
    assert counts.emitted == emitted + by_token
    assert emitted == len(outcome.tokens) or finish.reason is FinishReason.STOP_STRING
    assert outcome.committed[len(PROMPT) :][: len(outcome.tokens)] == outcome.ids
    check_texts(outcome)


def check_texts(outcome: Outcome) -> None:
    """Each token has what it completed, and joined that is the text; a stop string cuts it there, for good."""
    assert "".join(outcome.texts) == outcome.text
    stopped = outcome.finish is not None and outcome.finish.reason is FinishReason.STOP_STRING
    whole = completed_by(outcome.ids, ended=not stopped)
    assert stopped or outcome.texts == whole
    left = len(outcome.text)
    for text, completed in zip(outcome.texts, whole, strict=True):
        assert text == completed[:left]
        left -= len(text)


def perfect(script: Sequence[int]) -> Drafter:
    said = [*script, *[FILLER] * 64]
    return lambda step, most: said[step : step + most]


def wrong(script: Sequence[int]) -> Drafter:
    said = [*script, *[FILLER] * 64]
    return lambda step, most: [
        3 + (token % 5) if token != 3 + (token % 5) else 16 for token in said[step : step + most]
    ]


def half(script: Sequence[int]) -> Drafter:
    right, off = perfect(script), wrong(script)
    return lambda step, most: [*right(step, most)[: most // 2], *off(step + most // 2, most - most // 2)]


def lucky(script: Sequence[int], seed: int) -> Drafter:
    """Right or wrong by chance, and of any length up to too long."""
    luck = random.Random(seed)
    right, off = perfect(script), wrong(script)

    def guess(step: int, most: int) -> list[int]:
        count = luck.randint(0, most + 2)
        return [luck.choice(pair) for pair in zip(right(step, count), off(step, count), strict=True)]

    return guess


def drafters(script: Sequence[int]) -> list[Drafter]:
    return [perfect(script), wrong(script), half(script), lambda step, most: [], lucky(script, 1), lucky(script, 2)]


def by_any_rounds(script: Sequence[int], stopping: Stopping) -> Outcome:
    """Runs plainly and with every kind of drafter and width; returns the plain outcome after comparing all with it."""
    plain = drive(script, stopping)
    for width in (1, 2, 4, 8):
        for drafter in drafters(script):
            drive(script, stopping, drafter, width).same_as(plain)
    return plain


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("held", [False, True])
def test_an_end_token_ends_the_output_wherever_it_stands(position: int, held: bool) -> None:
    """Kind of fault: an end token inside the accepted burst is not seen; it is never content, as draft or as bonus."""
    script = [*[3] * position, EOS, 4, 4, 4]
    stopping = Stopping(max_tokens=20, end_ids=frozenset({EOS}), stops=("aZ",) if held else ())
    outcome = by_any_rounds(script, stopping)
    assert outcome.text == "a" * position
    assert outcome.ids == [3] * position
    assert outcome.finish == Finish(FinishReason.EOS, stop_id=EOS)
    assert outcome.completion_tokens == position + 1
    assert outcome.committed == [*PROMPT, *[3] * position]


def test_an_accepted_end_token_counts_as_accepted_and_what_follows_as_cut() -> None:
    """Kind of fault: statistics claim more accepted drafts than tokens that the round made."""
    script = [3, 4, EOS, 3, 4]
    outcome = drive(script, Stopping(max_tokens=20, end_ids=frozenset({EOS})), perfect(script), 5)
    counts = outcome.counts
    assert (counts.drafted, counts.accepted, counts.cut, counts.rejected) == (5, 3, 2, 0)
    assert (counts.emitted, counts.forwards, counts.forwards_saved) == (3, 1, 2)
    assert [token.from_draft for token in outcome.tokens] == [True, True]


@pytest.mark.parametrize("ending", range(5))
def test_the_union_of_end_ids_ends_the_output(ending: int) -> None:
    """Kind of fault: only one of several end tokens is known."""
    script = [8, 8, 3 + ending, 8]
    outcome = by_any_rounds(script, Stopping(max_tokens=20, end_ids=frozenset(range(3, 8))))
    assert outcome.finish == Finish(FinishReason.EOS, stop_id=3 + ending)
    assert outcome.ids == [8, 8]


def test_stop_ids_end_the_output_and_say_so() -> None:
    script = [3, STOP_ID, EOS]
    outcome = by_any_rounds(script, Stopping(max_tokens=9, end_ids=frozenset({EOS}), stop_ids=frozenset({STOP_ID})))
    assert outcome.finish == Finish(FinishReason.STOP_TOKEN, stop_id=STOP_ID)
    assert outcome.text == "a"
    assert outcome.completion_tokens == 2


def test_an_id_that_is_both_end_and_stop_is_reported_as_end() -> None:
    stopping = Stopping(max_tokens=9, end_ids=frozenset({EOS}), stop_ids=frozenset({EOS}))
    assert by_any_rounds([3, EOS], stopping).finish == Finish(FinishReason.EOS, stop_id=EOS)


def test_ignored_end_tokens_are_delivered_as_ids_and_do_not_end() -> None:
    """With ignore_eos there are no end ids: the id comes, with whatever text its piece has, and the output goes on."""
    outcome = by_any_rounds([3, EOS, 4, EOS], Stopping(max_tokens=4))
    assert outcome.ids == [3, EOS, 4, EOS]
    assert outcome.finish == Finish(FinishReason.MAX_TOKENS)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("pair", [(6, 7), (13, 14)])
def test_a_stop_string_ends_the_output_wherever_it_stands(position: int, include: bool, pair: tuple[int, int]) -> None:
    """Kinds of fault: a stop completed in mid-burst is missed; the first half of one is streamed."""
    stop = (PIECES[pair[0]] + PIECES[pair[1]]).decode()
    script = [*[8] * position, *pair, 3, 3, 3]
    outcome = by_any_rounds(script, Stopping(max_tokens=30, stops=(stop,), include_stop=include))
    assert outcome.text == " the" * position + (stop if include else "")
    assert outcome.finish == Finish(FinishReason.STOP_STRING, stop=stop)
    assert outcome.completion_tokens == position + 2 * include
    assert outcome.committed == [*PROMPT, *[8] * position, *pair]


def test_a_stop_that_spans_three_bursts_is_found() -> None:
    script = [3, 13, 14, 8, 6, 7, 4]
    outcome = by_any_rounds(script, Stopping(max_tokens=30, stops=("\nUser: theXY",)))
    assert outcome.text == "a"
    assert outcome.ids == [3]


def test_one_stop_that_begins_another() -> None:
    outcome = by_any_rounds([8, 3, 4, 6], Stopping(max_tokens=9, stops=("abX", "ab")))
    assert (outcome.text, outcome.finish) == (" the", Finish(FinishReason.STOP_STRING, stop="ab"))
    outcome = by_any_rounds([8, 3, 4, 6], Stopping(max_tokens=9, stops=("abX", "abY")))
    assert (outcome.text, outcome.finish) == (" the", Finish(FinishReason.STOP_STRING, stop="abX"))


def test_text_held_for_a_stop_leaves_when_something_else_ends_the_output() -> None:
    for script, reason in [([3, 13, EOS], FinishReason.EOS), ([3, 3, 13], FinishReason.MAX_TOKENS)]:
        stopping = Stopping(max_tokens=3, end_ids=frozenset({EOS}), stops=("\nUser:",))
        outcome = by_any_rounds(script, stopping)
        assert outcome.finish is not None
        assert outcome.finish.reason is reason
        assert outcome.text.endswith("\nUser")


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop() -> None:
    outcome = by_any_rounds([3, 6, 7], Stopping(max_tokens=3, stops=("XY",)))
    assert outcome.finish == Finish(FinishReason.STOP_STRING, stop="XY")


@pytest.mark.parametrize("budget", range(1, 11))
@pytest.mark.parametrize("capped", [False, True])
def test_the_budget_is_met_exactly(budget: int, capped: bool) -> None:
    """Kind of fault: a whole burst is charged at once, so that fewer or more tokens come than were asked for."""
    outcome = by_any_rounds([3, 4] * 8, Stopping(max_tokens=budget, capped_by_context=capped))
    assert len(outcome.ids) == outcome.completion_tokens == budget
    reason = FinishReason.CONTEXT_LENGTH if capped else FinishReason.MAX_TOKENS
    assert outcome.finish == Finish(reason)


@pytest.mark.parametrize("budget", range(1, 6))
def test_an_end_token_as_the_last_of_the_budget_is_the_reason(budget: int) -> None:
    outcome = by_any_rounds([*[3] * (budget - 1), EOS], Stopping(max_tokens=budget, end_ids=frozenset({EOS})))
    assert outcome.finish == Finish(FinishReason.EOS, stop_id=EOS)
    assert outcome.completion_tokens == budget


@pytest.mark.parametrize("min_tokens", range(6))
def test_stop_strings_are_ignored_in_the_first_tokens(min_tokens: int) -> None:
    outcome = by_any_rounds([6, 6, 6, 6, 6], Stopping(max_tokens=5, min_tokens=min_tokens, stops=("X",)))
    assert outcome.text == "X" * min_tokens
    stopped = min_tokens < 5
    assert outcome.finish == (
        Finish(FinishReason.STOP_STRING, stop="X") if stopped else Finish(FinishReason.MAX_TOKENS)
    )


def test_a_character_cut_by_the_budget_is_marked_once() -> None:
    """Kind of fault: replacement marks in the stream for characters that are split across tokens."""
    assert by_any_rounds([9, 10, 9], Stopping(max_tokens=3)).text == "😀\ufffd"
    assert by_any_rounds([9, 10, 9, EOS], Stopping(max_tokens=9, end_ids=frozenset({EOS}))).text == "😀\ufffd"
    assert by_any_rounds([9, 10, 11, 12], Stopping(max_tokens=4)).text == "😀e\u0301"


def test_the_ids_of_a_character_leave_together() -> None:
    chunks = drive([3, 9, 10, 4], Stopping(max_tokens=4)).chunks
    assert [([token.id for token in chunk.tokens], chunk.text) for chunk in chunks] == [
        ([3], "a"),
        ([9, 10], "😀"),
        ([4], "b"),
    ]


def test_a_character_belongs_to_the_token_that_completed_it() -> None:
    """Kind of fault: the ends of one burst count from the last token's text, not from the beginning of the chunk."""
    script = [3, 9, 10, 4, 8]
    outcome = by_any_rounds(script, Stopping(max_tokens=5))
    assert outcome.texts == ["a", "", "😀", "b", " the"]
    assert drive(script, Stopping(max_tokens=5), perfect(script), 4).chunks[0].text_ends == (1, 1, 2, 3, 7)


def test_a_round_that_lets_nothing_go_releases_nothing() -> None:
    ledger = Ledger(PROMPT, Stopping(max_tokens=9, stops=("\nUser:",)), piece)
    assert ledger.commit(Verdict((13,), 0), None).released is None
    assert ledger.completion_tokens == 0
    assert ledger.step == 1


def test_hidden_special_tokens_are_delivered_without_text() -> None:
    outcome = by_any_rounds([3, HIDDEN, 4], Stopping(max_tokens=3))
    assert (outcome.text, outcome.ids) == ("ab", [3, HIDDEN, 4])


def test_logprobs_come_with_their_own_token_and_only_if_wanted() -> None:
    """Kind of fault: with drafts, accepted tokens have the logprob of another, or none. Cut tokens have none at all."""
    script = [3, 9, 10, 4, EOS, 3, 3]
    outcome = by_any_rounds(script, Stopping(max_tokens=20, end_ids=frozenset({EOS})))
    assert [token.logprobs for token in outcome.tokens] == [logprobs_at(step) for step in range(4)]
    ledger = Ledger(PROMPT, Stopping(max_tokens=9), piece)
    released = ledger.commit(accept((3,), (3, 4)), None).released
    assert released is not None
    assert [token.logprobs for token in released.tokens] == [None, None]


def test_drafts_are_told_from_corrections_and_bonuses() -> None:
    script = [3, 4, 3, 4]
    outcome = drive(script, Stopping(max_tokens=4), lambda step, most: [3, 3][:most], 2)
    assert [token.from_draft for token in outcome.tokens] == [True, False, True, False]


def test_the_ledger_does_not_keep_the_callers_prompt() -> None:
    prompt = [1, 2]
    ledger = Ledger(prompt, Stopping(max_tokens=9), piece)
    ledger.commit(Verdict((3,), 0), None)
    assert prompt == [1, 2]


@settings(max_examples=250, deadline=None)
@given(
    script=st.lists(st.sampled_from(sorted(PIECES)), max_size=16),
    stops=st.lists(
        st.sampled_from(["a", "ab", "abX", "XY", "\nUser:", "b the", "😀", "你", "e\u0301", " t", "\ufffd"]),
        max_size=3,
        unique=True,
    ).map(tuple),
    include=st.booleans(),
    end_ids=st.sampled_from([frozenset[int](), frozenset({EOS}), frozenset({EOS, 7})]),
    budget=st.integers(1, 18),
    min_tokens=st.integers(0, 4),
    seed=st.integers(0, 1 << 16),
    width=st.integers(1, 9),
)
def test_no_partition_into_rounds_changes_anything(**case: object) -> None:
    """One by one or in bursts, by any drafter: the same text of each token, ids, reason, usage, logprobs and commits."""
    script, width, seed = case["script"], case["width"], case["seed"]
    assert isinstance(script, list)
    assert isinstance(width, int)
    assert isinstance(seed, int)
    stopping = stopping_of(case)
    plain = drive(script, stopping)
    for drafter in (perfect(script), lucky(script, seed)):
        drive(script, stopping, drafter, width).same_as(plain)
    for chunk in plain.chunks:
        assert chunk.text == "" or chunk.tokens


def stopping_of(case: dict[str, object]) -> Stopping:
    budget, min_tokens, stops, end_ids = case["budget"], case["min_tokens"], case["stops"], case["end_ids"]
    assert isinstance(budget, int)
    assert isinstance(min_tokens, int)
    assert isinstance(stops, tuple)
    assert isinstance(end_ids, frozenset)
    return Stopping(
        max_tokens=budget,
        min_tokens=min(min_tokens, budget),
        stops=stops,
        end_ids=end_ids,
        include_stop=bool(case["include"]),
    )
