"""`python -m <service> healthcheck`: what containers and probes ask. Its exit status is the truth about the service."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from service.target_fixture import Program, program

from client.services import free_port
from draftwire.serving import SERVER_OPTIONS, State
from draftwire.testing import FakeDraftService, serve
from draftwire.testing_models import save_tiny_model


async def ask(name: str, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and what it said."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWIRE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", name, "healthcheck", *flags,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**plain, **(env or {})},
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def env_of(running: Program) -> dict[str, str]:
    """The port as the service itself was told, on all interfaces."""
    return {"DRAFTWIRE_PORT": str(running.port), "DRAFTWIRE_HOST": "0.0.0.0"}


async def test_a_drafter_is_healthy_while_it_serves_and_not_after(tmp_path: Path) -> None:
    async with program("draft_service") as running:
        await running.until("state", state="serving")
        assert await ask("draft_service", env=env_of(running)) == (0, f"{running.address}: SERVING\n")
        for service in ("draftwire.v1.DraftService", ""):
            assert (await ask("draft_service", "--address", running.address, "--service", service))[0] == 0
        status, said = await ask("draft_service", "--address", running.address, "--service", "no.Such")
        assert status == 1
        assert "Traceback" not in said
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == 0
        status, said = await ask("draft_service", env=env_of(running))
        assert (status, "Traceback" in said) == (1, False)


async def test_a_target_is_healthy_while_it_serves(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=4096)
    async with program("target_service", "--model", str(model)) as running:
        await running.until("state", state="serving")
        assert (await ask("target_service", env=env_of(running)))[0] == 0


async def test_a_service_that_loads_or_drains_is_not_healthy() -> None:
    fake = FakeDraftService()
    async with serve(fake) as address:
        for state in (State.LOADING, State.DRAINING, State.STUCK):
            await fake.lifecycle.enter(state)
            assert await ask("draft_service", "--address", address) == (1, f"{address}: NOT_SERVING\n")
        await fake.lifecycle.enter(State.SERVING)
        assert (await ask("draft_service", "--address", address))[0] == 0


async def test_a_service_that_hangs_is_not_healthy() -> None:
    """Frozen: the port takes connections, nobody answers."""
    async with program("draft_service") as running:
        await running.until("state", state="serving")
        running.process.send_signal(signal.SIGSTOP)
        status, said = await ask("draft_service", "--timeout-s", "0.3", env=env_of(running))
        assert (status, "Traceback" in said) == (1, False)
        running.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
async def test_bad_usage_ends_with_2_and_help_names_every_flag(name: str) -> None:
    for flags in (["--timeout-s", "0"], ["--timeout-s", "nan"], ["--no-such-flag"], ["extra"]):
        assert (await ask(name, *flags))[0] == 2
    status, said = await ask(name, "--help")
    assert status == 0
    for flag in ("--address", "--service", "--timeout-s", "--tls-ca", "--tls-cert", "--tls-key", "--tls-server-name"):
        assert flag in said
    port = {"target_service": 50051, "draft_service": 50052}[name]
    assert f"127.0.0.1:{port}" in said


@pytest.mark.parametrize("mutual", [False, True])
async def test_it_speaks_tls_with_what_the_service_itself_is_told(tmp_path: Path, mutual: bool) -> None:
    """Its own certificate is enough to trust it, and to be let in where clients need one."""
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("target.internal", "localhost")
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca", "strange")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["strange"])
    pair = (files["key"].read_bytes(), files["cert"].read_bytes())
    credentials = grpc.ssl_server_credentials([pair], files["ca"].read_bytes() if mutual else None, mutual)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    env = {
        "DRAFTWIRE_PORT": str(port),
        "DRAFTWIRE_TLS_CERT": str(files["cert"]),
        "DRAFTWIRE_TLS_KEY": str(files["key"]),
    }
    patient = ["--timeout-s", "10"]
    named = ["--tls-server-name", "localhost", *patient]
    try:
        assert (await ask("target_service", *named, env=env))[0] == 0
        internal = {"DRAFTWIRE_TLS_SERVER_NAME": "target.internal"}
        assert (await ask("target_service", *patient, env={**env, **internal}))[0] == 0
        ca = {"DRAFTWIRE_TLS_CA": str(files["ca"])}
        assert (await ask("target_service", *named, env={**env, **ca}))[0] == 0
        other = {"DRAFTWIRE_TLS_CA": str(files["strange"])}
        assert (await ask("target_service", *named, env={**env, **other}))[0] == 0, "authorities are those of clients"
        stranger_only = {"DRAFTWIRE_PORT": str(port), **other}
        assert (await ask("target_service", *named, env=stranger_only))[0] == 1
        assert (await ask("target_service", env={"DRAFTWIRE_PORT": str(port)}))[0] == 1, "plain text"
    finally:
        await server.stop(None)


async def test_a_certificate_file_that_is_missing_is_named() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    status, said = await ask("draft_service", "--address", address, env={"DRAFTWIRE_TLS_CERT": "nowhere.pem"})
    assert status == 1
    assert "nowhere.pem" in said
    assert "Traceback" not in said


def test_it_imports_nothing_heavy() -> None:
    """It runs every few seconds in each container."""
    code = "import sys, draftwire.healthcheck; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx", "numpy", "pydantic", "structlog", "rich", "typer"} & set(loaded)
