"""The sessions of a drafter: who owns them, how long they last, and how many fit. Nothing here waits or computes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from draft_service.calls import Call
from draft_service.history import History
from draft_service.sources.base import Drafter, SessionSpec
from draftwire.errors import DraftwireError, NotFound, Overloaded, PermissionDenied

_MIN_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a drafter can hold."""

    sessions: int
    kv_bytes: int
    lease_s: float
    """Idle time that a session may have when it asks for none."""
    max_lease_s: float
    sessions_per_owner: int | None = None
    """None is as many as there may be."""
    idle_s: float = 5.0
    """A session that was used within this time is in use, though its target may be verifying at the moment."""


class Session:
    """One session. Owned by the event loop; `drafter` is used by the holder of `turn` only."""

    def __init__(self, session_id: str, owner: str) -> None:
        self.session_id = session_id
        self.owner = owner
        self.spec: SessionSpec | None = None
        self.history = History()
        self.lease_s = 0.0
        self.charged_bytes = 0
        self.used_at_s = 0.0
        self.calls: set[Call] = set()
        """Running and waiting ones; a session that has any is never evicted."""
        self.newest: Call | None = None
        """The call of the newest round, kept for its answer; None before the first one."""
        self.turn = asyncio.Lock()
        self.drafter: Drafter | None = None
        self.drafter_spec: SessionSpec | None = None
        self.rewritten = False
        """Whether the history was replaced since the drafter last looked."""
        self.sound = True
        """Whether what the drafter computed can be trusted: false after a failure."""

    def stop_calls(self, error: DraftwireError) -> None:
        """Stops all calls."""
        for call in list(self.calls):
            call.stop(error)


class SessionTable:
    """All sessions, by name. Memory is charged when a session opens, for the longest it may become."""

    def __init__(self, limits: SessionLimits, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self.on_close: Callable[[Session], None] | None = None
        """Told of each session that has left the table."""
        self._limits = limits
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self.kv_bytes = 0
        """Bytes that are charged."""
        self.opened = 0
        """Sessions ever made."""
        self.closed: Counter[str] = Counter()
        """Sessions that have left: "released", "expired", "evicted", "failed" or "stopped"."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def spare_bytes(self) -> int:
        """What sessions leave of the limit."""
        return self._limits.kv_bytes - self.kv_bytes

    def find(self, owner: str, session_id: str) -> Session:
        """The session, its lease renewed. Raises NotFound (SESSION_UNKNOWN) or PermissionDenied."""
        session = self._get(owner, session_id)
        if session is None:
            raise unknown(session_id)
        session.used_at_s = self._clock()
        return session

    def held(self, owner: str, session_id: str) -> History:
        """What the session holds, empty where there is none. Raises PermissionDenied."""
        session = self._get(owner, session_id)
        return History() if session is None else session.history

    def open(self, owner: str, session_id: str, *, spec: SessionSpec, kv_bytes: int, lease_s: float | None) -> Session:
        """Makes the session or brings it to `spec`; evicts idle ones, the longest unused first, where that makes room.

        Raises Overloaded (SESSION_LIMIT, OWNER_LIMIT or KV_BUDGET), then nothing has changed, and PermissionDenied.
        """
        session = self._get(owner, session_id)
        if session is None:
            self._check_owner(owner)
        self._make_room(session, kv_bytes)
        if session is None:
            session = self._sessions[session_id] = Session(session_id, owner)
            self.opened += 1
        self.kv_bytes += kv_bytes - session.charged_bytes
        session.charged_bytes = kv_bytes
        session.spec = spec
        session.lease_s = min(lease_s or self._limits.lease_s, self._limits.max_lease_s)
        session.used_at_s = self._clock()
        return session

    def touch(self, session: Session) -> None:
        """Renews the lease: a call has ended."""
        session.used_at_s = self._clock()

    def release(self, owner: str, session_ids: Iterable[str]) -> None:
        """Closes sessions; unknown ones, and those of somebody else, are left alone."""
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            if session is not None and session.owner == owner:
                self.close(session, "released")

    def sweep(self) -> int:
        """Closes the sessions whose lease is over; returns how many."""
        over = [session for session in self._sessions.values() if self._is_over(session)]
        for session in over:
            self.close(session, "expired")
        return len(over)

    def close(self, session: Session, reason: str) -> None:
        """Takes the session out and stops its calls. Idempotent. reason: see `closed`."""
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
            self.closed[reason] += 1
            self.kv_bytes -= session.charged_bytes
            session.stop_calls(unknown(session.session_id))
            if self.on_close is not None:
                self.on_close(session)

    def close_all(self) -> None:
        """Closes every session."""
        for session in list(self._sessions.values()):
            self.close(session, "stopped")

    def _get(self, owner: str, session_id: str) -> Session | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        if session.owner != owner:
            raise PermissionDenied(f"session {session_id!r} belongs to another peer", reason="NOT_OWNER")
        if self._is_over(session):
            self.close(session, "expired")
            return None
        return session

    def _is_over(self, session: Session) -> bool:
        return not session.calls and self._clock() - session.used_at_s > session.lease_s

    def _check_owner(self, owner: str) -> None:
        most = self._limits.sessions_per_owner
        if most is not None and sum(other.owner == owner for other in self._sessions.values()) >= most:
            raise Overloaded(
                f"you have {most} sessions open, as many as one target may have",
                reason="OWNER_LIMIT",
                retry_after_s=_MIN_RETRY_S,
            )

    def _make_room(self, session: Session | None, kv_bytes: int) -> None:
        """Evicts as many idle sessions as it takes, or none at all."""
        others = [other for other in self._sessions.values() if other is not session and not other.calls]
        others.sort(key=lambda other: other.used_at_s)
        now_s = self._clock()
        idle = [other for other in others if now_s - other.used_at_s >= self._limits.idle_s]
        surplus_sessions = len(self) + (session is None) - self._limits.sessions
        surplus_bytes = self.kv_bytes + kv_bytes - (session.charged_bytes if session else 0) - self._limits.kv_bytes
        victims = []
        for other in idle:
            if surplus_sessions <= 0 and surplus_bytes <= 0:
                break
            victims.append(other)
            surplus_sessions -= 1
            surplus_bytes -= other.charged_bytes
        if surplus_sessions > 0 or surplus_bytes > 0:
            waits = [self._limits.idle_s - (now_s - other.used_at_s) for other in others]
            retry_after_s = max(_MIN_RETRY_S, min(waits, default=self._limits.idle_s))
            raise self._full(surplus_sessions > 0, kv_bytes, retry_after_s)
        for victim in victims:
            self.close(victim, "evicted")

    def _full(self, sessions: bool, kv_bytes: int, retry_after_s: float) -> Overloaded:
        if sessions:
            text, reason = f"all {self._limits.sessions} sessions are in use", "SESSION_LIMIT"
        else:
            text = f"no room for {kv_bytes} bytes, the limit of all sessions is {self._limits.kv_bytes} bytes"
            reason = "KV_BUDGET"
        return Overloaded(text, reason=reason, retry_after_s=retry_after_s)


def unknown(session_id: str) -> NotFound:
    """The error for a session that is not here (any more)."""
    return NotFound(
        f"session {session_id!r} is not here: it was never opened, released, expired or evicted; open it with Prefill",
        reason="SESSION_UNKNOWN",
    )
