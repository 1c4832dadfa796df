"""Both services on a read-only root, with nothing writable but the tmpfs of compose/compose.yaml: as their containers run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from e2e.namespaces import REFUSAL
from service.target_fixture import program
from unit.test_manifests import compose

from draftwire.aio_client import AsyncClient
from draftwire.testing_models import save_tiny_model

PLACE = "/var/tmp"
"""Where the tmpfs goes, for /tmp has the models of the test."""


def inside(options: str) -> list[str]:
    """What comes before a command in such a place."""
    script = 'mount -o remount,bind,ro / && mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", options, PLACE]


def refusal() -> str:
    """Why it cannot be tested here; empty where it can."""
    if REFUSAL:
        return REFUSAL
    done = subprocess.run([*inside("mode=1777"), "true"], capture_output=True, text=True, check=False)
    return f"no read-only root here: {done.stderr.strip()}" if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")


async def test_the_target_compiles_its_kernels_there_and_serves(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=4096)
    (mount,) = compose()["services"]["target"]["tmpfs"]
    place, _, options = mount.partition(":")
    assert place == "/tmp"
    env = {"TMPDIR": PLACE, "HOME": "/nonexistent"}
    async with program("target_service", "--model", str(model), env=env, before=inside(options)) as running:
        await running.until("state", state="serving")
        async with AsyncClient(running.address) as client:
            assert (await client.complete("hello", max_tokens=4, temperature=0.7, ignore_eos=True)).tokens
        running.process.terminate()
        assert await running.end() == 0


async def test_the_drafter_serves_there(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=4096)
    (mount,) = compose()["services"]["draft"]["tmpfs"]
    env = {"TMPDIR": PLACE, "HOME": "/nonexistent", "DRAFTWIRE_DRAFT_MODEL": str(model)}
    async with program("draft_service", env=env, before=inside(mount.partition(":")[2])) as running:
        await running.until("state", state="serving")
        running.process.terminate()
        assert await running.end() == 0
