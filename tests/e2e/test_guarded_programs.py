"""Both services as programs behind TLS and tokens: what listens, what does not start, and the command line in front."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from secrets_fixture import Authority, put, token_file
from service.target_fixture import Program, program, until

from client.services import free_port
from draft_service.config import DraftSettings
from draftwire.access import ROLES
from draftwire.aio_client import AsyncClient
from draftwire.events import DrafterState
from draftwire.testing_models import save_tiny_model
from draftwire.tokens import Role
from target_service.config import TargetSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LISTEN = "0A"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which the process listens, as the kernel has it."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
        if found:
            inodes.add(found[1])
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[index] for index in (1, 3, 9))
            if state == LISTEN and inode in inodes:
                words, _, port = local.partition(":")
                # Each word of 32 bits as this machine orders its bytes.
                raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
                host = ipaddress.ip_address(raw)
                sockets.add((str(getattr(host, "ipv4_mapped", None) or host), int(port, 16)))
    return sockets


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_each_program_listens_on_its_port_of_loopback_and_on_nothing_else(model: Path) -> None:
    """docs/security.md has the table; the page's own words name the ports that are the defaults."""
    for name, flags in (("draft_service", ()), ("target_service", ("--model", str(model)))):
        async with program(name, *flags) as running:
            await running.until("state", state="serving")
            assert listening(running.process.pid) == {("127.0.0.1", running.port)}
    for name, settings in (("target_service", TargetSettings), ("draft_service", DraftSettings)):
        default = settings.model_fields["port"].get_default()
        assert f"| `{name}` | `--port`, {default} |" in PAGE


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--host", "0.0.0.0"], ("0.0.0.0", "--tls-cert", "--insecure")),
        (["--host", "::"], ("::", "--tls-cert", "--insecure")),
        (["--host", "service.example"], ("service.example", "--tls-cert", "--insecure")),
        (["--tls-cert", "a.pem"], ("--tls-cert", "--tls-key")),
        (["--tls-ca", "a.pem"], ("--tls-ca", "--tls-cert")),
        (["--watchdog-s", "0"], ("--watchdog-s", "DRAFTWIRE_WATCHDOG_S")),
        (["--max-message-bytes", "10"], ("--max-message-bytes", "DRAFTWIRE_MAX_MESSAGE_BYTES")),
    ],
)
async def test_settings_that_are_not_safe_end_with_2_and_name_the_flags(
    name: str, flags: list[str], named: tuple[str, ...]
) -> None:
    async with program(name, *flags) as running:
        assert await running.end() == 2
        assert all(word in running.text for word in named), running.text
        assert "Traceback" not in running.text
        assert "Value error" not in running.text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--drafter-tls-cert", "a.pem"], ("--drafter-tls-cert", "--drafter-tls-key")),
        (["--drafter-tls-server-name", "x"], ("--drafter-tls-server-name", "--drafter-tls-ca")),
        (["--drafter", "far.example:50052", "--drafter-token-file", "t"], ("far.example", "--drafter-tls-ca")),
        (["--client-rate", "0"], ("--client-rate", "DRAFTWIRE_CLIENT_RATE")),
    ],
)
async def test_a_targets_way_to_its_drafters_is_checked_too(flags: list[str], named: tuple[str, ...]) -> None:
    async with program("target_service", *flags) as running:
        assert await running.end() == 2
        assert all(word in running.text for word in named), running.text


@pytest.mark.parametrize("bad", ["certificate", "tokens", "tokens missing", "drafter token"])
async def test_files_that_cannot_be_used_end_with_1_and_name_the_file(tmp_path: Path, model: Path, bad: str) -> None:
    pair, other = Authority(tmp_path).server(), Authority(tmp_path, "other").issue("other", "localhost")
    name, file = "draft_service", tmp_path / "tokens"
    match bad:
        case "certificate":
            flags, file = ["--tls-cert", str(pair.certificate), "--tls-key", str(other.key)], other.key
        case "tokens":
            put(file, b"alice everything sha256:00\n")
            flags = ["--token-file", str(file)]
        case "tokens missing":
            flags = ["--token-file", str(file)]
        case _:
            name, flags = "target_service", ["--model", str(model), "--drafter-token-file", str(file)]
    async with program(name, *flags) as running:
        assert await running.end() == 1, running.text
        assert str(file) in running.text
        assert "Traceback" not in running.text


async def test_insecure_listens_everywhere_and_says_that_it_is_open() -> None:
    async with program("draft_service", "--host", "0.0.0.0", "--insecure") as running:
        await running.until("open_to_everybody", level="warning")
        await running.until("state", state="serving")


async def test_a_generation_through_both_programs_over_mutual_tls_with_tokens(tmp_path: Path, model: Path) -> None:
    """From the command line to drafts; the same command without its secrets is refused and says what is missing."""
    authority = Authority(tmp_path)
    pair, own, user = authority.server(), authority.issue("own", "target-1"), authority.issue("user", "user")
    tokens = token_file(tmp_path / "tokens", alice="generate", ops="admin", **{"target-1": "drafter"})
    put(tmp_path / "target.token", tokens["target-1"].encode())
    put(tmp_path / "alice.token", tokens["alice"].encode())
    server = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key), "--tls-ca", str(authority.ca)]
    server += ["--token-file", str(tmp_path / "tokens")]
    async with program("draft_service", *server) as drafter:
        await drafter.until("state", state="serving")
        hop = ["--drafter", drafter.address, "--drafter-token-file", str(tmp_path / "target.token")]
        hop += ["--drafter-tls-ca", str(authority.ca), "--drafter-tls-server-name", "localhost"]
        hop += ["--drafter-tls-cert", str(own.certificate), "--drafter-tls-key", str(own.key)]
        async with program("target_service", "--model", str(model), *server, *hop) as target:
            await target.until("state", state="serving")
            async with AsyncClient(target.address, tls=authority.trusting(user), token=tokens["ops"]) as ops:
                await until(ops.drafters, lambda found: found[0].state is DrafterState.READY)
            secrets = {
                "DRAFTWIRE_CLIENT_TLS_CA": str(authority.ca),
                "DRAFTWIRE_CLIENT_TLS_CERT": str(user.certificate),
                "DRAFTWIRE_CLIENT_TLS_KEY": str(user.key),
                "DRAFTWIRE_CLIENT_TLS_SERVER_NAME": "localhost",
                "DRAFTWIRE_CLIENT_TOKEN_FILE": str(tmp_path / "alice.token"),
            }
            command = ["generate", "--address", target.address, "--timeout", "20", "abcabcabcabcabcabc"]
            fixed = ["--max-tokens", "24", "--ignore-eos", "--drafting", "fixed", "--num-draft-tokens", "4"]
            done = draftwire(*command, *fixed, env=secrets)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
            as_ops = {**secrets, "DRAFTWIRE_TOKEN": tokens["ops"]}
            del as_ops["DRAFTWIRE_CLIENT_TOKEN_FILE"]
            listed = draftwire("drafters", "--address", target.address, env=as_ops)
            assert "ready" in listed.stdout, listed.stderr
            anonymous = {key: value for key, value in secrets.items() if not key.endswith("TOKEN_FILE")}
            refused = draftwire("drafters", "--address", target.address, env=anonymous)
            assert refused.returncode == 4
            assert "DRAFTWIRE_TOKEN" in refused.stderr
            flags = ["--tls-ca", str(authority.ca), "--tls-cert", str(user.certificate), "--tls-key", str(user.key)]
            flags += ["--token-file", str(tmp_path / "alice.token"), "--max-message-bytes", "100000"]
            assert draftwire(*command, *fixed, *flags, env={}).returncode == 0
            silent(target, *tokens.values(), "abcabc")
            silent(drafter, *tokens.values())


def test_up_serves_behind_tls_and_tokens(tmp_path: Path, model: Path) -> None:
    """It trusts what it is told to, waits for the drafter where its token may, and its drafter is on loopback alone."""
    authority = Authority(tmp_path)
    pair = authority.server()
    tokens = token_file(tmp_path / "tokens", alice="generate,admin")
    argv = [sys.executable, "-m", "client", "up", "--model", str(model), "--port", str(free_port("127.0.0.1"))]
    argv += ["--host", "0.0.0.0", "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    argv += ["--token-file", str(tmp_path / "tokens"), "--client-tls-ca", str(authority.ca)]
    environment = {**plain_environment(), "DRAFTWIRE_TOKEN": tokens["alice"]}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            found = re.search(r"Serving at (\S+:\d+)\.", process.stdout.readline())
            assert found is not None, process.stderr.read()
            secrets = {"DRAFTWIRE_CLIENT_TLS_CA": str(authority.ca), "DRAFTWIRE_TOKEN": tokens["alice"]}
            listed = draftwire("drafters", "--address", found[1], env=secrets)
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "ready" in listed.stdout, listed.stderr
    assert re.search(r"drafter \|.*127\.0\.0\.1", errors)
    assert "target: serving, without its drafter" not in errors


def test_the_table_of_roles_is_that_of_the_code() -> None:
    found = {
        method: set(roles.split(", "))
        for method, roles in re.findall(r"^\| `(\w+/\w+)` \| ([a-z, ]+) \|$", PAGE, re.MULTILINE)
    }
    assert found == {
        re.sub(r"^/(\w+\.)+", "", method): {str(role) for role in roles} for method, roles in ROLES.items()
    }
    assert {role for roles in ROLES.values() for role in roles} == set(Role)


@pytest.mark.parametrize("name", ["target_service", "draft_service"])
def test_every_flag_is_in_help_and_in_a_test(name: str) -> None:
    """The README's tables have a test of their own."""
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**plain_environment(), "COLUMNS": "200"},
    )
    assert done.returncode == 0
    settings: Any = TargetSettings if name == "target_service" else DraftSettings
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for field in settings.model_fields:
        flag = f"--{field.replace('_', '-')}"
        assert re.search(rf"{flag}\b(?!-)", done.stdout), flag
        assert re.search(rf"\b{field}\b|{flag}\b(?!-)|DRAFTWIRE_{field.upper()}\b", tests), f"no test names {flag}"


def silent(running: Program, *words: str) -> None:
    """None of these is in the log of a program."""
    for word in words:
        assert word not in running.text


def plain_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWIRE_")}
    return {**kept, "DRAFTWIRE_THREADS": "1", "DRAFTWIRE_BLAS": os.environ.get("DRAFTWIRE_BLAS", "auto")}


def draftwire(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command line, with these variables and none of the developer's own."""
    return subprocess.run(
        [sys.executable, "-m", "client", *arguments],
        env={**plain_environment(), "COLUMNS": "200", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
