"""The drafts of one sequence from a drafter in another process: one session, kept open in the background.

Whatever goes wrong costs drafts, never the request: the session is opened again, at the same drafter or another, while
decoding goes on.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from draftwire.errors import DraftwireError, NotFound
from draftwire.logs import get_logger
from draftwire.noise import NOISE_VERSION
from draftwire.sampling import SAMPLER_VERSION, Sampler
from draftwire.v1 import common_pb2, draft_pb2
from draftwire.wire import PROTOCOL_VERSION, from_rpc_error, prefix_hash, to_duration, to_seconds
from target_service.drafter_link import Description, DrafterLink, LinkState, answer_of
from target_service.drafter_pool import DrafterPool
from target_service.drafts import Answer, Lost, SourceReport
from target_service.spans import NoSpan, RequestSpan

_log = get_logger("drafts")

_PREFILL_TIMEOUT_S = 5.0
_PREFILL_ID_S = 0.02
_MAX_PREFILL_TIMEOUT_S = 60.0
_CHUNK_IDS = 65_536
_RELEASE_TIMEOUT_S = 2.0
_REOPEN_PAUSE_S = 0.05
_MAX_REOPEN_PAUSE_S = 2.0
_SUPERSEDED_CODES = (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What a drafter must know of a sequence."""

    sampler: Sampler
    prompt_length: int
    max_length: int
    end_ids: frozenset[int]
    vocabulary: int
    """Ids at or above it are not ids: a draft is cut there."""
    cache_salt: str
    cache_disabled: bool
    timeout_s: float
    """Deadline of a Draft call."""


@dataclass(slots=True)
class _Session:
    link: DrafterLink
    session_id: str
    instance_id: str
    held: int
    """Committed ids that the drafter surely holds."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another one has to take its place: it is lost, or its drafter leaves."""


class RemoteDrafts:
    """A `DraftSource` over gRPC. Belongs to the event loop."""

    def __init__(
        self,
        pool: DrafterPool,
        terms: SessionTerms,
        committed: Callable[[], Sequence[int]],
        span: RequestSpan | None = None,
    ) -> None:
        """committed: the sequence's committed ids as they are now; only ever appended to. span: where calls are drawn."""
        self._pool = pool
        self._terms = terms
        self._committed = committed
        self._span = span or NoSpan()
        self._session: _Session | None = None
        self._question: asyncio.Task[None] | None = None
        self._inbox: Answer | Lost | None = None
        self._round = 0
        self._hash = 0
        self._hashed = 0
        self._opened = 0
        self._failovers = 0
        self._last_link: DrafterLink | None = None
        self._rpc_s: list[float] = []
        self._missing = "first_round"
        self._pause_s = 0.0
        self._avoid: DrafterLink | None = None
        self._opening = asyncio.create_task(self._keep_open())

    @property
    def asking(self) -> bool:
        """Whether a question is running."""
        return self._question is not None and not self._question.done()

    @property
    def ready(self) -> bool:
        """Whether a session is open and no question is running."""
        return self._session is not None and not self.asking

    @property
    def limit(self) -> int:
        """Most drafts of the drafter; 0 without a session or beyond its context."""
        session = self._session
        description = session.link.description if session else None
        if description is None:
            return 0
        if description.context_length is not None and len(self._committed()) >= description.context_length:
            return 0
        return description.max_drafts

    def ask(self, ids: Sequence[int], drafts: int) -> None:
        """Sends one Draft call; `take` has the answer later."""
        session = self._session
        if session is None or self.asking:
            raise RuntimeError("ask() needs a source that is ready")
        self._round += 1
        advance = draft_pb2.Advance(
            base_length=session.held, token_ids=ids[session.held :], prefix_hash=self._prefix_hash(ids)
        )
        request = draft_pb2.DraftRequest(
            session_id=session.session_id,
            round=self._round,
            advance=advance,
            max_draft_tokens=drafts,
            time_budget=to_duration(self._terms.timeout_s * 0.8),
        )
        self._question = asyncio.create_task(self._call(session, request, len(ids)))

    def take(self) -> Answer | Lost | None:
        """What came since the last call."""
        came, self._inbox = self._inbox, None
        return came

    async def arrival(self) -> None:
        """Waits for the running question."""
        if self._question is not None:
            await asyncio.wait([self._question])

    def scored(self, proposed: int, accepted: int) -> None:
        """Counts for ListDrafters."""
        if self._last_link is not None:
            self._last_link.drafted += proposed
            self._last_link.accepted += accepted

    def report(self) -> SourceReport:
        """For the request's statistics."""
        return SourceReport(
            drafter_id=self._last_link.address if self._last_link else "",
            reseeds=max(0, self._opened - 1),
            failovers=self._failovers,
            draft_rpc_p50_s=statistics.median(self._rpc_s) if self._rpc_s else None,
            missing=self._missing,
        )

    def close(self) -> None:
        """Cancels what runs and releases the session in the background."""
        self._opening.cancel()
        if self._question is not None:
            self._question.cancel()
        session, self._session = self._session, None
        if session is not None:
            self._given_up(session)

    def _prefix_hash(self, ids: Sequence[int]) -> int:
        self._hash = prefix_hash(ids[self._hashed :], self._hash)
        self._hashed = len(ids)
        return self._hash

    async def _call(self, session: _Session, request: draft_pb2.DraftRequest, base_length: int) -> None:
        began_s = time.perf_counter()
        try:
            with self._span.call("Draft", session.link.address) as call:
                stub, timeout_s = session.link.stub, self._terms.timeout_s
                reply = await answer_of(stub.Draft(request, timeout=timeout_s, metadata=call.metadata))
                if reply.instance_id != session.instance_id:
                    raise NotFound("another instance answered")
                _check(reply, request, base_length)
                call.note("draft_tokens", len(reply.token_ids))
        except DraftwireError as error:
            self._call_failed(session, error)
            return
        delay_s = time.perf_counter() - began_s
        session.link.succeeded(delay_s)
        self._pool.recorder.draft_answered(session.link.address, delay_s)
        session.held = base_length
        self._pause_s = 0.0
        self._rpc_s.append(delay_s)
        ids = self._inside(reply.token_ids[: request.max_draft_tokens])
        # It computed for no longer than it took to answer, whatever it says: costs are reckoned with this.
        computed_s = min(max(0.0, to_seconds(reply.timings.computed)), delay_s)
        self._inbox = Answer(base_length, ids, delay_s, computed_s)

    def _call_failed(self, session: _Session, error: DraftwireError) -> None:
        self._pool.recorder.draft_failed(session.link.address, error.code.name)
        if error.code in _SUPERSEDED_CODES:
            self._inbox = Lost("superseded")
        elif error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            session.link.failed(error)
            self._inbox = Lost("deadline")
            # It may still be alive and only slow: the session stays, overlap makes a repeated advance harmless. Again and
            # again is too slow where another could draft.
            if session.link.state is not LinkState.READY and self._pool.best() is not None:
                self._lose(session, "deadline")
        elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._inbox = Lost("overloaded")
        elif error.code is grpc.StatusCode.NOT_FOUND:
            # The drafter may have been restarted with another model: it must describe itself first.
            session.link.suspect(str(error))
            self._lose(session, "session lost")
        else:
            session.link.failed(error)
            self._lose(session, str(error))

    def _lose(self, session: _Session, reason: str) -> None:
        """Gives the session up and opens another in the background."""
        _log.info("drafter_lost", address=session.link.address, reason=reason)
        self._inbox = Lost(reason)
        self._missing = "lost"
        if self._session is session:
            self._session = None
            self._avoid = session.link
            self._given_up(session)
            session.over.set()

    async def _keep_open(self) -> None:
        """Opens a session as soon as some drafter takes it, and the next one when that is over, while the request lives.

        A session whose drafter leaves drafts on until the next one is open.
        """
        while True:
            await asyncio.sleep(self._pause_s)
            link, description = await self._ready_link()
            if (kept := self._session) is not None and kept.link is link:
                # It did not leave after all.
                kept.over.clear()
                await kept.over.wait()
                continue
            # Only an answer ends the doubling: each opening makes a drafter read the whole text, of which one that opens
            # and then fails could otherwise have as much as it likes.
            self._pause_s = min(_MAX_REOPEN_PAUSE_S, max(_REOPEN_PAUSE_S, self._pause_s * 2))
            session = _Session(link, secrets.token_urlsafe(24), description.instance_id, 0)
            link.join(session.over)
            try:
                await self._prefill(session)
                while self.asking:
                    await self.arrival()
            except DraftwireError as fault:
                self._given_up(session)
                if fault.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    link.suspect(str(fault), draining=fault.reason == "DRAINING")
                self._missing, self._avoid = "lost", link
                continue
            except asyncio.CancelledError:
                self._given_up(session)
                raise
            failover = self._last_link not in (None, link)
            self._pool.recorder.session_opened(reseed=self._opened > 0, failover=failover)
            self._opened += 1
            self._failovers += int(failover)
            self._last_link = link
            old, self._session = self._session, session
            if old is not None:
                self._given_up(old)
            await session.over.wait()

    async def _ready_link(self) -> tuple[DrafterLink, Description]:
        while True:
            link = self._pool.best(self._avoid)
            if link is not None and link.description is not None:
                return link, link.description
            if self._opened == 0:
                self._missing = self._pool.missing()
            await self._pool.change()

    def _given_up(self, session: _Session) -> None:
        """Whatever went wrong, the drafter may have the session."""
        session.link.releasing += 1
        session.link.part(session.over)
        self._pool.spawn(asyncio.create_task(_release(session)))

    async def _prefill(self, session: _Session) -> None:
        ids = list(self._committed())
        # One that hangs must not keep the request from another drafter; one that reads slower than this is of no use.
        timeout_s = min(_MAX_PREFILL_TIMEOUT_S, _PREFILL_TIMEOUT_S + _PREFILL_ID_S * len(ids))
        with self._span.call("Prefill", session.link.address) as call:
            prefill = session.link.stub.Prefill(self._parts(session, ids), timeout=timeout_s, metadata=call.metadata)
            reply = await answer_of(prefill)
            if reply.instance_id != session.instance_id:
                raise NotFound("another instance answered")
            if reply.committed_length != len(ids):
                raise DraftwireError(f"the drafter holds {reply.committed_length} ids after a prefill of {len(ids)}")
        session.held = len(ids)

    async def _parts(self, session: _Session, ids: Sequence[int]) -> AsyncIterator[draft_pb2.PrefillRequest]:
        sampler = self._terms.sampler
        sampling = common_pb2.NoiseSampling(
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            top_k=sampler.top_k,
            min_p=sampler.min_p,
            seed=sampler.seed,
            noise_version=NOISE_VERSION,
            sampler_version=SAMPLER_VERSION,
        )
        yield draft_pb2.PrefillRequest(
            open=draft_pb2.SessionOpen(
                session_id=session.session_id,
                protocol_version=PROTOCOL_VERSION,
                tokenizer_fingerprint=self._pool.identity.fingerprint,
                expected_instance_id=session.instance_id,
                sampling=sampling,
                prompt_length=self._terms.prompt_length,
                max_length=self._terms.max_length,
                end_token_ids=sorted(self._terms.end_ids),
                cache_salt=self._terms.cache_salt,
                cache_disabled=self._terms.cache_disabled,
            )
        )
        digest = 0
        for begin in range(0, len(ids), _CHUNK_IDS):
            chunk = ids[begin : begin + _CHUNK_IDS]
            digest = prefix_hash(chunk, digest)
            yield draft_pb2.PrefillRequest(
                chunk=draft_pb2.Advance(base_length=begin, token_ids=chunk, prefix_hash=digest)
            )

    def _inside(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The drafts up to the first that is no id of the target's vocabulary."""
        end = next((i for i, token in enumerate(ids) if token >= self._terms.vocabulary), len(ids))
        return tuple(ids[:end])


def _check(reply: draft_pb2.DraftResponse, request: draft_pb2.DraftRequest, base_length: int) -> None:
    """Raises DraftwireError for an answer that must not be used."""
    if reply.round != request.round:
        raise DraftwireError(f"it answered round {reply.round}, not {request.round}")
    if reply.committed_length != base_length or reply.first_position != base_length:
        place = f"position {reply.first_position} of {reply.committed_length}"
        raise DraftwireError(f"it drafts for {place}, not {base_length}")


async def _release(session: _Session) -> None:
    """Best effort: a lease ends what this does not."""
    request = draft_pb2.ReleaseRequest(session_ids=[session.session_id])
    try:
        await session.link.stub.Release(request, timeout=_RELEASE_TIMEOUT_S)
    except grpc.RpcError as error:
        _log.debug("release_failed", address=session.link.address, reason=str(from_rpc_error(error)))
    finally:
        session.link.released()
