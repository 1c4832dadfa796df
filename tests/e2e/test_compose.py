"""The topology of compose/compose.yaml as processes: same commands, same environment, real names, scaled and stopped."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.namespaces import REFUSAL, Hosts, with_file
from service.target_fixture import program, until
from unit.test_manifests import compose, seconds

from draftwire.aio_client import AsyncClient
from draftwire.events import DrafterState
from draftwire.models import default_cache_dir

pytestmark = [pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL), pytest.mark.model]


@dataclass(frozen=True, slots=True)
class Network:
    """What a container engine gives: addresses, names, and a volume with the models."""

    services: dict[str, Any]
    hosts: Hosts
    block: str

    def address(self, number: int) -> str:
        """A loopback address of this test alone."""
        return f"{self.block}.{number}"

    def environment(self, service: str, host: str) -> dict[str, str]:
        """The environment of a container: its own, where "everywhere" is its address and the volume is its folder."""
        own: dict[str, str] = self.services[service].get("environment", {})
        (mount,) = [entry.split(":")[1] for entry in self.services[service]["volumes"] if entry.startswith("models:")]
        moved = {name: str(default_cache_dir()) if value == mount else value for name, value in own.items()}
        return {name: value.replace("0.0.0.0", host) for name, value in moved.items() if name != "HOME"}

    async def run(self, command: list[str], env: dict[str, str]) -> int:
        """Exit status of a command in a container."""
        process = await asyncio.create_subprocess_exec(*argv_of(command), env={**inherited(), **env})
        return await asyncio.wait_for(process.wait(), 300)


def inherited() -> dict[str, str]:
    """What every process needs; nobody's own settings."""
    kept = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    return {name: os.environ[name] for name in kept if name in os.environ}


def argv_of(command: list[str]) -> list[str]:
    """The command with this interpreter, and with the scripts beside it."""
    python = Path(sys.executable)
    return [sys.executable if command[0] == "python" else str(python.parent / command[0]), *command[1:]]


@asynccontextmanager
async def container(network: Network, service: str, host: str) -> AsyncIterator[Any]:
    """One container as a process in a mount namespace with the network's names."""
    command = network.services[service]["command"]
    python, dash, name, *flags = command
    assert (python, dash) == ("python", "-m")
    env = {**network.environment(service, host), "DRAFTWIRE_THREADS": "1"}
    async with program(name, *flags, env=env, before=with_file(network.hosts.path)) as running:
        yield running


async def healthy(network: Network, service: str, host: str) -> None:
    """The container's own health check, until it succeeds."""
    check = network.services[service]["healthcheck"]["test"]
    assert check[0] == "CMD"
    deadline_s = time.monotonic() + seconds(network.services[service]["healthcheck"]["start_period"])
    while await network.run(check[1:], network.environment(service, host)):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(seconds(network.services[service]["healthcheck"]["start_interval"]) / 4)


async def test_it_comes_up_scales_and_goes_down(tmp_path: Path) -> None:
    # Test runs at the same time have other addresses: the ports are those of the file.
    block = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
    network = Network(compose()["services"], Hosts(tmp_path / "hosts", "draft"), block)
    models = network.services["models"]
    assert await network.run(models["command"], network.environment("models", network.address(1))) == 0
    target_host = network.address(10)
    port = network.services["target"]["environment"]["DRAFTWIRE_PORT"]
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(container(network, "target", target_host))
        drafters = []
        await healthy(network, "target", target_host)
        client = await stack.enter_async_context(AsyncClient(f"{target_host}:{port}"))
        prompt = "one two three four one two three four one two"
        plain = await client.complete(prompt, max_tokens=12, ignore_eos=True)
        for count in (1, 3):  # --scale draft=3
            while len(drafters) < count:
                host = network.address(20 + len(drafters))
                drafters.append(await stack.enter_async_context(container(network, "draft", host)))
                await healthy(network, "draft", host)
            network.hosts.set(*(network.address(20 + index) for index in range(count)))
            await until(
                client.drafters,
                lambda found, count=count: (  # type: ignore[misc]
                    len(found) == count and all(drafter.state is DrafterState.READY for drafter in found)
                ),
                timeout_s=20,
            )
            drafted = await client.complete(prompt, max_tokens=12, ignore_eos=True, drafting="fixed")
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation.num_draft_tokens > 0
        for service, running in [("target", target), *(("draft", drafter) for drafter in drafters)]:
            running.process.send_signal(signal.SIGTERM)
            assert await running.end(seconds(network.services[service]["stop_grace_period"])) == 0
