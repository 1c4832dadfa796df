"""One drafter as this target sees it: its channel, what it says of itself, and whether it can be trusted now."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import grpc

from draftwire.errors import DraftwireError, Unavailable
from draftwire.logs import get_logger
from draftwire.noise import NOISE_VERSION
from draftwire.sampling import SAMPLER_VERSION
from draftwire.v1 import draft_pb2
from draftwire.wire import PROTOCOL_VERSION, from_rpc_error
from target_service.drafter_channel import DraftCalls, DrafterCredentials

_log = get_logger("drafters")

_DESCRIBE_TIMEOUT_S = 2.0
_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_RECHECK_S = 5.0
"""A drafter that nobody asks may have gone, or have become one that fits."""
_RECENT_S = 30.0
"""Draft calls longer ago say nothing of what one would take now."""
_MAX_TEXT = 500
"""Characters kept of what a drafter says: ListDrafters repeats it."""
M = TypeVar("M")


async def answer_of(call: Awaitable[M]) -> M:
    """The reply to a call. Raises DraftwireError for whatever else a drafter may do."""
    try:
        reply: M | None = await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # So grpc.aio ends a streaming call whose connection breaks while it is being sent. Nobody cancelled us.
        raise Unavailable("the connection was lost") from None
    if reply is None:
        # So grpc.aio answers bytes that are not the message.
        raise DraftwireError("its reply cannot be read: it does not speak this contract", reason="MALFORMED_REPLY")
    return reply


class LinkState(Enum):
    """What the target thinks of a drafter."""

    CONNECTING = "connecting"
    READY = "ready"
    OPEN_BREAKER = "open_breaker"
    REFUSED = "refused"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this target is, for its drafters."""

    instance_id: str
    fingerprint: str
    """Tokenizer fingerprint."""
    credentials: DrafterCredentials = field(default_factory=DrafterCredentials)
    """How it connects, and shows who it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a drafter says of itself."""

    instance_id: str
    source_kind: str
    model_id: str
    max_drafts: int
    context_length: int | None
    shares_noise: bool
    """Whether it draws with our noise; else its drafts are greedy."""


class DrafterLink:
    """Keeps one drafter described. Belongs to the event loop; `run` is its life.

    READY links take questions. A failure counts towards the breaker; three in a row, or a lost connection, open it, and only a
    successful Describe closes it again, tried after pauses that double from 0.1 s to 5 s.
    """

    def __init__(self, address: str, identity: Identity, changed: Callable[[], None], *, authority: str = "") -> None:
        """authority: the name, with port, whose address this is; empty where the address is all there is."""
        self.address = address
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.tokenizer_mismatch = False
        self.description: Description | None = None
        self.leaving = False
        """Whether its address is gone: no new sessions, and those that it has move."""
        self.releasing = 0
        """Sessions whose Release is on its way."""
        self.drafted = 0
        self.accepted = 0
        self._identity = identity
        self._changed = changed
        self._failures = 0
        self._rpc_s: deque[float] = deque(maxlen=256)
        self._last_rpc_s = 0.0
        self._guests: set[asyncio.Event] = set()
        self._moved = asyncio.Event()
        self._recheck = asyncio.Event()
        self.stub = DraftCalls(address, identity.credentials, authority)

    @property
    def rpc_p50_s(self) -> float | None:
        """Median of the last Draft calls, as seen here."""
        return statistics.median(self._rpc_s) if self._rpc_s else None

    @property
    def recent_rpc_s(self) -> float | None:
        """The same, None where the last call is long ago."""
        return self.rpc_p50_s if time.monotonic() - self._last_rpc_s < _RECENT_S else None

    @property
    def sessions(self) -> int:
        """Our sessions there."""
        return len(self._guests)

    @property
    def busy(self) -> bool:
        """Whether its channel is still needed."""
        return bool(self._guests or self.releasing)

    def join(self, over: asyncio.Event) -> None:
        """A session is opened there. `over` is set when it should move elsewhere, and names it in `part`."""
        self._guests.add(over)

    def part(self, over: asyncio.Event) -> None:
        """A session is over."""
        self._guests.discard(over)
        self._moved.set()

    def released(self) -> None:
        """A Release has been answered, or not."""
        self.releasing -= 1
        self._moved.set()

    def leave(self, reason: str) -> None:
        """Its address is gone: DRAINING until it is dropped, or until `stay`."""
        self._enter(LinkState.DRAINING, reason)
        self.leaving = True
        for over in self._guests:
            over.set()

    def stay(self) -> None:
        """Its address is back."""
        self.leaving = False
        self._enter(LinkState.CONNECTING, "")
        self._recheck.set()
        self._moved.set()

    async def moved(self) -> None:
        """Waits for the next change of `busy` or `leaving`. For one waiter."""
        self._moved.clear()
        await self._moved.wait()

    async def run(self) -> None:
        """Describes the drafter, again whenever something is wrong and now and then. Runs until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._describe()
            except DraftwireError as fault:
                state = LinkState.CONNECTING if self.description is None else LinkState.OPEN_BREAKER
                if fault.reason == "DRAINING":
                    state = LinkState.DRAINING
                self._enter(state, str(fault))
                await self._wait(pause_s)
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)
                continue
            pause_s = _FIRST_PAUSE_S
            await self._wait(_RECHECK_S)

    async def close(self) -> None:
        """Closes the channel."""
        await self.stub.close()

    def succeeded(self, seconds: float) -> None:
        """A Draft call was answered."""
        self._failures = 0
        self._rpc_s.append(seconds)
        self._last_rpc_s = time.monotonic()

    def failed(self, error: DraftwireError) -> None:
        """A call failed for a fault of the drafter."""
        self._failures += 1
        if error.code is grpc.StatusCode.UNAVAILABLE or self._failures >= _FAILURES_TO_OPEN:
            self.suspect(str(error), draining=error.reason == "DRAINING")

    def suspect(self, reason: str, *, draining: bool = False) -> None:
        """Takes the link out until the drafter has described itself again."""
        if self.state is LinkState.READY:
            self._enter(LinkState.DRAINING if draining else LinkState.OPEN_BREAKER, reason)
        self._recheck.set()

    async def _wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._recheck.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            self._recheck.clear()
        # A storm of failures must not become a storm of Describe calls.
        await asyncio.sleep(_FIRST_PAUSE_S)

    async def _describe(self) -> None:
        await self.stub.renew()
        request = draft_pb2.DescribeRequest(
            protocol_version=PROTOCOL_VERSION, target_instance_id=self._identity.instance_id
        )
        reply = await answer_of(self.stub.Describe(request, timeout=_DESCRIBE_TIMEOUT_S))
        refusal = self._refusal(reply)
        self.tokenizer_mismatch = refusal.startswith("tokenizer")
        shares = NOISE_VERSION in reply.noise_versions and SAMPLER_VERSION in reply.sampler_versions
        self.description = Description(
            instance_id=reply.instance_id,
            source_kind=reply.source_kind[:_MAX_TEXT],
            model_id=reply.model_id[:_MAX_TEXT],
            max_drafts=reply.max_draft_tokens,
            context_length=reply.context_length or None,
            shares_noise=shares,
        )
        if self.state is not LinkState.READY:
            self._failures = 0
        self._enter(LinkState.REFUSED if refusal else LinkState.READY, refusal)

    def _refusal(self, reply: draft_pb2.DescribeResponse) -> str:
        if not reply.min_protocol_version <= PROTOCOL_VERSION <= reply.max_protocol_version:
            spoken = f"{reply.min_protocol_version} to {reply.max_protocol_version}"
            return f"it speaks protocol {spoken}, this target speaks {PROTOCOL_VERSION}"
        if reply.tokenizer_fingerprint and reply.tokenizer_fingerprint != self._identity.fingerprint:
            return "tokenizer differs from the target's: its ids mean other texts"
        if reply.max_draft_tokens < 1:
            return "it offers no drafts (max_draft_tokens is 0)"
        if reply.HasField("taps"):
            return "it needs hidden states of the target (taps), which this target does not send"
        return ""

    def _enter(self, state: LinkState, reason: str) -> None:
        reason = reason[:_MAX_TEXT]
        if self.leaving or (state, reason) == (self.state, self.reason):
            return
        kind = self.description.source_kind if self.description else None
        _log.info("drafter", address=self.address, state=state.value, reason=reason or None, source=kind)
        self.state, self.reason = state, reason
        self._changed()
