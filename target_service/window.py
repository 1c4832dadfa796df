"""What one forward pass sees of a sequence, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftwire.errors import DraftwireError
from target_service.ledger import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """[pending, *drafts] of one sequence: row i is what the target says after drafts[:i]."""

    slot: int
    """The sequence's place in the engine."""
    pending: int
    """The last committed id."""
    drafts: tuple[int, ...] = ()
    first_step: int
    """Step of row 0; row i draws with the noise of first_step + i."""
    history: tuple[int, ...] = ()
    """Ids up to and including pending that penalties look at; empty without penalties."""
    ahead: bool = False
    """The next window will be [what row 0 chooses] alone: the engine may begin it before this one is read."""
    likely: bool = False
    """The next window may be that: the engine may prepare it, but not begin it."""
    limits: Callable[[], Any] | None = None
    """What a constraint allows: gives (rows, vocab) float32 for numpy, inf or -inf. Called on the compute thread while the
    forward runs, once."""
    forced: tuple[bool, ...] = ()
    """One a draft where a constraint proposed any: whether it did."""

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return 1 + len(self.drafts)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target chose at each row of a window."""

    ids: tuple[int, ...]
    """(rows,)"""
    logprobs: tuple[TokenLogprobs, ...] | None
    """(rows,), or None where not asked for."""
    forward_s: float
    """From building the graph to the ids read back."""
    landed_s: float
    """When they were read back, on the performance counter."""
    error: DraftwireError | None = None
    """Why this window has no choice, where its neighbours in the batch have one."""
    dead_row: int | None = None
    """The first row in which a constraint left nothing to choose; its id and those behind it mean nothing."""
    near: tuple[bool, ...] = ()
    """(rows,) whether the two best scores were closer than the engine's gap; empty where it does not look."""
    replayed: int = 0
    """Rows that were computed again before the window's own, after a rollback of recurrent state."""
