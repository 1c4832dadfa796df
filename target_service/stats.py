"""What drafts did in one request, counted as the field counts it. Pure.

drafted = accepted + rejected + cut;  mean acceptance length = 1 + accepted / speculative rounds;  a round without drafts is
not a speculative round; the bonus token is never counted as accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


@dataclass(slots=True)
class SpeculationCounts:
    """Counters of one request; the round loop adds, the reply reads."""

    spec_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cut: int = 0
    forced: int = 0
    """Of drafted, those that a constraint proposed."""
    forced_accepted: int = 0
    forwards: int = 0
    """Decode forwards of the target."""
    emitted: int = 0
    """Tokens that those forwards made, an end token included."""
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    """Index: accepted drafts of a speculative round."""
    near_ties: int = 0
    """Emitted tokens whose two best scores were closer than the engine's gap."""
    without_draft: Counter[str] = field(default_factory=Counter)
    """Rounds without drafts, by reason."""

    def book(
        self, *, drafted: int, accepted: int, cut: int, emitted: int, reason: str, forced: Sequence[bool] = ()
    ) -> None:
        """Counts one round. reason: why there were no drafts, if there were none. forced: as in `Window`."""
        self.forwards += 1
        self.emitted += emitted
        if not drafted:
            self.without_draft[reason] += 1
            return
        self.spec_rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.cut += cut
        self.forced += sum(forced)
        self.forced_accepted += sum(forced[:accepted])
        for position in range(drafted):
            _bump(self.drafted_by_position, position)
        self.accepted_by_position.extend([0] * (len(self.drafted_by_position) - len(self.accepted_by_position)))
        for position in range(accepted):
            self.accepted_by_position[position] += 1
        _bump(self.histogram, accepted)

    @property
    def rejected(self) -> int:
        """Drafts that the target chose otherwise, and those behind them."""
        return self.drafted - self.accepted - self.cut

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a speculative round, the target's own included; 0 without such rounds."""
        return 1 + self.accepted / self.spec_rounds if self.spec_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def forwards_saved(self) -> int:
        """Forwards that plain decoding would have needed beyond those made."""
        return max(0, self.emitted - self.forwards)


@dataclass(slots=True)
class Times:
    """Moments of one request, seconds on the monotonic clock; None until reached."""

    arrived: float
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queued_s(self) -> float:
        """Waiting for admission."""
        return _between(self.arrived, self.admitted)

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival to the first token."""
        return _between(self.arrived, self.first_token)

    @property
    def prefill_s(self) -> float:
        """Reading the prompt."""
        return _between(self.admitted, self.prefilled)

    @property
    def decode_s(self) -> float:
        """From the end of prefill to the end."""
        return _between(self.prefilled, self.finished)

    @property
    def after_first_token_s(self) -> float:
        """From the first token to the end."""
        return _between(self.first_token, self.finished)

    @property
    def total_s(self) -> float:
        """From arrival to the end."""
        return _between(self.arrived, self.finished)


def _between(begin: float | None, end: float | None) -> float:
    return max(0.0, end - begin) if begin is not None and end is not None else 0.0
