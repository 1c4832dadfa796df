"""Counts the calls of a server, as gRPC's own ecosystem counts them. Pure; `draftwire.metrics` exposes it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from draftwire.histogram import Histogram

if TYPE_CHECKING:
    import grpc

    from draftwire.observe import Method


class RpcTally:
    """An `Observer` that adds. Belongs to the event loop."""

    def __init__(self) -> None:
        self.started: Counter[Method] = Counter()
        self.received: Counter[Method] = Counter()
        """Messages."""
        self.sent: Counter[Method] = Counter()
        self.handled: Counter[tuple[Method, str]] = Counter()
        """(method, status name)."""
        self.handling_s: defaultdict[Method, Histogram] = defaultdict(Histogram)
        self.errors: Counter[tuple[Method, str, str]] = Counter()
        """(method, status name, reason); calls that clients gave up are none."""

    def began(self, method: Method, metadata: Mapping[str, str | bytes]) -> CountedCall:
        """See `Observer`."""
        self.started[method] += 1
        return CountedCall(self, method)


class CountedCall:
    """One call that is counted."""

    __slots__ = ("_began_s", "_method", "_tally")

    def __init__(self, tally: RpcTally, method: Method) -> None:
        self._tally = tally
        self._method = method
        self._began_s = time.monotonic()

    def received(self) -> None:
        """See `CallWatch`."""
        self._tally.received[self._method] += 1

    def sent(self) -> None:
        """See `CallWatch`."""
        self._tally.sent[self._method] += 1

    def ended(self, code: grpc.StatusCode, reason: str) -> None:
        """See `CallWatch`."""
        tally, method = self._tally, self._method
        tally.handled[method, code.name] += 1
        tally.handling_s[method].observe(time.monotonic() - self._began_s)
        if code.name not in ("OK", "CANCELLED"):
            tally.errors[method, code.name, reason] += 1
