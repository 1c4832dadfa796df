"""Which drafts stand: the longest prefix of them that equals what the target itself chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of a window's drafts."""

    ids: tuple[int, ...]
    """(accepted + 1,) the ids that the round may commit: accepted drafts, then the correction or the bonus."""
    proposed: int
    """Drafts in the window."""

    @property
    def accepted(self) -> int:
        """Drafts that agree, before any cut by an end token, a stop or the budget."""
        return len(self.ids) - 1


def accept(drafts: Sequence[int], choices: Sequence[int]) -> Verdict:
    """drafts: (d,) ids; choices: (d + 1,) ids, row i being what the target chose after drafts[:i].

    Row i depends on drafts[:i] only, so everything up to the first disagreement is exactly what plain decoding would
    have made: the target's choice there is the correction, or the bonus after d agreements.
    """
    accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
    return Verdict(tuple(choices[: accepted + 1]), len(drafts))
