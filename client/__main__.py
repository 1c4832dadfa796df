"""Entry point of `draftwire` and of `python -m client`."""

from __future__ import annotations

from client.app import build_app


def main() -> None:
    """Runs the command line; exits with a code of `client.console`."""
    build_app()(prog_name="draftwire")


if __name__ == "__main__":
    main()
