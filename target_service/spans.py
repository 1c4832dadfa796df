"""Where the time of one request went, for whoever draws it: the seam of traces. Nothing here knows of a tracing library."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from target_service.sequence import Sequence


class CallSpan(Protocol):
    """One call to a drafter."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What must be sent with the call, so that the drafter's part of it is found."""

    def note(self, name: str, value: int | float | str) -> None:
        """Adds a fact."""


class RequestSpan(Protocol):
    """One request. Never raises."""

    def call(self, method: str, drafter: str) -> AbstractContextManager[CallSpan]:
        """A call of a method of the draft service that begins now; ends with the block, failed by its exception."""

    def ended(self, sequence: Sequence) -> None:
        """The request has ended, however it did: its times and counts are final."""


class Tracer(Protocol):
    """Makes spans."""

    def request(self) -> RequestSpan:
        """The span of the call that this task serves."""


class NoSpan:
    """Nobody draws."""

    metadata: tuple[tuple[str, str], ...] = ()

    def request(self) -> NoSpan:
        """Nothing."""
        return self

    def call(self, method: str, drafter: str) -> AbstractContextManager[NoSpan]:
        """Nothing."""
        return nullcontext(self)

    def note(self, name: str, value: int | float | str) -> None:
        """Nothing."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing."""
