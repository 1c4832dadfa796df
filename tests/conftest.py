"""The BLAS is one choice per process and must be made before anything imports mlx: DRAFTWIRE_BLAS says which."""

import pytest

from draftwire.blas import load_blas_from_env

load_blas_from_env()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the default model go first: they take longest, and a worker that begins one last works on alone."""
    long = {item.path for item in items if item.get_closest_marker("model") is not None}
    items.sort(key=lambda item: item.path not in long)
