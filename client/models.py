"""`draftwire models`: which models there are by a short name, and fetching them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn
from rich.table import Table

from client.console import stderr, stdout
from draftwire import models

CacheDir = Annotated[
    Path | None, typer.Option(help="Where models lie; the user's cache folder.", envvar="DRAFTWIRE_CACHE_DIR")
]
_WORDS = {"wait": "waiting for another pull of", "download": "downloading", "convert": "converting"}


def list_models(cache_dir: CacheDir = None) -> None:
    """Lists the models that have a short name."""
    table = Table("name", "state", "license", "description", "folder")
    for state in models.list_models(cache_dir=cache_dir):
        word = "[green]here[/]" if state.pulled else "not pulled"
        model = state.model
        table.add_row(model.name, word, model.license, model.description, str(state.path) if state.pulled else "")
    stdout().print(table)


def pull(
    name: Annotated[str, typer.Argument(help="Short name of the model, see `models list`.")] = "smollm2-135m",
    cache_dir: CacheDir = None,
) -> None:
    """Fetches a model unless it is here."""
    stdout().print(str(pull_with_progress(name, cache_dir)), soft_wrap=True, markup=False)


def ensure(model: str, cache_dir: Path | None = None) -> None:
    """Fetches a model with a short name that is not here yet; leaves paths and other names alone."""
    if model in models.BUNDLED and not models.is_pulled(model, cache_dir=cache_dir):
        pull_with_progress(model, cache_dir)


def pull_with_progress(name: str, cache_dir: Path | None) -> Path:
    """`models.pull` with a bar on stderr."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=stderr(),
        transient=True,
    )
    tasks = {}
    lock = threading.Lock()

    def on_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
        with lock:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{_WORDS.get(stage, stage)} {name}", total=total_bytes)
            bar.update(tasks[stage], completed=done_bytes, total=total_bytes)

    with bar:
        return models.pull(name, cache_dir=cache_dir, progress=on_progress)
