"""The counters of a target since it began to serve: a `Recorder` that adds. Pure; ListRequests and the metrics read it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection

from draftwire.histogram import COUNTS, Histogram
from target_service.stats import SpeculationCounts, Times


class Tally:
    """Belongs to the event loop. What it counts is what replies count: over all requests, the same sums."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.speculation = SpeculationCounts()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.finished_by: Counter[str] = Counter()
        """Completions by finish reason."""
        self.failed_by: Counter[str] = Counter()
        """Requests that ended otherwise, by reason."""
        self.reseeds = 0
        self.failovers = 0
        self.draft_failures: Counter[tuple[str, str]] = Counter()
        """(drafter, status name) -> calls."""
        self.draft_rpc_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        """By drafter."""
        self.batch_size = Histogram(COUNTS)
        self.queue_s = Histogram()
        self.first_token_s = Histogram()
        self.prefill_s = Histogram()
        self.inter_token_s = Histogram()
        self.decode_s = Histogram()
        self.request_s = Histogram()
        self.per_output_token_s = Histogram()

    def tick(self, sequences: int) -> None:
        """See `Recorder`."""
        self.batch_size.observe(sequences)

    def admitted(self, queued_s: float) -> None:
        """See `Recorder`."""
        self.queue_s.observe(queued_s)

    def first_token(self, prompt_tokens: int, times: Times) -> None:
        """See `Recorder`."""
        self.prompt_tokens += prompt_tokens
        self.prefill_s.observe(times.prefill_s)
        self.first_token_s.observe(times.time_to_first_token_s)

    def round(self, *, drafted: int, accepted: int, cut: int, emitted: int, reason: str) -> None:
        """See `Recorder`."""
        self.speculation.book(drafted=drafted, accepted=accepted, cut=cut, emitted=emitted, reason=reason)

    def delivered(self, tokens: int, gap_s: float | None) -> None:
        """See `Recorder`."""
        self.completion_tokens += tokens
        if gap_s is not None:
            self.inter_token_s.observe(gap_s)

    def finished(self, reason: str, completion_tokens: int, times: Times) -> None:
        """See `Recorder`."""
        self.finished_by[reason] += 1
        self.request_s.observe(times.total_s)
        self.decode_s.observe(times.decode_s)
        if completion_tokens > 1:
            self.per_output_token_s.observe(times.after_first_token_s / (completion_tokens - 1))

    def failed(self, reason: str) -> None:
        """See `Recorder`."""
        self.failed_by[reason] += 1

    def draft_answered(self, drafter: str, seconds: float) -> None:
        """See `Recorder`."""
        self.draft_rpc_s[drafter].observe(seconds)

    def draft_failed(self, drafter: str, code: str) -> None:
        """See `Recorder`."""
        self.draft_failures[drafter, code] += 1

    def session_opened(self, *, reseed: bool, failover: bool) -> None:
        """See `Recorder`."""
        self.reseeds += reseed
        self.failovers += failover

    def keep_drafters(self, addresses: Collection[str]) -> None:
        """Forgets drafters that are gone for good, so that replicas that come and go do not add up in memory."""
        for drafter in [drafter for drafter in self.draft_rpc_s if drafter not in addresses]:
            del self.draft_rpc_s[drafter]
        for key in [key for key in self.draft_failures if key[0] not in addresses]:
            del self.draft_failures[key]
