"""What a target does at the moment, on the wire: its requests without their texts, and its totals."""

from __future__ import annotations

import time
from collections.abc import Iterable

from draftwire.v1 import target_pb2
from draftwire.wire import to_duration
from target_service.sequence import Sequence
from target_service.tally import Tally


def requests(live: Iterable[Sequence], tally: Tally) -> target_pb2.ListRequestsResponse:
    """The reply of ListRequests."""
    now_s = time.monotonic()
    return target_pb2.ListRequestsResponse(
        requests=[_request(sequence, now_s) for sequence in live], totals=_totals(tally, now_s)
    )


def state_of(sequence: Sequence) -> target_pb2.RequestState.ValueType:
    """Where a request is on its way."""
    if sequence.times.admitted is None:
        return target_pb2.REQUEST_STATE_QUEUED
    if sequence.times.prefilled is None:
        return target_pb2.REQUEST_STATE_PREFILLING
    return target_pb2.REQUEST_STATE_STALLED if sequence.crowded else target_pb2.REQUEST_STATE_DECODING


def _request(sequence: Sequence, now_s: float) -> target_pb2.RequestInfo:
    ledger, counts, times = sequence.ledger, sequence.counts, sequence.times
    decoding_s = (times.finished or now_s) - times.prefilled if times.prefilled is not None else 0.0
    return target_pb2.RequestInfo(
        request_id=sequence.generation.request_id,
        state=state_of(sequence),
        age=to_duration(max(0.0, now_s - times.arrived)),
        priority=sequence.generation.priority,
        prompt_tokens=ledger.prompt_length,
        prefilled_tokens=sequence.prefilled,
        completion_tokens=ledger.completion_tokens,
        max_tokens=sequence.generation.stopping.max_tokens,
        decode_tokens_per_second=ledger.completion_tokens / decoding_s if decoding_s > 0 else 0.0,
        num_spec_steps=counts.spec_rounds,
        num_draft_tokens=counts.drafted,
        num_accepted_draft_tokens=counts.accepted,
        drafter_id=sequence.source.report().drafter_id,
    )


def _totals(tally: Tally, now_s: float) -> target_pb2.ServiceTotals:
    counts = tally.speculation
    return target_pb2.ServiceTotals(
        uptime=to_duration(max(0.0, now_s - tally.began_s)),
        requests_finished=tally.finished_by.total(),
        requests_failed=tally.failed_by.total(),
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        rounds=counts.forwards,
        num_spec_steps=counts.spec_rounds,
        num_draft_tokens=counts.drafted,
        num_accepted_draft_tokens=counts.accepted,
        num_cut_draft_tokens=counts.cut,
        drafted_by_position=counts.drafted_by_position,
        accepted_by_position=counts.accepted_by_position,
        rounds_without_draft=dict(counts.without_draft),
    )
