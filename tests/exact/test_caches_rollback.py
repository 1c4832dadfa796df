"""L3: whatever was accepted, a cache agrees with a fresh prefill, and every row with a forward that has no cache at all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

from draftwire.caches import KvQuantisation, flat
from draftwire.loaded import LoadedModel
from draftwire.testing_kinds import CacheKind
from draftwire.testing_models import TINY_VOCAB, make_tiny_model
from target_service.caches import MOST_REPLAYED, ReplayCache

pytestmark = pytest.mark.exact

KINDS = ("llama", "gemma3", *get_args(CacheKind))
WINDOWED = ("gemma3", "gpt_oss", "ministral3", "cohere2", "llama4", "recurrent_gemma", "baichuan_m1")
CASES = [(kind, 8, 5) for kind in KINDS] + [(kind, window, 70) for kind in WINDOWED for window in (16, 64)]
TOKENS = 220
TOLERANCE = 2e-4
"""Of logits whose spread is about 10, in float32: rows are summed in another order than without a cache."""


@pytest.mark.parametrize(("kind", "window", "prompt"), CASES)
def test_any_pattern_of_acceptances_leaves_the_cache_true(kind: Any, window: int, prompt: int) -> None:
    """Windows of 1 to 9 rows, before, at and after the wrap, random acceptance, with and without a forward ahead."""
    loaded = make_tiny_model(kind, seed=3, sliding_window=window)
    noise = random.Random(f"{kind} {window}")
    ids = [noise.randrange(TINY_VOCAB) for _ in range(TOKENS)]
    oracle = loaded.model(_batch(ids))[0]
    go(Rounds(loaded, ids, oracle), prompt, noise)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_is_that_of_a_fresh_prefill(bits: int) -> None:
    """Within one quantisation step, though here bit for bit; the rows are those of plain steps with the same bits."""
    loaded = make_tiny_model("llama", seed=3, head_dim=32)
    noise = random.Random(bits)
    ids = [noise.randrange(TINY_VOCAB) for _ in range(TOKENS)]
    plain = Rounds(loaded, ids, None, KvQuantisation(bits, 32))
    oracle = mx.concatenate([plain.feed([token]) for token in ids])
    assert mx.max(mx.abs(oracle - loaded.model(_batch(ids))[0])).item() > 10 * TOLERANCE
    go(Rounds(loaded, ids, oracle, KvQuantisation(bits, 32)), 5, noise)


def go(run: Rounds, prompt: int, noise: random.Random) -> None:
    run.prefill(prompt)
    while run.kept < TOKENS - 12:
        run.round(noise.randrange(9), noise)
        if noise.random() < 0.1:
            run.compare_with_fresh_prefill()
    run.compare_with_fresh_prefill()
    assert run.rejected > 20


class Rounds:
    """Does with a cache what the engine does with it, over a text that is known."""

    def __init__(
        self, loaded: LoadedModel, ids: list[int], oracle: Any, quantisation: KvQuantisation | None = None
    ) -> None:
        self.quantisation = quantisation
        self.model = loaded.model
        self.ids = ids
        self.oracle = oracle
        self.cache = ReplayCache(loaded.model, quantisation)
        self.kept = 0
        self.rejected = 0

    def prefill(self, length: int) -> None:
        """Two chunks."""
        for chunk in (self.ids[: length // 2], self.ids[length // 2 : length]):
            self.feed(chunk)
        self.kept = length

    def feed(self, ids: Sequence[int]) -> Any:
        logits = self.model(_batch(ids), cache=self.cache.cache.layers)[0]
        self.cache.written(len(ids))
        self.cache.cache.evaluate()
        assert self.cache.cache.counted()
        return logits

    def round(self, drafts: int, noise: random.Random) -> None:
        """[pending, *drafts], of which a random number is right."""
        self.cache.truncate(self.kept)
        accepted = noise.randint(0, drafts) if noise.random() < 0.7 else drafts
        right = self.ids[self.kept : self.kept + 1 + accepted]
        wrong = [(token + 1) % TINY_VOCAB for token in self.ids[self.kept + 1 + accepted : self.kept + 1 + drafts]]
        if len(self.cache.replay) > MOST_REPLAYED and drafts:
            self.feed(self.cache.begin([], 0))
        fed = self.cache.begin([*right, *wrong], drafts)
        logits = self.feed(fed)[-1 - drafts :]
        _agree(logits[: 1 + accepted], self.oracle[self.kept : self.kept + 1 + accepted])
        self.kept += 1 + accepted
        self.rejected += len(wrong)
        if not drafts and noise.random() < 0.5:
            # A forward that is begun ahead and that nobody wants.
            self.cache.begin_ahead()
            self.feed([noise.randrange(TINY_VOCAB)])

    def compare_with_fresh_prefill(self) -> None:
        """Cached rows themselves: keys, values and states."""
        self.cache.truncate(self.kept)
        if self.cache.replay:
            self.feed(self.cache.begin([], 0))
        fresh = ReplayCache(self.model, self.quantisation)
        self.model(_batch(self.ids[: self.kept]), cache=fresh.cache.layers)
        fresh.written(self.kept)
        assert self.cache.length == self.cache.cache.length == self.kept
        for found, expected in zip(_rows(self.cache), _rows(fresh), strict=True):
            _agree(found, expected)


def _rows(cache: ReplayCache) -> Iterator[Any]:
    """Every array that the next forward could see, cut to what it may see of it."""
    for leaf in flat(cache.cache.layers):
        if isinstance(leaf, ArraysCache):
            yield from (array for array in leaf.cache if array is not None)
        else:
            # The next row sees itself and window - 1 rows before it.
            window = getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", None) or leaf.offset + 1
            seen = min(leaf.offset, window - 1)
            for array in leaf.keys_and_values():
                rows = array
                if isinstance(leaf, QuantizedKVCache):
                    rows = mx.dequantize(*array, group_size=leaf.group_size, bits=leaf.bits)
                yield rows[..., -seen:, :]


def _batch(ids: Sequence[int]) -> Any:
    return mx.array([list(ids)])


def _agree(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    if found.size:
        assert mx.max(mx.abs(found - expected)).item() <= TOLERANCE
