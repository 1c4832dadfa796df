"""How much of a long text is read between two steps of other sessions' drafts. Values in, values out."""

from __future__ import annotations

from typing import Final

_LEAST: Final = 16
_STEPS: Final = 2
"""Steps that a chunk may last: others then draft at a third of their pace, and the prompt is read at about half of its own,
for a short chunk costs nearly as much as a longer one."""
_FIRST: Final = 32
_FOLLOW: Final = 0.25


class Pace:
    """Follows what steps and chunks cost, and shares the time: a chunk takes about as long as two steps."""

    def __init__(self, most: int) -> None:
        """most: ids of a chunk when nobody drafts."""
        self._most = most
        self._step_s: float | None = None
        self._id_s: float | None = None

    def chunk(self, drafting: bool) -> int:
        """Ids to read now. drafting: whether somebody's draft waits for it, or may come at any moment."""
        if not drafting:
            return self._most
        if self._step_s is None or not self._id_s:
            return min(_FIRST, self._most)
        return min(self._most, max(_LEAST, int(_STEPS * self._step_s / self._id_s)))

    def stepped(self, seconds: float) -> None:
        """A step of drafts took so long."""
        self._step_s = _followed(self._step_s, seconds)

    def read(self, ids: int, seconds: float) -> None:
        """A chunk of so many ids took so long. What a short one costs says little of many ids, and is left out."""
        if ids >= _LEAST:
            self._id_s = _followed(self._id_s, seconds / ids)


def _followed(usual: float | None, now: float) -> float:
    """One slow moment of the machine must not count for more than twice the usual."""
    return now if usual is None else usual + _FOLLOW * (min(now, 2 * usual) - usual)
