"""L1, L3 and L5 under constraints: drafts, those that the grammar forces among them, change nothing that a user sees."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from harness import Result, Script, ScriptedSource, auto, complete, drain, fixed, generation, loaded_target

from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_END_IDS, TinyKind, save_tiny_model
from target_service.core import Target
from target_service.drafts import Lost
from target_service.params import Choosing, Constraint, Generation, Penalties

pytestmark = pytest.mark.exact

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 999},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "done": {"type": "boolean"},
    },
    "required": ["name", "size", "kind", "done"],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [
            {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</n>"}
        ],
    },
}
CONSTRAINTS = {
    "json_schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "json_object": Constraint("json_object", any_whitespace=True),
    "regex": Constraint("regex", r"[a-m]{2,9}(-[0-9]+){1,3}!"),
    "ebnf": Constraint("ebnf", 'root ::= "[" item ("," item)* "]"\nitem ::= "one" | "twenty" | [0-9] root'),
    "choice": Constraint("choice", values=("yes", "no", "not at all", "nothing")),
    "structural_tag": Constraint("structural_tag", json.dumps(TAG)),
}
CHOOSINGS = {
    "greedy": Choosing(top_logprobs=3),
    "warm": Choosing(
        sampler=Sampler(temperature=1.0, top_p=0.95, seed=11),
        penalties=Penalties(repetition=1.2, presence=0.3),
        logit_bias={34: 2.0, 97: -100.0},
        min_tokens=5,
        banned=frozenset(TINY_END_IDS),
        top_logprobs=2,
    ),
    "unfiltered": Choosing(sampler=Sampler(temperature=1.0, seed=5)),
}
PROMPT = [10, 200, 33, 4, 97, 120, 33, 4, 61]
FENCE = list(b"```json\n")
WIDTH = 259


def scripts(truth: list[int]) -> Iterator[tuple[str, Script]]:
    """Drafters by name; truth is what plain decoding commits."""
    noise = random.Random(3)

    def perfect(ids: list[int], drafts: int) -> list[int]:
        return truth[len(ids) : len(ids) + drafts]

    def anything(ids: list[int], drafts: int) -> list[int] | Lost | None:
        choice = noise.randrange(5)
        if choice == 0:
            return Lost("script")
        if choice == 1 and drafts > 0:
            return None
        return [noise.randrange(WIDTH) if noise.random() < 0.3 else token for token in perfect(ids, abs(drafts))]

    yield "none", lambda ids, drafts: []
    yield "perfect", perfect
    # The answer, an end id, and text behind it: a window that reaches past the end of the grammar.
    yield "beyond", lambda ids, drafts: [*truth, TINY_END_IDS[1], 120, 121][len(ids) : len(ids) + drafts + 3]
    yield "fence", lambda ids, drafts: FENCE[:drafts]
    yield "specials", lambda ids, drafts: [257, 256, 258][:drafts]
    yield "late", lambda ids, drafts: None if drafts > 0 else perfect(ids, -drafts)
    yield "anything", anything


def wanted(kind: str, choosing: Choosing, max_tokens: int = 48) -> Generation:
    made = generation(
        PROMPT,
        choosing=choosing,
        max_tokens=max_tokens,
        end_ids=frozenset(TINY_END_IDS),
        min_tokens=choosing.min_tokens,
    )
    return replace(made, constraint=CONSTRAINTS[kind])


def reconcile(result: Result) -> None:
    """L5, forced drafts counted apart."""
    counts = result.counts
    assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    assert counts.rejected >= 0
    assert counts.forced_accepted <= counts.forced <= counts.drafted
    assert sum(counts.drafted_by_position) == counts.drafted
    assert sum(counts.accepted_by_position) == counts.accepted
    assert counts.forwards == counts.spec_rounds + sum(counts.without_draft.values())


@pytest.mark.parametrize(("model", "batching"), [("llama", "auto"), ("gemma3", "off"), ("qwen3_next", "off")])
def test_drafts_change_nothing_under_a_constraint(model: TinyKind, batching: str, tmp_path: Path) -> None:
    """Every kind of grammar and sampler, each drafter, 0 to 8 drafts, in the pool and one by one, with every rollback."""
    asyncio.run(_all_equal(model, batching, tmp_path))


async def _all_equal(model: TinyKind, batching: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / model, model, 7, context_length=128, sliding_window=32)
    ends, numbers = set(), cycle(range(1, 9))
    async with loaded_target(folder, batching=batching) as target:
        for kind in CONSTRAINTS:
            for name in CHOOSINGS if batching == "auto" else ("warm",):
                asked = wanted(kind, CHOOSINGS[name])
                plain = await complete(target, asked)
                assert plain.counts.drafted == 0
                ends.add(plain.finish[0])
                forced = 0
                for drafter, script in scripts(PROMPT + list(plain.ids)):
                    for drafts in (next(numbers), next(numbers)) if batching == "auto" else (next(numbers),):
                        result = await complete(target, fixed(asked, drafts), script)
                        assert result.visible == plain.visible, f"{kind}, {name}, {drafter}, {drafts} drafts"
                        reconcile(result)
                        forced += result.counts.forced
                result = await complete(target, auto(asked), script)
                assert result.visible == plain.visible, f"{kind}, {name}, auto"
                reconcile(result)
                assert forced or kind not in ("json_schema", "choice", "ebnf"), f"{kind} forced nothing"
        assert target.engine.slots == 0
    assert "grammar_end" in ends


def test_constrained_and_free_requests_share_forwards(tmp_path: Path) -> None:
    """A batch of both gives each what it gets alone, and its cache is that of a fresh prefill, with hostile drafters."""
    asyncio.run(_mixed(tmp_path))


async def _mixed(tmp_path: Path) -> None:
    dice = random.Random(4)
    folder = save_tiny_model(tmp_path / "m", "llama", 7, context_length=160)
    async with loaded_target(folder, max_running=6) as target:
        asked = [wanted(kind, CHOOSINGS[name], 40) for kind, name in zip(CONSTRAINTS, [*CHOOSINGS] * 2, strict=True)]
        asked += [replace(one, constraint=None) for one in asked[:3]]
        plain = [await complete(target, one) for one in asked]
        truths = {f"{n}": PROMPT + list(one.ids) for n, one in enumerate(plain)}

        def source(sequence: Any) -> ScriptedSource:
            return ScriptedSource(dice.choice(list(scripts(truths[sequence.generation.request_id])))[1])

        target.scheduler.open_source = source
        widest = 0
        forward = target.engine.forward

        async def watched(windows: Any, chunks: Any = None) -> Any:
            nonlocal widest
            widest = max(widest, len(windows))
            return await forward(windows, chunks)

        target.engine.forward = watched  # type: ignore[method-assign]
        for _ in range(6):
            order = dice.sample(range(len(asked)), len(asked))
            results = await asyncio.gather(*(_one(target, asked[n], f"{n}", dice) for n in order))
            for n, result in zip(order, results, strict=True):
                assert result.visible == plain[n].visible, n
                reconcile(result)
        assert widest >= 4
        assert target.engine.slots == 0


async def _one(target: Target, asked: Generation, name: str, dice: random.Random) -> Result:
    made = replace(asked, request_id=name)
    made = dice.choice([made, fixed(made, 2), fixed(made, 7), auto(made)])
    return await drain(target.submit(made, await target.matcher(made)))
