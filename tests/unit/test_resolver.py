"""Looking names of drafters up: what is a name, what the machine's resolver gives, and one that does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from target_service.resolver import SystemResolver, parse_name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("dns:///draft:50052", ("draft", 50052)),
        ("dns:///draft.ns.svc.cluster.local:1", ("draft.ns.svc.cluster.local", 1)),
        ("dns:///127.0.0.1:50052", ("127.0.0.1", 50052)),
        ("dns:///[::1]:50052", ("::1", 50052)),
        ("draft:50052", None),
        ("[::1]:50052", None),
    ],
)
def test_a_name_is_told_from_an_address(target: str, name: tuple[str, int] | None) -> None:
    assert parse_name(target) == name


@pytest.mark.parametrize(
    "target",
    ["dns:///draft", "dns:///draft:0", "dns:///draft:65536", "dns://8.8.8.8/draft:1", "dns:///:1", "http://draft:1", "dns:///a/b:1"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_two_forms(target: str) -> None:
    with pytest.raises(ValueError, match=r"neither host:port nor dns:///name:port"):
        parse_name(target)


def entries(*hosts: str) -> list[Any]:
    """What getaddrinfo gives, each host twice as with two socket types."""
    families = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in hosts]
    return [(family, socket.SOCK_STREAM, 6, "", (host, 7)) for family, host in families for _ in range(2)]


async def test_all_addresses_of_both_families_come_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries("10.0.0.1", "10.0.0.2", "fd00::2"))
    assert await SystemResolver().resolve("draft", 7) == {"10.0.0.1:7", "10.0.0.2:7", "[fd00::2]:7"}


async def test_the_machine_knows_localhost() -> None:
    assert await SystemResolver().resolve("localhost", 7) <= {"127.0.0.1:7", "[::1]:7"}
    assert await SystemResolver().resolve("::1", 7) == {"[::1]:7"}


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
async def test_a_name_that_nobody_can_have_is_an_oserror(host: str) -> None:
    with pytest.raises(OSError, match=r".+"):
        await SystemResolver().resolve(host, 7)


async def test_a_name_server_that_hangs_costs_one_thread_and_no_more_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, begun = threading.Event(), []

    def hang(*_: Any, **__: Any) -> list[Any]:
        begun.append(threading.current_thread())
        answer.wait(20)
        return entries("10.0.0.1")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    resolver = SystemResolver(timeout_s=0.02)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
            await resolver.resolve("draft", 7)
    assert len(begun) == 1
    assert begun[0].daemon, "the end of the process does not wait for it"
    waiting = asyncio.ensure_future(SystemResolver(timeout_s=20).resolve("other", 7))
    answer.set()
    assert await waiting == {"10.0.0.1:7"}
    begun[0].join()
    await asyncio.sleep(0)
    assert await resolver.resolve("draft", 7) == {"10.0.0.1:7"}
    assert len(begun) == 3, "the late answer was dropped, the next lookup is a new one"
