"""What a session is asked, what it answers, and the call in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from draft_service.history import Advance
from draft_service.sources.base import Ask, DraftEnd, Guess
from draftwire.errors import DraftwireError

NOTHING = Guess(end=DraftEnd.NO_MATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One question of a target."""

    session_id: str
    number: int
    advance: Advance
    ask: Ask | None
    """None commits without a draft."""
    time_budget_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call came to."""

    committed_length: int
    lease_s: float
    guess: Guess = NOTHING
    reused_length: int = 0
    queued_s: float = 0.0
    computed_s: float = 0.0


class Call:
    """One running or waiting call. `should_stop` is asked from the compute thread, all else belongs to the loop."""

    def __init__(self, clock: Callable[[], float], asked: Round | None = None) -> None:
        """asked: None for a Prefill, which has no round."""
        self.asked = asked
        self.error: DraftwireError | None = None
        self.waiters = 0
        self.began_s = clock()
        self.computed_s = 0.0
        self.task: asyncio.Task[Outcome] | None = None
        self._clock = clock
        budget_s = asked.time_budget_s if asked else None
        self._deadline_s = None if budget_s is None else self.began_s + budget_s

    @property
    def running(self) -> bool:
        """Whether its work has begun, or waits, and has not ended."""
        return self.task is not None and not self.task.done()

    @property
    def answerable(self) -> bool:
        """Whether it has an answer, or will have one, that a retry may share."""
        if self.error is not None:
            return False
        return self.task is None or not self.task.done() or self.task.exception() is None

    def stop(self, error: DraftwireError) -> None:
        """Ends the call with this error, before or between computing tokens. The first error counts."""
        self.error = self.error or error

    def should_stop(self) -> bool:
        """Whether nobody wants (more of) the answer."""
        return self.error is not None or (self._deadline_s is not None and self._clock() >= self._deadline_s)

    def check(self) -> None:
        """Raises the error that it was stopped with."""
        if self.error is not None:
            raise self.error
