"""The state of a sequence in its grammar: masks, walks, ends and forced text, against a fresh matcher with the same prefix."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftwire.errors import InternalError
from target_service.grammar_compile import Compiler, tokenizer_info
from target_service.matcher import Matcher, Vocabulary

END, SPECIAL, END_TOO = 256, 257, 258
WIDTH = 272
"""Wider than the vocabulary: the last ids have no token."""
PIECES = [*(bytes([byte]) for byte in range(256)), b"", b"", b"", b"nul", b'":', b"true", b"\xc3", b"yes", b"es"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
)


def encode(text: str) -> list[int]:
    return list(text.encode())


class Compiled:
    """Matchers for constraints, compiled in this process."""

    def __init__(self) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        self._info = tokenizer_info(PIECES, WIDTH, [END, END_TOO])
        self._compiler = Compiler(self._info)
        self._vocabulary = Vocabulary(WIDTH, PIECES, frozenset({END, END_TOO}), encode)

    def __call__(self, kind: str, text: str, values: Sequence[str] = (), **options: Any) -> Matcher:
        grammar = self._compiler.compile(kind, text, values, False)
        compiled = self._xgrammar.CompiledGrammar.deserialize_json(grammar, self._info)
        vocabulary = replace(self._vocabulary, control=kind not in ("json_schema", "structural_tag"))
        return Matcher(
            vocabulary,
            lambda ends: self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends),
            **options,
        )


@pytest.fixture(scope="module")
def made() -> Compiled:
    return Compiled()


def allowed(matcher: Matcher, drafts: Sequence[int] = ()) -> list[set[int]]:
    limits = matcher.limits(drafts)
    assert limits.shape == (1 + len(drafts), WIDTH)
    assert set(np.unique(limits)) <= {np.float32(np.inf), np.float32(-np.inf)}
    return [set(np.flatnonzero(row > 0).tolist()) for row in limits]


def advanced(matcher: Matcher, text: str) -> Matcher:
    for token in encode(text):
        matcher.advance(token)
    return matcher


def test_masks_of_a_window_are_those_of_the_rows_committed_one_by_one(made: Compiled) -> None:
    """Bug 10: for random JSON, any n committed and any m tried, over the end id too, nothing is left of the trial."""
    dice = random.Random(1)
    text = '{"a": -120, "b": true}'
    ids = [*encode(text), END]
    for _ in range(60):
        n = dice.randrange(len(ids) - 1)
        m = dice.randrange(len(ids) - n + 1)
        matcher = advanced(made("json_schema", SCHEMA), text[:n])
        before = allowed(matcher)
        rows = allowed(matcher, ids[n : n + m])
        # Behind an end id nothing is looked at.
        for row in range(min(m + 1, len(ids) - n)):
            fresh = advanced(made("json_schema", SCHEMA), text[: n + row])
            assert rows[row] == allowed(fresh)[0]
        assert matcher.fitting(ids[n:]) == tuple(ids[n : len(ids) - 1])
        matcher.forced(ids[n : n + m], 8)
        assert allowed(matcher) == before


@pytest.mark.parametrize("bad", [SPECIAL, 270, 271, WIDTH, 2**31, ord("`"), END])
def test_drafts_are_cut_at_the_first_that_may_not_stand(
    made: Compiled, bad: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bug 9: code fences, special ids, ids without a token and ids beyond the vocabulary, without a flood of log lines."""
    matcher = advanced(made("json_schema", SCHEMA), '{"a": 1')
    assert matcher.fitting([ord("2"), bad, ord("3")]) == (ord("2"),)
    assert matcher.fitting([bad]) == ()
    assert matcher.fitting([ord("2"), ord("3")]) == (ord("2"), ord("3"))
    with pytest.raises(InternalError):
        matcher.advance(bad)
    assert capfd.readouterr().err == ""


def test_the_draft_that_ends_the_grammar_is_the_last(made: Compiled) -> None:
    """Bug 8: what a drafter adds behind the closing brace, or behind an end id, never costs a row."""
    matcher = advanced(made("json_schema", SCHEMA), '{"a": 1, "b": tru')
    for beyond in ([END, 120, 121], [120], [END_TOO], []):
        assert matcher.fitting([ord("e"), ord("}"), *beyond]) == (ord("e"), ord("}"))
    digits = advanced(made("regex", "[0-9]+"), "1")
    assert digits.fitting([ord("2"), END, ord("3")]) == (ord("2"), END)


def test_the_end_is_where_only_end_ids_may_follow(made: Compiled) -> None:
    """A number may go on after one digit; an object may not after its brace."""
    digits = made("regex", "[0-9]+")
    assert (digits.ended, digits.complete) == (False, False)
    digits.advance(ord("7"))
    assert (digits.ended, digits.complete) == (False, True)
    assert allowed(digits)[0] == {*encode("0123456789"), END, END_TOO}
    closed = advanced(made("json_schema", SCHEMA), '{"a": 1, "b": true}')
    assert (closed.ended, closed.complete) == (True, True)
    assert allowed(closed)[0] == {END, END_TOO}


def test_stop_ids_without_text_end_the_grammar_and_those_with_text_are_content(made: Compiled) -> None:
    digits = advanced(made("regex", "[0-9]+", stop_ids=frozenset({SPECIAL, ord("5")})), "1")
    assert allowed(digits)[0] == {*encode("0123456789"), END, END_TOO, SPECIAL}
    assert not digits.ended


def test_ignored_end_ids_are_not_offered_before_the_end(made: Compiled) -> None:
    """With ignore_eos a number goes on; the grammar's end still is one."""
    digits = advanced(made("regex", "[0-9]{1,2}", ignore_eos=True), "1")
    assert allowed(digits)[0] == set(encode("0123456789"))
    assert digits.fitting([END]) == ()
    digits.advance(ord("1"))
    assert digits.ended


def test_ids_without_a_token_are_never_allowed(made: Compiled) -> None:
    """Also where any text may follow: padded heads, special tokens."""
    free = made("regex", "(.|\n)*")
    (ids,) = allowed(free)
    assert ids & {SPECIAL, *range(len(PIECES), WIDTH)} == set()
    assert {END, END_TOO, ord("x")} <= ids


def test_forced_text_is_what_must_follow(made: Compiled) -> None:
    """Keys, punctuation and the rest of an enum; nothing where there is a choice, and no more than asked for."""
    matcher = made("json_schema", SCHEMA)
    assert bytes(matcher.forced((), 64)) == b'{"a": '
    assert bytes(matcher.forced((), 3)) == b'{"a'
    assert matcher.forced((), 0) == ()
    assert bytes(matcher.forced(encode('{"a": 1,'), 64)) == b' "b": '
    assert matcher.forced(encode('{"a": 1'), 64) == ()
    assert matcher.forced(encode("nonsense"), 64) == ()
    enum = made("choice", "", ["yes", "nothing", "never"])
    assert enum.forced((), 8) == ()
    assert bytes(enum.forced(encode("no"), 8)) == b"thing"


def test_forced_bytes_inside_a_character_are_found(made: Compiled) -> None:
    """After a token that is the first half of a character, the second half is forced though it is no text yet."""
    matcher = made("choice", "", ["é!", "x"])
    matcher.advance(PIECES.index(b"\xc3"))
    assert matcher.forced((), 8)[0] == 0xA9
    split = made("choice", "", ["é", "è"])
    assert split.forced((), 8) in ((), (0xC3,), (PIECES.index(b"\xc3"),))


def test_text_after_a_trigger_obeys_within_the_same_burst(made: Compiled) -> None:
    """Bug 13: free text, then a tag at position 2 of 6; what breaks it behind that is cut."""
    tag = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</n>"}
    text = json.dumps(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [tag]}}
    )
    matcher = made("structural_tag", text)
    assert matcher.fitting(encode("ab<n>x12")) == tuple(encode("ab<n>"))
    assert matcher.fitting(encode("ab<n>12<")) == tuple(encode("ab<n>12<"))
    rows = allowed(matcher, encode("a<n>1"))
    assert ord("z") in rows[0]
    assert rows[4] == set(encode("-0123456789"))


def test_a_whole_text_is_judged_apart(made: Compiled) -> None:
    matcher = advanced(made("regex", "[0-9]+x"), "12")
    assert matcher.completes("1x")
    assert not matcher.completes("12")
    assert not matcher.completes("x")
    assert allowed(matcher)[0] == set(encode("0123456789x"))


def test_json_never_has_a_control_character(made: Compiled) -> None:
    """xgrammar lets them into strings of bounded length; masks, drafts and forced text do not."""
    matcher = made("json_schema", json.dumps({"type": "string", "maxLength": 5}))
    matcher.advance(ord('"'))
    (ids,) = allowed(matcher)
    assert ids & set(range(32)) == set()
    assert ord("x") in ids
    assert matcher.fitting([ord("a"), 9, ord("b")]) == (ord("a"),)
    assert 9 in allowed(made("regex", "[^x]+"))[0]
