"""The contract's calls, thinly: read the request, ask `Rounds`, write the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import grpc

from draft_service import requests
from draft_service.calls import Outcome
from draft_service.history import History
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits
from draft_service.tally import NullRecorder, Recorder
from draftwire.access import owner_of
from draftwire.errors import FailedPrecondition, Overloaded
from draftwire.logs import beginning, get_logger
from draftwire.noise import NOISE_VERSION
from draftwire.sampling import SAMPLER_VERSION
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, invalid, to_duration

_CANCELLATION_S = 0.003
"""In which a cancellation arrives behind the end of its stream. Opening a session is nobody's wait: decoding goes on."""
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
NEW_WORK = frozenset({"Prefill"})
"""Methods that begin something, refused while draining."""

_log = get_logger("draft_service")


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The draft service. The gate in front of it lets no call but health through before `ready`."""

    def __init__(
        self,
        instance_id: str,
        limits: SessionLimits,
        *,
        max_draft_tokens: int,
        max_calls: int = 256,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        log_prompts: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """max_calls: Prefill and Draft calls that may run or wait at once."""
        self._instance_id = instance_id
        self._limits = limits
        self._max_draft_tokens = max_draft_tokens
        self._max_calls = max_calls
        self._max_message_bytes = max_message_bytes
        self._log_prompts = log_prompts
        self._calls = 0
        self._recorder = recorder or NullRecorder()
        self.rounds: Rounds | None = None
        """None while the source is loading."""
        self.note: Callable[[str, int | float | str], None] = lambda name, value: None
        """Adds a fact to the trace of a call."""

    def ready(self, rounds: Rounds) -> None:
        """The source is loaded: calls may come."""
        self.rounds = rounds

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeResponse:
        """Says what this drafter is."""
        requests.read_describe(request)
        source = self._ready.source
        return draft_pb2.DescribeResponse(
            instance_id=self._instance_id,
            software_version=version("draftwire"),
            min_protocol_version=PROTOCOL_VERSION,
            max_protocol_version=PROTOCOL_VERSION,
            source_kind=source.kind,
            model_id=source.model_id,
            model_revision=source.model_revision,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            tokenizer_size=source.tokenizer_size,
            context_length=source.context_length,
            max_draft_tokens=self._max_draft_tokens,
            noise_versions=[NOISE_VERSION] if source.draws else [],
            sampler_versions=[SAMPLER_VERSION] if source.draws else [],
            weights_bytes=source.weights_bytes,
            max_message_bytes=self._max_message_bytes,
            max_lease=to_duration(self._limits.max_lease_s),
            load=self._load(),
            batching=source.batching,
        )

    async def Prefill(
        self, request_iterator: AsyncIterator[draft_pb2.PrefillRequest], context: Any
    ) -> draft_pb2.PrefillResponse:
        """Reads the whole stream, then opens the session: a stream that breaks off has changed nothing."""
        owner, rounds = owner_of(context), self._ready
        with self._counted():
            opening, history = await self._read_prefill(owner, request_iterator)
            # grpc.aio ends the iteration of a stream that its client has cancelled as if it were whole, and cancels this call
            # with one of the next events that it reads.
            await asyncio.sleep(_CANCELLATION_S)
            if self._log_prompts:
                _log.info("prompt", session_id=opening.session_id, **beginning("", history.since(0)))
            outcome = await rounds.prefill(
                owner, opening.session_id, spec=opening.spec, history=history, lease_s=opening.lease_s
            )
        self._recorder.prefilled(outcome)
        self._note(outcome, reused_tokens=outcome.reused_length)
        return draft_pb2.PrefillResponse(
            instance_id=self._instance_id,
            committed_length=outcome.committed_length,
            reused_length=outcome.reused_length,
            lease=to_duration(outcome.lease_s),
            timings=_timings(outcome),
            load=self._load(),
        )

    async def Draft(self, request: draft_pb2.DraftRequest, context: Any) -> draft_pb2.DraftResponse:
        """Commits and drafts."""
        rounds = self._ready
        asked = requests.read_draft(request, rounds.source.tokenizer_size)
        with self._counted():
            outcome = await rounds.draft(owner_of(context), asked)
        self._recorder.drafted(request.max_draft_tokens, outcome)
        self._note(outcome, draft_tokens=len(outcome.guess.ids))
        guess = outcome.guess
        return draft_pb2.DraftResponse(
            instance_id=self._instance_id,
            round=asked.number,
            committed_length=outcome.committed_length,
            first_position=outcome.committed_length + len(request.assumed_token_ids),
            token_ids=guess.ids,
            confidences=guess.confidences,
            end=draft_pb2.DraftEnd.Value(f"DRAFT_END_{guess.end.name}"),
            timings=_timings(outcome),
            load=self._load(),
        )

    async def Commit(self, request: draft_pb2.CommitRequest, context: Any) -> draft_pb2.CommitResponse:
        """Commits without drafting."""
        rounds = self._ready
        outcome = rounds.commit(owner_of(context), requests.read_commit(request, rounds.source.tokenizer_size))
        return draft_pb2.CommitResponse(
            instance_id=self._instance_id,
            committed_length=outcome.committed_length,
            lease=to_duration(outcome.lease_s),
        )

    async def Release(self, request: draft_pb2.ReleaseRequest, context: Any) -> draft_pb2.ReleaseResponse:
        """Ends sessions."""
        self._ready.table.release(owner_of(context), requests.read_release(request))
        return draft_pb2.ReleaseResponse()

    @property
    def _ready(self) -> Rounds:
        if self.rounds is None:
            raise RuntimeError("a call passed the gate before the source was loaded")
        return self.rounds

    async def _read_prefill(
        self, owner: str, stream: AsyncIterator[draft_pb2.PrefillRequest]
    ) -> tuple[requests.Opening, History]:
        opening: requests.Opening | None = None
        history: History | None = None
        async for message in stream:
            part = message.WhichOneof("part")
            if part is None:
                raise invalid("part", "is missing, expected open or chunk", reason="FIELD_REQUIRED")
            if (part == "open") != (opening is None):
                raise invalid("part", f"is {part}: open comes first, exactly once, then chunks")
            if opening is None:
                opening = requests.read_opening(message.open)
                self._check_fit(opening)
                continue
            chunk = requests.read_chunk(message.chunk, self._ready.source.tokenizer_size)
            if chunk.end > opening.spec.max_length:
                raise invalid("chunk.token_ids", f"end at {chunk.end}, max_length is {opening.spec.max_length}")
            if history is None:
                # What is sent replaces the rest; ids before the first chunk are taken from the session.
                history = self._ready.table.held(owner, opening.session_id).prefix(chunk.base_length)
            history.apply(chunk)
        if opening is None:
            raise invalid("part", "is missing: the stream was empty, expected open first", reason="FIELD_REQUIRED")
        return opening, History() if history is None else history

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Raises Overloaded (QUEUE_FULL) where so many calls run or wait that this one would only wait in vain."""
        if self._calls >= self._max_calls:
            raise Overloaded(f"{self._calls} calls run or wait", reason="QUEUE_FULL", retry_after_s=0.1)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _check_fit(self, opening: requests.Opening) -> None:
        expected, own = opening.expected_instance_id, self._ready.source.tokenizer_fingerprint
        if expected and expected != self._instance_id:
            raise FailedPrecondition(
                f"this is drafter {self._instance_id}, not {expected}: call Describe again",
                reason="INSTANCE_MISMATCH",
                metadata={"instance_id": self._instance_id},
            )
        if opening.tokenizer_fingerprint and own and opening.tokenizer_fingerprint != own:
            raise FailedPrecondition(
                f"the tokenizers differ: {opening.tokenizer_fingerprint[:12]}... against {own[:12]}... of "
                f"{self._ready.source.model_id}; use a draft model with the target's vocabulary",
                reason="TOKENIZER_MISMATCH",
                metadata={"tokenizer_fingerprint": own},
            )
        needed = self._ready.source.bytes_for(opening.spec.max_length)
        if needed > self._limits.kv_bytes:
            # Before the ids are read: there could be four billion of them.
            raise Overloaded(
                f"a session of {opening.spec.max_length} tokens needs {needed} bytes, the limit of all sessions is "
                f"{self._limits.kv_bytes} bytes",
                reason="KV_BUDGET",
            )

    def _note(self, outcome: Outcome, **facts: int) -> None:
        timed = {"queued_s": outcome.queued_s, "computed_s": outcome.computed_s, **facts}
        for name, value in {"committed_length": outcome.committed_length, **timed}.items():
            self.note(f"draftwire.{name}", value)

    def _load(self) -> draft_pb2.Load:
        rounds = self._ready
        return draft_pb2.Load(
            sessions=len(rounds.table),
            session_limit=self._limits.sessions,
            kv_bytes=rounds.table.kv_bytes,
            kv_bytes_limit=self._limits.kv_bytes,
            queue_depth=rounds.queue_depth,
            prompt_cache_bytes=rounds.prefixes.nbytes,
        )


def _timings(outcome: Outcome) -> draft_pb2.Timings:
    return draft_pb2.Timings(queued=to_duration(outcome.queued_s), computed=to_duration(outcome.computed_s))


def register(servicer: DraftServicer, server: grpc.aio.Server) -> None:
    """Adds the servicer to a server."""
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
