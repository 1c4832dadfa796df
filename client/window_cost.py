"""Measures what windows of several rows cost on a real model: `python -m client.window_cost MODEL`.

A process of its own, because the BLAS is chosen once a process, before mlx is imported. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

from client.exact_cost import tile_forwards, tiles_of
from draftwire.blas import BlasError, default_threads, load_blas
from draftwire.models import ModelError

ROWS: Final = (1, 2, 4, 8, 16)
_PROMPT_TOKENS: Final = 64
_WARM_UP: Final = 2
K = TypeVar("K")


def measure(forward: Callable[[K], None], rows: Sequence[K], repeats: int) -> dict[K, float]:
    """Median seconds of a forward by kind, as its number of rows. Kinds alternate, so that a slow moment hits all of them."""
    times: dict[K, list[float]] = {count: [] for count in rows}
    for turn in range(_WARM_UP + repeats):
        for count in rows:
            begin_s = time.perf_counter()
            forward(count)
            if turn >= _WARM_UP:
                times[count].append(time.perf_counter() - begin_s)
    return {count: statistics.median(values) for count, values in times.items()}


def run(model: str, blas: str, threads: int | None, repeats: int, cache_dir: str | None) -> dict[str, Any]:
    """Everything that the process can say: BLAS, device, model, and milliseconds by rows."""
    info = load_blas(blas, threads=threads or default_threads())  # type: ignore[arg-type]
    from pathlib import Path

    from draftwire.lm import load_model

    loaded = load_model(model, cache_dir=Path(cache_dir) if cache_dir else None)
    import mlx.core as mx
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

    module, cache = loaded.model, make_prompt_cache(loaded.model)
    mx.eval(module(mx.array([[1] * _PROMPT_TOKENS]), cache=cache))
    trims = can_trim_prompt_cache(cache)

    exact = tiles_of(module, loaded.head_width, loaded.context_length)
    sizes = [int(rows) for rows, fault in exact.get("faults", {}).items() if not fault]
    tile = tile_forwards(module, [1] * _PROMPT_TOKENS, sizes) if sizes else None

    def forward(kind: tuple[str, int]) -> None:
        name, count = kind
        if tile is not None and name == "exact":
            tile(count)
            return
        mx.eval(module(mx.array([[1] * count]), cache=cache))
        if trims:
            trim_prompt_cache(cache, count)

    kinds = [("fast", count) for count in ROWS] + [("exact", count) for count in sizes]
    seconds = measure(forward, kinds, repeats)
    milliseconds = {
        name: {str(count): value * 1e3 for (kind, count), value in seconds.items() if kind == name}
        for name in ("fast", "exact")
    }
    return {
        "blas": asdict(info),
        "device": str(mx.default_device()),
        "model_id": loaded.model_id,
        "dtype": loaded.dtype,
        "context_length": loaded.context_length,
        "weights_bytes": loaded.weights_bytes,
        "rolls_back": trims,
        "rows_ms": milliseconds["fast"],
        "exact": exact | {"ms": milliseconds["exact"]},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints {"error": ...} and returns 1 where it cannot be measured."""
    parser = argparse.ArgumentParser(prog="client.window_cost")
    parser.add_argument("model")
    parser.add_argument("--blas", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cache-dir")
    given = parser.parse_args(argv)
    try:
        found = run(given.model, given.blas, given.threads, given.repeats, given.cache_dir)
    except (ModelError, BlasError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    code = main()
    if "mlx.core" in sys.modules:
        # Without it, a process that used mlx aborts at its exit. Not in `main`: a caller may still need its streams.
        sys.modules["mlx.core"].clear_streams()
    sys.exit(code)
