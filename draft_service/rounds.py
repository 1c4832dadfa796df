"""Runs the calls of sessions: one at a time in each, the newest round first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from draft_service.calls import NOTHING, Call, Outcome, Round
from draft_service.history import History
from draft_service.sessions import Session, SessionTable
from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, Runner, SessionSpec, Source
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
        prefill_step_size: int = 256,
    ) -> None:
        self.table = table
        table.on_close = self._closed
        self.source = source
        self._runner = runner
        self._clock = clock
        self._max_draft_tokens = max_draft_tokens
        self._step = prefill_step_size
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def queue_depth(self) -> int:
        """Jobs that wait for the compute thread."""
        return self._runner.queue_depth

    async def idle(self) -> None:
        """Returns once no call runs."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Stops all calls, closes all sessions, and waits until their drafters are gone."""
        self.table.close_all()
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
            while drafter.behind and not call.should_stop():
                await self._compute(session, call, lambda: drafter.feed(call.should_stop))
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
            while drafter.behind > self._step and not call.should_stop():
                await self._compute(session, call, lambda: drafter.feed(call.should_stop))
            guess = Guess(end=DraftEnd.TIME_BUDGET)
            if not call.should_stop():
                guess = await self._compute(session, call, lambda: drafter.draft(ask, call.should_stop))
            call.check()
            return self._outcome(session, call, length, guess)

    async def _ready(self, session: Session) -> tuple[Drafter, int]:
        """The drafter, told all that is committed, and how much of that it need not compute. Holds the turn."""
        assert session.spec is not None
        if session.drafter is not None and session.drafter_spec != session.spec:
            await self._drop(session)
        if session.drafter is None:
            session.drafter, session.drafter_spec = self.source.open(session.spec), session.spec
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

    async def _compute(self, session: Session, call: Call, job: Callable[[], T]) -> T:
        """Runs a job of the session's drafter; one that fails costs the session, for its state is unknown."""

        def timed() -> T:
            began_s = self._clock()
            try:
                return job()
            finally:
                call.computed_s += self._clock() - began_s

        try:
            return await self._runner.run(timed)
        except Exception:
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
        self._start(self._discard(session))

    async def _discard(self, session: Session) -> None:
        async with session.turn:
            try:
                await self._drop(session)
            except Exception as error:
                _log.error("close_failed", session_id=session.session_id, exc_info=error)

    async def _drop(self, session: Session) -> None:
        drafter, session.drafter = session.drafter, None
        if drafter is not None:
            await self._runner.run(drafter.close)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check_length(field: str, length: int, max_length: int) -> None:
    """Raises InvalidRequest for more ids than the session may hold."""
    if length > max_length:
        raise invalid(field, f"they end at {length}; the session was opened with max_length {max_length}")
