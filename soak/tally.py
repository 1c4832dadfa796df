"""What the suite has seen: outcomes, faults, gaps, samples of processes, probes of health."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import psutil

RSS_AFTER_S = 120.0
"""Memory is looked at from here on: pools and caches have grown by then."""
GAP_QUANTILE = 0.999


@dataclass(slots=True)
class Tally:
    """Filled by everything that runs. Belongs to the event loop."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """behaviour -> status -> count."""
    faults: Counter[str] = field(default_factory=Counter)
    """What must not happen, by what it is."""
    examples: list[str] = field(default_factory=list)
    """The first faults in full."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    failovers: int = 0
    reseeds: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks of streams whose reader is quick."""
    probes: int = 0
    chaos: Counter[str] = field(default_factory=Counter)

    def outcome(self, behaviour: str, status: str) -> None:
        """One request has ended so."""
        self.outcomes.setdefault(behaviour, Counter())[status] += 1

    def fault(self, kind: str, detail: str) -> None:
        """Something that must not happen."""
        self.faults[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {detail[:300]}")

    @property
    def requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    @property
    def statuses(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in self.outcomes.values():
            total.update(counts)
        return total

    def gap_s(self) -> float:
        """p99.9 of the gaps; 0 without any."""
        return float(np.quantile(self.gaps_s, GAP_QUANTILE)) if self.gaps_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds."""

    at_s: float
    rss_bytes: int
    threads: int
    fds: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Raises psutil.Error where it is gone."""
        process = psutil.Process(pid)
        with process.oneshot():
            rss = process.memory_info().rss
            return cls(at_s=time.monotonic(), rss_bytes=rss, threads=process.num_threads(), fds=process.num_fds())


def slope_mib_per_min(samples: list[Footprint], began_s: float) -> float | None:
    """Least-squares slope of the memory after the first two minutes; None where there is less than a minute of it."""
    late = [sample for sample in samples if sample.at_s - began_s >= RSS_AFTER_S]
    if len(late) < 2 or late[-1].at_s - late[0].at_s < 60.0:
        return None
    minutes = [(sample.at_s - began_s) / 60 for sample in late]
    mib = [sample.rss_bytes / 2**20 for sample in late]
    return float(np.polyfit(minutes, mib, 1)[0])
