"""The command line as a whole: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from client import demo, doctor, generate, models, show, token, top, up
from client.console import EXIT_CODES, GuardedGroup
from client.flags import grouped

_HELP = "Talk to a draftwire target service, and run one.\n\n" + EXIT_CODES


def build_app() -> typer.Typer:
    """A new typer application."""
    app = typer.Typer(cls=GuardedGroup, help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_options)
    app.command()(grouped(up.up))
    app.command()(grouped(generate.generate))
    app.command()(grouped(generate.chat))
    app.command()(grouped(show.info))
    app.command()(grouped(show.drafters))
    app.command()(grouped(top.top))
    app.command()(grouped(show.tokenize))
    app.command()(grouped(doctor.doctor))
    app.command()(demo.demo)
    catalogue = typer.Typer(help="Models with a short name.", no_args_is_help=True)
    catalogue.command("list")(models.list_models)
    catalogue.command("pull")(models.pull)
    app.add_typer(catalogue, name="models")
    tokens = typer.Typer(help="Bearer tokens for --token-file.", no_args_is_help=True)
    tokens.callback()(_tokens)
    tokens.command("new")(token.new)
    app.add_typer(tokens, name="token")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        import draftwire

        print(f"draftwire {draftwire.__version__}")
        raise typer.Exit


def _tokens() -> None:
    """Bearer tokens for --token-file."""


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Shows the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of the program itself; the help text is that of the application."""
