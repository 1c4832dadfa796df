"""The documents are true: examples run, links lead somewhere, tables and golden values are those of the code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from flag_tables import README, filled

from client.services import free_port
from draftwire.client import Client
from draftwire.wire import prefix_hash

ROOT = README.parent
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*/*.md")}
)
TARGET = "127.0.0.1:50051"
DRAFTER = "127.0.0.1:50052"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block and what its info string says: "python test" and "sh test" run, "sh services" serve."""

    language: str
    use: str
    body: str

    def __str__(self) -> str:
        return self.body.strip().splitlines()[-1][:40]


def blocks(use: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(README.read_text(encoding="utf-8")):
        language, _, rest = match["info"].partition(" ")
        if rest == use:
            found.append(Block(language=language, use=rest, body=match["body"]))
    return found


def environment(**more: str) -> dict[str, str]:
    """The scripts of this interpreter come first; nobody's own settings reach the examples."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWIRE_")}
    return {**plain, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120", **more}


@dataclass(frozen=True, slots=True)
class Started:
    """The programs of a block in the order of its lines, each with its address; the last one is what users talk to."""

    programs: list[tuple[subprocess.Popen[bytes], str]]

    @property
    def address(self) -> str:
        return self.programs[-1][1]

    def wait_ready(self) -> None:
        """Until every line's program is SERVING."""
        for _, address in self.programs:
            with Client(address) as client:
                client.wait_ready(180)


def start(block: Block, stack: ExitStack) -> Started:
    """Each line as a process at a free port, which is killed at the end if it is still there."""
    target, drafter = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    started = Started([])
    for line in block.body.splitlines():
        argv = shlex.split(line, comments=True)
        if not argv:
            continue
        own = drafter if "draft_service" in argv else target
        moved = [drafter if word == DRAFTER else word for word in argv] + ["--port", own.rpartition(":")[2]]
        process = subprocess.Popen(
            moved, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        started.programs.append((process, own))
    return started


def is_up(block: Block) -> bool:
    """Whether it is the block that starts everything at once."""
    return "draftwire up" in block.body


@pytest.fixture(scope="module")
def up() -> Iterator[Started]:
    """What `draftwire up` starts: a target with a lookup drafter, on the default model. The test of its end comes last."""
    (block,) = filter(is_up, blocks("services"))
    with ExitStack() as stack:
        started = start(block, stack)
        started.wait_ready()
        yield started


@pytest.fixture
def address(up: Started) -> str:
    return up.address


@pytest.mark.model
@pytest.mark.parametrize("block", blocks("test"), ids=str)
def test_examples_run(block: Block, address: str, tmp_path: Path) -> None:
    """Exit code 0, something on stdout, and no traceback."""
    shell = ["bash", "-euo", "pipefail", "-c", block.body]
    argv = (
        shell if block.language == "sh" else [sys.executable, "-W", "error", "-c", block.body.replace(TARGET, address)]
    )
    done = subprocess.run(
        argv,
        env=environment(DRAFTWIRE_ADDRESS=address),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()
    assert "equal: False" not in done.stdout


@pytest.mark.model
@pytest.mark.parametrize("block", blocks("services"), ids=str)
def test_services_that_are_started_by_hand_serve_and_stop(block: Block, request: pytest.FixtureRequest) -> None:
    """Each line is a program that becomes SERVING, the last one answers, and SIGTERM ends each with 0.

    `draftwire up` is the one that answered the examples before.
    """
    with ExitStack() as stack:
        started: Started = request.getfixturevalue("up") if is_up(block) else start(block, stack)
        started.wait_ready()
        with Client(started.address, timeout_s=60) as client:
            assert client.complete("one two three", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        for process, _ in reversed(started.programs):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_every_kind_of_example_is_there() -> None:
    """So that a slip in an info string does not silently take an example out."""
    assert {block.language for block in blocks("test")} == {"python", "sh"}
    assert any("draftwire up" in block.body for block in blocks("services"))
    assert any("target_service" in block.body for block in blocks("services"))
    infos = {match["info"] for match in _FENCE.finditer(README.read_text(encoding="utf-8"))}
    assert infos <= {"", "sh", "python test", "sh test", "sh services", "text"}


def test_the_tables_of_flags_are_those_of_the_settings() -> None:
    readme = README.read_text(encoding="utf-8")
    assert readme == filled(readme), "stale: run `python tests/e2e/flag_tables.py`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    """Relative links of a document, outside code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", document.read_text(encoding="utf-8")))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if heading:
            assert heading in headings(target), link


def headings(document: Path) -> set[str]:
    """Anchors as code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_make_targets_that_are_named_exist(document: Path) -> None:
    """What a document puts in backticks as a path of the repository, or as `make ...`, is there."""
    text = document.read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for word in re.findall(r"`make ([a-z-]+)", text):
        assert word in rules, f"make {word}"
    roots = "draftwire|target_service|draft_service|client|tests|benchmarks|docs|protos|examples"
    for path in re.findall(rf"`((?:{roots})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_golden_prefix_hashes_are_those_of_the_code() -> None:
    """docs/protocol.md has a table that an implementer checks against."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\[([\d, ]*)\]` \| (\d+) \| `0x([0-9a-f]{8})` \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for ids, number, digits in rows:
        assert prefix_hash([int(word) for word in ids.split(",") if word.strip()]) == int(number) == int(digits, 16)
