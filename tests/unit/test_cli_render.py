"""How accepted drafts are told apart in a chunk's text, and what reaches a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from client.render import Mark, Tally, TextView, mark_for, split_by_draft, statistics
from draftwire import parse
from draftwire.events import Chunk, Finished, Token
from draftwire.scripted_target import finished, started
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import to_duration


def made(*tokens: tuple[str, bool]) -> Chunk:
    """A chunk of (text, from_draft)."""
    made = tuple(Token(id=i, text=text, from_draft=drafted) for i, (text, drafted) in enumerate(tokens))
    return Chunk(first_step=0, text="".join(token.text for token in made), tokens=made)


def view(mark: Mark, *, terminal: bool = True) -> tuple[TextView, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=20)
    return TextView(console, mark), file


@pytest.mark.parametrize(
    ("chunk", "runs"),
    [
        (made((" a", True)), [(" a", True)]),
        (made((" a", True), ("b", True), (" c", False)), [(" ab", True), (" c", False)]),
        (made((" a", False), ("b", True), (" c", False)), [(" a", False), ("b", True), (" c", False)]),
        # Two tokens that are one character: it belongs to the run in which it is complete.
        (made((" a", True), ("", True), ("é", False)), [(" a", True), ("é", False)]),
        (made(("", True), ("", False)), [("", True), ("", False)]),
        (made(), []),
    ],
)
def test_runs_join_to_the_text_of_the_chunk(chunk: Chunk, runs: list[tuple[str, bool]]) -> None:
    """Neighbours of one kind make one run, and not a character is lost, doubled or moved."""
    found = list(split_by_draft(chunk))
    assert found == runs
    assert "".join(text for text, _ in found) == chunk.text


def test_tint_and_brackets_mark_accepted_drafts_only() -> None:
    """Green on a terminal, brackets where there is no colour."""
    chunk = made((" a", True), ("b", True), (" c", False))
    tinted, file = view(Mark.TINT)
    tinted.show(chunk)
    assert file.getvalue() == "\x1b[32m ab\x1b[0m c"
    bracketed, file = view(Mark.BRACKETS, terminal=False)
    bracketed.show(chunk)
    assert file.getvalue() == "[ ab] c"


def test_long_text_is_not_folded() -> None:
    """A line of the answer stays a line, whatever the width of the terminal."""
    plain, file = view(Mark.NONE)
    plain.show(made(("word " * 20, False)))
    plain.close()
    assert file.getvalue() == "word " * 20 + "\n"


def test_an_answer_cannot_steer_the_terminal_but_a_pipe_gets_every_byte() -> None:
    """Escape sequences are shown as U+FFFD on a terminal, and untouched in a file."""
    text = "a\x1b[2Jb\tc\n"
    shown, file = view(Mark.NONE)
    shown.show(made((text, False)))
    assert "\x1b" not in file.getvalue()
    piped, file = view(Mark.NONE, terminal=False)
    piped.show(made((text, False)))
    piped.close()
    assert file.getvalue() == text


def test_no_colour_means_no_tint() -> None:
    """NO_COLOR, a pipe and --no-tint all turn the tint off."""
    colour = Console(file=io.StringIO(), force_terminal=True)
    assert mark_for(Console(file=io.StringIO(), force_terminal=True, no_color=True), True) is Mark.NONE
    assert mark_for(Console(file=io.StringIO()), True) is Mark.NONE
    assert mark_for(colour, False) is Mark.NONE


def test_an_interrupted_answer_is_counted_as_far_as_it_was_seen() -> None:
    """Without the last event, tokens and accepted drafts are those of the chunks."""
    tally = Tally()
    tally.see(made((" a", True), ("b", True), (" c", False)))
    assert tally.line().startswith("interrupted after 3 tokens in ")
    assert tally.line().endswith("2 of them accepted drafts")


def test_statistics_name_forced_drafts_and_an_unfinished_object() -> None:
    """What the constraint drafted, what it took, and that the text does not satisfy it."""
    response = finished(10, drafted=6, accepted=5)
    stats = response.finished.speculation
    stats.num_forced_draft_tokens, stats.num_accepted_forced_draft_tokens = 4, 3
    stats.constraint_time.CopyFrom(to_duration(0.001))
    response.finished.grammar_complete = False
    line = statistics(seen(response))
    assert "forced by the constraint: 4 of them, accepted 3" in line
    assert "constraint 100 us a token" in line
    assert line.endswith("end: max tokens (the constraint is not satisfied)")
    response.finished.grammar_complete = True
    assert statistics(seen(response)).endswith("end: max tokens")


def seen(response: pb.GenerateResponse) -> Finished:
    """The event as a client has it."""
    state = parse.StreamState()
    state.observe(started())
    event = state.observe(response)
    assert isinstance(event, Finished)
    return event
