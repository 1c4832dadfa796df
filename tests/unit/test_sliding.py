"""A sliding window's cache shows each row exactly what mlx-lm shows it, however the length was reached."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from draftwire.sliding import SlidingKVCache


def seen(cache: Any, rows: int, window: int | None = None) -> list[list[int]]:
    """Writes rows whose keys are their positions. Returns the positions that each of them sees, in the order of columns."""
    mask = cache.make_mask(rows, window_size=window)
    keys = mx.arange(cache.offset, cache.offset + rows, dtype=mx.float32).reshape(1, 1, rows, 1)
    columns, values = cache.update_and_fetch(keys, -keys)
    assert mx.array_equal(columns, -values).item()
    positions = [int(position) for position in columns[0, 0, :, 0].tolist()]
    if mask is None:
        return [positions] * rows
    if isinstance(mask, str):
        assert mask == "causal"
        count = len(positions) - rows
        return [positions[: count + row + 1] for row in range(rows)]
    flags = mx.broadcast_to(mask, (rows, len(positions))).tolist()
    return [[p for p, flag in zip(positions, row, strict=True) if flag] for row in flags]


def right(length: int, rows: int, window: int, keep: int = 0) -> list[list[int]]:
    return [[q for q in range(p + 1) if q > p - (window - keep) or q < keep] for p in range(length, length + rows)]


@pytest.mark.parametrize(("window", "keep"), [(8, 0), (8, 3), (13, 0), (16, 4), (40, 0), (64, 1)])
def test_rows_see_the_window_in_the_order_of_time_after_any_rollback(window: int, keep: int) -> None:
    noise = random.Random(window)
    cache = SlidingKVCache(window, keep, slack=10)
    longest = 0
    for _ in range(300):
        length, rows = cache.offset, noise.choice([1, 1, 2, 3, 9])
        longest = max(longest, length)
        assert seen(cache, rows) == right(length, rows, window, keep)
        if noise.random() < 0.5:
            back = noise.choice([1, 1, 2, 10])
            floor = cache.lowest
            expected = min(back, cache.offset - floor)
            assert cache.trim(back) == expected
            assert floor <= max(0, longest - 10)
    assert cache.offset > 300
    assert cache.nbytes <= 2 * 4 * (window + 10 + 9 + 2 * max(16, window) + keep)


@pytest.mark.parametrize("window", [8, 16])
def test_without_rollbacks_it_agrees_with_mlx_lm(window: int) -> None:
    """Prompts shorter and longer than the window, then any windows; also where the model names a smaller window."""
    for prompt in (3, window, window + 1, 3 * window):
        for named in (None, window, window - 3):
            noise = random.Random(prompt)
            ours, theirs = SlidingKVCache(window), RotatingKVCache(window)
            for rows in [prompt, *(noise.choice([1, 1, 4]) for _ in range(30))]:
                assert seen(ours, rows, named) == [sorted(row) for row in seen(theirs, rows, named)]


def test_kept_first_rows_are_seen_as_by_mlx_lm_s_single_steps() -> None:
    ours, theirs = SlidingKVCache(8, 3), RotatingKVCache(8, 3)
    for _ in range(60):
        assert seen(ours, 1) == [sorted(row) for row in seen(theirs, 1)]


def test_what_has_left_for_good_cannot_be_taken_back() -> None:
    cache = SlidingKVCache(8, slack=10)
    for _ in range(100):
        seen(cache, 1)
    lowest = cache.lowest
    assert 0 < lowest <= 90
    assert cache.trim(100) == 100 - lowest
    assert cache.offset == lowest
    assert seen(cache, 4) == right(lowest, 4, 8)


def test_an_empty_cache_says_so() -> None:
    cache = SlidingKVCache(8)
    assert (cache.empty(), cache.nbytes, cache.trim(3), cache.size()) == (True, 0, 0, 0)
    seen(cache, 20)
    assert (cache.empty(), cache.size()) == (False, 8)
