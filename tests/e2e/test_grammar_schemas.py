"""Schemas of our own generator, the real tokenizer: what ends by grammar parses and validates, the rest says it is cut.

112 of them, the first ones of 200: DRAFTWIRE_TEST_FULL=1 runs all.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import Result, auto, drain, generation, loaded_target
from jsonschema import Draft202012Validator
from schema_generator import schema

from draftwire.models import is_pulled, model_path
from draftwire.sampling import Sampler
from draftwire.testing_models import save_tiny_model
from draftwire.tokenizer import Tokenizer
from target_service.core import Target
from target_service.params import Choosing, Constraint

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
MAX_TOKENS = 160
FULL = os.environ.get("DRAFTWIRE_TEST_FULL") == "1"
VOCAB = 49_152


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny random model with SmolLM2's tokenizer, and a head that is wider than it."""
    if not is_pulled(MODEL):
        pytest.skip(f"the default model is not here: run `draftwire models pull {MODEL}`")
    folder = save_tiny_model(
        tmp_path_factory.mktemp("tiny") / "m", "llama", 7, vocab_size=VOCAB + 40, hidden_size=32, context_length=1024
    )
    real = model_path(MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
        if (real / name).exists():
            shutil.copy(real / name, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = sorted(Tokenizer(real).end_ids(real))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends, "pad_token_id": ends[0]}))
    yield folder
    shutil.rmtree(folder)


def test_random_weights_write_valid_objects(tiny: Path) -> None:
    """100 schemas, half of them sampled: the model knows nothing, the grammar everything."""
    asyncio.run(_check(str(tiny), "180", 180 if FULL else 100, fields=6))


def test_smollm2_writes_valid_objects() -> None:
    """12 schemas on the real model."""
    if not is_pulled(MODEL):
        pytest.skip(f"the default model is not here: run `draftwire models pull {MODEL}`")
    asyncio.run(_check(MODEL, "20", 20 if FULL else 12, fields=4))


async def _check(model: str, seed: str, count: int, *, fields: int) -> None:
    dice = random.Random(seed)
    schemas = [schema(dice, fields) for _ in range(count)]
    async with loaded_target(model, max_running=8, max_queued=count) as target:
        results = await asyncio.gather(*(_one(target, wanted, number) for number, wanted in enumerate(schemas)))
    ended = 0
    for wanted, result in zip(schemas, results, strict=True):
        where = f"{json.dumps(wanted)} -> {result.text}"
        assert result.completion_tokens <= MAX_TOKENS
        if result.finish[0] in ("grammar_end", "eos"):
            ended += 1
            assert result.grammar_complete is True, where
            Draft202012Validator(wanted).validate(json.loads(result.text))
        else:
            assert (result.finish[0], result.grammar_complete) == ("max_tokens", False), where
    assert ended >= 0.9 * count
    counts = [result.counts for result in results]
    assert sum(one.forced_accepted for one in counts) > 0
    for one in counts:
        assert one.drafted == one.accepted + one.rejected + one.cut


async def _one(target: Target, wanted: dict[str, Any], number: int) -> Result:
    tokenizer = target.parts.tokenizer
    prompt = tokenizer.encode(f"Object {number} as JSON, with {', '.join(wanted['properties'])}: ", True)
    sampler = Sampler(temperature=1.0, seed=number) if number % 2 else Sampler()
    asked = generation(
        prompt, max_tokens=MAX_TOKENS, choosing=Choosing(sampler=sampler), end_ids=target.parts.defaults.end_ids
    )
    # Random weights would write whitespace for ever, so it is allowed only now and then.
    constraint = Constraint("json_schema", json.dumps(wanted), any_whitespace=number % 20 == 3)
    made = replace(auto(asked), constraint=constraint)
    return await drain(target.submit(made, await target.matcher(made)))
