"""`draftwire top`: what a target does at the moment, in the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from client.console import describe, stdout
from client.looks import Looks, as_json, look_at
from client.options import Connection
from client.top_view import page
from draftwire.client import Client
from draftwire.errors import DeadlineExceeded, Unavailable

_CALL_TIMEOUT_S = 5.0
_ROWS_OF_THE_REST = 20


def top(
    connection: Connection,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Looks twice, prints one page, and ends.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a look, on a line of its own.")] = False,
) -> None:
    """Shows requests, drafters, acceptance by position and tokens a second. Ctrl-C ends it. Never shows a text."""
    console = stdout()
    with connection.client() as client, suppress(KeyboardInterrupt):
        watch = Watch(client, interval, connection.timeout or _CALL_TIMEOUT_S)
        if json_lines or once or not console.is_terminal:
            _pages(console, watch, once=once, json_lines=json_lines)
        else:
            _live(console, watch)


class Watch:
    """Looks at one target again and again."""

    def __init__(self, client: Client, interval_s: float, timeout_s: float) -> None:
        """Looks for the first time. Raises DraftwireError."""
        self.looks = Looks()
        self.address = client.address
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self.looks.add(look_at(client, timeout_s))

    def next(self) -> None:
        """Waits, and looks. Raises DraftwireError."""
        time.sleep(self._interval_s)
        self.looks.add(look_at(self._client, self._timeout_s))


def _pages(console: Console, watch: Watch, *, once: bool, json_lines: bool) -> None:
    while True:
        watch.next()
        if json_lines:
            sys.stdout.write(json.dumps(as_json(watch.looks)) + "\n")
            sys.stdout.flush()
        else:
            console.print(page(watch.looks, watch.address, most_requests=sys.maxsize))
            console.file.flush()
        if once:
            return


def _live(console: Console, watch: Watch) -> None:
    """Until Ctrl-C. A target that does not answer for a while is waited for, with what was seen last."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        fault: str | None = None
        while True:
            rows = max(3, console.height - _ROWS_OF_THE_REST)
            live.update(page(watch.looks, watch.address, most_requests=rows, fault=fault), refresh=True)
            try:
                watch.next()
                fault = None
            except (Unavailable, DeadlineExceeded) as error:
                fault = describe(error)
