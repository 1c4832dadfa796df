"""One child process: its log lines, its end, and stopping it."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from draftwire.errors import Unavailable

_TAIL_LINES: Final = 20
_HURRY_S: Final = 3.0

Sink = Callable[[str, str], None]
"""Takes the name of a process and one of its log lines."""


class ProcessDied(Unavailable):
    """A child process ended by itself; the message has its last log lines."""

    default_reason = "PROCESS_DIED"


class ChildProcess:
    """A program that runs until it is told to stop. Owns the process and one thread that reads its log."""

    def __init__(self, name: str, argv: Sequence[str], sink: Sink, on_exit: Callable[[ChildProcess], None]) -> None:
        """Starts it at once. `sink` and `on_exit` are called on the reading thread."""
        self.name = name
        self.stopping = False
        """Whether its end is wanted."""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._sink = sink
        self._on_exit = on_exit
        # In a process group of its own: Ctrl-C in the terminal reaches the parent only, which stops children in order.
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name=f"log-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative is the number of the signal that ended it."""
        return self._process.poll()

    def check(self) -> None:
        """Raises ProcessDied where it has ended."""
        if self.returncode is not None:
            raise self.death()

    def death(self) -> ProcessDied:
        """What to say of its end."""
        self._reader.join(_HURRY_S)
        code = self.returncode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        )
        lines = "".join(f"\n  {line}" for line in self._tail)
        return ProcessDied(f"the {self.name} service {how}; its last log lines:{lines or ' none'}")

    def signal(self, number: int) -> None:
        """Sends a signal; nothing happens where it has ended."""
        if self.returncode is None:
            self._process.send_signal(number)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace. Ctrl-C meanwhile asks it to hurry. Idempotent."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        try:
            self._wait(grace_s)
        except KeyboardInterrupt:
            self.signal(signal.SIGTERM)  # the second one tells a service to cut its streams
            self._wait(_HURRY_S)
        if self.returncode is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(_HURRY_S)

    def _wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.rstrip("\n")
                self._tail.append(text)
                self._sink(self.name, text)
        self._process.wait()
        self._on_exit(self)
