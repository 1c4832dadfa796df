"""What a target exposes to Prometheus. Names beginning as vLLM's mean what they mean there; docs/metrics.md has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draftwire.metrics import (
    LoopCollector,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    histograms,
)
from draftwire.serving import Lifecycle, State
from target_service.core import Target
from target_service.drafter_link import LinkState
from target_service.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReading:
    """One drafter at the moment of a scrape."""

    address: str
    state: str
    sessions: int


class PrefixCounts(Protocol):
    """What a prefix cache has counted since the start, and holds now; not to change once it was handed over."""

    prompt_tokens: int
    """Of prompts that were looked up."""
    reused_tokens: int
    disk_reused_tokens: int
    memory_bytes: int
    memory_limit_bytes: int
    memory_entries: int
    memory_evictions: int
    disk_bytes: int
    disk_limit_bytes: int
    disk_entries: int
    disk_evictions: int
    disk_errors: int
    disk_dropped: int
    disk_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReading:
    """Everything of a target at the moment of a scrape."""

    tally: Tally
    running: int
    queued: int
    kv_bytes: int
    kv_bytes_limit: int
    drafters: tuple[DrafterReading, ...]
    info: dict[str, str]
    prefix_cache: PrefixCounts | None = None


def target_collector(
    lifecycle: Lifecycle,
    target: Callable[[], Target | None],
    prefix_cache: Callable[[], PrefixCounts | None] = lambda: None,
) -> Collector:
    """Made on the event loop. target: None while it is loading. prefix_cache: read at each scrape, where there is one."""

    def read() -> tuple[State, TargetReading | None]:
        loaded = target()
        return lifecycle.state, None if loaded is None else reading_of(loaded, lifecycle.instance_id, prefix_cache())

    return LoopCollector(read, lambda seen: families(*seen))


def reading_of(target: Target, instance_id: str, prefix_cache: PrefixCounts | None = None) -> TargetReading:
    """A copy of all that is exposed. On the event loop."""
    loaded, links = target.parts.loaded, target.pool.links
    target.tally.keep_drafters({link.address for link in links})
    return TargetReading(
        tally=deepcopy(target.tally),
        running=target.scheduler.running,
        queued=target.scheduler.queued,
        kv_bytes=target.scheduler.kv_bytes,
        kv_bytes_limit=target.parts.limits.kv_bytes,
        drafters=tuple(
            DrafterReading(address=link.address, state=link.state.value, sessions=link.sessions) for link in links
        ),
        info={
            "instance_id": instance_id,
            "version": version("draftwire"),
            "model": target.parts.defaults.model_id,
            "revision": loaded.revision or "",
            "dtype": loaded.dtype,
            "numerics": target.parts.numerics,
            "batching": target.engine.batching.partition(":")[0],
        },
        prefix_cache=prefix_cache,
    )


def families(state: State, reading: TargetReading | None) -> Iterable[Metric]:
    """The metrics of a reading."""
    yield gauges("draftwire_service_state", "1 for the state of the service.", ("state",), _one_of(State, state.value))
    if reading is None:
        return
    yield gauges(
        "draftwire_instance_info",
        "1; its labels say what is served.",
        tuple(reading.info),
        [(list(reading.info.values()), 1)],
    )
    yield from _requests(reading)
    yield from _speculation(reading.tally)
    yield from _drafters(reading)
    if reading.prefix_cache is not None:
        yield from _prefix_cache(reading.prefix_cache)


def _requests(reading: TargetReading) -> Iterable[Metric]:
    tally = reading.tally
    yield gauge("draftwire_num_requests_running", "Requests that have a place.", reading.running)
    yield gauge("draftwire_num_requests_waiting", "Requests that wait for one.", reading.queued)
    yield gauge("draftwire_kv_cache_bytes", "KV cache that running requests are charged with.", reading.kv_bytes)
    yield gauge("draftwire_kv_cache_capacity_bytes", "Most KV cache of all requests.", reading.kv_bytes_limit)
    yield counters(
        "draftwire_request_success", "Completions, by what ended them.", ("finished_reason",), _by(tally.finished_by)
    )
    yield counters(
        "draftwire_request_failure", "Queued requests that ended otherwise.", ("reason",), _by(tally.failed_by)
    )
    yield counter("draftwire_prompt_tokens", "Tokens of prompts that were read.", tally.prompt_tokens)
    yield counter("draftwire_generation_tokens", "Tokens that were made.", tally.completion_tokens)
    for name, text, values in (
        ("time_to_first_token_seconds", "From arrival to the first token.", tally.first_token_s),
        ("inter_token_latency_seconds", "Between two deliveries of one stream.", tally.inter_token_s),
        ("request_time_per_output_token_seconds", "After the first token, a token.", tally.per_output_token_s),
        ("e2e_request_latency_seconds", "From arrival to the end.", tally.request_s),
        ("request_queue_time_seconds", "From arrival to admission.", tally.queue_s),
        ("request_prefill_time_seconds", "Reading the prompt.", tally.prefill_s),
        ("request_decode_time_seconds", "From the end of prefill to the end.", tally.decode_s),
        ("batch_size", "Sequences of a forward.", tally.batch_size),
    ):
        yield histogram(f"draftwire_{name}", text, values)


def _speculation(tally: Tally) -> Iterable[Metric]:
    counts, stem = tally.speculation, "draftwire_spec_decode_num_"
    yield counter("draftwire_rounds", "Rounds, one a request and forward.", counts.forwards)
    yield counter(f"{stem}drafts", "Rounds that verified at least one draft.", counts.spec_rounds)
    yield counter(f"{stem}draft_tokens", "Drafts that were verified.", counts.drafted)
    yield counter(f"{stem}accepted_tokens", "Drafts that were accepted.", counts.accepted)
    yield counter(f"{stem}cut_tokens", "Drafts that agreed but came after an end.", counts.cut)
    for name, text, values in (
        ("draft_tokens_per_pos", "Verified drafts by position.", counts.drafted_by_position),
        ("accepted_tokens_per_pos", "Accepted drafts by position.", counts.accepted_by_position),
    ):
        yield counters(f"{stem}{name}", text, ("position",), (([str(i)], count) for i, count in enumerate(values)))
    yield counters("draftwire_rounds_without_draft", "Rounds without drafts.", ("reason",), _by(counts.without_draft))
    yield counter("draftwire_drafter_reseeds", "Sessions that were built again.", tally.reseeds)
    yield counter("draftwire_drafter_failovers", "Sessions that another drafter took over.", tally.failovers)


def _drafters(reading: TargetReading) -> Iterable[Metric]:
    yield histograms(
        "draftwire_draft_rpc_seconds",
        "Draft calls that were answered.",
        ("drafter",),
        (([drafter], values) for drafter, values in reading.tally.draft_rpc_s.items()),
    )
    yield counters(
        "draftwire_draft_rpc_failures",
        "Draft calls that failed, by status.",
        ("drafter", "grpc_code"),
        reading.tally.draft_failures.items(),
    )
    yield gauges(
        "draftwire_drafter_state",
        "1 for the state of each drafter.",
        ("drafter", "state"),
        (
            ([drafter.address, *state], value)
            for drafter in reading.drafters
            for state, value in _one_of(LinkState, drafter.state)
        ),
    )
    yield gauges(
        "draftwire_drafter_sessions",
        "Sessions of this target at each drafter.",
        ("drafter",),
        (([drafter.address], drafter.sessions) for drafter in reading.drafters),
    )


def _prefix_cache(cache: PrefixCounts) -> Iterable[Metric]:
    stem, tier = "draftwire_prefix_cache_", ("tier",)
    yield counter(f"{stem}queries", "Prompt tokens that were looked up.", cache.prompt_tokens)
    yield counter(f"{stem}hits", "Prompt tokens that were found.", cache.reused_tokens)
    yield counter(f"{stem}disk_hits", "Of those, tokens that came from disk.", cache.disk_reused_tokens)
    evictions = {"memory": cache.memory_evictions, "disk": cache.disk_evictions}
    yield counters(f"{stem}evictions", "Entries that had to go for others.", tier, _by(evictions))
    for name, text, values in (
        ("entries", "Entries now.", {"memory": cache.memory_entries, "disk": cache.disk_entries}),
        ("bytes", "Bytes of all entries.", {"memory": cache.memory_bytes, "disk": cache.disk_bytes}),
        ("capacity_bytes", "Most bytes.", {"memory": cache.memory_limit_bytes, "disk": cache.disk_limit_bytes}),
    ):
        yield gauges(f"{stem}{name}", text, tier, _by(values))
    lost = {"error": cache.disk_errors, "damaged": cache.disk_dropped, "busy": cache.disk_skipped}
    yield counters(f"{stem}disk_failures", "Entries that the disk lost.", ("reason",), _by(lost))


def _one_of(states: type[State] | type[LinkState], now: str) -> list[tuple[list[str], int]]:
    return [([state.value], int(state.value == now)) for state in states]


def _by(counts: dict[str, int]) -> Iterable[tuple[list[str], int]]:
    return (([reason], count) for reason, count in counts.items())
