"""Where drafts come from, as the round loop sees it: ask, go on, and take what has come. Nothing here ever blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Answer:
    """Drafts that arrived."""

    base_length: int
    """Committed length that was asked about: ids[0] is a guess for this position."""
    ids: tuple[int, ...]
    """The drafts, inside the vocabulary; may be empty."""
    delay_s: float
    """From the question to the answer."""
    computed_s: float
    """Of that, what the drafter says it computed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A question that failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What a source has to say at the end of a request."""

    drafter_id: str = ""
    """Address of the last drafter."""
    reseeds: int = 0
    failovers: int = 0
    draft_rpc_p50_s: float | None = None
    missing: str = "no_drafter"
    """Why there is (or was) no session: "no_drafter", "tokenizer_mismatch", "lost" or "first_round" (not open yet)."""


class DraftSource(Protocol):
    """The drafts of one sequence. Its faults are its own: no method raises for them."""

    @property
    def ready(self) -> bool:
        """Whether a question can be asked now: a session is open and no question is running."""

    @property
    def asking(self) -> bool:
        """Whether a question is running."""

    @property
    def limit(self) -> int:
        """Most drafts that the drafter returns; 0 without one."""

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        """Asks what may follow the committed `ids`. Call only when `ready`. The answer comes to `take`."""

    def take(self) -> Answer | Lost | None:
        """What came since the last call, if anything."""

    async def arrival(self) -> None:
        """Waits until the running question has an answer or fails; returns at once without one."""

    def scored(self, proposed: int, accepted: int) -> None:
        """Tells what became of the drafts, for the drafter's statistics."""

    def report(self) -> SourceReport:
        """For the request's statistics."""

    def close(self) -> None:
        """Releases the session, in the background."""


class NoDrafts:
    """The source of a request that wants no drafts, or of a target that has no drafter."""

    ready = False
    asking = False
    limit = 0

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        """Never called: never ready."""

    def take(self) -> Answer | Lost | None:
        """Nothing comes."""
        return None

    async def arrival(self) -> None:
        """Nothing runs."""

    def scored(self, proposed: int, accepted: int) -> None:
        """Nothing to tell."""

    def report(self) -> SourceReport:
        """Nothing happened."""
        return SourceReport()

    def close(self) -> None:
        """Nothing to release."""


@dataclass(slots=True)
class Offer:
    """An answer, held against what the target has committed since. Pure.

    ids[:agreed] came true; ids[agreed:] may still be drafts while nothing disagrees.
    """

    base_length: int
    ids: tuple[int, ...]
    agreed: int = 0
    refuted: bool = False

    def update(self, committed: Sequence[int]) -> None:
        """Compares with the committed ids."""
        while not self.refuted and self.agreed < len(self.ids):
            position = self.base_length + self.agreed
            if position >= len(committed):
                return
            self.refuted = committed[position] != self.ids[self.agreed]
            self.agreed += not self.refuted

    @property
    def rest(self) -> tuple[int, ...]:
        """Drafts for the next window."""
        return () if self.refuted else self.ids[self.agreed :]

    @property
    def resolved(self) -> bool:
        """Whether the truth about every draft that matters is known."""
        return self.refuted or self.agreed == len(self.ids)
