"""The command line as a process: Ctrl-C, and what a real terminal gets."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from draftwire.scripted_target import ScriptedTarget, chunk, finished, serve, started

GOOD = (
    started(),
    chunk(0, (5, "Hello")),
    chunk(1, (6, " big"), (7, " world"), drafted=1),
    finished(3, drafted=2, accepted=1),
)


def command(address: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "client", "generate", "Hi", "--address", address, *arguments]


def in_terminal(address: str, *arguments: str, **environ: str) -> str:
    """What a terminal shows of the command's stdout."""
    parent, child = pty.openpty()
    environment = {
        key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    }
    environment |= {"TERM": "xterm-256color", **environ}
    try:
        done = subprocess.run(
            command(address, *arguments), stdout=child, stderr=subprocess.PIPE, env=environment, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return os.read(parent, 65536).decode()
    finally:
        os.close(parent)
        os.close(child)


def test_a_terminal_shows_accepted_drafts_in_green() -> None:
    """Only the accepted part of a round is tinted; NO_COLOR and --no-tint leave plain text."""
    target = ScriptedTarget(GOOD)
    with serve(target) as address:
        assert in_terminal(address) == "Hello\x1b[32m big\x1b[0m world\r\n"
        assert in_terminal(address, NO_COLOR="1") == "Hello big world\r\n"
        assert in_terminal(address, "--no-tint") == "Hello big world\r\n"


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_cancels_the_request_and_prints_what_there_is(flags: tuple[str, ...]) -> None:
    """The server stops, the statistics count what was seen, the exit code is 130, and there is no traceback."""
    target = ScriptedTarget((*GOOD[:3], threading.Event(), GOOD[3]))
    with serve(target) as address:
        process = subprocess.Popen(command(address, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            seen = process.stdout.read(len("Hello big world")) if not flags else process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
        assert target.cancelled.wait(10)
    assert process.returncode == 130
    assert "interrupted after " in errors
    assert "Traceback" not in errors
    if not flags:
        assert seen + rest == "Hello big world\n"
        assert "interrupted after 3 tokens" in errors


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    """`draftwire generate | head -c 1` is not a crash."""
    target = ScriptedTarget((*GOOD[:2], *(chunk(i, (6, "x" * 1000)) for i in range(1, 200)), finished(200)))
    with serve(target) as address:
        process = subprocess.Popen(command(address), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            assert process.stdout.read(1) == "H"
            process.stdout.close()
            assert process.stderr is not None
            errors = process.stderr.read()
        assert process.returncode != 0
        assert "Traceback" not in errors
