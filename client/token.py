"""`draftwire token`: makes bearer tokens and the lines of token files that grant them."""

from __future__ import annotations

from typing import Annotated

import typer

from client.console import stderr
from draftwire.tokens import Role, TokenFileError, line_of, new_token


def new(
    name: Annotated[str, typer.Option(help="Who the token is for; owns its requests and sessions.")],
    role: Annotated[list[Role], typer.Option(help="What it may do; may be repeated.")],
) -> None:
    """Makes a token. Prints the token on the first line, for its holder, and the line for --token-file on the second.

    The service keeps only the hash: a token that is lost is replaced, not found again.
    """
    token = new_token()
    try:
        line = line_of(name, role, token)
    except TokenFileError as error:
        raise typer.BadParameter(str(error), param_hint="--name") from None
    print(token)
    print(line)
    stderr().print("Keep the first line secret; append the second to the service's --token-file.", style="dim")
