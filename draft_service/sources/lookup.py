"""Drafts by copying: what followed the last time the text ended like this?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TypeVar

from draft_service.forwards import ForwardCounts
from draft_service.sources.automaton import SuffixAutomaton
from draft_service.sources.base import Ask, Computing, DraftEnd, Drafter, Guess, Prefix, Runner, SessionSpec, Stop
from draft_service.sources.one_by_one import OneByOne

T = TypeVar("T")

# Measured with tracemalloc: 330 to 620 bytes a token, from one repeated id to random bits.
_BYTES_PER_TOKEN = 640
# About half a millisecond.
_FEED_IDS = 256


class LookupSource:
    """Prompt lookup over prompt and answer. Fits any vocabulary, needs no model and no mlx."""

    kind = "lookup"
    model_id = ""
    model_revision = ""
    tokenizer_fingerprint = ""
    tokenizer_size = 0
    weights_bytes = 0
    batching = ""
    draws = False

    def __init__(self, *, min_match: int = 2, context_length: int = 0) -> None:
        """min_match: shortest match, in tokens, that is copied from; context_length: 0 means no limit."""
        self.context_length = context_length
        self.forwards = ForwardCounts()
        self._min_match = min_match

    def bytes_for(self, length: int) -> int:
        """Upper bound of the index's size."""
        return length * _BYTES_PER_TOKEN

    def open(self, spec: SessionSpec) -> Drafter:
        """An empty index."""
        return LookupDrafter(spec, min_match=self._min_match, context_length=self.context_length)

    def computing(self, runner: Runner, clock: Callable[[], float]) -> Computing:
        """One after another: a draft takes some microseconds."""
        return OneByOne(runner, clock)

    def close(self) -> None:
        """Nothing is shared by sessions."""


class LookupDrafter:
    """The index of one session."""

    def __init__(self, spec: SessionSpec, *, min_match: int, context_length: int = 0) -> None:
        self._spec = spec
        self._min_match = min_match
        self._context_length = context_length
        self._automaton = SuffixAutomaton()
        self._waiting: list[int] = []

    @property
    def length(self) -> int:
        """Committed ids, indexed or waiting."""
        return len(self._automaton) + len(self._waiting)

    @property
    def behind(self) -> int:
        """Committed ids that are not in the index yet."""
        return len(self._waiting)

    @property
    def kv_bytes(self) -> int:
        """Estimate of the index's size."""
        return len(self._automaton) * _BYTES_PER_TOKEN

    def advance(self, ids: Sequence[int]) -> None:
        """Notes ids for the index."""
        self._waiting.extend(ids)

    def rewrite(self, ids: Sequence[int]) -> int:
        """Keeps the index where it is a prefix of ids; an automaton cannot forget, so else it is built anew."""
        text = self._automaton.text
        if text != list(islice(ids, len(text))):
            self._automaton = SuffixAutomaton()
        kept = len(self._automaton)
        self._waiting = list(ids[kept:])
        return kept

    def feed(self, stop: Stop) -> None:
        """Indexes up to 256 ids."""
        self._automaton.extend(self._waiting[:_FEED_IDS])
        del self._waiting[:_FEED_IDS]

    def draft(self, ask: Ask, stop: Stop) -> Guess:
        """Copies what followed the longest match.

        On text that SmolLM2-135M wrote, the id behind a match of m tokens is right with a chance of about
        m / (m + 2), and each right one makes the match longer. So the chance that ids 0..i are all right is
        m (m + 1) / ((m + i + 1) (m + i + 2)); after 2 m ids it is near 1/9, about what one more row of a verify
        forward costs, and the draft ends.
        """
        while self._waiting:
            self.feed(stop)
        length, position = self._automaton.follow(ask.assumed)
        if length < self._min_match:
            return Guess(end=DraftEnd.NO_MATCH)
        limit, end = self._limit(ask, length)
        # The copy may run past the end of the text into what it wrote itself: a period goes on.
        path = [*self._automaton.text[position:], *ask.assumed]
        start = len(path)
        for i in range(limit):
            path.append(path[i])
            if path[i] in self._spec.end_ids:
                end = DraftEnd.END_TOKEN
                break
        ids = tuple(path[start:])
        chances = [length * (length + 1) / ((length + i + 1) * (length + i + 2)) for i in range(len(ids))]
        return Guess(ids=ids, confidences=tuple(chances) if ask.want_confidences else (), end=end)

    def keep(self) -> Prefix | None:
        """Nothing: an index is built faster than a cache is worth (ADR 0303)."""

    def adopt(self, prefix: Prefix, length: int) -> None:
        """Never called: nothing is kept."""

    def close(self) -> None:
        """Drops the index."""
        self._automaton = SuffixAutomaton()
        self._waiting = []

    def _limit(self, ask: Ask, match_length: int) -> tuple[int, DraftEnd]:
        limit, end = ask.limit, DraftEnd.MAX_DRAFT_TOKENS
        if 2 * match_length < limit:
            limit, end = 2 * match_length, DraftEnd.LOW_CONFIDENCE
        if self._context_length:
            room = max(0, self._context_length - self.length - len(ask.assumed))
            if room < limit:
                limit, end = room, DraftEnd.CONTEXT_FULL
        return limit, end


class InlineRunner:
    """Runs jobs on the event loop at once: a lookup is shorter than the way to another thread and back."""

    queue_depth = 0

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Runs the job now; its outcome is in the future."""
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    async def run(self, job: Callable[[], T]) -> T:
        """Lets other calls have their turn, then runs the job."""
        await asyncio.sleep(0)
        return job()
