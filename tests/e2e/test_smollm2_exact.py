"""SmolLM2 with --numerics exact and OpenBLAS: drafted and plain, alone and in company, equal to the last bit."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from dataclasses import replace

import pytest
import structlog
from harness import Result, Script, ScriptedSource, complete, drain, fixed, generation, loaded_target
from smollm2_prompts import PROMPTS

from draftwire.models import is_pulled
from draftwire.sampling import Sampler
from target_service.core import Target
from target_service.params import Choosing, Generation

pytestmark = pytest.mark.model

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

TOKENS = 20
CHOOSINGS = (
    Choosing(top_logprobs=5),
    Choosing(sampler=Sampler(temperature=0.8, top_p=0.95, seed=1 << 40), top_logprobs=5),
    Choosing(top_logprobs=5),
)
"""The copied prompt, a question, and the long letter: its answer begins at 1,024 positions with others far below."""


def requests(target: Target) -> list[Generation]:
    tokenizer = target.parts.tokenizer
    texts = [PROMPTS[0][1], PROMPTS[1][1], PROMPTS[-1][1] * 3]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts
    ]
    prompts[-1] = prompts[-1][-1010:]
    return [
        generation(prompt, choosing=choosing, max_tokens=TOKENS)
        for prompt, choosing in zip(prompts, CHOOSINGS, strict=True)
    ]


def drafter(wanted: Generation, plain: Result, dice: random.Random) -> Script:
    """Mostly right, so that windows of every width are accepted up to every row."""
    truth = [*wanted.prompt, *plain.ids]
    turns = itertools.count()

    def script(ids: list[int], drafts: int) -> list[int]:
        # The first is half right: a short text too meets both.
        right = dice.randint(0, drafts) if next(turns) else drafts // 2
        return truth[len(ids) : len(ids) + right] + [dice.randrange(49_152) for _ in range(drafts - right)]

    return script


async def test_drafts_and_company_change_no_bit_of_smollm2() -> None:
    """Three prompts, greedy and sampled, across a step in the number of keys: ids and the five best log-probabilities."""
    if not is_pulled("smollm2-135m"):
        pytest.skip("the default model is not here: run `draftwire models pull smollm2-135m`")
    dice = random.Random(1)
    async with loaded_target("smollm2-135m", numerics="exact", prefill_step_size=256) as target:
        wanted = requests(target)
        plains = [await complete(target, one) for one in wanted]
        assert all(len(plain.ids) == TOKENS for plain in plains)
        for drafts, one, plain in zip((7, 5, 2), wanted, plains, strict=True):
            alone = await complete(target, fixed(one, drafts), drafter(one, plain, dice))
            assert alone.visible == plain.visible
            assert alone.counts.accepted > 0 < alone.counts.rejected
        named = [replace(fixed(one, 3), request_id=f"{number}") for number, one in enumerate(wanted)]
        scripts = [drafter(one, plain, dice) for one, plain in zip(wanted, plains, strict=True)]
        target.scheduler.open_source = lambda sequence: ScriptedSource(scripts[int(sequence.generation.request_id)])
        together = await asyncio.gather(*(drain(target.submit(one)) for one in named))
        for result, plain in zip(together, plains, strict=True):
            assert result.visible == plain.visible
            assert result.counts.accepted > 0
