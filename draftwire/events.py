"""What a target service answers, as plain frozen records. Times are seconds; names of counts are those of the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class FinishReason(StrEnum):
    """Why a stream ended. Failures are errors, not reasons."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    GRAMMAR_END = "grammar_end"
    UNKNOWN = "unknown"
    """A newer server sent a reason that this client does not know."""


class NoDraftReason(StrEnum):
    """Why a request had no drafts at all."""

    OFF_BY_REQUEST = "off_by_request"
    NO_DRAFTER = "no_drafter"
    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    CACHE_CANNOT_ROLL_BACK = "cache_cannot_roll_back"
    NOT_WORTH_IT = "not_worth_it"
    DRAFTER_LOST = "drafter_lost"
    TOO_SHORT = "too_short"
    UNKNOWN = "unknown"


class DrafterState(StrEnum):
    """What the target thinks of a drafter."""

    READY = "ready"
    CONNECTING = "connecting"
    OPEN_BREAKER = "open_breaker"
    REFUSED = "refused"
    DRAINING = "draining"
    UNKNOWN = "unknown"


class RequestState(StrEnum):
    """Where a request is on its way."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    STALLED = "stalled"
    """Its reader is too slow."""
    UNKNOWN = "unknown"


class Health(StrEnum):
    """Answer of a health check."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN = "unknown"
    """The server does not know a service of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling values; None where the server said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window: int | None = None
    logit_bias: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event: what will be done."""

    request_id: str
    model_id: str
    model_revision: str
    """Empty where unknown."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that came from a prefix cache."""
    max_tokens: int
    """Most tokens that will be made."""
    sampling: Sampling
    """The values in force, with the seed."""
    numerics: str
    """"fast" or "exact"."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely ids at a step."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One delivered token."""

    id: int
    text: str
    """Its part of the chunk's text. Empty inside an unfinished character, which belongs to the token that completed it."""
    from_draft: bool
    """Whether it was an accepted draft."""
    logprob: float | None = None
    """Natural logarithm; None unless logprobs were asked for."""
    top_logprobs: tuple[TopLogprob, ...] = ()
    """Most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and the tokens that it belongs to."""

    first_step: int
    """Step of tokens[0], counted from 0 at the first emitted token."""
    text: str
    """The texts of the tokens, joined."""
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    """Delivered ids, plus one if an end or stop token ended the output."""
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, as the server measured it."""

    queued_s: float
    time_to_first_token_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What drafts did. num_draft_tokens = accepted + rejected + cut."""

    num_spec_steps: int
    """Rounds that verified at least one draft."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_cut_draft_tokens: int
    """Drafts that agreed but came after an end token, a stop, the budget or the grammar's end."""
    target_calls: int
    """Forward passes of the target; the whole prefill counts as one."""
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    acceptance_histogram: tuple[int, ...]
    """Number of speculative rounds that accepted 0, 1, 2, ... drafts."""
    mean_acceptance_length: float
    draft_acceptance_rate: float
    reseeds: int
    failovers: int
    rounds_without_draft: Mapping[str, int]
    draft_rpc_p50_s: float | None
    drafter_id: str
    """Address of the last drafter; empty without one."""
    no_draft_reason: NoDraftReason | None
    """None where there were drafts."""
    forwards_saved: int
    """Decode forwards that plain decoding would have needed beyond those made."""
    near_ties: int = 0
    """Tokens whose two best scores were closer than `ModelInfo.near_tie_gap`; 0 with exact numerics."""
    num_forced_draft_tokens: int = 0
    """Of num_draft_tokens, those whose text the constraint forced."""
    num_accepted_forced_draft_tokens: int = 0
    constraint_s: float | None = None
    """What the constraint took on the server's host, mostly beside its forwards; None without one."""

    @property
    def num_rejected_draft_tokens(self) -> int:
        """Drafts that the target chose otherwise."""
        return self.num_draft_tokens - self.num_accepted_draft_tokens - self.num_cut_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event: how it went."""

    finish_reason: FinishReason
    matched: int | str | None
    """The stop token id or the stop string that ended the output."""
    usage: Usage
    timings: Timings
    speculation: SpeculationStats
    grammar_complete: bool | None
    """Whether the constraint was satisfied; None without one."""

    @property
    def no_draft_reason(self) -> NoDraftReason | None:
        """Why there was not a single draft; None where there were drafts."""
        return self.speculation.no_draft_reason


Event: TypeAlias = Started | Chunk | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    started: Started
    chunks: tuple[Chunk, ...]
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events in order."""
        return (self.started, *self.chunks, self.finished)

    @property
    def request_id(self) -> str:
        return self.started.request_id

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.finish_reason

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def speculation(self) -> SpeculationStats:
        return self.finished.speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a target service serves, and within which limits."""

    instance_id: str
    """Identity of the process, new at each start."""
    software_version: str
    model_id: str
    model_revision: str
    tokenizer_fingerprint: str
    tokenizer_size: int
    context_length: int
    end_token_ids: tuple[int, ...]
    dtype: str
    device: str
    numerics: str
    default_sampling: Sampling
    capabilities: frozenset[str]
    max_top_logprobs: int
    rollback: str
    no_drafting_reason: str
    """Empty where drafts are possible."""
    default_max_tokens: int
    max_running: int
    max_queued: int
    running: int
    queued: int
    batching: str
    """"ragged", or "one by one: <reason>"; empty from an older target."""
    kv_bytes: int = 0
    """KV cache that running requests are charged with."""
    kv_bytes_limit: int = 0
    """0 from an older target."""
    exact_rows: int = 0
    """Rows of every decode forward with exact numerics; 0 with fast."""
    near_tie_gap: float = 0.0
    """Logits closer than this count as a near tie; 0 where none are counted."""
    prompt_cache_bytes: int = 0
    """Memory that the target's prefix cache takes now."""
    prompt_cache_bytes_limit: int = 0
    """Most that it takes; 0 where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """One drafter as the target sees it."""

    address: str
    instance_id: str
    source_kind: str
    model_id: str
    state: DrafterState
    refused_reason: str
    sessions: int
    rpc_p50_s: float | None
    draft_acceptance_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """One request that runs or waits, without what it says or gets."""

    request_id: str
    state: RequestState
    age_s: float
    priority: int
    prompt_tokens: int
    prefilled_tokens: int
    """Tokens of the prompt that were read."""
    completion_tokens: int
    max_tokens: int
    decode_tokens_per_second: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    drafter_id: str
    """Address of its drafter; empty without one."""

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share; 0 without drafts."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTotals:
    """What a target has done since it began to serve, over all requests."""

    uptime_s: float
    requests_finished: int
    requests_failed: int
    """Ended otherwise after they were queued: errors, aborts, clients that left."""
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    """One a request and forward."""
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_cut_draft_tokens: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    rounds_without_draft: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a target does at the moment."""

    requests: tuple[RequestInfo, ...]
    """In the order in which they came."""
    totals: ServiceTotals
