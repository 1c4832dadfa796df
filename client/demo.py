"""`draftwire demo`: one answer with drafts and without, on this machine, from nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from client import render
from client.console import EXIT_FAILED, stderr, stdout
from client.generate import play
from client.models import ensure
from client.options import Output
from client.services import Services, ServicesConfig
from client.up import StatusView, terminated_like_interrupted
from draftwire.client import Client
from draftwire.events import Completion
from draftwire.request import GenerateOptions

MODEL: Final = "smollm2-135m"
PASSAGE: Final = (
    "The lighthouse stood on a narrow spit of rock at the northern end of the bay. Every evening the keeper climbed "
    "the one hundred and twelve steps to the lamp room, trimmed the wick, wound the clockwork that turned the great "
    "lens, and wrote the weather into a small green book. In winter the spray froze on the railings and the stairs "
    "grew slippery, so he tied a rope around his waist before he went out to clear the glass. Ships that passed at "
    "night counted the seconds between two flashes, and knew from the count which rocks lay ahead of them."
)
PROMPT: Final = f"Repeat the following text exactly, word for word:\n\n{PASSAGE}"


def demo(
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 200,
    threads: Annotated[int | None, typer.Option(help="Threads of both services together.")] = None,
) -> None:
    """Fetches a small model, starts both services, and shows one answer with drafts and without."""
    if max_tokens < 1:
        raise typer.BadParameter(f"--max-tokens {max_tokens}: 1 or more")
    ensure(MODEL)
    err = stderr()
    view = StatusView(err)
    with terminated_like_interrupted(), tempfile.TemporaryDirectory(prefix="draftwire-demo-") as logs:
        services = Services(
            ServicesConfig(model=MODEL, drafter="lookup", threads=threads), log_dir=Path(logs), progress=view.set
        )
        with view.status, services:
            view.status.stop()
            equal = _compare(services.target_address, max_tokens)
    if not equal:
        raise typer.Exit(EXIT_FAILED)


def _compare(address: str, max_tokens: int) -> bool:
    """Streams the answer with drafts, then makes it again without; returns whether both are equal."""
    out = stdout()
    options = GenerateOptions(
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0.0,
        max_tokens=max_tokens,
        cache=False,  # both answers read the prompt anew
    )
    with Client(address) as client:
        mark = _mark(out)
        out.print("Asked to repeat a passage, the model answers; accepted drafts are " + _legend(mark), soft_wrap=True)
        out.print()
        drafted = play(client, None, options, Output(stats=False), mark)
        options["drafting"] = "off"
        plain = client.complete(None, **options)
    out.print()
    out.print(render.statistics(drafted.finished), style="dim", soft_wrap=True)
    out.print(_table(drafted, plain))
    equal = drafted.token_ids == plain.token_ids
    if equal:
        out.print("Both answers are equal, token for token.", style="green")
    else:
        first = next(
            (i for i, (a, b) in enumerate(zip(drafted.tokens, plain.tokens, strict=False)) if a.id != b.id), None
        )
        out.print(f"The answers differ from token {first} on. That is a fault: please report it.", style="bold red")
    return equal


def _mark(console: Console) -> render.Mark:
    tint = render.mark_for(console, True)
    return render.Mark.BRACKETS if tint is render.Mark.NONE else tint


def _legend(mark: render.Mark) -> str:
    return "[green]green[/]." if mark is render.Mark.TINT else r"in \[brackets]."


def _table(drafted: Completion, plain: Completion) -> Table:
    table = Table("", "tokens", "decode", "tokens per second", "forwards")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, answer in (("with drafts", drafted), ("without", plain)):
        table.add_row(
            name,
            str(answer.usage.completion_tokens),
            f"{answer.timings.decode_s:.2f} s",
            f"{answer.timings.decode_tokens_per_second:.1f}",
            str(answer.speculation.target_calls),
        )
    speed = plain.timings.decode_tokens_per_second
    if speed:
        table.caption = f"{drafted.timings.decode_tokens_per_second / speed:.2f} times as fast with drafts"
    return table
