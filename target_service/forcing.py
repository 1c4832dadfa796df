"""Drafts that a constraint forces, joined with those of a drafter. Pure but for the matcher that it asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_PRIOR: Final = 30.0
_PRIOR_CHANCE: Final = 0.97
_DECAY: Final = 0.98


class Walker(Protocol):
    """The parts of `Matcher` that drafts need."""

    def fitting(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """The drafts as far as the grammar allows them."""

    def forced(self, after: Sequence[int], most: int) -> tuple[int, ...]:
        """What must follow `after`."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The drafts of one window."""

    ids: tuple[int, ...]
    sure: int = 0
    """How many at the start are forced text, whoever proposed them."""
    tail: int = 0
    """How many at the end are forced text behind a drafter's."""
    own: tuple[bool, ...] = ()
    """One an id: whether the constraint proposed it."""

    def first(self, count: int) -> Joined:
        """Without all but the first ones."""
        lost = len(self.ids) - count
        return Joined(self.ids[:count], min(self.sure, count), max(0, self.tail - lost), self.own[:count])


def join(walker: Walker, forced: Sequence[int], remote: Sequence[int], most: int) -> Joined:
    """One window's drafts, at most so many: the drafter's where they begin with what is forced, else what is forced.

    Behind the drafter's, as far as the grammar allows them, comes what is forced there.
    """
    forced, remote = tuple(forced[:most]), tuple(remote[:most])
    if forced and remote[: len(forced)] != forced:
        return Joined(forced, sure=len(forced), own=(True,) * len(forced))
    fit = walker.fitting(remote)
    tail: tuple[int, ...] = ()
    if len(fit) == len(remote) and fit:
        tail = walker.forced(fit, most - len(fit))
    return Joined(fit + tail, len(forced), len(tail), (False,) * len(fit) + (True,) * len(tail))


class Certainty:
    """How likely the model writes forced text in the tokens that were drafted, a token: followed from round to round."""

    def __init__(self) -> None:
        self._tried = _PRIOR
        self._stood = _PRIOR * _PRIOR_CHANCE

    @property
    def chance(self) -> float:
        """Of one token, given those before it."""
        return self._stood / self._tried

    def scored(self, proposed: int, accepted: int) -> None:
        """A window's leading forced drafts met the truth. Those behind the first disagreement were not tried."""
        for number in range(min(proposed, accepted + 1)):
            self._tried = self._tried * _DECAY + 1.0
            self._stood = self._stood * _DECAY + float(number < accepted)
