"""Whether a model may run several sequences in one ragged forward: tried at load against mlx-lm's own cache.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.loaded import LoadedModel
from draftwire.ragged import RaggedPool, prefill_caches, smallest_window, unpoolable

_LENGTHS = (11, 29)
_WRONG = 3
_AFTER = (3, 2)
_MOST_WINDOWS = 4
# Relative distance of two rows of logits: rounding stays far below, a wrong position or mask lies far above.
_TOLERANCE = {"float32": 1e-3}
_COARSE = 5e-2


def why_not(loaded: LoadedModel) -> str:
    """Why this model must run its sequences one by one; "" where it need not. Runs on the compute thread."""
    prototype = make_prompt_cache(loaded.model)
    reason = unpoolable(prototype)
    window = smallest_window(prototype)
    if not reason and window is not None and loaded.context_length > _MOST_WINDOWS * window:
        reason = (
            f"a context of {loaded.context_length} tokens is more than {_MOST_WINDOWS} sliding windows of {window}; "
            "a lower context_length would do"
        )
    if reason:
        return reason
    try:
        error = _difference(loaded.model, loaded.head_width)
    except Exception as failure:
        return f"the model does not take rows of different lengths ({type(failure).__name__})"
    finally:
        mx.clear_cache()
    tolerance = _TOLERANCE.get(loaded.dtype, _COARSE)
    if not error <= tolerance:
        return f"rows of different lengths differ from the same rows alone by {error:.1e}, over {tolerance:.0e}"
    return ""


def _difference(model: Any, width: int) -> float:
    """The largest relative distance between rows in a pool and the same rows alone: a wrong window, then a right one."""
    prompts = [_ids(number, length, width) for number, length in enumerate(_LENGTHS)]
    wrong = [_ids(number + 2, _WRONG, width) for number in range(2)]
    after = [_ids(number + 4, length, width) for number, length in enumerate(_AFTER)]
    pool = RaggedPool(make_prompt_cache(model))
    rows = []
    for prompt in prompts:
        caches = prefill_caches(make_prompt_cache(model))
        model(mx.array([prompt]), cache=caches)
        rows.append(pool.join(caches, len(prompt)))
    errors = []
    for windows in (wrong, after):
        # The wrong window was never booked: the next one overwrites it.
        longest = max(len(window) for window in windows)
        pool.begin(longest)
        ids = [window + window[-1:] * (longest - len(window)) for window in windows]
        logits = model(mx.array(ids), cache=pool.layers)
        for row, prompt, window in zip(rows, prompts, windows, strict=True):
            alone = make_prompt_cache(model)
            model(mx.array([prompt]), cache=alone)
            expected = model(mx.array([window]), cache=alone)[0].astype(mx.float32)
            found = logits[row.index, : len(window)].astype(mx.float32)
            errors.append(mx.max(mx.linalg.norm(found - expected, axis=-1) / mx.linalg.norm(expected, axis=-1)))
    largest = max(cast("list[float]", mx.stack(errors).tolist()))
    pool.clear()
    return largest


def _ids(seed: int, count: int, width: int) -> list[int]:
    return [(seed * 7919 + position * 104729 + 13) % width for position in range(count)]
