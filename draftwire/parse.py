"""Replies of the target contract as the client's own records, and the order that a stream of them must keep."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from grpc_health.v1 import health_pb2

from draftwire.errors import IncompleteStream, InternalError
from draftwire.events import (
    Activity,
    Chunk,
    Completion,
    Drafter,
    DrafterState,
    Event,
    Finished,
    FinishReason,
    Health,
    ModelInfo,
    NoDraftReason,
    RequestInfo,
    RequestState,
    Sampling,
    ServiceTotals,
    SpeculationStats,
    Started,
    Timings,
    Token,
    TopLogprob,
    Usage,
)
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import to_seconds

E = TypeVar("E", bound=StrEnum)


class StreamState:
    """Holds a stream to its contract: one `started`, chunks whose steps follow each other, one `finished`. Pure."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._chunks: list[Chunk] = []
        self._next_step = 0

    def observe(self, response: pb.GenerateResponse) -> Event | None:
        """The event of a response; None for a kind that only newer servers know. Raises InternalError out of order."""
        kind = response.WhichOneof("event")
        if kind is None:
            return None
        if self.finished is not None:
            raise _fault(f"the stream went on with {kind!r} after its last event")
        if (kind == "started") != (self.started is None):
            raise _fault(f"the stream has {kind!r} where it may not stand")
        if kind == "started":
            self.started = _started(response.started)
            return self.started
        if kind == "finished":
            self.finished = _finished(response.finished)
            return self.finished
        chunk = _chunk(response.chunk)
        if chunk.tokens and chunk.first_step != self._next_step:
            raise _fault(f"a chunk begins at step {chunk.first_step}, expected {self._next_step}")
        self._next_step += len(chunk.tokens)
        self._chunks.append(chunk)
        return chunk

    def end(self) -> None:
        """Tells that the call ended OK. Raises IncompleteStream where `finished` is missing."""
        if self.finished is None:
            raise IncompleteStream(
                f"the stream ended after {self._next_step} tokens without its last event; send the request again",
                metadata={"request_id": self.started.request_id} if self.started else None,
            )

    def completion(self) -> Completion:
        """The whole answer. Raises IncompleteStream before the last event."""
        self.end()
        assert self.started is not None
        assert self.finished is not None
        return Completion(started=self.started, chunks=tuple(self._chunks), finished=self.finished)


def model_info(reply: pb.GetModelInfoResponse) -> ModelInfo:
    """The record of a GetModelInfo reply."""
    return ModelInfo(
        instance_id=reply.instance_id,
        software_version=reply.software_version,
        model_id=reply.model_id,
        model_revision=reply.model_revision,
        tokenizer_fingerprint=reply.tokenizer_fingerprint,
        tokenizer_size=reply.tokenizer_size,
        context_length=reply.context_length,
        end_token_ids=tuple(reply.end_token_ids),
        dtype=reply.dtype,
        device=reply.device,
        numerics=reply.numerics,
        default_sampling=_sampling(reply.default_sampling),
        capabilities=frozenset(reply.capabilities),
        max_top_logprobs=reply.max_top_logprobs,
        rollback=reply.rollback,
        no_drafting_reason=reply.no_drafting_reason,
        default_max_tokens=reply.default_max_tokens,
        max_running=reply.max_running,
        max_queued=reply.max_queued,
        running=reply.running,
        queued=reply.queued,
        batching=reply.batching,
        kv_bytes=reply.kv_bytes,
        kv_bytes_limit=reply.kv_bytes_limit,
        exact_rows=reply.exact_rows,
        near_tie_gap=round(reply.near_tie_gap, 6),
        prompt_cache_bytes=reply.prompt_cache_bytes,
        prompt_cache_bytes_limit=reply.prompt_cache_bytes_limit,
    )


def drafters(reply: pb.ListDraftersResponse) -> tuple[Drafter, ...]:
    """The records of a ListDrafters reply."""
    return tuple(
        Drafter(
            address=one.address,
            instance_id=one.instance_id,
            source_kind=one.source_kind,
            model_id=one.model_id,
            state=_member(DrafterState, pb.DrafterState, one.state, "DRAFTER_STATE_"),
            refused_reason=one.refused_reason,
            sessions=one.sessions,
            rpc_p50_s=to_seconds(one.rpc_p50) if one.HasField("rpc_p50") else None,
            draft_acceptance_rate=one.draft_acceptance_rate,
        )
        for one in reply.drafters
    )


def activity(reply: pb.ListRequestsResponse) -> Activity:
    """The record of a ListRequests reply."""
    totals = reply.totals
    return Activity(
        requests=tuple(
            RequestInfo(
                request_id=one.request_id,
                state=_member(RequestState, pb.RequestState, one.state, "REQUEST_STATE_"),
                age_s=to_seconds(one.age),
                priority=one.priority,
                prompt_tokens=one.prompt_tokens,
                prefilled_tokens=one.prefilled_tokens,
                completion_tokens=one.completion_tokens,
                max_tokens=one.max_tokens,
                decode_tokens_per_second=one.decode_tokens_per_second,
                num_spec_steps=one.num_spec_steps,
                num_draft_tokens=one.num_draft_tokens,
                num_accepted_draft_tokens=one.num_accepted_draft_tokens,
                drafter_id=one.drafter_id,
            )
            for one in reply.requests
        ),
        totals=ServiceTotals(
            uptime_s=to_seconds(totals.uptime),
            requests_finished=totals.requests_finished,
            requests_failed=totals.requests_failed,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            rounds=totals.rounds,
            num_spec_steps=totals.num_spec_steps,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_draft_tokens=totals.num_accepted_draft_tokens,
            num_cut_draft_tokens=totals.num_cut_draft_tokens,
            drafted_by_position=tuple(totals.drafted_by_position),
            accepted_by_position=tuple(totals.accepted_by_position),
            rounds_without_draft=dict(totals.rounds_without_draft),
        ),
    )


def health(reply: health_pb2.HealthCheckResponse) -> Health:
    """The record of a health reply."""
    serving = health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if reply.status == serving else Health.NOT_SERVING


def _started(message: pb.GenerateStarted) -> Started:
    return Started(
        request_id=message.request_id,
        model_id=message.model_id,
        model_revision=message.model_revision,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        max_tokens=message.max_tokens,
        sampling=_sampling(message.sampling),
        numerics=message.numerics,
    )


def _sampling(message: pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        penalty_window=message.penalty_window if message.HasField("penalty_window") else None,
        logit_bias=dict(message.logit_bias),
    )


def _chunk(message: pb.GenerateChunk) -> Chunk:
    count = len(message.token_ids)
    if len(message.from_draft) != count:
        raise _fault(f"a chunk has {count} token_ids and {len(message.from_draft)} from_draft")
    if len(message.text_ends) != count:
        raise _fault(f"a chunk has {count} token_ids and {len(message.text_ends)} text_ends")
    logprobs: Sequence[pb.TokenLogprobs | None] = message.logprobs or [None] * count
    if len(logprobs) != count:
        raise _fault(f"a chunk has {count} token_ids and {len(logprobs)} logprobs")
    text = message.text
    tokens = zip(message.token_ids, _split(text, message.text_ends), message.from_draft, logprobs, strict=True)
    return Chunk(first_step=message.first_step, text=text, tokens=tuple(_token(*token) for token in tokens))


def _split(text: str, ends: Sequence[int]) -> list[str]:
    marks = (0, *ends)
    if marks[-1] != len(text) or any(begin > end for begin, end in pairwise(marks)):
        raise _fault(f"the text_ends of a chunk do not rise to {len(text)}, the length of its text")
    return [text[begin:end] for begin, end in pairwise(marks)]


def _token(token_id: int, text: str, from_draft: bool, logprobs: pb.TokenLogprobs | None) -> Token:
    if logprobs is None:
        return Token(id=token_id, text=text, from_draft=from_draft)
    if len(logprobs.top_token_ids) != len(logprobs.top_logprobs):
        raise _fault("top_token_ids and top_logprobs differ in length")
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return Token(
        id=token_id,
        text=text,
        from_draft=from_draft,
        logprob=logprobs.logprob,
        top_logprobs=tuple(TopLogprob(top_id, logprob) for top_id, logprob in top),
    )


def _finished(message: pb.GenerateFinished) -> Finished:
    kind = message.WhichOneof("matched")
    return Finished(
        finish_reason=_member(FinishReason, pb.FinishReason, message.finish_reason, "FINISH_REASON_"),
        matched=None if kind is None else getattr(message, kind),
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
        ),
        timings=_timings(message.timings),
        speculation=_speculation(message.speculation),
        grammar_complete=message.grammar_complete if message.HasField("grammar_complete") else None,
    )


def _timings(message: pb.GenerateTimings) -> Timings:
    return Timings(
        queued_s=to_seconds(message.queued),
        time_to_first_token_s=to_seconds(message.time_to_first_token),
        prefill_s=to_seconds(message.prefill),
        decode_s=to_seconds(message.decode),
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        decode_tokens_per_second=message.decode_tokens_per_second,
    )


def _speculation(message: pb.SpeculationStats) -> SpeculationStats:
    reason = _member(NoDraftReason, pb.NoDraftReason, message.no_draft_reason, "NO_DRAFT_REASON_")
    return SpeculationStats(
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        num_cut_draft_tokens=message.num_cut_draft_tokens,
        target_calls=message.target_calls,
        drafted_by_position=tuple(message.drafted_by_position),
        accepted_by_position=tuple(message.accepted_by_position),
        acceptance_histogram=tuple(message.acceptance_histogram),
        mean_acceptance_length=message.mean_acceptance_length,
        draft_acceptance_rate=message.draft_acceptance_rate,
        reseeds=message.reseeds,
        failovers=message.failovers,
        rounds_without_draft=dict(message.rounds_without_draft),
        draft_rpc_p50_s=to_seconds(message.draft_rpc_p50) if message.HasField("draft_rpc_p50") else None,
        drafter_id=message.drafter_id,
        no_draft_reason=reason if message.no_draft_reason else None,
        forwards_saved=message.forwards_saved,
        num_forced_draft_tokens=message.num_forced_draft_tokens,
        num_accepted_forced_draft_tokens=message.num_accepted_forced_draft_tokens,
        constraint_s=to_seconds(message.constraint_time) if message.HasField("constraint_time") else None,
        near_ties=message.near_ties,
    )


def _member(cls: type[E], names: object, number: int, prefix: str) -> E:
    """The member of a StrEnum for an enum value of the contract; `unknown` for 0 and for values of newer servers."""
    values: dict[int, str] = {value: name for name, value in names.items()}  # type: ignore[attr-defined]
    try:
        return cls(values.get(number, "").removeprefix(prefix).lower())
    except ValueError:
        return cls("unknown")


def _fault(text: str) -> InternalError:
    return InternalError(f"the server broke the contract: {text}", reason="BAD_RESPONSE")
