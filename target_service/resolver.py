"""Names of drafters to addresses. gRPC's own resolver looks again only when a connection breaks: it sees no new replicas."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from draftwire.logs import get_logger

_log = get_logger("drafters")
_NAME: Final = re.compile(r"dns:///(\[[^\]]+\]|[^:/\[\]]+):([0-9]{1,5})")
Addresses: TypeAlias = frozenset[str]
"""host:port with numeric hosts, IPv6 in brackets: each is one drafter."""


class Resolver(Protocol):
    """Looks names up."""

    async def resolve(self, host: str, port: int) -> Addresses:
        """All addresses of a name. Raises OSError (TimeoutError is one) where it cannot say."""


class SystemResolver:
    """`getaddrinfo` of this machine, IPv4 and IPv6: /etc/hosts and DNS as they are set up.

    Each lookup is a daemon thread of its own, not a job of an executor: threads of those are joined when the process ends,
    and a name server that does not answer would hold the exit for as long as it likes.
    """

    def __init__(self, timeout_s: float = 3.0) -> None:
        self._timeout_s = timeout_s
        self._running: dict[tuple[str, int], asyncio.Future[Addresses]] = {}

    async def resolve(self, host: str, port: int) -> Addresses:
        """Raises TimeoutError after `timeout_s`; a lookup that still hangs then is waited for again, not begun again."""
        key = (host, port)
        running = self._running.get(key)
        if running is None or running.done():
            running = self._running[key] = asyncio.get_running_loop().create_future()
            running.add_done_callback(lambda done: self._ended(key, done))
            threading.Thread(target=_look_up, args=(host, port, running), daemon=True, name="resolve").start()
        try:
            return await asyncio.wait_for(asyncio.shield(running), self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from None

    def _ended(self, key: tuple[str, int], done: asyncio.Future[Addresses]) -> None:
        if self._running.get(key) is done:
            del self._running[key]
        if not done.cancelled():
            done.exception()  # one that came too late was nobody's


def _look_up(host: str, port: int, answer: asyncio.Future[Addresses]) -> None:
    found: Addresses = frozenset()
    error: OSError | UnicodeError | None = None
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = frozenset(_address(str(entry[4][0]), port) for entry in entries)
    except (OSError, UnicodeError) as fault:  # UnicodeError: labels of no possible name
        error = fault
    loop = answer.get_loop()

    def tell() -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        else:
            answer.set_result(found)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:
        return  # the loop has gone meanwhile


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_name(target: str) -> tuple[str, int] | None:
    """(host, port) of "dns:///name:port"; None for a plain host:port. Raises ValueError for other schemes and bad ports."""
    if "/" not in target:
        return None
    found = _NAME.fullmatch(target)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(f"{target!r} is neither host:port nor dns:///name:port")
    return found[1].strip("[]"), int(found[2])


async def watch_name(
    target: str, resolver: Resolver, interval_s: float, changed: Callable[[str, Addresses], None]
) -> None:
    """Looks `target` (dns:///name:port) up again and again and tells each answer. Runs until cancelled.

    A lookup that fails, or finds nothing, tells nothing: the last addresses stay, for a name server may be ill as well.
    """
    name = parse_name(target)
    assert name is not None
    last_fault = ""
    while True:
        try:
            found = await resolver.resolve(*name)
            fault = "" if found else "it has no addresses"
        except OSError as error:
            found, fault = frozenset(), str(error)
        if fault:
            # Once a fault, not once a lookup.
            (_log.debug if fault == last_fault else _log.warning)("lookup_failed", name=target, reason=fault)
        else:
            changed(target, found)
        last_fault = fault
        await asyncio.sleep(interval_s)
