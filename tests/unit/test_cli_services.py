"""Starting, watching and stopping the two services, with an interpreter that plays both of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from client.process import ProcessDied
from client.services import Services, ServicesConfig, share_threads
from draftwire.client import Client
from draftwire.errors import DraftwireError, Unavailable
from draftwire.events import Health

# Stands for `python -m draft_service ...` and `python -m target_service ...`.
PLAYER = """#!{python}
import os, pathlib, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc
from draftwire.scripted_target import ScriptedTarget
from draftwire.v1 import target_pb2 as pb, target_pb2_grpc

name = sys.argv[2]
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
journal = pathlib.Path(__file__).with_name("journal")


def note(text):
    with journal.open("a") as file:
        file.write(f"{{name}} {{text}}\\n")
    print(text, flush=True)


note(" ".join(sys.argv[3:]))
if name == {broken!r}:
    sys.exit("the model is broken")
drafters = pb.ListDraftersResponse(drafters=[pb.Drafter(state=pb.DRAFTER_STATE_READY)])
target = ScriptedTarget(replies={{"ListDrafters": drafters}})
server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(f"{{flags['--host']}}:{{flags['--port']}}")
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
server.start()
while not stop.wait(0.05):
    pass
server.stop(0).wait()
note("stopped")
"""


def player(folder: Path, *, broken: str = "") -> str:
    script = folder / "player"
    script.write_text(PLAYER.format(python=sys.executable, broken=broken), encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def journal(folder: Path) -> list[str]:
    return (folder / "journal").read_text(encoding="utf-8").splitlines()


def test_both_serve_inside_the_block_and_stop_target_first(tmp_path: Path) -> None:
    """The target is told its drafter's address; after the block both are gone; logs are files with their names."""
    config = ServicesConfig(python=player(tmp_path), model="m", threads=3, num_draft_tokens=5)
    states: list[tuple[str, str]] = []
    with Services(config, log_dir=tmp_path / "logs", progress=lambda *state: states.append(state)) as services:
        with Client(services.target_address) as client:
            assert client.health() is Health.SERVING
        drafter_address = services.drafter_address
    started, stopped = journal(tmp_path)[:2], journal(tmp_path)[2:]
    assert stopped == ["target_service stopped", "draft_service stopped"]
    (target,) = (line for line in started if line.startswith("target_service"))
    assert f"--drafter {drafter_address}" in target
    assert "--model m --threads 3" in target
    assert "--num-draft-tokens 5" in target
    assert (tmp_path / "logs" / "target.log").read_text(encoding="utf-8").endswith("stopped\n")
    assert ("drafter", "serving") in states
    assert states[-1] == ("drafter", "stopped")
    with Client(services.target_address) as client, pytest.raises(Unavailable):
        client.health(timeout_s=2.0)
    services.stop()  # a second time does nothing


def test_a_service_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    """Not with a timeout: at once, by name, with its exit code, and the other one is stopped."""
    lines: list[str] = []
    config = ServicesConfig(python=player(tmp_path, broken="target_service"))
    services = Services(config, sink=lambda name, line: lines.append(f"{name}: {line}"))
    with pytest.raises(ProcessDied, match=r"target service ended with code 1(.|\n)*the model is broken") as caught:
        services.start()
    assert isinstance(caught.value, DraftwireError)
    assert "target: the model is broken" in lines
    assert journal(tmp_path)[-1].startswith(("draft_service", "target_service"))


def test_a_drafter_can_be_killed_and_restarted_at_its_address(tmp_path: Path) -> None:
    """The target notices nothing of the process itself: the address stays."""
    with Services(ServicesConfig(python=player(tmp_path)), log_dir=tmp_path) as services:
        address = services.drafter_address
        services.kill_drafter()
        with Client(address) as client, pytest.raises(Unavailable):
            client.health(timeout_s=2.0)
        services.restart_drafter()
        assert services.drafter_address == address
        with Client(address) as client:
            assert client.health() is Health.SERVING
        services.kill_drafter(signal.SIGTERM)
    assert "draft_service stopped" in journal(tmp_path)


def test_an_end_that_was_wanted_does_not_end_the_wait_but_another_does(tmp_path: Path) -> None:
    """`wait` passes over drafters that were killed on purpose."""
    with Services(ServicesConfig(python=player(tmp_path)), log_dir=tmp_path) as services:
        services.kill_drafter()
        target = services._target
        assert target is not None
        os.kill(target.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="the target service was ended by SIGKILL"):
            services.wait()


def test_services_without_a_drafter_have_none(tmp_path: Path) -> None:
    """For plain baselines: one process, no --drafter."""
    config = ServicesConfig(python=player(tmp_path), drafter="none")
    with Services(config, log_dir=tmp_path) as services, pytest.raises(RuntimeError, match="no drafter"):
        services.kill_drafter()
    assert [line.split()[0] for line in journal(tmp_path)] == ["target_service", "target_service"]
    assert "--drafter" not in journal(tmp_path)[0]


@pytest.mark.parametrize(
    ("total", "kind", "shares"),
    [
        (None, "model", (None, 1)),
        (None, "lookup", (None, 1)),
        (1, "model", (1, 1)),
        (2, "model", (1, 1)),
        (8, "model", (7, 1)),
        (8, "lookup", (8, 1)),
        (1, "none", (1, 1)),
    ],
)
def test_only_a_model_takes_a_core_from_the_target(
    total: int | None, kind: str, shares: tuple[int | None, int]
) -> None:
    """Two services that each take all cores ruin each other."""
    assert share_threads(total, kind) == shares  # type: ignore[arg-type]


def test_a_draft_model_needs_the_kind_that_uses_it() -> None:
    """No setting is dropped in silence."""
    with pytest.raises(ValueError, match="draft_model"):
        ServicesConfig(draft_model="m")
    with pytest.raises(ValueError, match="draft_model"):
        ServicesConfig(drafter="model")
