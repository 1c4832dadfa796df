"""What the core tells of its work, for whoever counts it. Plain values only; nothing here knows of a format or a clock."""

from __future__ import annotations

from typing import Protocol

from target_service.stats import Times


class Recorder(Protocol):
    """Told of everything as it happens, on the event loop. Must be cheap: some of it comes every round. Never raises."""

    def tick(self, sequences: int) -> None:
        """A forward with so many sequences begins."""

    def admitted(self, queued_s: float) -> None:
        """A request has got a place."""

    def first_token(self, prompt_tokens: int, times: Times) -> None:
        """The prompt was read and the first round has come to its end."""

    def round(self, *, drafted: int, accepted: int, cut: int, emitted: int, reason: str) -> None:
        """One round of one sequence, as `SpeculationCounts.book`."""

    def delivered(self, tokens: int, gap_s: float | None) -> None:
        """Completion tokens that a round let go, and the seconds since the last ones; None for the first."""

    def finished(self, reason: str, completion_tokens: int, times: Times) -> None:
        """A completion has ended by itself."""

    def failed(self, reason: str) -> None:
        """A request that was queued has ended otherwise. reason: that of the error, or CLIENT_LEFT."""

    def draft_answered(self, drafter: str, seconds: float) -> None:
        """A Draft call was answered. drafter: its address; seconds: as seen here."""

    def draft_failed(self, drafter: str, code: str) -> None:
        """A Draft call failed. code: name of a gRPC status, never a word of the drafter's."""

    def session_opened(self, *, reseed: bool, failover: bool) -> None:
        """A session was opened; again for the same request (reseed), at another drafter than before (failover)."""


class NullRecorder:
    """Nobody counts."""

    def tick(self, sequences: int) -> None:
        """Nothing."""

    def admitted(self, queued_s: float) -> None:
        """Nothing."""

    def first_token(self, prompt_tokens: int, times: Times) -> None:
        """Nothing."""

    def round(self, *, drafted: int, accepted: int, cut: int, emitted: int, reason: str) -> None:
        """Nothing."""

    def delivered(self, tokens: int, gap_s: float | None) -> None:
        """Nothing."""

    def finished(self, reason: str, completion_tokens: int, times: Times) -> None:
        """Nothing."""

    def failed(self, reason: str) -> None:
        """Nothing."""

    def draft_answered(self, drafter: str, seconds: float) -> None:
        """Nothing."""

    def draft_failed(self, drafter: str, code: str) -> None:
        """Nothing."""

    def session_opened(self, *, reseed: bool, failover: bool) -> None:
        """Nothing."""
