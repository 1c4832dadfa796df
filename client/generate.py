"""`draftwire generate` and `draftwire chat`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from client import render
from client.console import EXIT_INTERRUPTED, report, stderr, stdout
from client.options import Connection, Generation, Output
from draftwire.client import Client
from draftwire.errors import DraftwireError, Unavailable
from draftwire.events import Completion
from draftwire.request import GenerateOptions

Message = Mapping[str, Any]
System = Annotated[str | None, typer.Option(help="What the model is told before the conversation.")]


def generate(
    *,
    connection: Connection,
    generation: Generation,
    output: Output,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; from standard input when absent or '-'.")] = None,
    chat: Annotated[bool, typer.Option(help="Sends the prompt as a user's turn of a chat, or as it is.")] = True,
    system: System = None,
) -> None:
    """Streams one answer. Text goes to stdout, statistics to stderr."""
    if system is not None and not chat:
        raise typer.BadParameter("--system needs a chat; leave --no-chat out")
    text = _read_prompt() if prompt is None or prompt == "-" else prompt
    options = generation.options()
    if chat:
        options["messages"] = [*_system(system), {"role": "user", "content": text}]
    with connection.client() as client:
        play(client, None if chat else text, options, output)


def chat(*, connection: Connection, generation: Generation, output: Output, system: System = None) -> None:
    """Talks with the model. /reset forgets the conversation, /quit (or Ctrl-D) ends it."""
    err = stderr()
    history: list[Message] = _system(system)
    with connection.client() as client:
        if err.is_terminal:
            err.print(f"{client.model_info().model_id} at {client.address}; /reset, /quit", style="dim", soft_wrap=True)
        while (line := _ask()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                history = _system(system)
                continue
            if not line:
                continue
            turns = [*history, {"role": "user", "content": line}]
            try:
                options = generation.options()
                options["messages"] = turns
                answer = play(client, None, options, output).text
            except Unavailable:
                raise
            except DraftwireError as error:
                report(error)  # this turn is dropped, the conversation is not
            else:
                history = [*turns, {"role": "assistant", "content": answer}]


def play(
    client: Client, prompt: str | None, options: GenerateOptions, output: Output, mark: render.Mark | None = None
) -> Completion:
    """Streams one answer to stdout, its statistics to stderr; returns it. Ctrl-C cancels and exits with 130."""
    console = stdout()
    view = render.view_for(console, mark or render.mark_for(console, output.tint), output.json)
    tally = render.Tally()
    try:
        with client.generate(prompt, **options) as stream:
            for event in stream:
                tally.see(event)
                view.show(event)
    except KeyboardInterrupt:
        view.close()
        _print_statistics(tally, output)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except DraftwireError:
        view.close()
        raise
    view.close()
    _print_statistics(tally, output)
    return stream.completion()


def _print_statistics(tally: render.Tally, output: Output) -> None:
    if output.stats:
        stderr().print(tally.line(), style="dim", soft_wrap=True, markup=False)


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": text}]


def _read_prompt() -> str:
    if sys.stdin.isatty():
        stderr().print("Type the prompt, then Ctrl-D.", style="dim")
    return sys.stdin.read()


def _ask() -> str | None:
    """The next line of the user; None at the end of the input."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        import readline  # noqa: F401  (gives input() history and editing)
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
