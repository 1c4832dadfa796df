"""Runs the calls of sessions: one at a time in each, the newest round first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from draft_service.calls import NOTHING, Call, Outcome, Round
from draft_service.history import History
from draft_service.prefixes import PrefixCache
from draft_service.sessions import Session, SessionTable
from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, Prefix, Runner, SessionSpec, Source
from draftwire.errors import Cancelled, DraftwireError, PositionGap, Superseded
from draftwire.logs import get_logger
from draftwire.wire import invalid

T = TypeVar("T")
_log = get_logger("rounds")


class Rounds:
    """The rules of calls over a `SessionTable` and a `Source`. Belongs to the event loop.

    Ids are committed when a call arrives, in the order of rounds; only drafting waits for the session's turn and for the
    compute thread. So an answer that was superseded has still committed what it brought, and nothing is ever taken back.
    """

    def __init__(
        self,
        table: SessionTable,
        source: Source,
        runner: Runner,
        clock: Callable[[], float],
        *,
        max_draft_tokens: int,
        prompt_cache_bytes: int = 0,
    ) -> None:
        """prompt_cache_bytes: most bytes of prefixes that are kept after their sessions; 0 keeps none."""
        self.table = table
        table.on_close = self._closed
        self.source = source
        self.prefixes = PrefixCache(prompt_cache_bytes, self._forget)
        self._computing = source.computing(runner, clock)
        self._clock = clock
        self._max_draft_tokens = max_draft_tokens
        self._closing = False
        self._leaving: dict[tuple[str, str], set[asyncio.Task[None]]] = {}
        """By group: sessions that are over and whose prefixes are not in the cache yet."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def queue_depth(self) -> int:
        """Calls that wait for the compute thread."""
        return self._computing.waiting

    async def idle(self) -> None:
        """Returns once no call runs."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Stops all calls, closes all sessions, forgets all prefixes, and waits until all of it is gone."""
        self._closing = True
        self.table.close_all()
        self.prefixes.clear()
        await self.idle()

    async def prefill(
        self, owner: str, session_id: str, *, spec: SessionSpec, history: History, lease_s: float | None
    ) -> Outcome:
        """Opens the session, or makes an open one hold exactly `history`, and computes on it.

        Rounds start anew. Raises Overloaded, PermissionDenied, Superseded (by another Prefill).
        """
        _check_length("chunk.token_ids", len(history), spec.max_length)
        session = self.table.open(
            owner, session_id, spec=spec, kv_bytes=self.source.bytes_for(spec.max_length), lease_s=lease_s
        )
        self._make_way()
        session.stop_calls(Superseded(f"session {session_id!r} was opened anew"))
        session.newest, session.history, session.rewritten = None, history, True
        call = Call(self._clock)
        return await self._wait(self._begin(session, call, self._prefill(session, call)))

    async def draft(self, owner: str, asked: Round) -> Outcome:
        """Commits and drafts. Raises NotFound, PositionGap, FailedPrecondition, Superseded, InvalidRequest."""
        session = self.table.find(owner, asked.session_id)
        call = self._retried(session, asked)
        if call is None:
            self._commit(session, asked)
            call = Call(self._clock, asked)
            session.newest = self._begin(session, call, self._draft(session, call, asked))
        return await self._wait(call)

    def commit(self, owner: str, asked: Round) -> Outcome:
        """Commits without drafting; its KV is computed when the next draft needs it. Raises as `draft`."""
        session = self.table.find(owner, asked.session_id)
        if self._retried(session, asked) is None:
            self._commit(session, asked)
            session.newest = Call(self._clock, asked)
        return Outcome(committed_length=len(session.history), lease_s=session.lease_s)

    def _retried(self, session: Session, asked: Round) -> Call | None:
        """The call of which this round is a retry. Raises Superseded for an older round."""
        newest = session.newest
        if newest is None or newest.asked is None or asked.number > newest.asked.number:
            return None
        if asked.number < newest.asked.number:
            raise Superseded(f"round {asked.number} is older than round {newest.asked.number}")
        if replace(asked, time_budget_s=newest.asked.time_budget_s) != newest.asked:
            raise invalid("round", f"round {asked.number} was another question; use a higher number for a new one")
        # One that was given up or failed has no answer: it is asked again.
        return newest if newest.answerable else None

    def _commit(self, session: Session, asked: Round) -> None:
        """Applies the ids; only then the round is the newest and stops those before it."""
        assert session.spec is not None
        _check_length("advance.token_ids", asked.advance.end, session.spec.max_length)
        length = len(session.history)
        if asked.ask is not None and max(length, asked.advance.end) < session.spec.prompt_length:
            raise PositionGap(
                f"the session holds {length} of {session.spec.prompt_length} prompt tokens: send the rest first",
                metadata={"committed_length": str(length)},
            )
        session.history.apply(asked.advance)
        for call in list(session.calls):
            # A Prefill has no round: what it computes is of use to this one, which waits for it.
            if call.asked is not None:
                call.stop(Superseded(f"round {asked.number} took the session"))

    async def _prefill(self, session: Session, call: Call) -> Outcome:
        async with session.turn:
            call.check()
            length = len(session.history)
            drafter, reused_length = await self._ready(session)
            await self._sound(session, self._computing.catch_up(drafter, call))
            call.check()
            return self._outcome(session, call, length, reused_length=reused_length)

    async def _draft(self, session: Session, call: Call, asked: Round) -> Outcome:
        assert asked.ask is not None
        async with session.turn:
            call.check()
            length = len(session.history)
            drafter, _ = await self._ready(session)
            ask = self._lowered(session, asked.ask)
            if ask is None:
                return self._outcome(session, call, length, Guess(end=DraftEnd.MAX_DRAFT_TOKENS))
            guess = await self._sound(session, self._computing.draft(drafter, ask, call))
            call.check()
            return self._outcome(session, call, length, guess)

    async def _ready(self, session: Session) -> tuple[Drafter, int]:
        """The drafter, told all that is committed, and how much of that it need not compute. Holds the turn."""
        assert session.spec is not None
        if session.drafter is not None and session.drafter_spec != session.spec:
            await self._drop(session)
        if session.drafter is None:
            session.drafter, session.drafter_spec = self.source.open(session.spec), session.spec
            await self._adopt(session, session.drafter, session.spec)
        drafter = session.drafter
        if session.rewritten:
            session.rewritten = False
            return drafter, drafter.rewrite(session.history.since(0))
        drafter.advance(session.history.since(drafter.length))
        return drafter, drafter.length

    def _lowered(self, session: Session, ask: Ask) -> Ask | None:
        """Within the service's limit and the length that the session was opened for; None if nothing fits."""
        assert session.spec is not None
        room = session.spec.max_length - len(session.history) - len(ask.assumed)
        limit = min(ask.limit, self._max_draft_tokens, room)
        return replace(ask, limit=limit) if limit > 0 else None

    async def _sound(self, session: Session, computing: Awaitable[T]) -> T:
        """Waits for the session's drafter; one that fails costs the session, for its state is unknown."""
        try:
            return await computing
        except Exception:
            session.sound = False
            self.table.close(session, "failed")
            raise

    def _outcome(
        self, session: Session, call: Call, length: int, guess: Guess = NOTHING, *, reused_length: int = 0
    ) -> Outcome:
        waited_s = self._clock() - call.began_s - call.computed_s
        return Outcome(
            committed_length=length,
            guess=guess,
            reused_length=reused_length,
            lease_s=session.lease_s,
            queued_s=max(0.0, waited_s),
            computed_s=call.computed_s,
        )

    def _begin(self, session: Session, call: Call, work: Coroutine[Any, Any, Outcome]) -> Call:
        """Starts the work as a task of its own: a caller that goes away must not leave a drafter half-way."""
        session.calls.add(call)

        def ended(task: asyncio.Task[Outcome]) -> None:
            session.calls.discard(call)
            self.table.touch(session)
            error = task.exception()
            if error is not None and not isinstance(error, DraftwireError) and not call.waiters:
                _log.error("call_failed", session_id=session.session_id, exc_info=error)

        call.task = self._start(work)
        call.task.add_done_callback(ended)
        return call

    async def _wait(self, call: Call) -> Outcome:
        """The call's outcome. When the last of those who wait goes away, the call stops."""
        assert call.task is not None
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiters -= 1
            if not call.waiters and call.running:
                call.stop(Cancelled("nobody waits for the answer"))

    def _closed(self, session: Session) -> None:
        """A session has left the table: its drafter goes once no call uses it."""
        task = self._start(self._discard(session))
        self._make_way()
        if session.spec is None or not session.spec.cached or not self.prefixes.limit_bytes:
            return
        group = session.owner, session.spec.cache_salt
        self._leaving.setdefault(group, set()).add(task)
        task.add_done_callback(lambda task: self._left(group, task))

    def _left(self, group: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._leaving[group].discard(task)
        if not self._leaving[group]:
            del self._leaving[group]

    async def _discard(self, session: Session) -> None:
        async with session.turn:
            try:
                await self._drop(session)
            except Exception as error:
                _log.error("close_failed", session_id=session.session_id, exc_info=error)

    async def _drop(self, session: Session) -> None:
        """Closes the drafter; what it computed goes into the prefix cache, if the session allows it."""
        drafter, spec = session.drafter, session.drafter_spec
        session.drafter = None
        if drafter is None or spec is None:
            return
        if not (spec.cached and session.sound and self.prefixes.limit_bytes) or self._closing:
            await self._computing.run(drafter.close)
            return
        prefix = await self._computing.run(lambda: _kept(drafter))
        if prefix is not None:
            self.prefixes.add((session.owner, spec.cache_salt), prefix)
            self._make_way()

    async def _adopt(self, session: Session, drafter: Drafter, spec: SessionSpec) -> None:
        """Gives a new drafter what a former session of the same owner and salt computed of the same ids."""
        if not spec.cached or not self.prefixes.limit_bytes:
            return
        leaving = self._leaving.get((session.owner, spec.cache_salt))
        if leaving:
            # A follow-up turn often comes right behind the Release of the turn before.
            await asyncio.wait(list(leaving))
        found = self.prefixes.find((session.owner, spec.cache_salt), session.history.ids)
        if found is not None:
            prefix, length = found
            await self._sound(session, self._computing.run(lambda: drafter.adopt(prefix, length)))

    def _make_way(self) -> None:
        """Sessions come first: prefixes have what those leave of the memory, and pools of many what is left then."""
        if self._closing:
            self.prefixes.clear()
        else:
            self.prefixes.fit(self.table.spare_bytes)
        self._computing.spare(self.table.spare_bytes - self.prefixes.nbytes)

    def _forget(self, prefix: Prefix) -> None:
        """A prefix has left the cache."""
        self._start(self._computing.run(prefix.drop))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _kept(drafter: Drafter) -> Prefix | None:
    try:
        return drafter.keep()
    finally:
        drafter.close()


def _check_length(field: str, length: int, max_length: int) -> None:
    """Raises InvalidRequest for more ids than the session may hold."""
    if length > max_length:
        raise invalid(field, f"they end at {length}; the session was opened with max_length {max_length}")
