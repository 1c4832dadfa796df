"""The client library and the command line start without what only the services need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("mlx", "mlx_lm", "numpy", "structlog", "pydantic", "pydantic_settings", "transformers", "tokenizers")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after the statement."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_not_even_grpc() -> None:
    """`import draftwire` is free, so the services pay nothing for the client's names."""
    assert loaded_by("import draftwire") & {*HEAVY, "grpc", "google"} == set()


@pytest.mark.parametrize(
    "statement",
    ["from draftwire import *", "from draftwire import Client, AsyncClient", "import client.__main__, client.app"],
)
def test_clients_load_nothing_that_computes(statement: str) -> None:
    """Every exported name, and the command line, work where mlx and the services' packages are not installed."""
    loaded = loaded_by(statement)
    assert "grpc" in loaded
    assert loaded & set(HEAVY) == set()


def test_every_exported_name_exists() -> None:
    """__all__, the lazy table and dir() agree."""
    import draftwire

    for name in draftwire.__all__:
        assert getattr(draftwire, name) is not None
        assert name in dir(draftwire)
    assert draftwire.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = draftwire.no_such_name
