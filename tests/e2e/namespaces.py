"""Processes with names of their own: a mount namespace in which /etc/hosts (or another file) is one of the test's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def refusal() -> str:
    """Why this machine has no mount namespaces of one's own; empty where it has."""
    if os.name != "posix" or shutil.which("unshare") is None:
        return "there is no unshare here"
    if os.geteuid() != 0:
        return "it needs root for a private mount namespace with its own /etc/hosts"
    hosts = ["unshare", "--mount", "--propagation", "private", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    done = subprocess.run(hosts, capture_output=True, text=True, check=False)
    return f"no private mount namespace here: {done.stderr.strip()}" if done.returncode else ""


REFUSAL = refusal()
"""Why tests with names cannot run here; empty where they can."""


class Hosts:
    """What one name stands for, as a hosts file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._name = name
        self.set()

    def set(self, *hosts: str) -> None:
        """Written in place: a bind mount is of the file, not of its path."""
        lines = ["127.0.0.1 localhost", *(f"{host} {self._name}" for host in hosts)]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def with_file(own: Path, path: str = "/etc/hosts") -> list[str]:
    """What comes before a command that shall see `own` at `path`."""
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(own), path]
