"""L1: ids, text, finish reason, usage and logprobs are those of plain decoding, bit for bit, whatever the drafter does."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from harness import Result, Script, auto, complete, fixed, generation, loaded_target

from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_END_IDS, save_tiny_model
from target_service.drafts import Lost
from target_service.params import Choosing, Penalties

pytestmark = pytest.mark.exact

KINDS = ("llama", "qwen3", "gemma3", "qwen2", "phi3")
CHOOSINGS = {
    "greedy": Choosing(top_logprobs=3),
    "warm": Choosing(sampler=Sampler(temperature=0.7, top_p=0.9, seed=11), top_logprobs=0),
    "hot": Choosing(
        sampler=Sampler(temperature=1.3, top_k=30, min_p=0.01, seed=5),
        penalties=Penalties(repetition=1.2, presence=0.3, frequency=0.2),
        logit_bias={7: 3.0, 9: -100.0},
        top_logprobs=5,
    ),
    "whole history": Choosing(
        penalties=Penalties(repetition=1.3, window=0), min_tokens=8, banned=frozenset(TINY_END_IDS)
    ),
    "unfiltered": Choosing(sampler=Sampler(temperature=1.0, seed=2**63 + 1)),
}
PROMPT = [10, 200, 33, 4, 97, 120, 33, 4, 61]
WIDTH = 259


def drafters(truth: list[int], prompt_length: int) -> dict[str, Script]:
    """Scripts by name; truth is the committed ids of plain decoding."""
    noise = random.Random(3)

    def perfect(ids: list[int], drafts: int) -> list[int]:
        return truth[len(ids) : len(ids) + drafts]

    def wrong(ids: list[int], drafts: int) -> list[int]:
        return [(token + 1) % WIDTH for token in perfect(ids, drafts)] or [1] * drafts

    def half(ids: list[int], drafts: int) -> list[int]:
        right = perfect(ids, drafts)
        return right[: drafts // 2] + [(token + 1) % WIDTH for token in right[drafts // 2 :]]

    def mixed(ids: list[int], drafts: int) -> list[int] | Lost | None:
        choice = noise.randrange(5)
        if choice == 0:
            return Lost("script")
        if choice == 1 and drafts > 0:
            return None
        return [noise.randrange(WIDTH) if noise.random() < 0.3 else token for token in perfect(ids, abs(drafts))]

    def late(ids: list[int], drafts: int) -> list[int] | None:
        return None if drafts > 0 else perfect(ids, -drafts)

    return {
        "perfect": perfect,
        "wrong": wrong,
        "half right": half,
        "empty": lambda ids, drafts: [],
        "lost": lambda ids, drafts: Lost("script"),
        "late": late,
        "too many": lambda ids, drafts: perfect(ids, drafts) + [3] * 40,
        "anything": mixed,
    }


@pytest.mark.parametrize("name", CHOOSINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_never_change_what_a_user_sees(kind: str, name: str, tmp_path: Path) -> None:
    """For every drafter and number of drafts, fixed or chosen, the completion is the plain one."""
    asyncio.run(_all_equal(kind, name, tmp_path))


async def _all_equal(kind: str, name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / kind, kind, 7, context_length=128, sliding_window=64)
    async with loaded_target(tmp_path / kind) as target:
        wanted = generation(PROMPT, choosing=CHOOSINGS[name], max_tokens=40, end_ids=frozenset(TINY_END_IDS))
        plain = await complete(target, wanted)
        assert plain.counts.drafted == 0
        truth = PROMPT + list(plain.ids)
        for drafter, script in drafters(truth, len(PROMPT)).items():
            for drafts in (1, 3, 8):
                result = await complete(target, fixed(wanted, drafts), script)
                assert result.visible == plain.visible, f"{drafter}, {drafts} drafts"
                _reconcile(result)
                if drafter == "perfect":
                    assert result.counts.accepted == result.counts.drafted > 0
                    assert result.counts.forwards < plain.counts.forwards
                if drafter == "wrong":
                    assert result.counts.accepted == 0
            result = await complete(target, auto(wanted), script)
            assert result.visible == plain.visible, f"{drafter}, auto"
            _reconcile(result)
        assert target.engine.slots == 0


def _reconcile(result: Result) -> None:
    """L5."""
    counts = result.counts
    assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    assert counts.rejected >= 0
    assert sum(counts.drafted_by_position) == counts.drafted
    assert sum(counts.accepted_by_position) == counts.accepted
    assert sum(counts.histogram) == counts.spec_rounds
    assert counts.forwards == counts.spec_rounds + sum(counts.without_draft.values())
    ended_by_token = result.finish[0] in ("eos", "stop_token")
    assert result.completion_tokens == len(result.ids) + ended_by_token
    assert sum(result.from_draft) <= counts.accepted
