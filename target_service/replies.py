"""From the core to the wire: the events of a stream, and what the service says of itself."""

from __future__ import annotations

from collections.abc import Sequence as Items

from draftwire.v1 import target_pb2
from draftwire.wire import to_duration
from target_service.drafter_link import DrafterLink, LinkState
from target_service.ledger import Finish, FinishReason, Released, TokenLogprobs
from target_service.params import Choosing, DraftingMode
from target_service.sequence import Sequence

_REASONS = {
    FinishReason.EOS: target_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_STRING: target_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: target_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.MAX_TOKENS: target_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: target_pb2.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.GRAMMAR_END: target_pb2.FINISH_REASON_GRAMMAR_END,
}
_STATES = {
    LinkState.CONNECTING: target_pb2.DRAFTER_STATE_CONNECTING,
    LinkState.READY: target_pb2.DRAFTER_STATE_READY,
    LinkState.OPEN_BREAKER: target_pb2.DRAFTER_STATE_OPEN_BREAKER,
    LinkState.REFUSED: target_pb2.DRAFTER_STATE_REFUSED,
    LinkState.DRAINING: target_pb2.DRAFTER_STATE_DRAINING,
}


def started(sequence: Sequence, model_id: str, revision: str | None, numerics: str) -> target_pb2.GenerateResponse:
    """The first event."""
    generation = sequence.generation
    return target_pb2.GenerateResponse(
        started=target_pb2.GenerateStarted(
            request_id=generation.request_id,
            model_id=model_id,
            model_revision=revision or "",
            prompt_tokens=len(generation.prompt),
            cached_tokens=sequence.cached_tokens,
            max_tokens=generation.stopping.max_tokens,
            sampling=sampling(generation.choosing),
            numerics=numerics,
        )
    )


def sampling(choosing: Choosing) -> target_pb2.SamplingParams:
    """The values in force."""
    sampler, penalties = choosing.sampler, choosing.penalties
    return target_pb2.SamplingParams(
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        seed=sampler.seed,
        repetition_penalty=penalties.repetition,
        presence_penalty=penalties.presence,
        frequency_penalty=penalties.frequency,
        penalty_window=penalties.window,
        logit_bias=dict(choosing.logit_bias),
    )


def chunk(released: Released) -> target_pb2.GenerateResponse:
    """What one round let go."""
    logprobs = [_logprobs(token.logprobs) for token in released.tokens if token.logprobs is not None]
    return target_pb2.GenerateResponse(
        chunk=target_pb2.GenerateChunk(
            first_step=released.first_step,
            text=released.text,
            token_ids=[token.id for token in released.tokens],
            from_draft=[token.from_draft for token in released.tokens],
            logprobs=logprobs,
            text_ends=released.text_ends,
        )
    )


def finished(sequence: Sequence, finish: Finish, rollback_kind: str) -> target_pb2.GenerateResponse:
    """The last event."""
    ledger = sequence.ledger
    event = target_pb2.GenerateFinished(
        finish_reason=_REASONS[finish.reason],
        usage=target_pb2.Usage(
            prompt_tokens=ledger.prompt_length,
            completion_tokens=ledger.completion_tokens,
            cached_tokens=sequence.cached_tokens,
        ),
        timings=_timings(sequence),
        speculation=speculation(sequence, rollback_kind),
        grammar_complete=ledger.grammar_complete,
    )
    if finish.reason is FinishReason.STOP_STRING:
        event.stop_string = finish.stop or ""
    elif finish.stop_id is not None:
        event.stop_token_id = finish.stop_id
    return target_pb2.GenerateResponse(finished=event)


def speculation(sequence: Sequence, rollback_kind: str) -> target_pb2.SpeculationStats:
    """What drafts did."""
    counts, report = sequence.counts, sequence.source.report()
    prefill_calls = int(sequence.last_prompt > sequence.cached_tokens)
    stats = target_pb2.SpeculationStats(
        num_spec_steps=counts.spec_rounds,
        num_draft_tokens=counts.drafted,
        num_accepted_draft_tokens=counts.accepted,
        num_cut_draft_tokens=counts.cut,
        target_calls=counts.forwards + prefill_calls,
        drafted_by_position=counts.drafted_by_position,
        accepted_by_position=counts.accepted_by_position,
        acceptance_histogram=counts.histogram,
        mean_acceptance_length=counts.mean_acceptance_length,
        draft_acceptance_rate=counts.acceptance_rate,
        reseeds=report.reseeds,
        failovers=report.failovers,
        rounds_without_draft=dict(counts.without_draft),
        drafter_id=report.drafter_id,
        no_draft_reason=no_draft_reason(sequence, rollback_kind),
        forwards_saved=counts.forwards_saved,
        num_forced_draft_tokens=counts.forced,
        num_accepted_forced_draft_tokens=counts.forced_accepted,
        near_ties=counts.near_ties,
    )
    if sequence.matcher is not None:
        stats.constraint_time.CopyFrom(to_duration(sequence.matcher.seconds))
    if report.draft_rpc_p50_s is not None:
        stats.draft_rpc_p50.CopyFrom(to_duration(report.draft_rpc_p50_s))
    return stats


def no_draft_reason(sequence: Sequence, rollback_kind: str) -> target_pb2.NoDraftReason.ValueType:
    """Why there was not a single draft; UNSPECIFIED where there was one."""
    if sequence.counts.drafted:
        return target_pb2.NO_DRAFT_REASON_UNSPECIFIED
    if sequence.generation.drafting.mode is DraftingMode.OFF:
        return target_pb2.NO_DRAFT_REASON_OFF_BY_REQUEST
    if not rollback_kind:
        return target_pb2.NO_DRAFT_REASON_CACHE_CANNOT_ROLL_BACK
    report = sequence.source.report()
    if not report.drafter_id:
        if report.missing == "tokenizer_mismatch":
            return target_pb2.NO_DRAFT_REASON_TOKENIZER_MISMATCH
        too_short = report.missing == "first_round"
        return target_pb2.NO_DRAFT_REASON_TOO_SHORT if too_short else target_pb2.NO_DRAFT_REASON_NO_DRAFTER
    if sequence.source.limit == 0 and report.missing == "lost":
        return target_pb2.NO_DRAFT_REASON_DRAFTER_LOST
    if sequence.counts.forwards <= 1:
        return target_pb2.NO_DRAFT_REASON_TOO_SHORT
    return target_pb2.NO_DRAFT_REASON_NOT_WORTH_IT


def drafters(links: Items[DrafterLink]) -> target_pb2.ListDraftersResponse:
    """The drafters as the target sees them."""
    reply = target_pb2.ListDraftersResponse()
    for link in links:
        described = link.description
        entry = reply.drafters.add(
            address=link.address,
            instance_id=described.instance_id if described else "",
            source_kind=described.source_kind if described else "",
            model_id=described.model_id if described else "",
            state=_STATES[link.state],
            refused_reason=link.reason,
            sessions=link.sessions,
            draft_acceptance_rate=link.accepted / link.drafted if link.drafted else 0.0,
        )
        if link.rpc_p50_s is not None:
            entry.rpc_p50.CopyFrom(to_duration(link.rpc_p50_s))
    return reply


def _timings(sequence: Sequence) -> target_pb2.GenerateTimings:
    times, ledger = sequence.times, sequence.ledger
    read = sequence.last_prompt - sequence.cached_tokens
    return target_pb2.GenerateTimings(
        queued=to_duration(times.queued_s),
        time_to_first_token=to_duration(times.time_to_first_token_s),
        prefill=to_duration(times.prefill_s),
        decode=to_duration(times.decode_s),
        prefill_tokens_per_second=read / times.prefill_s if times.prefill_s > 0 else 0.0,
        decode_tokens_per_second=ledger.completion_tokens / times.decode_s if times.decode_s > 0 else 0.0,
    )


def _logprobs(found: TokenLogprobs) -> target_pb2.TokenLogprobs:
    return target_pb2.TokenLogprobs(logprob=found.logprob, top_token_ids=found.top_ids, top_logprobs=found.top_logprobs)
