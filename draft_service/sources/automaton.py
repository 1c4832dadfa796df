"""Finds where the end of a growing text occurred before: an online suffix automaton over token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Appending refreshes the most recent end of at most this many suffix classes. Text has about ten; only a long
# repetition of a short period has more, and there any occurrence continues alike.
_REFRESHED = 64


class Match(NamedTuple):
    """The longest suffix that occurred before."""

    length: int
    """Tokens of the suffix; 0 where its last id never occurred before."""
    end: int
    """Exclusive end of an earlier occurrence in the text: `text[end]` is what followed there."""


class SuffixAutomaton:
    """The smallest automaton of all substrings of a text, extended id by id in amortised constant time.

    A state stands for the substrings that end at the same places; its suffix link leads to the longest suffix that
    ends at more places (Blumer et al., 1985). So the link of the newest state is the longest suffix that occurred
    before, and nothing is ever searched. Among the earlier occurrences the most recent one is given.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._recent: list[int] = [0]
        self._last = 0
        self._match = Match(0, 0)
        self._match_state = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def match(self) -> Match:
        """The longest suffix of the text that ended before its end, too."""
        return self._match

    def extend(self, ids: Iterable[int]) -> None:
        """Appends ids to the text."""
        for token_id in ids:
            self._append(token_id)

    def follow(self, ids: Sequence[int]) -> Match:
        """The longest suffix of text + ids that occurs in the text. Changes nothing; O(len(ids)) amortised."""
        if not ids:
            return self._match
        state, length = self._match_state, self._match.length
        for token_id in ids:
            while state != -1 and token_id not in self._next[state]:
                state = self._link[state]
                length = self._length[state] if state != -1 else 0
            if state == -1:
                state = 0
            else:
                state, length = self._next[state][token_id], length + 1
        return Match(length, self._recent[state] if length else 0)

    def _append(self, token_id: int) -> None:
        self.text.append(token_id)
        end = len(self.text)
        new = self._add_state({}, end, end)
        state = self._last
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
        self._link[new] = 0 if state == -1 else self._suffix_state(state, token_id)
        self._last = new
        found = self._link[new]
        self._match_state, self._match = found, Match(self._length[found], self._recent[found] if found else 0)
        self._refresh(found, end)

    def _suffix_state(self, state: int, token_id: int) -> int:
        """The state whose longest substring is the longest one of `state`, plus the id; split off where needed."""
        target = self._next[state][token_id]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(dict(self._next[target]), length, self._recent[target])
        self._link[clone], self._link[target] = self._link[target], clone
        while state != -1 and self._next[state].get(token_id) == target:
            self._next[state][token_id] = clone
            state = self._link[state]
        return clone

    def _add_state(self, edges: dict[int, int], length: int, recent: int) -> int:
        self._next.append(edges)
        self._link.append(-1)
        self._length.append(length)
        self._recent.append(recent)
        return len(self._next) - 1

    def _refresh(self, state: int, end: int) -> None:
        for _ in range(_REFRESHED):
            if state <= 0:
                return
            self._recent[state] = end
            state = self._link[state]
