"""What `draftwire doctor` says about exact numerics: which tiles keep a row's bits on this machine, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table


def tiles_of(model: Any, width: int, context_length: int) -> dict[str, Any]:
    """{"reason": why there are no tiles at all} or {"faults": {rows: why not, "" where it passed}}. Needs mlx."""
    from draftwire.tile_probe import explain, probe

    reason = explain(model)
    if reason:
        return {"reason": reason}
    try:
        probed = probe(model, width, context_length, all_sizes=True)
    except Exception as failure:
        return {"reason": f"the model does not take rows of one position each ({type(failure).__name__})"}
    return {"reason": "", "faults": {str(one.rows): one.fault for one in probed.found}}


def tile_forwards(model: Any, prompt: list[int], sizes: list[int]) -> Callable[[int], None]:
    """A function that runs one forward with so many rows behind this prompt. Needs mlx."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from draftwire.ragged import prefill_caches
    from draftwire.rows import Place, RowPool, run_tile
    from draftwire.tiles import extent_class

    pool = RowPool(make_prompt_cache(model))
    caches = prefill_caches(make_prompt_cache(model))
    model(mx.array([prompt]), cache=caches)
    row = pool.join(caches, len(prompt))
    extent = extent_class(len(prompt) + max(sizes, default=1))

    def forward(rows: int) -> None:
        places = [Place(row, len(prompt) + number, 1) for number in range(rows)]
        mx.eval(run_tile(model, pool, places, rows, extent))

    return forward


def exact_table(found: Mapping[str, Any]) -> Table | str:
    """The tiles, their faults, and their cost against windows of fast numerics. `found` is what `doctor.measured` returns."""
    exact = found["exact"]
    if exact["reason"]:
        return f"exact numerics: not with this model: {exact['reason']}"
    table = Table(
        "rows of every forward", "keeps bits", "ms", "of 1 row, fast", "of as many rows, fast", title="exact numerics"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    fast_ms = found["rows_ms"]
    for rows, fault in exact["faults"].items():
        if fault:
            table.add_row(rows, f"no: {fault}", "", "", "")
            continue
        cost_ms = exact["ms"][rows]
        same = f"{cost_ms / fast_ms[rows]:.2f}x" if rows in fast_ms else ""
        table.add_row(rows, "yes", f"{cost_ms:.1f}", f"{cost_ms / fast_ms['1']:.2f}x", same)
    return table
