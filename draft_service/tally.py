"""The counters of a draft service since it began. Pure; the metrics read it."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from draft_service.calls import Outcome
from draftwire.histogram import Histogram


class Recorder(Protocol):
    """Told of each answer, on the event loop. Must be cheap, and never raises."""

    def prefilled(self, outcome: Outcome) -> None:
        """A Prefill was answered."""

    def drafted(self, asked: int, outcome: Outcome) -> None:
        """A Draft was answered. asked: ids that the call wanted."""


class Tally:
    """A `Recorder` that adds."""

    def __init__(self) -> None:
        self.asked_tokens = 0
        self.draft_tokens = 0
        self.answers: Counter[str] = Counter()
        """Answered Draft calls, by where the draft ended."""
        self.prefill_tokens: Counter[str] = Counter()
        """Tokens of answered Prefill calls: "computed" or "reused"."""
        self.queue_s = {"draft": Histogram(), "prefill": Histogram()}
        self.compute_s = {"draft": Histogram(), "prefill": Histogram()}

    def prefilled(self, outcome: Outcome) -> None:
        """See `Recorder`."""
        self.prefill_tokens["reused"] += outcome.reused_length
        self.prefill_tokens["computed"] += outcome.committed_length - outcome.reused_length
        self._timed("prefill", outcome)

    def drafted(self, asked: int, outcome: Outcome) -> None:
        """See `Recorder`."""
        self.asked_tokens += asked
        self.draft_tokens += len(outcome.guess.ids)
        self.answers[outcome.guess.end.name.lower()] += 1
        self._timed("draft", outcome)

    def _timed(self, call: str, outcome: Outcome) -> None:
        self.queue_s[call].observe(outcome.queued_s)
        self.compute_s[call].observe(outcome.computed_s)


class NullRecorder:
    """Nobody counts."""

    def prefilled(self, outcome: Outcome) -> None:
        """Nothing."""

    def drafted(self, asked: int, outcome: Outcome) -> None:
        """Nothing."""
