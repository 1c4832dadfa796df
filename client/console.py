"""What all commands share: consoles, exit codes, and the one line that an error becomes."""

from __future__ import annotations

from typing import Any, Final

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from draftwire.errors import DraftwireError, InvalidRequest, Overloaded, Unauthenticated, Unavailable, Unsupported
from draftwire.models import ModelError

EXIT_INVALID: Final = 2
"""Wrong usage, or a request that this server can never take."""
EXIT_UNAVAILABLE: Final = 3
"""Nothing answers, or it has no room: the same command may work later."""
EXIT_FAILED: Final = 4
"""The server, a model or a process failed in another way."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C."""

EXIT_CODES: Final = (
    "Exit codes: 0 done; 2 wrong usage or invalid request; 3 the service is unavailable or full; "
    "4 any other failure; 130 interrupted."
)


def stdout() -> Console:
    """For results."""
    return Console(highlight=False)


def stderr() -> Console:
    """For everything else: errors, statistics, logs, progress."""
    return Console(stderr=True, highlight=False)


def exit_code(error: Exception) -> int:
    """The exit code that stands for an error."""
    match error:
        case InvalidRequest() | Unsupported():
            return EXIT_INVALID
        case Unavailable() | Overloaded():
            return EXIT_UNAVAILABLE
        case _:
            return EXIT_FAILED


def describe(error: DraftwireError | ModelError) -> str:
    """The error in one line: what, which field, what to do."""
    if not isinstance(error, DraftwireError):
        return str(error)
    fields = "; ".join(f"{v.field}: {v.description}" if v.field else v.description for v in error.violations)
    # The fields say all that the message says, and what would be right.
    text = fields or error.message
    return f"{text} ({remedy})" if (remedy := _remedy(error)) else text


def report(error: DraftwireError | ModelError) -> int:
    """Prints the error to stderr and returns its exit code."""
    stderr().print(Text.assemble(("error: ", "bold red"), (describe(error), "red")), soft_wrap=True)
    return exit_code(error)


class GuardedGroup(TyperGroup):
    """Turns errors of the library into one line and an exit code, wherever a command meets them."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except (DraftwireError, ModelError) as error:
            raise typer.Exit(report(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _remedy(error: DraftwireError) -> str | None:
    match error:
        case Overloaded(retry_after_s=float(delay_s)) | Unavailable(retry_after_s=float(delay_s)):
            return f"try again in {delay_s:g} s"
        case Unavailable(reason="UNAVAILABLE"):
            return "is it running? start it with: draftwire up"
        case Unauthenticated():
            return "give --token-file or set DRAFTWIRE_TOKEN"
        case _:
            return None
