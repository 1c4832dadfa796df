"""`draftwire up`: both services on this machine, until Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from client.console import stderr, stdout
from client.models import ensure
from client.options import Listening
from client.services import Services, ServicesConfig


def up(
    *,
    model: Annotated[str, typer.Option(help="Model of the target service.")] = "smollm2-135m",
    draft_model: Annotated[str | None, typer.Option(help="Model that drafts, instead of the lookup.")] = None,
    lookup: Annotated[bool, typer.Option("--lookup", help="Drafts from the text so far (the default).")] = False,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most drafts a round.")] = None,
    host: Annotated[str, typer.Option(help="Address on which the target service listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the target service; 0 takes a free one.")] = 50051,
    threads: Annotated[int | None, typer.Option(help="Threads of both services together.")] = None,
    token: Annotated[
        str | None, typer.Option(help="Token that `up` itself shows to the target.", envvar="DRAFTWIRE_TOKEN")
    ] = None,
    listening: Listening,
) -> None:
    """Starts a draft service and a target service, and stops both at Ctrl-C."""
    if lookup and draft_model is not None:
        raise typer.BadParameter("--lookup and --draft-model exclude each other")
    if threads is not None and threads < 1:
        raise typer.BadParameter(f"--threads {threads}: 1 or more")
    for name in filter(None, (model, draft_model)):
        ensure(name)
    config = ServicesConfig(
        model=model,
        drafter="lookup" if draft_model is None else "model",
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        host=host,
        port=port,
        threads=threads,
        log_format="console",
        target_arguments=listening.arguments(),
        client_tls=listening.client_tls(),
        client_token=token,
    )
    with terminated_like_interrupted(), suppressed_interrupt():
        _serve(config)


def _serve(config: ServicesConfig) -> None:
    err = stderr()
    view = StatusView(err)
    services = Services(config, sink=lambda name, line: print_log(err, name, line), progress=view.set)
    try:
        with view.status, services:
            view.status.stop()
            out = stdout()
            out.print(f"Serving at {services.target_address}. Try, in another terminal:", soft_wrap=True)
            address = "" if services.target_address == "127.0.0.1:50051" else f" --address {services.target_address}"
            out.print(f"  draftwire generate{address} 'What is speculative decoding?'", soft_wrap=True)
            out.file.flush()
            services.wait()
    finally:
        view.status.stop()


class StatusView:
    """A spinner that says how far each service is; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self.status: Status = console.status("starting")

    def set(self, name: str, state: str) -> None:
        """A service has come to a state."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        self.status.update(", ".join(f"{known}: {told}" for known, told in self._states.items()))
        if not self._console.is_terminal or state.startswith(("serving", "stopped")):
            self._console.print(f"{name}: {state}", style="green" if state == "serving" else "dim")


def print_log(console: Console, name: str, line: str) -> None:
    """One log line of a service, with its name before it. Colours of the line are kept."""
    prefix = Text(f"{name:>7} | ", style="cyan" if name == "target" else "magenta")
    console.print(Text.assemble(prefix, Text.from_ansi(line)), soft_wrap=True)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP what Ctrl-C is, so that children are stopped on every way out."""
    old = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def suppressed_interrupt() -> Iterator[None]:
    """Ctrl-C is the usual way to end, not a failure."""
    try:
        yield
    except KeyboardInterrupt:
        return
