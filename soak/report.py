"""The bars, the table and the JSON object."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine
from soak.tally import Footprint, Tally, slope_mib_per_min

MAX_GAP_S = 1.0
MAX_SLOPE_MIB_PER_MIN = 1.0
MAX_MORE_THREADS = 4
"""gRPC's own pool grows and shrinks by a few."""
MAX_MORE_FDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How it stood after the last request, and how it ended."""

    before: Footprint
    """Of the target at rest, before the abuse."""
    after: Footprint
    """Of the target at rest, after it."""
    target_sessions: int
    """Running and queued requests of the target, and its sessions at drafters."""
    drafter_sessions: int
    """Sessions that drafters still hold."""
    drafts_again: bool
    """Whether each drafter is right again after all this."""
    exit_status: int
    exit_s: float
    exit_limit_s: float
    drafter_exits: Sequence[int]


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that is asked, and what was found."""

    what: str
    found: str
    asked: str
    held: bool


def bars(tally: Tally, ending: Ending, samples: list[Footprint], began_s: float) -> list[Bar]:
    """All bars. The slope of memory counts where the run was long enough to have one."""

    def none(what: str, count: int) -> Bar:
        return Bar(what, str(count), "0", count == 0)

    more_threads = ending.after.threads - ending.before.threads
    more_fds = ending.after.fds - ending.before.fds
    slope = slope_mib_per_min(samples, began_s)
    rest = sum(count for kind, count in tally.faults.items() if kind not in ("wrong text", "hang", "health"))
    found = [
        none("wrong texts", tally.faults["wrong text"]),
        none("hangs", tally.faults["hang"]),
        none("untrue health", tally.faults["health"]),
        none("other faults (INTERNAL, UNKNOWN, states, exits)", rest),
        none("requests and sessions left at the target", ending.target_sessions),
        none("sessions left at drafters", ending.drafter_sessions),
        Bar("threads more than before", str(more_threads), f"<= {MAX_MORE_THREADS}", more_threads <= MAX_MORE_THREADS),
        Bar("file descriptors more than before", str(more_fds), f"<= {MAX_MORE_FDS}", more_fds <= MAX_MORE_FDS),
        Bar("p99.9 gap between chunks", f"{tally.gap_s():.3f} s", f"<= {MAX_GAP_S:g} s", tally.gap_s() <= MAX_GAP_S),
        Bar("drafts again at the end", str(ending.drafts_again), "True", ending.drafts_again),
        Bar("exit status of the target", str(ending.exit_status), "0", ending.exit_status == 0),
        Bar(
            "exit after SIGTERM",
            f"{ending.exit_s:.1f} s",
            f"<= {ending.exit_limit_s:g} s",
            ending.exit_s <= ending.exit_limit_s,
        ),
        none("drafters that ended with another status than 0", sum(status != 0 for status in ending.drafter_exits)),
    ]
    if slope is not None:
        held = slope <= MAX_SLOPE_MIB_PER_MIN
        found.append(
            Bar("memory after 2 minutes", f"{slope:+.2f} MiB/min", f"<= {MAX_SLOPE_MIB_PER_MIN:g} MiB/min", held)
        )
    return found


def show(tally: Tally, found: list[Bar], console: Console) -> None:
    """What came of the requests, what was done to drafters, and the bars."""
    statuses = [status for status, _ in tally.statuses.most_common()]
    outcomes = Table("users", *statuses, title=f"{tally.requests} requests, {tally.tokens} tokens compared")
    for behaviour, counts in sorted(tally.outcomes.items()):
        outcomes.add_row(behaviour.replace("_", " "), *(str(counts[status] or "") for status in statuses))
    outcomes.add_section()
    outcomes.add_row("all", *(str(tally.statuses[status]) for status in statuses))
    console.print(outcomes)
    deeds = ", ".join(f"{deed} {count}" for deed, count in tally.chaos.items())
    console.print(
        f"drafters: {deeds}; drafted {tally.drafted}, accepted {tally.accepted}, reseeds {tally.reseeds}, "
        f"failovers {tally.failovers}; {tally.probes} probes of health"
    )
    table = Table("bar", "found", "asked", "")
    for bar in found:
        table.add_row(bar.what, bar.found, bar.asked, "held" if bar.held else "[bold red]MISSED[/]")
    console.print(table)
    for example in tally.examples:
        console.print(f"  {example}", style="red", markup=False)


def as_json(
    tally: Tally, found: list[Bar], samples: list[Footprint], *, seconds: float, seed: int, began_s: float
) -> dict[str, Any]:
    """The object of the last line."""
    slope = slope_mib_per_min(samples, began_s)
    return {
        "name": "soak",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "settings": {"seconds": seconds, "seed": seed},
        "figures": {
            "requests": tally.requests,
            "statuses": dict(tally.statuses),
            "tokens": tally.tokens,
            "wrong_texts": tally.faults["wrong text"],
            "hangs": tally.faults["hang"],
            "untrue_health": tally.faults["health"],
            "faults": dict(tally.faults),
            "drafter_deeds": dict(tally.chaos),
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "reseeds": tally.reseeds,
            "failovers": tally.failovers,
            "gap_p999_s": round(tally.gap_s(), 4),
            "rss_mib": round(samples[-1].rss_bytes / 2**20, 1) if samples else None,
            "rss_mib_per_min": None if slope is None else round(slope, 3),
            "bars": {bar.what: bar.found for bar in found},
            "missed": [bar.what for bar in found if not bar.held],
        },
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Keeps a long run's figures beside those of the benchmarks."""
    path = folder / "soak.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path
