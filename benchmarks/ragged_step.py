"""What a step of eight sequences of different lengths costs beside the model itself: gathering, masks, slots, choosing.

The other arm is the same model over mlx-lm's own cache with a batch of eight, all of them as long as the longest, which needs
none of that; mlx gets it layer by layer too, so that what building it ahead saves counts for neither.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from draftwire.blas import load_blas

MODEL: Final = "smollm2-135m"
_SLOTS: Final = 8
_LONGEST: Final = 272
_SHORTER: Final = 16
"""Positions that each next sequence has less."""
_REPEATS: Final = 25


def measure(widths: Sequence[int], threads: int) -> dict[int, tuple[float, float]]:
    """Width -> (seconds of a step, seconds of the model alone), medians of alternating runs.

    In a process of its own: whoever asks may have bound another BLAS already.
    """
    command = [sys.executable, "-m", "benchmarks.ragged_step", str(threads), *map(str, widths)]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {int(width): (step_s, model_s) for width, (step_s, model_s) in json.loads(made.stdout).items()}


def main() -> None:
    """Arguments: threads, widths. Prints what was found, as JSON."""
    load_blas("openblas", threads=int(sys.argv[1]))
    print(json.dumps(asyncio.run(_measure([int(width) for width in sys.argv[2:]]))))


async def _measure(widths: Sequence[int]) -> dict[int, tuple[float, float]]:
    from draftwire.compute import ComputeThread
    from draftwire.lm import load_model
    from target_service.batch_probe import make_engine
    from target_service.params import Choosing
    from target_service.window import Window

    compute = ComputeThread()
    loaded: list[Any] = await compute.run(lambda: [load_model(MODEL, dtype="float32")])
    engine = await make_engine(compute, loaded[0], "auto")
    assert engine.batching == "ragged"
    await engine.prepare((1,))
    slots = []
    for number in range(_SLOTS):
        slots.append(await engine.open(Choosing()))
        await engine.prefill(slots[-1], _ids(number, _LONGEST - number * _SHORTER))
    alone: list[Callable[[int], None]] = await compute.run(lambda: [_alone(loaded.pop().model)])
    found = {}
    for width in widths:
        ours, theirs = [], []
        for _ in range(_REPEATS + 1):
            windows = [Window(slot=slot, pending=9, drafts=(7,) * (width - 1), first_step=0) for slot in slots]
            began_s = time.perf_counter()
            await engine.forward(windows)
            ours.append(time.perf_counter() - began_s)
            for number, slot in enumerate(slots):
                engine.truncate(slot, _LONGEST - number * _SHORTER)
            theirs.append(await compute.run(lambda width=width: _timed(alone[0], width)))  # type: ignore[misc]
        # The first seats everybody.
        found[width] = statistics.median(ours[1:]), statistics.median(theirs[1:])
    await compute.run(alone.clear)
    await engine.unload()
    await asyncio.to_thread(compute.close)
    return found


def _alone(model: Any) -> Callable[[int], None]:
    """A step of the model over its own cache, batch 8. Runs on the compute thread."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, trim_prompt_cache

    class HandedOver(KVCache):
        """As a pool does with each layer."""

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            found = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
            mx.async_eval(self.keys, self.values)  # type: ignore[no-untyped-call]
            return found

    cache = [HandedOver() for _ in model.layers]  # type: ignore[no-untyped-call]
    model(mx.array([_ids(number, _LONGEST) for number in range(_SLOTS)]), cache=cache)
    mx.eval([layer.state for layer in cache])

    def step(width: int) -> None:
        chosen = mx.argmax(model(mx.array([[9] + [7] * (width - 1)] * _SLOTS), cache=cache), axis=-1)
        chosen.tolist()
        trim_prompt_cache(cache, width)

    return step


def _timed(step: Callable[[int], None], width: int) -> float:
    began_s = time.perf_counter()
    step(width)
    return time.perf_counter() - began_s


def _ids(number: int, count: int) -> list[int]:
    return [(number * 7919 + position * 104729 + 13) % 49_000 for position in range(count)]


if __name__ == "__main__":
    main()
