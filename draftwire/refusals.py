"""How often a service refused, by reason. Metrics read it; nothing else depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from draftwire.errors import DraftwireError

METRIC = "draftwire_refusals_total"
"""Name of the counter with the label `reason` that a metrics endpoint makes of it."""


class Refusals:
    """Counts calls that ended with an error, by its reason (docs/errors.md lists them). Belongs to the event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, error: DraftwireError) -> None:
        """A call has ended with this error."""
        self._counts[error.reason] += 1

    def snapshot(self) -> Mapping[str, int]:
        """Counts since the start by reason; a copy. Reasons that never came are absent."""
        return dict(self._counts)
