"""Real names: a target in a mount namespace with its own /etc/hosts finds draft services as they are added and taken away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from e2e.namespaces import REFUSAL, Hosts, with_file
from service.target_fixture import Program, program, until

from client.services import free_port
from draftwire.aio_client import AsyncClient
from draftwire.events import DrafterState
from draftwire.testing_models import save_tiny_model

pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


@asynccontextmanager
async def target_with(hosts: Path, *flags: str) -> AsyncIterator[Program]:
    """The target service as a process whose /etc/hosts is this file."""
    async with program("target_service", *flags, before=with_file(hosts)) as running:
        await running.until("state", state="serving")
        yield running


async def test_drafters_of_a_name_come_and_go(tmp_path: Path) -> None:
    """Three draft services at one port of three loopback addresses, as replicas of one service have it."""
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=4096)
    port = free_port("127.0.0.2")
    hosts = Hosts(tmp_path / "hosts", "draft.internal")
    flags = ["--model", str(model), "--drafter", f"dns:///draft.internal:{port}", "--drafter-resolve-s", "0.1"]
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_with(hosts.path, *flags))
        client = await stack.enter_async_context(AsyncClient(target.address))
        plain = await client.complete("a b c a b c a b", drafting="off", max_tokens=60, ignore_eos=True)
        seen: set[str] = set()
        for count in (1, 2, 3, 1):
            wanted = [f"127.0.0.{2 + index}" for index in range(count)]
            for host in set(wanted) - seen:
                drafter = await stack.enter_async_context(program("draft_service", "--host", host, "--port", str(port)))
                await drafter.until("state", state="serving")
            seen |= set(wanted)
            hosts.set(*wanted)
            await until(
                client.drafters,
                lambda found, wanted=wanted: (  # type: ignore[misc]
                    [drafter.address for drafter in found] == [f"{host}:{port}" for host in wanted]
                    and all(drafter.state is DrafterState.READY for drafter in found)
                ),
            )
            result = await client.complete("a b c a b c a b", drafting="fixed", max_tokens=60, ignore_eos=True)
            assert result.token_ids == plain.token_ids
            assert result.speculation.drafter_id.rpartition(":")[0] in wanted
        target.process.terminate()
        assert await target.end() == 0
        found = [line["addresses"] for line in target.lines if line.get("event") == "resolved"]
        assert [len(addresses) for addresses in found] == [1, 2, 3, 1], json.dumps(found)


async def test_a_name_server_that_does_not_answer_does_not_hold_the_exit(tmp_path: Path) -> None:
    """A name that only a name server could know, and none is reachable: it serves, and ends with 0 at once."""
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=4096)
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.9\noptions timeout:30 attempts:5\n", encoding="utf-8")
    silent = asyncio.DatagramProtocol()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: silent, local_addr=("127.0.0.9", 53))
    inside = with_file(resolv, "/etc/resolv.conf")
    flags = ["--model", str(model), "--drafter", "dns:///draft.nowhere:1", "--drafter-resolve-s", "0.1"]
    try:
        async with program("target_service", *flags, before=inside) as running:
            await running.until("state", state="serving")
            failed = await running.until("lookup_failed")
            assert failed["reason"] == "no answer within 3 s"
            running.process.terminate()
            assert await running.end(6.0) == 0
    finally:
        transport.close()
