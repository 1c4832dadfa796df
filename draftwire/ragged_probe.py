"""Whether a model may run several sequences in one ragged forward: tried at load against mlx-lm's own cache.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from draftwire.beside import forward_beside, teach
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
    return _verdict(error, loaded, "rows of different lengths differ from the same rows alone")


def learn_beside(loaded: LoadedModel) -> str:
    """Teaches a model that `why_not` found fit to read prompts beside windows. Why it cannot be; "" where it has learnt it.

    Runs on the compute thread.
    """
    # Latent attention, for one, has products of its own between projections and attention: a call a segment.
    return _learn(loaded, once=False) if _learn(loaded, once=True) else ""


def _learn(loaded: LoadedModel, *, once: bool) -> str:
    """As `learn_beside`, in one of the ways that `teach` has."""
    try:
        untaught = teach(loaded.model, once=once)
    except ValueError as error:
        return str(error)
    try:
        reason = _verdict(
            _difference_beside(loaded.model, loaded.head_width),
            loaded,
            "a prompt beside windows differs from one alone",
        )
    except Exception as failure:
        reason = f"the model does not take prompts beside windows ({type(failure).__name__})"
    finally:
        mx.clear_cache()
    if reason:
        untaught()
    return reason


def _verdict(error: float, loaded: LoadedModel, what: str) -> str:
    tolerance = _TOLERANCE.get(loaded.dtype, _COARSE)
    return "" if error <= tolerance else f"{what} by {error:.1e}, over {tolerance:.0e}"


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
            expected = model(mx.array([window]), cache=alone)[0]
            errors.append(_distance(logits[row.index, : len(window)], expected))
    largest = max(cast("list[float]", mx.stack(errors).tolist()))
    pool.clear()
    return largest


def _difference_beside(model: Any, width: int) -> float:
    """As `_difference`: of windows in a pool and beside it, beside two prompts' second chunks, and of what those then say."""
    texts = [_ids(number, length, width) for number, length in enumerate((*_LENGTHS, 17, *_LENGTHS))]
    ends = [_ids(number + 5, length, width) for number, length in enumerate((2, 2, 2, *_AFTER))]
    alone, own, errors = [], [], []
    for text, end in zip(texts, ends, strict=True):
        caches = make_prompt_cache(model)
        model(mx.array([text]), cache=caches)
        alone.append(model(mx.array([end]), cache=caches)[0])
        alone[-1] = mx.concatenate([alone[-1], model(mx.array([end]), cache=caches)[0]])
        own.append(prefill_caches(make_prompt_cache(model)))
        model(mx.array([text]), cache=own[-1])
    pool = RaggedPool(make_prompt_cache(model))
    for caches, text in zip(own[:2], texts[:2], strict=True):
        pool.join(caches, len(text))
    pool.begin(2)
    chunks = [(end, caches) for end, caches in zip(ends[3:], own[3:], strict=True)]
    logits = forward_beside(model, mx.array(ends[:3]), [(2, pool.layers), (1, own[2])], chunks)
    for found, expected in zip(logits, alone[:3], strict=True):
        errors.append(_distance(found, expected[:2]))
    for (end, caches), expected in zip(chunks, alone[3:], strict=True):
        errors.append(_distance(model(mx.array([end]), cache=caches)[0], expected[len(end) :]))
    largest = max(cast("list[float]", mx.stack(errors).tolist()))
    pool.clear()
    return largest


def _distance(found: mx.array, expected: mx.array) -> mx.array:
    """The largest relative distance of two (rows, vocab) arrays' rows."""
    apart = found.astype(mx.float32) - expected.astype(mx.float32)
    return mx.max(mx.linalg.norm(apart, axis=-1) / mx.linalg.norm(expected.astype(mx.float32), axis=-1))


def _ids(seed: int, count: int, width: int) -> list[int]:
    return [(seed * 7919 + position * 104729 + 13) % width for position in range(count)]
