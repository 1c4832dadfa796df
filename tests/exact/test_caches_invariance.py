"""L1 for every kind of cache: drafts never change what a user sees, past a window's wrap and over recurrent state too."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import Result, Script, complete, fixed, generation, loaded_target

from draftwire.models import ModelError
from draftwire.sampling import Sampler
from draftwire.testing_kinds import CacheKind
from draftwire.testing_models import TINY_VOCAB, TinyKind, save_tiny_model
from target_service.params import Choosing

pytestmark = pytest.mark.exact

LOOSE = ("falcon_h1", "mamba2", "longcat_flash", "deepseek_v32")
"""mlx-lm computes a single row in another way than several: Mamba 2 scans in blocks, latent attention decompresses its keys.
Ids, text and counts are equal; logprobs agree to `TOLERANCE` (deepseek_v32: 4e-6 measured)."""
TOLERANCE = 1e-4
WINDOWS = {
    "gemma3": 8,
    "gpt_oss": 16,
    "ministral3": 64,
    "cohere2": 8,
    "llama4": 16,
    "recurrent_gemma": 8,
    "baichuan_m1": 16,
}
GREEDY = Choosing(top_logprobs=1)
# The filters make the target look for the token after a forward has been begun ahead, which is then taken back at times.
DRAWN = Choosing(sampler=Sampler(temperature=1.2, top_p=0.8, top_k=50, seed=11), top_logprobs=1)
SHORT = [10, 200, 33, 4, 97]
LONG = [(7 * i * i + 3 * i) % 256 for i in range(90)]


@pytest.mark.parametrize("kind", ["gemma3", *get_args(CacheKind)])
def test_drafts_never_change_what_a_user_sees(kind: TinyKind, tmp_path: Path) -> None:
    """Prompts shorter and longer than the window, 1 to 8 drafts, random acceptance, up to 200 tokens."""
    save_tiny_model(tmp_path / kind, kind, 7, context_length=512, sliding_window=WINDOWS.get(kind, 16))
    asyncio.run(_all_equal(tmp_path / kind, loose=kind in LOOSE))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_changes_the_text_but_drafts_do_not(bits: int, tmp_path: Path) -> None:
    """From the first token on, and the bytes that are charged are those of the bits."""
    save_tiny_model(tmp_path / "llama", "llama", 7, context_length=512, head_dim=32)
    asyncio.run(_all_equal(tmp_path / "llama", kv_bits=bits, kv_group_size=32))


async def _all_equal(model: Path, *, loose: bool = False, **settings: Any) -> None:
    async with loaded_target(model, **settings) as target:
        assert target.engine.rollback.kind
        if settings:
            values = 2 * 2 * 2 * 32
            assert target.parts.loaded.kv_bytes_per_token == values * settings["kv_bits"] // 8 + values // 32 * 8
        for prompt, choosing, tokens in ((SHORT, GREEDY, 200), (LONG, DRAWN, 80)):
            wanted = generation(prompt, choosing=choosing, max_tokens=tokens)
            plain = await complete(target, wanted)
            truth = [*prompt, *plain.ids]
            for drafts in (1, 3, 8):
                result = await complete(target, fixed(wanted, drafts), randomly_right(truth, drafts))
                assert result.ids == plain.ids
                assert _same(result, plain, loose)
                assert result.counts.accepted > 0
                assert result.counts.rejected > 0
                assert result.counts.without_draft["cache"] == 0
        assert target.engine.slots == 0


def _same(result: Result, plain: Result, loose: bool) -> bool:
    if not loose:
        return result.visible == plain.visible
    pairs = zip(result.logprobs, plain.logprobs, strict=True)
    return replace(result, logprobs=()).visible == replace(plain, logprobs=()).visible and all(
        one is not None and other is not None and math.isclose(one.logprob, other.logprob, abs_tol=TOLERANCE)
        for one, other in pairs
    )


def randomly_right(truth: list[int], seed: int) -> Script:
    """A drafter that is right for a random while, silent now and then, and late now and then."""
    noise = random.Random(seed)

    def script(ids: list[int], drafts: int) -> list[int] | None:
        chance = noise.random()
        if chance < 0.15:
            return []
        if chance < 0.25 and drafts > 0:
            return None
        right = truth[len(ids) : len(ids) + abs(drafts)]
        kept = len(right) if noise.random() < 0.4 else noise.randrange(len(right) + 1)
        return right[:kept] + [(token + 1) % TINY_VOCAB for token in right[kept:]]

    return script


async def _serve(model: Path, **settings: Any) -> tuple[str, str]:
    async with loaded_target(model, **settings) as target:
        result = await complete(target, fixed(generation(SHORT, max_tokens=12), 4), lambda ids, drafts: [1] * drafts)
        assert result.counts.drafted == 0
        assert set(result.counts.without_draft) == {"cache"}
        return target.engine.rollback.kind, target.engine.rollback.reason


def test_a_cache_of_an_unknown_kind_is_served_without_drafts_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided at load, whatever a request asks for."""
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache

    class OddCache(KVCache):  # type: ignore[misc]
        def is_trimmable(self) -> bool:
            return False

    save_tiny_model(tmp_path / "odd", "llama", 7)
    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [OddCache() for _ in self.layers])
    kind, reason = asyncio.run(_serve(tmp_path / "odd"))
    assert (kind, reason) == ("", "its cache (OddCache) cannot take rejected drafts back")
    with pytest.raises(ModelError, match=r"OddCache.*--drafting auto"):
        asyncio.run(_serve(tmp_path / "odd", drafting="fixed"))


@pytest.mark.parametrize(
    ("kind", "sizes", "fault"),
    [
        ("gemma3", {}, "RotatingKVCache cannot be quantised"),
        ("lfm2", {}, "ArraysCache cannot be quantised"),
        ("llama", {"head_dim": 16}, "cannot use a quantised cache"),
    ],
)
def test_a_cache_without_a_quantised_form_is_refused_at_load(
    kind: TinyKind, sizes: dict[str, int], fault: str, tmp_path: Path
) -> None:
    """Sliding windows, recurrent state, and heads that no group of values divides."""
    save_tiny_model(tmp_path / kind, kind, 7, **sizes)
    with pytest.raises(ModelError, match=f"{fault}.*leave --kv-bits out"):
        asyncio.run(_serve(tmp_path / kind, kv_bits=4, kv_group_size=32))


def test_layers_that_quantise_differently_are_served_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    save_tiny_model(tmp_path / "mixed", "llama", 7, head_dim=32)
    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [KVCache(), QuantizedKVCache(32, 8)])
    kind, reason = asyncio.run(_serve(tmp_path / "mixed"))
    assert not kind
    assert "quantise their caches differently" in reason
