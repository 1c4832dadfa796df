"""The text gate against an oracle: whole characters, never a part of a stop string, ids and text together."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from target_service.text import Passed, TextGate, first_stop, open_length

FLAG = "🇩🇪"
FAMILY = "👩‍👩‍👧‍👦"
ACCENT = "e\u0301"
TEXTS = [
    "plain text",
    FLAG,
    FAMILY,
    ACCENT + "a" + ACCENT,
    "你好，世界",
    "naïve €uro",
    " lead\n\ttrail ",
    "\u0000\ufeff",
]


@dataclass
class Outcome:
    """All that a gate let go."""

    text: str = ""
    released: int = 0
    stop: str | None = None
    each: list[Passed] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of each token released."""


def run_gate(
    pieces: list[bytes], stops: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0
) -> Outcome:
    gate = TextGate(stops, include_stop=include_stop, min_tokens=min_tokens)
    outcome = Outcome()
    for piece in pieces:
        passed = gate.push(piece)
        _add(outcome, passed)
        if passed.stop is not None:
            return outcome
    _add(outcome, gate.finish())
    return outcome


def _add(outcome: Outcome, passed: Passed) -> None:
    outcome.each.append(passed)
    outcome.text += passed.text
    outcome.released += passed.count
    outcome.stop = passed.stop
    outcome.texts += [passed.text[a:b] for a, b in pairwise((0, *passed.ends))]


def oracle(
    pieces: list[bytes], stops: tuple[str, ...], *, include_stop: bool = False, min_tokens: int = 0
) -> tuple[str, str | None]:
    """(text, stop): everything decoded, searched character by character from the first searched token on."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(piece) for piece in pieces]
    unsearched = "".join(texts[:min_tokens])
    searched = "".join(texts[min_tokens:])
    for end in range(1, len(searched) + 1):
        ending = [stop for stop in stops if searched[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return unsearched + searched[: end if include_stop else end - len(stop)], stop
    return b"".join(pieces).decode("utf-8", errors="replace"), None


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces; equal places make empty pieces, as hidden special tokens have."""
    marks = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[a:b] for a, b in pairwise(marks)]


PIECES = st.builds(
    cut,
    st.one_of(
        st.lists(st.sampled_from(TEXTS), max_size=3).map(lambda parts: "".join(parts).encode()),
        st.text(alphabet="ab\nU é你😀", max_size=12).map(str.encode),
        st.binary(max_size=12),
        st.lists(st.sampled_from(["a", "b", "é", "😀"]), max_size=8).map(lambda t: "".join(t).encode() + b"\xf0\x9f"),
    ),
    st.lists(st.integers(0, 1000), max_size=12),
)
STOPS = st.lists(
    st.one_of(
        st.text(alphabet="ab\nU é你😀", min_size=1, max_size=4), st.sampled_from(["ab", "a", "b\n", "😀a", "\nU"])
    ),
    max_size=4,
).map(tuple)


@settings(max_examples=400, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 4))
@example([b"a\xf0\x9f", b"\x98\x80b"], ("a",), False, 1)
def test_any_pieces_and_stops_agree_with_the_oracle(
    pieces: list[bytes], stops: tuple[str, ...], include_stop: bool, min_tokens: int
) -> None:
    """Kinds of fault: characters split across tokens; a stop string missed in mid-burst; half of a stop string streamed."""
    outcome = run_gate(pieces, stops, include_stop=include_stop, min_tokens=min_tokens)
    text, stop = oracle(pieces, stops, include_stop=include_stop, min_tokens=min_tokens)
    assert outcome.text == text
    assert outcome.stop == stop


@settings(max_examples=200, deadline=None)
@given(PIECES, STOPS)
def test_what_left_is_never_taken_back_and_ids_leave_with_their_text(
    pieces: list[bytes], stops: tuple[str, ...]
) -> None:
    """After every push, the text so far is exactly that of the tokens so far, decoded alone and whole."""
    gate = TextGate(stops)
    text, released = "", 0
    for piece in pieces:
        passed = gate.push(piece)
        text, released = text + passed.text, released + passed.count
        if passed.stop is not None:
            assert "".join(pieces_text(pieces[:released])).startswith(text)
            return
        assert text == b"".join(pieces[:released]).decode("utf-8", errors="replace")
    rest = gate.finish()
    assert released + rest.count == len(pieces)
    assert text + rest.text == b"".join(pieces).decode("utf-8", errors="replace")


@settings(max_examples=400, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 4))
@example([b"a\xf0\x9f", b"", b"\x98\x80b"], (), False, 0)
@example([b"xa", b"", b"b"], ("ab",), False, 0)
@example([b"xa", b"bc"], ("ab",), True, 0)
def test_each_token_has_the_text_that_it_completed(
    pieces: list[bytes], stops: tuple[str, ...], include_stop: bool, min_tokens: int
) -> None:
    """Joined, the texts of the tokens are what was released; only a stop cuts one, and what follows has none."""
    outcome = run_gate(pieces, stops, include_stop=include_stop, min_tokens=min_tokens)
    assert "".join(outcome.texts) == outcome.text
    whole = pieces_text(pieces)
    if outcome.stop is None and pieces:
        whole[-1] += b"".join(pieces).decode("utf-8", errors="replace")[len("".join(whole)) :]
    left = len(outcome.text)
    for text, completed in zip(outcome.texts, whole[: outcome.released], strict=True):
        assert text == completed[:left]
        left -= len(text)
    assert outcome.stop is not None or outcome.texts == whole
    assert all(not passed.ends or passed.ends[-1] == len(passed.text) for passed in outcome.each)


def pieces_text(pieces: list[bytes]) -> list[str]:
    """The characters that each piece completed."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(piece) for piece in pieces]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), st.lists(st.integers(0, 1000), max_size=12), STOPS)
def test_valid_text_never_shows_a_replacement_mark(texts: list[str], places: list[int], stops: tuple[str, ...]) -> None:
    pieces = cut("".join(texts).encode(), places)
    outcome = run_gate(pieces, stops)
    assert all("\ufffd" not in passed.text for passed in outcome.each)


@pytest.mark.parametrize("text", TEXTS)
def test_every_single_byte_boundary_is_harmless(text: str) -> None:
    raw = text.encode()
    outcome = run_gate([raw[i : i + 1] for i in range(len(raw))])
    assert outcome.text == text
    assert outcome.released == len(raw)
    for at in range(len(raw) + 1):
        assert run_gate([raw[:at], raw[at:]]).text == text


def test_a_truncated_character_becomes_one_mark_at_the_end() -> None:
    outcome = run_gate([b"ok ", "😀".encode()[:3]])
    assert [passed.text for passed in outcome.each] == ["ok ", "", "\ufffd"]
    assert [passed.count for passed in outcome.each] == [1, 0, 1]


def test_invalid_bytes_become_marks_and_hold_nothing_up() -> None:
    outcome = run_gate([b"a", b"\xff", b"b"])
    assert [passed.text for passed in outcome.each[:3]] == ["a", "\ufffd", "b"]


@pytest.mark.parametrize("position", range(8))
def test_a_stop_completed_anywhere_in_a_run_of_tokens_is_seen(position: int) -> None:
    """Kind of fault: the search looks only at a tail that is sized for one new token."""
    pieces = [b"."] * 8
    pieces[position] = b"XY"
    outcome = run_gate(pieces, ("XY",))
    assert outcome.text == "." * position
    assert outcome.released == position
    assert outcome.stop == "XY"


def test_a_stop_longer_than_many_tokens_is_held_from_its_first_character() -> None:
    pieces = [b"so", b"<", b"|", b"im", b"_", b"end", b"|", b">", b"more"]
    outcome = run_gate(pieces, ("<|im_end|>",))
    assert outcome.text == "so"
    assert all(passed == Passed("", ()) for passed in outcome.each[1:-1])


def test_held_text_comes_whole_and_in_order_where_the_stop_does_not() -> None:
    """Kind of fault: the first half of a stop string is streamed, or lost where the second half never comes."""
    no_match = run_gate([b"x", b"\nUser", b"s", b"!"], ("\nUser:",))
    assert [(passed.count, passed.text) for passed in no_match.each] == [
        (1, "x"),
        (0, ""),
        (2, "\nUsers"),
        (1, "!"),
        (0, ""),
    ]
    at_the_end = run_gate([b"x", b"\nUser"], ("\nUser:",))
    assert [passed.text for passed in at_the_end.each] == ["x", "", "\nUser"]
    match = run_gate([b"x", b"\nUser", b":", b"y"], ("\nUser:",))
    assert match.text == "x"
    assert match.released == 1


def test_of_two_stops_the_one_that_is_complete_first_ends_the_text() -> None:
    assert run_gate([b"ab", b"c"], ("abc", "ab")).stop == "ab"
    assert run_gate([b"a", b"b", b"c"], ("abc", "bc")).stop == "abc"
    assert run_gate([b"xabc"], ("bc", "abc")).text == "x"
    assert run_gate([b"xabz"], ("abc", "bz")).text == "xa"
    inside = run_gate([b"xabcd"], ("abcd", "bc"))
    assert (inside.text, inside.stop) == ("xa", "bc")


@pytest.mark.parametrize(("include", "text", "released"), [(False, "say ", 1), (True, "say STOP", 2)])
def test_a_token_that_a_stop_begins_or_ends_within(include: bool, text: str, released: int) -> None:
    """A token leaves with the part of its text that may leave; one that holds nothing but the stop does not leave."""
    outcome = run_gate([b"say ", b"STOP and go"], ("STOP",), include_stop=include)
    assert (outcome.text, outcome.released) == (text, released)
    straddling = run_gate([b"say ST", b"OP and go"], ("STOP",), include_stop=include)
    assert (straddling.text, straddling.released) == (text, released)


def test_a_stop_cuts_the_text_of_tokens_and_no_token_reaches_beyond_it() -> None:
    """Kind of fault: ends count the text that the stop cut off."""
    assert run_gate([b"say ", b"it ST", b"", b"OP and go"], ("STOP",)).texts == ["say ", "it ", ""]
    assert run_gate([b"it ST", b"OP and", b" go"], ("STOP",), include_stop=True).texts == ["it ST", "OP"]


def test_hidden_tokens_pass_without_text_and_inside_a_stop_are_held() -> None:
    outcome = run_gate([b"a", b"", b"S", b"", b"T", b"x"], ("ST",))
    assert [passed.count for passed in outcome.each] == [1, 1, 0, 0, 0]
    assert run_gate([b"a", b"", b"b"]).released == 3


@pytest.mark.parametrize("min_tokens", range(5))
def test_the_first_tokens_are_not_searched(min_tokens: int) -> None:
    outcome = run_gate([b"S", b"S", b"S", b"S"], ("S",), min_tokens=min_tokens)
    assert outcome.text == "S" * min(min_tokens, 4)
    assert outcome.stop == ("S" if min_tokens < 4 else None)


def test_an_unfinished_character_does_not_bring_the_first_tokens_into_the_search() -> None:
    """The first token is held only for its character; its other text must stay out of the search."""
    outcome = run_gate([b" \xf0\x9f", b"\x98\x80", b"x"], (" ",), min_tokens=1)
    assert outcome.text == " 😀x"
    assert outcome.stop is None


def test_finish_empties_the_gate() -> None:
    gate = TextGate(("stop",))
    gate.push(b"sto")
    assert gate.finish() == Passed("sto", (3,))
    assert gate.finish() == Passed("", ())


@given(st.text(alphabet="ab", max_size=12), STOPS)
def test_first_stop_and_open_length_against_brute_force(text: str, stops: tuple[str, ...]) -> None:
    ends = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    best = min(ends, default=None)
    assert first_stop(text, stops) == ((best[1], best[0]) if best else None)
    beginnings = [n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])]
    assert open_length(text, stops) == max(beginnings, default=0)
