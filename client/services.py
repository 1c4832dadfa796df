"""A target service and a draft service as child processes: what `up`, the demo and the benchmarks run."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Literal, Self, TextIO, TypeAlias

from client.process import ChildProcess, Sink
from draftwire.channels import TLS
from draftwire.client import Client
from draftwire.errors import DeadlineExceeded, PermissionDenied, Unauthenticated, Unavailable
from draftwire.events import DrafterState, Health

DrafterKind: TypeAlias = Literal["lookup", "model", "none"]
Progress: TypeAlias = Callable[[str, str], None]
"""Takes the name of a service and its state."""

_POLL_S: Final = 0.1
_STOP_S: Final = 25.0
_LINK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesConfig:
    """What to run."""

    model: str = "smollm2-135m"
    drafter: DrafterKind = "lookup"
    draft_model: str | None = None
    """Model of a "model" drafter."""
    num_draft_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the target service; 0 takes a free one."""
    threads: int | None = None
    """Threads of both services together; all cores when None."""
    log_format: Literal["auto", "console", "json"] = "auto"
    target_arguments: tuple[str, ...] = ()
    draft_arguments: tuple[str, ...] = ()
    """More flags of the services."""
    client_tls: TLS | None = None
    """How the target service is reached from here."""
    client_token: str | None = field(default=None, repr=False)
    """Shown to the target service; with the role admin, starting also waits for the drafter."""
    ready_timeout_s: float = 180.0
    python: str = sys.executable
    """Interpreter that runs the services."""

    def __post_init__(self) -> None:
        if (self.drafter == "model") != (self.draft_model is not None):
            raise ValueError("draft_model goes with drafter='model', and only with it")


def share_threads(total: int | None, drafter: DrafterKind) -> tuple[int | None, int]:
    """Threads of (target, drafter); None leaves the target its default, which is all cores but one.

    A model drafts on a core of its own where there are two; a lookup needs none.
    """
    if total is None:
        return None, 1
    return (total - 1, 1) if drafter == "model" and total >= 2 else (total, 1)


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Services:
    """Owns both processes. As a context manager: both are SERVING inside the block, and gone after it.

    Use it from one thread. Raises ProcessDied where a process ends by itself, Unavailable where one is not ready in time.
    """

    def __init__(
        self,
        config: ServicesConfig,
        *,
        log_dir: Path | None = None,
        sink: Sink | None = None,
        progress: Progress = lambda name, state: None,
    ) -> None:
        """Logs go to files `target.log` and `drafter.log` in `log_dir`, else to `sink`, else to stderr with a prefix."""
        self.config = config
        self._progress = progress
        self._sink = sink or _to_stderr
        self._log_dir = log_dir
        self._files: dict[str, TextIO] = {}
        self._exits: SimpleQueue[ChildProcess] = SimpleQueue()
        self._target: ChildProcess | None = None
        self._drafter: ChildProcess | None = None
        self._target_port = config.port or free_port(config.host)
        self._drafter_port = free_port("127.0.0.1")

    @property
    def target_address(self) -> str:
        """host:port for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        return f"[{host}]:{self._target_port}" if ":" in host else f"{host}:{self._target_port}"

    @property
    def drafter_address(self) -> str:
        """host:port of the draft service; it is on loopback."""
        return f"127.0.0.1:{self._drafter_port}"

    def start(self) -> None:
        """Starts both and waits until both are SERVING and the target has found its drafter."""
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for name in ("target", "drafter"):
                self._files[name] = (self._log_dir / f"{name}.log").open("w", encoding="utf-8", buffering=1)
        try:
            if self.config.drafter != "none":
                self._drafter = self._spawn("drafter", self._drafter_argv())
            self._target = self._spawn("target", self._target_argv())
            if self._drafter is not None:
                self._await_serving(self._drafter, Client(self.drafter_address))
            self._await_serving(self._target, self._target_client())
            if self._drafter is not None:
                self._await_link()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the target, then the drafter. Idempotent."""
        # A stack runs all of it, last first, also when Ctrl-C interrupts a part.
        with ExitStack() as stack:
            stack.callback(self._close_files)
            for process in (self._drafter, self._target):
                if process is not None:
                    stack.callback(self._stop, process)
        self._target = self._drafter = None

    def wait(self) -> None:
        """Blocks until a process ends unasked, and raises ProcessDied. Ctrl-C ends the wait."""
        while (process := self._exits.get()).stopping:
            continue
        raise process.death()

    def kill_drafter(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the drafter and, for one that ends it, waits until it is gone."""
        drafter = self._running_drafter()
        if number in (signal.SIGSTOP, signal.SIGCONT):
            drafter.signal(number)
            return
        drafter.stopping = True
        drafter.signal(number)
        drafter.stop(_STOP_S)

    def restart_drafter(self) -> None:
        """Starts the drafter anew at the same address, ending the old one first; returns when it is SERVING."""
        drafter = self._running_drafter()
        drafter.stop(_STOP_S)
        self._drafter = self._spawn("drafter", self._drafter_argv())
        self._await_serving(self._drafter, Client(self.drafter_address))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _running_drafter(self) -> ChildProcess:
        if self._drafter is None:
            raise RuntimeError("there is no drafter: start() with a drafter other than 'none' comes first")
        return self._drafter

    def _spawn(self, name: str, argv: list[str]) -> ChildProcess:
        self._progress(name, "starting")
        return ChildProcess(name, argv, self._log, self._exits.put)

    def _stop(self, process: ChildProcess) -> None:
        self._progress(process.name, "stopping")
        process.stop(_STOP_S)
        self._progress(process.name, "stopped")

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _log(self, name: str, line: str) -> None:
        file = self._files.get(name)
        if file is None:
            self._sink(name, line)
            return
        with suppress(ValueError):  # closed: the process outlived its stop
            file.write(line + "\n")

    def _threads(self) -> tuple[int | None, int]:
        return share_threads(self.config.threads, self.config.drafter)

    def _drafter_argv(self) -> list[str]:
        argv = [self.config.python, "-m", "draft_service", "--host", "127.0.0.1", "--port", str(self._drafter_port)]
        argv += ["--source", self.config.drafter, "--log-format", self.config.log_format]
        if self.config.draft_model is not None:
            argv += ["--draft-model", self.config.draft_model, "--threads", str(self._threads()[1])]
        return [*argv, *self.config.draft_arguments]

    def _target_argv(self) -> list[str]:
        argv = [
            self.config.python,
            "-m",
            "target_service",
            "--host",
            self.config.host,
            "--port",
            str(self._target_port),
        ]
        argv += ["--model", self.config.model]
        threads = self._threads()[0]
        argv += ["--threads", str(threads)] if threads is not None else []
        argv += ["--log-format", self.config.log_format]
        if self.config.drafter != "none":
            argv += ["--drafter", self.drafter_address]
        if self.config.num_draft_tokens is not None:
            argv += ["--num-draft-tokens", str(self.config.num_draft_tokens)]
        return [*argv, *self.config.target_arguments]

    def _target_client(self) -> Client:
        return Client(self.target_address, tls=self.config.client_tls, token=self.config.client_token)

    def _await_serving(self, process: ChildProcess, client: Client) -> None:
        deadline_s = time.monotonic() + self.config.ready_timeout_s
        self._progress(process.name, "loading")
        with client:
            while time.monotonic() < deadline_s:
                process.check()
                with suppress(Unavailable, DeadlineExceeded):
                    if client.health(timeout_s=1.0) is Health.SERVING:
                        self._progress(process.name, "serving")
                        return
                time.sleep(_POLL_S)
        raise Unavailable(
            f"the {process.name} service is not ready after {self.config.ready_timeout_s:g} s", reason="NOT_READY"
        )

    def _await_link(self) -> None:
        """Waits a while for the target to describe its drafter. Not longer: a target serves without one as well."""
        deadline_s = time.monotonic() + _LINK_S
        with self._target_client() as client:
            while time.monotonic() < deadline_s:
                try:
                    if any(drafter.state is DrafterState.READY for drafter in client.drafters()):
                        return
                except (Unauthenticated, PermissionDenied):
                    # Who has no token for it may start services all the same.
                    return
                time.sleep(_POLL_S)
        self._progress("target", "serving, without its drafter")


def _to_stderr(name: str, line: str) -> None:
    print(f"{name:>7} | {line}", file=sys.stderr, flush=True)
