"""What one request may ask for, and what one client may have at once. Defaults are those of the flags (docs/limits.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftwire.errors import Overloaded

_MOST_BUCKETS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of a request's own fields."""

    max_prompt_bytes: int = 1 << 20
    """Of a text, or of a conversation as it was sent; looked at before anything is tokenized."""
    max_prompt_tokens: int | None = None
    """None: what the context holds, less one."""
    max_output_tokens: int | None = None
    """Most that max_tokens may be; None: any, the context ends it."""
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024


class ClientLimits:
    """What each client has running and how fast it may ask. Belongs to the event loop."""

    def __init__(
        self,
        *,
        max_requests: int | None = None,
        rate: float | None = None,
        burst: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_requests: running and waiting ones of a client; rate: calls a second, of which `burst` may come at once."""
        self._max_requests = max_requests
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._requests: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}
        """Owner -> what was left in its bucket, and when."""

    def spend(self, owner: str) -> None:
        """Takes one from the client's bucket. Raises Overloaded (RATE_LIMIT) where it is empty."""
        if self._rate is None:
            return
        left = self._left(owner, self._rate)
        if left < 1:
            raise Overloaded(
                f"more than {self._rate:g} requests a second, {self._burst} at once",
                reason="RATE_LIMIT",
                retry_after_s=(1 - left) / self._rate,
            )
        self._buckets[owner] = (left - 1, self._clock())
        if len(self._buckets) > _MOST_BUCKETS:
            self._forget_full(self._rate)

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Counts a request of the client for as long as it lasts. Raises Overloaded (CLIENT_LIMIT) where it has too many."""
        if self._max_requests is not None and self._requests[owner] >= self._max_requests:
            raise Overloaded(
                f"{self._requests[owner]} requests of yours run or wait, at most {self._max_requests} may",
                reason="CLIENT_LIMIT",
                retry_after_s=1.0,
            )
        self._requests[owner] += 1
        try:
            yield
        finally:
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner]

    def _left(self, owner: str, rate: float) -> float:
        left, since_s = self._buckets.get(owner, (float(self._burst), self._clock()))
        return min(float(self._burst), left + (self._clock() - since_s) * rate)

    def _forget_full(self, rate: float) -> None:
        for owner in [owner for owner in self._buckets if self._left(owner, rate) >= self._burst]:
            del self._buckets[owner]
