"""Files that an operator may replace while a service runs: certificates, keys, tokens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

Stamp = tuple[int, int, int] | None
"""What changes with a file: inode, size, time of change in nanoseconds. None where it cannot be looked at."""


def stamp_of(path: Path) -> Stamp:
    """The file's stamp, links followed: orchestrators renew a mounted secret by switching a link."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_to_others(path: Path) -> bool:
    """Whether somebody else than the owner may read or write the file."""
    try:
        return bool(os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False
