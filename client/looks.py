"""Looks at a target service, one after another, and the rates between them. Pure but for `look_at`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftwire.client import Client
from draftwire.events import Activity, Drafter, ModelInfo, ServiceTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a target said at one moment."""

    unix_s: float
    """When, in seconds of Unix time."""
    model: ModelInfo
    drafters: tuple[Drafter, ...]
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was done between two looks; zeros where nothing was."""

    seconds: float
    """Between them, on the server's clock; 0 where there is one look only."""
    completion_tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    """Completions."""
    draft_acceptance_rate: float = 0.0
    mean_acceptance_length: float = 0.0
    """Tokens a speculative round, the target's own included."""
    tokens_per_round: float = 0.0
    """Completion tokens a round, of all rounds."""
    acceptance_by_position: tuple[float, ...] = ()
    """Accepted share of the drafts that were verified at each position."""


class Looks:
    """The last looks, and the rates between the first and the last of them."""

    def __init__(self, keep: int = 11) -> None:
        """keep: looks that rates reach back, 2 or more."""
        self._looks: deque[Look] = deque(maxlen=keep)

    def add(self, look: Look) -> None:
        """Takes a look. Those at another process, before a restart, are forgotten."""
        if self._looks and self._looks[-1].model.instance_id != look.model.instance_id:
            self._looks.clear()
        self._looks.append(look)

    @property
    def last(self) -> Look:
        """The last one. Raises IndexError before the first."""
        return self._looks[-1]

    @property
    def rates(self) -> Rates:
        """Between the oldest look that is kept and the last."""
        return rates_between(self._looks[0].activity.totals, self._looks[-1].activity.totals)


def look_at(client: Client, timeout_s: float) -> Look:
    """Three short calls with this deadline each. Raises DraftwireError."""
    return Look(
        unix_s=time.time(),
        model=client.model_info(timeout_s=timeout_s),
        drafters=client.drafters(timeout_s=timeout_s),
        activity=client.activity(timeout_s=timeout_s),
    )


def rates_between(before: ServiceTotals, after: ServiceTotals) -> Rates:
    """Of everything that was counted in between."""
    seconds = after.uptime_s - before.uptime_s
    if seconds <= 0:
        return Rates(seconds=0.0)
    tokens = after.completion_tokens - before.completion_tokens
    rounds = after.rounds - before.rounds
    speculative = after.num_spec_steps - before.num_spec_steps
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    return Rates(
        seconds=seconds,
        completion_tokens_per_second=tokens / seconds,
        prompt_tokens_per_second=(after.prompt_tokens - before.prompt_tokens) / seconds,
        requests_per_second=(after.requests_finished - before.requests_finished) / seconds,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / speculative if speculative else 0.0,
        tokens_per_round=tokens / rounds if rounds else 0.0,
        acceptance_by_position=by_position(
            _minus(after.drafted_by_position, before.drafted_by_position),
            _minus(after.accepted_by_position, before.accepted_by_position),
        ),
    )


def by_position(drafted: Sequence[int], accepted: Sequence[int]) -> tuple[float, ...]:
    """Accepted share at each position, up to the last one that was drafted."""
    shares = [hits / all_ if all_ else 0.0 for all_, hits in zip(drafted, accepted, strict=True)]
    while shares and not drafted[len(shares) - 1]:
        shares.pop()
    return tuple(shares)


def as_json(looks: Looks) -> dict[str, Any]:
    """The last look and the rates, as plain values."""
    look, totals = looks.last, looks.last.activity.totals
    return {
        "unix_s": round(look.unix_s, 3),
        "model": asdict(look.model) | {"capabilities": sorted(look.model.capabilities)},
        "rates": asdict(looks.rates),
        "requests": [asdict(one) for one in look.activity.requests],
        "drafters": [asdict(one) for one in look.drafters],
        "totals": asdict(totals),
    }


def _minus(after: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = (*before, *([0] * (len(after) - len(before))))
    return [now - then for now, then in zip(after, padded, strict=True)]
