"""`draftwire doctor`: what is installed, what computes, what windows cost here, and how a running service is."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from client.console import describe, exit_code, stderr, stdout
from client.exact_cost import exact_table
from client.models import CacheDir
from client.options import Connection
from client.show import drafter_table, info_table
from draftwire import models
from draftwire.errors import DraftwireError, Unavailable

_PACKAGES = ("draftwire", "mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "cmeel-openblas", "grpcio", "protobuf", "xgrammar")
_MEASURE_S = 600.0


def doctor(
    *,
    connection: Connection,
    model: Annotated[str, typer.Option(help="Model to look for and to measure.")] = "smollm2-135m",
    measure: Annotated[bool, typer.Option(help="Measures windows on the model.")] = True,
    blas: Annotated[str, typer.Option(help="BLAS to measure with: auto, openblas or reference.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads to measure with; all cores but one, as the services.")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Looks at this machine and at the service behind --address. Exits with 4 where something is wrong."""
    out = stdout()
    out.print(_versions())
    faults = [_look_for(model, cache_dir, out)]
    if measure and faults == [None]:
        faults.append(_measure(model, blas, threads, cache_dir, out))
    faults.append(_look_at(connection, out))
    if any(faults):
        for fault in filter(None, faults):
            stderr().print(f"wrong: {fault}", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(4)


def _versions() -> Table:
    table = Table("software", "version")
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "[dim]not installed[/]")
    return table


def _look_for(model: str, cache_dir: Path | None, out: Console) -> str | None:
    """Says where the model is; returns what is wrong."""
    try:
        where = models.resolve(model, cache_dir=cache_dir)
    except models.ModelError as error:
        return str(error)
    out.print(f"model {model}: {where}", soft_wrap=True, markup=False)
    return None


def _measure(model: str, blas: str, threads: int | None, cache_dir: Path | None, out: Console) -> str | None:
    """Shows BLAS, device and the cost of windows; returns what is wrong."""
    with stderr().status(f"measuring windows of {model}"):
        found = measured(model, blas=blas, threads=threads, cache_dir=cache_dir)
    if "error" in found:
        return str(found["error"])
    used = found["blas"]
    count = f", {used['threads']} threads" if used["threads"] else ""
    out.print(
        f"computes with: {found['device']}, {used['kind']}{count} ({used['reason']})", soft_wrap=True, markup=False
    )
    out.print(cost_table(found))
    out.print(exact_table(found))
    if used["kind"] == "reference" and blas != "reference":
        return "mlx computes with the reference BLAS, about ten times slower: pip install 'draftwire[cpu]'"
    if not found["rolls_back"]:
        return f"the caches of {model} cannot take rejected drafts back, so it is served without drafts"
    return None


def measured(
    model: str, *, blas: str = "auto", threads: int | None = None, cache_dir: Path | None = None
) -> Mapping[str, Any]:
    """What `client.window_cost` prints, from a new process; {"error": ...} where it could not measure."""
    argv = [sys.executable, "-m", "client.window_cost", model, "--blas", blas]
    argv += [] if threads is None else ["--threads", str(threads)]
    argv += [] if cache_dir is None else ["--cache-dir", str(cache_dir)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_MEASURE_S, check=False)
        found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"the measurement took longer than {_MEASURE_S:g} s"}
    except (ValueError, IndexError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return {"error": f"the measurement ended with code {done.returncode}: {last}"}
    return found


def cost_table(found: Mapping[str, Any]) -> Table:
    """Cost of windows by rows, absolutely and against one row. `found` is what `measured` returns."""
    table = Table("rows", "ms", "cost of 1 row", "pays from", title=f"{found['model_id']}, {found['dtype']}")
    for column in table.columns:
        column.justify = "right"
    one_ms = found["rows_ms"]["1"]
    for rows, value_ms in found["rows_ms"].items():
        ratio = value_ms / one_ms
        # A window of n rows yields 1 + accepted tokens for `ratio` steps of plain decoding.
        pays = "" if rows == "1" else f"{max(0.0, ratio - 1):.1f} accepted" if ratio < int(rows) else "never"
        table.add_row(rows, f"{value_ms:.1f}", f"{ratio:.2f}x", pays)
    return table


def _look_at(connection: Connection, out: Console) -> str | None:
    """Shows the running service, if one answers; returns what is wrong with it."""
    try:
        with connection.client() as client:
            health = client.health(timeout_s=3.0)
            out.print(f"service at {client.address}: {health.value}", soft_wrap=True)
            out.print(info_table(client.model_info(timeout_s=3.0)))
            found = client.drafters(timeout_s=3.0)
            out.print(drafter_table(found) if found else "no drafter is configured")
    except Unavailable as error:
        if error.reason == "UNAVAILABLE":
            out.print(f"service at {connection.address}: none is running", soft_wrap=True)
            return None
        return f"service at {connection.address}: {describe(error)}"
    except DraftwireError as error:
        if exit_code(error) == 2:
            raise
        return f"service at {connection.address}: {describe(error)}"
    return None
