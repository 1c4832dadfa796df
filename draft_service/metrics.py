"""What a draft service exposes to Prometheus; docs/metrics.md has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draft_service.forwards import Forwards
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits
from draft_service.tally import Tally
from draftwire.metrics import LoopCollector, counter, counters, gauge, gauges, histogram, histograms
from draftwire.serving import Lifecycle, State

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReading:
    """The prefix cache at the moment of a scrape."""

    queried_tokens: int
    found_tokens: int
    evicted: Mapping[str, int]
    entries: int
    nbytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReading:
    """Everything of a draft service at the moment of a scrape."""

    tally: Tally
    sessions: int
    limits: SessionLimits
    kv_bytes: int
    opened: int
    closed: Mapping[str, int]
    queue_depth: int
    info: dict[str, str]
    forwards: Forwards
    prefixes: PrefixReading


def draft_collector(
    lifecycle: Lifecycle, rounds: Callable[[], Rounds | None], limits: SessionLimits, tally: Tally
) -> Collector:
    """Made on the event loop. rounds: None while the source is loading."""

    def read() -> tuple[State, DraftReading | None]:
        ready = rounds()
        return lifecycle.state, None if ready is None else _reading_of(ready, lifecycle.instance_id, limits, tally)

    return LoopCollector(read, lambda seen: families(*seen))


def _reading_of(rounds: Rounds, instance_id: str, limits: SessionLimits, tally: Tally) -> DraftReading:
    table, source, prefixes = rounds.table, rounds.source, rounds.prefixes
    return DraftReading(
        tally=deepcopy(tally),
        sessions=len(table),
        limits=limits,
        kv_bytes=table.kv_bytes,
        opened=table.opened,
        closed=dict(table.closed),
        queue_depth=rounds.queue_depth,
        info={
            "instance_id": instance_id,
            "version": version("draftwire"),
            "source": source.kind,
            "model": source.model_id,
            "revision": source.model_revision,
        },
        forwards=source.forwards.snapshot(),
        prefixes=PrefixReading(
            queried_tokens=prefixes.queried_tokens,
            found_tokens=prefixes.found_tokens,
            evicted=dict(prefixes.evicted),
            entries=len(prefixes),
            nbytes=prefixes.nbytes,
            limit_bytes=prefixes.limit_bytes,
        ),
    )


def families(state: State, reading: DraftReading | None) -> Iterable[Metric]:
    """The metrics of a reading."""
    yield gauges(
        "draftwire_service_state",
        "1 for the state of the service.",
        ("state",),
        (([one.value], int(one is state)) for one in State),
    )
    if reading is None:
        return
    tally, info = reading.tally, reading.info
    yield gauges("draftwire_instance_info", "1; its labels say what drafts.", tuple(info), [(list(info.values()), 1)])
    yield gauge("draftwire_sessions", "Sessions that are open.", reading.sessions)
    yield gauge("draftwire_sessions_capacity", "Most sessions.", reading.limits.sessions)
    yield gauge("draftwire_session_bytes", "Bytes that open sessions are charged with.", reading.kv_bytes)
    yield gauge("draftwire_session_capacity_bytes", "Most bytes of all sessions.", reading.limits.kv_bytes)
    yield gauge("draftwire_compute_queue_depth", "Jobs that wait for the compute thread.", reading.queue_depth)
    yield counter("draftwire_sessions_opened", "Sessions that were opened.", reading.opened)
    yield counters("draftwire_sessions_closed", "Sessions that have gone.", ("reason",), _by(reading.closed))
    yield counters("draftwire_drafts", "Draft calls that were answered, by end.", ("end",), _by(tally.answers))
    yield counter("draftwire_draft_tokens_asked", "Ids that Draft calls wanted.", tally.asked_tokens)
    yield counter("draftwire_draft_tokens", "Ids that Draft calls got.", tally.draft_tokens)
    yield counters(
        "draftwire_prefill_tokens", "Tokens of Prefill calls, by source.", ("source",), _by(tally.prefill_tokens)
    )
    yield histograms("draftwire_queue_seconds", "Waiting to compute.", ("call",), _by(tally.queue_s))
    yield histograms("draftwire_compute_seconds", "Computing.", ("call",), _by(tally.compute_s))
    yield from _forwards(reading.forwards)
    yield from _prefix_cache(reading.prefixes)


def _forwards(forwards: Forwards) -> Iterable[Metric]:
    yield histogram("draftwire_draft_batch_size", "Sessions of a drafting forward.", forwards.batch_size)
    rows = {"draft": forwards.draft_rows, "prefill": forwards.prefill_rows, "padding": forwards.padding_rows}
    yield counters("draftwire_draft_forward_rows", "Rows of all forwards.", ("kind",), _by(rows))


def _prefix_cache(prefixes: PrefixReading) -> Iterable[Metric]:
    stem = "draftwire_draft_prefix_cache_"
    yield counter(f"{stem}queries", "Tokens of new sessions that were looked up.", prefixes.queried_tokens)
    yield counter(f"{stem}hits", "Of those, tokens that were found.", prefixes.found_tokens)
    yield counters(f"{stem}evictions", "Entries that had to go.", ("reason",), _by(prefixes.evicted))
    yield gauge(f"{stem}entries", "Entries now.", prefixes.entries)
    yield gauge(f"{stem}bytes", "Bytes of all entries.", prefixes.nbytes)
    yield gauge(f"{stem}capacity_bytes", "Most bytes.", prefixes.limit_bytes)


def _by(values: Mapping[str, T]) -> Iterable[tuple[list[str], T]]:
    return (([name], value) for name, value in values.items())
