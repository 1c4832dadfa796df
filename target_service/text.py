"""From token bytes to text that may leave: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Passed:
    """What left the gate."""

    text: str
    """Text of the tokens released, oldest first."""
    ends: tuple[int, ...]
    """One a token released: where its text ends within `text`, in characters; the last is the length of `text`."""
    stop: str | None = None
    """The stop string that was found. Tokens still held are then dropped."""

    @property
    def count(self) -> int:
        """Tokens released."""
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class _Held:
    text: str
    """What this token completed; "" inside a character and for hidden special tokens."""
    clean: bool
    """Whether no character is unfinished after this token."""


class TextGate:
    """Holds tokens back while their text is not final: a token leaves when all of its text may.

    Held tokens are those [released, pushed). They are held by an unfinished character, or by text that may yet become a
    stop string.
    """

    def __init__(self, stops: Iterable[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> None:
        """min_tokens: stop strings are not looked for in the text of the first tokens (vLLM's meaning)."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[_Held] = []
        self._pushed = 0

    def push(self, piece: bytes) -> Passed:
        """Takes the bytes of the next token (none for a special token that is not shown)."""
        text = self._decoder.decode(piece)
        self._held.append(_Held(text, clean=not self._decoder.getstate()[0]))
        self._pushed += 1
        held = "".join(token.text for token in self._held)
        # An unfinished character may still hold some of the first tokens, whose text is not searched.
        first = max(0, self._min_tokens - (self._pushed - len(self._held)))
        begin = sum(len(token.text) for token in self._held[:first])
        found = first_stop(held[begin:], self._stops)
        if found is not None:
            return self._stop(held, begin + found[0], begin + found[1])
        return self._release(len(held) - open_length(held[begin:], self._stops))

    def finish(self) -> Passed:
        """Ends the text without a stop: everything leaves, an unfinished character as U+FFFD."""
        if rest := self._decoder.decode(b"", final=True):
            self._held[-1] = _Held(self._held[-1].text + rest, clean=True)
        return self._let_go(len(self._held))

    def _release(self, free: int) -> Passed:
        """Lets go the tokens whose text lies within the first `free` characters, up to a clean one."""
        count = used = 0
        for index, token in enumerate(self._held):
            used += len(token.text)
            if used > free:
                break
            if token.clean:
                count = index + 1
        return self._let_go(count)

    def _stop(self, held: str, start: int, end: int) -> Passed:
        """Lets go what comes before the stop string, or all of it where it is to be included."""
        count = len(self._held)
        if not self._include_stop:
            count = offset = 0
            for token in self._held:
                if offset >= start and (token.text or not token.clean):
                    break
                offset += len(token.text)
                count += 1
        return self._let_go(count, cut=end if self._include_stop else start, stop=held[start:end])

    def _let_go(self, count: int, cut: int | None = None, stop: str | None = None) -> Passed:
        """Hands over the oldest tokens, and their text up to `cut`."""
        gone = self._held[:count]
        del self._held[:count]
        text = "".join(token.text for token in gone)[:cut]
        ends = accumulate(len(token.text) for token in gone)
        return Passed(text, tuple(min(end, len(text)) for end in ends), stop)


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, int] | None:
    """[start, end) of the stop string that is complete first; of those that end together, the longest."""
    hits = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if not hits:
        return None
    end, start = min(hits)
    return start, end


def open_length(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that is the beginning, but not the whole, of a stop string."""
    best = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), best, -1):
            if text.endswith(stop[:length]):
                best = length
                break
    return best
