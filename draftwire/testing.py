"""A drafter whose behaviour is a script, for tests of whatever speaks to a draft service. Needs no model and no mlx.

    fake = FakeDraftService(perfect(answer_ids))
    async with serve(fake) as address:          # a real grpc.aio server on a loopback port
        ...
    assert fake.drafts[0].assumed == ()

The service keeps sessions by the contract and refuses what breaks it, so it also tests its caller. A script says what each
Draft answers. To restart it empty on the same port: leave `serve`, then `serve(FakeDraftService(...), port=...)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from draftwire.errors import DraftwireError, FailedPrecondition, NotFound, PositionGap, Superseded
from draftwire.serving import Lifecycle, State, listen
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.wire import PROTOCOL_VERSION, prefix_hash, to_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One Draft call, as a script sees it."""

    number: int
    """How many Draft calls came before."""
    session_id: str
    round: int
    prompt_length: int
    committed: tuple[int, ...]
    assumed: tuple[int, ...]
    limit: int
    """max_draft_tokens of the request."""

    @property
    def step(self) -> int:
        """Index, counted from the end of the prompt, of the first id that is asked for."""
        return len(self.committed) + len(self.assumed) - self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a Draft call answers; what is None is answered as the contract says."""

    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    end: draft_pb2.DraftEnd.ValueType = draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS
    round: int | None = None
    committed_length: int | None = None
    first_position: int | None = None
    instance_id: str | None = None


Script: TypeAlias = Callable[[Asked], Awaitable[Reply]]
"""Answers one Draft call, or raises a DraftwireError for an error status."""


def perfect(continuation: Sequence[int]) -> Script:
    """Drafts the answer itself. continuation: the ids that follow the prompt."""

    async def script(asked: Asked) -> Reply:
        ids = tuple(continuation[asked.step : asked.step + asked.limit])
        short = len(ids) < asked.limit
        return Reply(ids=ids, end=draft_pb2.DRAFT_END_NO_MATCH if short else draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS)

    return script


def half_right(continuation: Sequence[int], *, right: int = 1, vocabulary: int = 256) -> Script:
    """The first `right` ids of each draft are those of the answer, the rest are not."""

    async def script(asked: Asked) -> Reply:
        reply = await perfect(continuation)(asked)
        other = tuple((token_id + 1) % vocabulary for token_id in reply.ids[right:])
        return replace(reply, ids=reply.ids[:right] + other)

    return script


def wrong(continuation: Sequence[int], *, vocabulary: int = 256) -> Script:
    """No id is that of the answer."""
    return half_right(continuation, right=0, vocabulary=vocabulary)


def fixed(*ids: int) -> Script:
    """The same ids each time, however few are asked for; with no ids, an empty draft."""

    async def script(asked: Asked) -> Reply:
        return Reply(ids=ids, end=draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS if ids else draft_pb2.DRAFT_END_NO_MATCH)

    return script


def outside_vocabulary(first_id: int = 2**32 - 1) -> Script:
    """Ids that no tokenizer has, as many as asked."""

    async def script(asked: Asked) -> Reply:
        return Reply(ids=(first_id,) * asked.limit)

    return script


def too_many(continuation: Sequence[int], *, count: int = 1000) -> Script:
    """Right ids first, then more than anybody asked for."""

    async def script(asked: Asked) -> Reply:
        ids = (*continuation[asked.step : asked.step + count], *([0] * count))[:count]
        return Reply(ids=ids)

    return script


def misplaced(script: Script, *, shift: int = 1) -> Script:
    """first_position is wrong by `shift`."""

    async def shifted(asked: Asked) -> Reply:
        place = len(asked.committed) + len(asked.assumed) + shift
        return replace(await script(asked), first_position=max(0, place))

    return shifted


def other_round(script: Script, *, shift: int = 1) -> Script:
    """Answers in the name of another round."""

    async def shifted(asked: Asked) -> Reply:
        return replace(await script(asked), round=max(0, asked.round + shift))

    return shifted


def stale(script: Script) -> Script:
    """Answers each call with what belonged to the call before, positions and round included; the first with nothing."""
    kept = [Reply(end=draft_pb2.DRAFT_END_NO_MATCH)]

    async def delayed(asked: Asked) -> Reply:
        place = len(asked.committed) + len(asked.assumed)
        own = replace(
            await script(asked), round=asked.round, first_position=place, committed_length=len(asked.committed)
        )
        kept.append(own)
        return kept.pop(0)

    return delayed


def late(event: asyncio.Event, script: Script) -> Script:
    """Answers once the event is set."""

    async def waiting(asked: Asked) -> Reply:
        await event.wait()
        return await script(asked)

    return waiting


def hang() -> Script:
    """Never answers."""
    return late(asyncio.Event(), fixed())


def failing(error: DraftwireError) -> Script:
    """Ends each call with this error's status."""

    async def script(asked: Asked) -> Reply:
        raise error

    return script


def in_turn(*scripts: Script) -> Script:
    """The first script for the first Draft call, and so on; the last one for all that follow."""

    async def script(asked: Asked) -> Reply:
        return await scripts[min(asked.number, len(scripts) - 1)](asked)

    return script


class FakeResolver:
    """Names of drafters by script: what a target that is told dns:///name:port finds. Every lookup is counted."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: frozenset[str] = frozenset(addresses)
        """What every name stands for, as host:port; set it anew at any time."""
        self.fault: OSError | None = None
        """Raised by lookups while it is set."""
        self.asked: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        """Answers at once."""
        self.asked.append((host, port))
        if self.fault is not None:
            raise self.fault
        return self.addresses


@dataclass(slots=True)
class _Session:
    open: draft_pb2.SessionOpen
    ids: list[int] = field(default_factory=list)
    newest_round: int = -1


class FakeDraftService(draft_pb2_grpc.DraftServiceServicer):
    """Keeps sessions by the contract and answers Draft by a script. Everything that was asked can be read afterwards."""

    def __init__(self, script: Script | None = None, **described: Any) -> None:
        """script: default is empty drafts; described: fields of DescribeResponse to set, as tokenizer_fingerprint=..."""
        self.script = script or fixed()
        self.lifecycle = Lifecycle(draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name, frozenset())
        self.described = described
        self.describes = 0
        self.prefills: list[tuple[str, tuple[int, ...]]] = []
        """(session_id, all ids that it then held) of each Prefill that was OK."""
        self.drafts: list[Asked] = []
        self.commits: list[tuple[str, int]] = []
        """(session_id, committed length) of each Commit that was OK."""
        self.released: list[str] = []
        self.refused: list[DraftwireError] = []
        """What the contract made it refuse; empty after a test whose caller did nothing wrong."""
        self.cancelled = 0
        """Draft calls that the caller gave up."""
        self._sessions: dict[str, _Session] = {}

    @property
    def instance_id(self) -> str:
        """New for each FakeDraftService."""
        return self.lifecycle.instance_id

    @property
    def open_sessions(self) -> dict[str, tuple[int, ...]]:
        """The committed ids of each session that is open."""
        return {name: tuple(session.ids) for name, session in self._sessions.items()}

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeResponse:
        """Fits any vocabulary unless told otherwise."""
        self.describes += 1
        base = draft_pb2.DescribeResponse(
            instance_id=self.instance_id,
            software_version="fake",
            min_protocol_version=PROTOCOL_VERSION,
            max_protocol_version=PROTOCOL_VERSION,
            source_kind="fake",
            max_draft_tokens=64,
            max_lease=to_duration(600),
        )
        base.MergeFrom(draft_pb2.DescribeResponse(**self.described))
        return base

    async def Prefill(
        self, request_iterator: AsyncIterator[draft_pb2.PrefillRequest], context: Any
    ) -> draft_pb2.PrefillResponse:
        """Opens a session with exactly the ids sent."""
        session: _Session | None = None
        old: _Session | None = None
        reused_length = 0
        async for message in request_iterator:
            if session is None:
                session, old = _Session(message.open), self._sessions.get(message.open.session_id)
                expected = message.open.expected_instance_id
                if expected and expected != self.instance_id:
                    raise self._refusal(FailedPrecondition("another instance", reason="INSTANCE_MISMATCH"))
                continue
            if not session.ids and old is not None:
                session.ids = old.ids[: message.chunk.base_length]
                reused_length = len(session.ids)
            self._apply(session, message.chunk)
        if session is None:
            raise self._refusal(FailedPrecondition("an empty Prefill"))
        self._sessions[session.open.session_id] = session
        self.prefills.append((session.open.session_id, tuple(session.ids)))
        return draft_pb2.PrefillResponse(
            instance_id=self.instance_id,
            committed_length=len(session.ids),
            reused_length=reused_length,
            lease=to_duration(60),
        )

    async def Draft(self, request: draft_pb2.DraftRequest, context: Any) -> draft_pb2.DraftResponse:
        """Commits, then answers as the script says."""
        session = self._commit(request)
        asked = Asked(
            number=len(self.drafts),
            session_id=request.session_id,
            round=request.round,
            prompt_length=session.open.prompt_length,
            committed=tuple(session.ids),
            assumed=tuple(request.assumed_token_ids),
            limit=request.max_draft_tokens,
        )
        self.drafts.append(asked)
        try:
            reply = await self.script(asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        place = len(asked.committed) + len(asked.assumed)
        return draft_pb2.DraftResponse(
            instance_id=self.instance_id if reply.instance_id is None else reply.instance_id,
            round=asked.round if reply.round is None else reply.round,
            committed_length=len(asked.committed) if reply.committed_length is None else reply.committed_length,
            first_position=place if reply.first_position is None else reply.first_position,
            token_ids=reply.ids,
            confidences=reply.confidences,
            end=reply.end,
        )

    async def Commit(self, request: draft_pb2.CommitRequest, context: Any) -> draft_pb2.CommitResponse:
        """Commits without a draft."""
        session = self._commit(request)
        self.commits.append((request.session_id, len(session.ids)))
        return draft_pb2.CommitResponse(
            instance_id=self.instance_id, committed_length=len(session.ids), lease=to_duration(60)
        )

    async def Release(self, request: draft_pb2.ReleaseRequest, context: Any) -> draft_pb2.ReleaseResponse:
        """Ends sessions."""
        self.released.extend(request.session_ids)
        for name in request.session_ids:
            self._sessions.pop(name, None)
        return draft_pb2.ReleaseResponse()

    def forget(self) -> None:
        """Loses all sessions, as by a full memory; the instance stays the same."""
        self._sessions.clear()

    def _commit(self, request: draft_pb2.DraftRequest | draft_pb2.CommitRequest) -> _Session:
        session = self._sessions.get(request.session_id)
        if session is None:
            raise NotFound(f"session {request.session_id!r} is not here", reason="SESSION_UNKNOWN")
        if request.round < session.newest_round:
            raise self._refusal(Superseded(f"round {request.round} is older than round {session.newest_round}"))
        self._apply(session, request.advance)
        session.newest_round = request.round
        return session

    def _apply(self, session: _Session, advance: draft_pb2.Advance) -> None:
        length, end = len(session.ids), advance.base_length + len(advance.token_ids)
        if advance.base_length > length:
            gap = PositionGap(f"the session holds {length}", metadata={"committed_length": str(length)})
            raise self._refusal(gap)
        ids = session.ids[: advance.base_length] + list(advance.token_ids)
        overlap = min(end, length)
        if ids[:overlap] != session.ids[:overlap] or prefix_hash(ids) != advance.prefix_hash:
            raise self._refusal(FailedPrecondition(f"the first {end} ids differ", reason="PREFIX_MISMATCH"))
        session.ids.extend(ids[length:])

    def _refusal(self, error: DraftwireError) -> DraftwireError:
        self.refused.append(error)
        return error


@asynccontextmanager
async def serve(fake: FakeDraftService, *, port: int = 0) -> AsyncIterator[str]:
    """Runs the fake on a real server on the loopback interface; gives its address, "127.0.0.1:port".

    Leaving cuts what still runs, as a killed process would.
    """
    server, bound = await listen(
        fake.lifecycle,
        "127.0.0.1",
        port,
        lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server),
    )
    await fake.lifecycle.enter(State.SERVING)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
