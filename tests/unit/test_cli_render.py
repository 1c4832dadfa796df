"""How accepted drafts are told apart in a chunk's text, and what reaches a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from client.render import Mark, Tally, TextView, mark_for, split_by_draft
from draftwire.errors import Unavailable
from draftwire.events import Chunk, Token

PIECES = {1: " a", 2: "b", 3: " c", 4: "\ufffd", 5: "x"}


def pieces_of(ids: Sequence[int]) -> str:
    return "".join(PIECES[token_id] for token_id in ids)


def made(text: str, *tokens: tuple[int, bool]) -> Chunk:
    return Chunk(first_step=0, text=text, tokens=tuple(Token(id=i, from_draft=drafted) for i, drafted in tokens))


def view(mark: Mark, *, terminal: bool = True) -> tuple[TextView, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=20)
    return TextView(console, mark, pieces_of), file


@pytest.mark.parametrize(
    ("chunk", "runs"),
    [
        (made(" a", (1, True)), [(" a", True)]),
        (made(" ab c", (1, True), (2, True), (3, False)), [(" ab", True), (" c", False)]),
        (made(" ab c", (1, False), (2, True), (3, False)), [(" a", False), ("b", True), (" c", False)]),
        # Two tokens that are one character: it belongs to the run in which it is complete.
        (made(" aé", (1, True), (4, True), (4, False)), [(" a", True), ("é", False)]),
        # A first token whose space the server left out: nothing fits, and nothing is lost.
        (made("ab", (1, True), (2, False)), [("", True), ("ab", False)]),
        (made("", (5, True), (5, False)), [("", True), ("", False)]),
        (made("left"), [("left", False)]),
    ],
)
def test_runs_join_to_the_text_of_the_chunk(chunk: Chunk, runs: list[tuple[str, bool]]) -> None:
    """However ids and text fit together, not a character is lost, doubled or moved."""
    found = list(split_by_draft(chunk, pieces_of))
    assert found == runs
    assert "".join(text for text, _ in found) == chunk.text


def test_tint_and_brackets_mark_accepted_drafts_only() -> None:
    """Green on a terminal, brackets where there is no colour."""
    chunk = made(" ab c", (1, True), (2, True), (3, False))
    tinted, file = view(Mark.TINT)
    tinted.show(chunk)
    assert file.getvalue() == "\x1b[32m ab\x1b[0m c"
    bracketed, file = view(Mark.BRACKETS, terminal=False)
    bracketed.show(chunk)
    assert file.getvalue() == "[ ab] c"


def test_long_text_is_not_folded() -> None:
    """A line of the answer stays a line, whatever the width of the terminal."""
    plain, file = view(Mark.NONE)
    plain.show(made("word " * 20, (5, False)))
    plain.close()
    assert file.getvalue() == "word " * 20 + "\n"


def test_an_answer_cannot_steer_the_terminal_but_a_pipe_gets_every_byte() -> None:
    """Escape sequences are shown as U+FFFD on a terminal, and untouched in a file."""
    text = "a\x1b[2Jb\tc\n"
    shown, file = view(Mark.NONE)
    shown.show(made(text, (5, False)))
    assert "\x1b" not in file.getvalue()
    piped, file = view(Mark.NONE, terminal=False)
    piped.show(made(text, (5, False)))
    piped.close()
    assert file.getvalue() == text


def test_marks_are_given_up_where_detokenize_fails() -> None:
    """The text goes on; the server is not asked again."""
    asked = []

    def down(ids: Sequence[int]) -> str:
        asked.append(ids)
        raise Unavailable("gone")

    file = io.StringIO()
    broken = TextView(Console(file=file, force_terminal=True, color_system="standard"), Mark.TINT, down)
    for _ in range(2):
        broken.show(made(" ab", (1, True), (2, False)))
    assert (file.getvalue(), len(asked)) == (" ab ab", 1)


def test_no_colour_means_no_tint() -> None:
    """NO_COLOR, a pipe and --no-tint all turn the tint off."""
    colour = Console(file=io.StringIO(), force_terminal=True)
    assert mark_for(Console(file=io.StringIO(), force_terminal=True, no_color=True), True) is Mark.NONE
    assert mark_for(Console(file=io.StringIO()), True) is Mark.NONE
    assert mark_for(colour, False) is Mark.NONE


def test_an_interrupted_answer_is_counted_as_far_as_it_was_seen() -> None:
    """Without the last event, tokens and accepted drafts are those of the chunks."""
    tally = Tally()
    tally.see(made(" ab c", (1, True), (2, True), (3, False)))
    assert tally.line().startswith("interrupted after 3 tokens in ")
    assert tally.line().endswith("2 of them accepted drafts")
