"""Shows an answer while it arrives: text with accepted drafts marked, or JSON lines; and its statistics in one line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.text import Text

from draftwire.events import Chunk, Event, Finished, Started

# What the model writes may not steer the terminal: control characters other than newline and tab.
_HARMLESS = {code: 0xFFFD for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """The text without what would steer a terminal."""
    return text.translate(_HARMLESS)


class Mark(StrEnum):
    """How accepted drafts are told apart."""

    NONE = "none"
    TINT = "tint"
    BRACKETS = "brackets"


def split_by_draft(chunk: Chunk) -> Iterator[tuple[str, bool]]:
    """The text of a chunk in runs of (text, from_draft), which joined are `chunk.text`."""
    for drafted, run in groupby(chunk.tokens, key=lambda token: token.from_draft):
        yield "".join(token.text for token in run), drafted


class TextView:
    """Writes text to a console as it arrives."""

    def __init__(self, console: Console, mark: Mark) -> None:
        self._console = console
        self._mark = mark
        self._ends_line = True

    def show(self, event: Event) -> None:
        """Writes the text of a chunk; other events have none."""
        if not isinstance(event, Chunk) or not event.text:
            return
        self._ends_line = event.text.endswith("\n")
        if not self._console.is_terminal and self._mark is Mark.NONE:
            self._console.file.write(event.text)  # byte for byte what the model wrote
        else:
            for text, drafted in split_by_draft(event):
                self._write(harmless(text), drafted)
        self._console.file.flush()

    def close(self) -> None:
        """Ends the line."""
        if not self._ends_line:
            self._console.file.write("\n")
            self._console.file.flush()

    def _write(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if drafted and self._mark is Mark.BRACKETS:
            text = f"[{text}]"
        style = "green" if drafted and self._mark is Mark.TINT else ""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


class JsonView:
    """Writes each event as one line of JSON."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, event: Event) -> None:
        """Writes the event with its kind under `event`."""
        line = json.dumps({"event": type(event).__name__.lower(), **asdict(event)}, ensure_ascii=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is left open."""


class Tally:
    """Counts what has been seen of an answer, for when its last event never comes."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._tokens = 0
        self._drafted = 0
        self.finished: Finished | None = None

    def see(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case Started():
                pass
            case Chunk():
                self._tokens += len(event.tokens)
                self._drafted += sum(token.from_draft for token in event.tokens)
            case Finished():
                self.finished = event

    def line(self) -> str:
        """The statistics that there are."""
        if self.finished is not None:
            return statistics(self.finished)
        elapsed_s = time.monotonic() - self._begin_s
        return f"interrupted after {self._tokens} tokens in {elapsed_s:.2f} s, {self._drafted} of them accepted drafts"


def statistics(finished: Finished) -> str:
    """One line: tokens, speed, drafts or why there were none, and the reason of the end."""
    usage, timings, drafts = finished.usage, finished.timings, finished.speculation
    parts = [
        f"{usage.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f} tok/s",
        f"first after {timings.time_to_first_token_s:.2f} s (prompt {usage.prompt_tokens}, cached {usage.cached_tokens})",
    ]
    if drafts.num_draft_tokens:
        parts.append(
            f"drafted {drafts.num_draft_tokens}, accepted {drafts.num_accepted_draft_tokens} "
            f"({drafts.draft_acceptance_rate:.0%}), {drafts.mean_acceptance_length:.2f} tokens a speculative round"
        )
        if drafts.num_forced_draft_tokens:
            parts.append(
                f"forced by the constraint: {drafts.num_forced_draft_tokens} of them, "
                f"accepted {drafts.num_accepted_forced_draft_tokens}"
            )
    else:
        reason = finished.no_draft_reason.value.replace("_", " ") if finished.no_draft_reason else "no reason given"
        parts.append(f"no drafts: {reason}")
    if drafts.near_ties:
        parts.append(f"{drafts.near_ties} near ties")
    if drafts.constraint_s is not None and usage.completion_tokens:
        parts.append(f"constraint {drafts.constraint_s / usage.completion_tokens * 1e6:.0f} us a token")
    incomplete = "" if finished.grammar_complete in (None, True) else " (the constraint is not satisfied)"
    parts.append(f"end: {finished.finish_reason.value.replace('_', ' ')}{incomplete}")
    return "; ".join(parts)


def mark_for(console: Console, tint: bool) -> Mark:
    """Tint where the console has colours and the user wants them."""
    return Mark.TINT if tint and console.is_terminal and not console.no_color else Mark.NONE


def view_for(console: Console, mark: Mark, as_json: bool) -> TextView | JsonView:
    """How to show an answer."""
    return JsonView(sys.stdout) if as_json else TextView(console, mark)
