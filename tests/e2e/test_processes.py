"""The target service as a program: its flags, its environment, and what it says where it cannot begin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from harness import loaded_target
from service.target_fixture import health, program, until

from draftwire.aio_client import AsyncClient
from draftwire.events import DrafterState
from draftwire.models import ModelError
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import target_pb2

NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


async def test_it_listens_first_loads_and_then_serves(model: Path) -> None:
    async with program("target_service", "--model", str(model)) as running:
        await running.until("listening")
        assert await health(running.address) in (
            health_pb2.HealthCheckResponse.NOT_SERVING,
            health_pb2.HealthCheckResponse.SERVING,
        )
        await running.until("state", state="serving")
        states = [line["state"] for line in running.lines if line.get("event") == "state"]
        assert states == ["loading", "serving"]
        for name in ("", NAME):
            assert await health(running.address, name) == health_pb2.HealthCheckResponse.SERVING
        async with AsyncClient(running.address) as client:
            info = await client.model_info()
            assert (info.model_id, info.context_length) == ("tiny", 4096)
            answer = await client.complete("hello", max_tokens=8, ignore_eos=True)
            assert len(answer.tokens) == 8
        finished = await running.until("finished")
        assert finished["completion_tokens"] == 8


async def test_settings_come_from_the_environment_and_flags_win(model: Path) -> None:
    drafter = "127.0.0.1:1"
    env = {
        "DRAFTWIRE_MODEL": str(model),
        "DRAFTWIRE_CONTEXT_LENGTH": "512",
        "DRAFTWIRE_MAX_TOKENS": "7",
        "DRAFTWIRE_TEMP": "0.5",
        "DRAFTWIRE_MAX_RUNNING": "3",
        "DRAFTWIRE_MAX_QUEUED": "5",
        "DRAFTWIRE_DRAFTER": f"{drafter},127.0.0.1:2",
    }
    async with program("target_service", "--max-running", "4", env=env) as running:
        await running.until("state", state="serving")
        async with AsyncClient(running.address) as client:
            info = await client.model_info()
            assert (info.context_length, info.default_max_tokens, info.max_running, info.max_queued) == (512, 7, 4, 5)
            assert info.default_sampling.temperature == 0.5
            assert [found.address for found in await client.drafters()] == [drafter, "127.0.0.1:2"]
            assert len((await client.complete("x", ignore_eos=True)).tokens) == 7


async def test_a_proxy_in_the_environment_does_not_divert(model: Path) -> None:
    proxy = "http://127.0.0.1:9"
    env = {"http_proxy": proxy, "https_proxy": proxy, "grpc_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": ""}
    async with program("draft_service", env=env) as drafter:
        await drafter.until("state", state="serving")
        flags = ["--model", str(model), "--drafter", drafter.address]
        async with program("target_service", *flags, env=env) as running:
            await running.until("state", state="serving")
            async with AsyncClient(running.address) as client:
                await until(client.drafters, lambda found: found[0].state is DrafterState.READY)


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
def test_version_is_told(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{name} ")
    assert done.stdout.split()[1][0].isdigit()


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--port", "70000"], {}, ("--port", "DRAFTWIRE_PORT")),
        (["--port", "many"], {}, ("--port", "DRAFTWIRE_PORT")),
        (["--context-length", "1"], {}, ("--context-length", "DRAFTWIRE_CONTEXT_LENGTH")),
        (["--drafting", "sometimes"], {}, ("--drafting", "DRAFTWIRE_DRAFTING")),
        (["--drafter", "nowhere"], {}, ("--drafter", "DRAFTWIRE_DRAFTER", "host:port")),
        (["--temp", "nan"], {}, ("--temp", "DRAFTWIRE_TEMP")),
        (["--num-draft-tokens", "65"], {}, ("--num-draft-tokens", "DRAFTWIRE_NUM_DRAFT_TOKENS")),
        (["--drain-s", "0"], {}, ("--drain-s", "DRAFTWIRE_DRAIN_S")),
        ([], {"DRAFTWIRE_MAX_RUNNING": "0"}, ("--max-running", "DRAFTWIRE_MAX_RUNNING")),
        ([], {"DRAFTWIRE_DRAFTER": "a:1,b"}, ("--drafter", "DRAFTWIRE_DRAFTER")),
        (["--no-such-flag", "1"], {}, ("--no-such-flag",)),
    ],
)
async def test_a_bad_value_ends_with_2_and_names_flag_and_variable(
    flags: list[str], env: dict[str, str], named: tuple[str, ...]
) -> None:
    async with program("target_service", *flags, env=env) as running:
        assert await running.end() == 2
        for name in named:
            assert name in running.text
        assert "Traceback" not in running.text


async def test_a_taken_port_ends_with_1_and_a_remedy(model: Path) -> None:
    """Also between two targets: gRPC would let both listen, and give each half of the calls."""
    async with program("target_service", "--model", str(model)) as first:
        await first.until("state", state="serving")
        for name in ("target_service", "draft_service"):
            flags = ["--model", str(model)] if name == "target_service" else []
            async with program(name, *flags, "--port", str(first.port)) as second:
                assert await second.end() == 1
                assert "--port" in second.text
                assert "Traceback" not in second.text
        async with AsyncClient(first.address) as client:
            assert (await client.complete("x", max_tokens=2)).tokens


@pytest.mark.parametrize("broken", ["nowhere", "unknown name", "no tokenizer", "no weights", "bad config"])
async def test_a_model_that_cannot_be_loaded_is_refused_and_the_reason_names_it(
    tmp_path: Path, model: Path, broken: str
) -> None:
    """Without a process, which ends with 1 for any of these: see below."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    match broken:
        case "nowhere":
            directory = tmp_path / "elsewhere"
        case "no tokenizer":
            (directory / "tokenizer.json").unlink()
            (directory / "tokenizer_config.json").unlink()
        case "no weights":
            (directory / "model.safetensors").unlink()
        case "bad config":
            (directory / "config.json").write_text("{", encoding="utf-8")
    wanted = "smollm9-1t" if broken == "unknown name" else str(directory)
    with pytest.raises(ModelError, match=re.escape(wanted)):
        async with loaded_target(wanted, cache_dir=tmp_path / "cache"):
            pass


async def test_a_model_that_cannot_be_loaded_ends_with_1_and_says_why(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    flags = ["--model", str(directory), "--cache-dir", str(tmp_path / "cache")]
    async with program("target_service", *flags, env={"HF_HUB_OFFLINE": "1"}) as running:
        assert await running.end() == 1, running.text
        reasons = [str(line["reason"]) for line in running.lines if line.get("event") == "cannot_serve"]
        assert len(reasons) == 1, running.text
        assert str(directory) in reasons[0]
        assert "Traceback" not in running.text


async def test_a_bundled_model_that_was_not_pulled_ends_with_1_and_the_command_that_pulls_it(tmp_path: Path) -> None:
    async with program("target_service", "--cache-dir", str(tmp_path)) as running:
        assert await running.end() == 1
        assert "draftwire models pull smollm2-135m" in running.text
