"""L1, L3 and L6 in company: what a sequence gets does not depend on who shares its forwards, when they come and go, and what
any drafter does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import Result, Script, ScriptedSource, auto, complete, drain, fixed, generation, loaded_target
from mlx_lm.models.cache import make_prompt_cache

from draftwire.ragged import flat, prefill_caches
from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_END_IDS, save_tiny_model
from target_service.batch_engine import BatchEngine
from target_service.core import Target
from target_service.drafts import DraftSource, Lost, NoDrafts
from target_service.engine import CacheLost
from target_service.params import Choosing, Generation, Penalties
from target_service.sequence import Sequence as Request
from target_service.window import Choice, Window

pytestmark = pytest.mark.exact

WIDTH = 259
CHOOSINGS = (
    Choosing(),
    Choosing(),
    Choosing(top_logprobs=3),
    Choosing(sampler=Sampler(temperature=0.8, top_p=0.9, seed=21), top_logprobs=0),
    Choosing(sampler=Sampler(temperature=1.0, seed=3)),
    Choosing(penalties=Penalties(repetition=1.2, presence=0.4), logit_bias={5: 2.0}),
    Choosing(min_tokens=6, banned=frozenset(TINY_END_IDS)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it gets alone, without drafts."""

    wanted: Generation
    plain: Result

    @property
    def truth(self) -> list[int]:
        return [*self.wanted.prompt, *self.plain.ids]


def requests(dice: random.Random) -> list[Generation]:
    """One for each way of choosing, prompts of 1 to 70 tokens: shorter and longer than a sliding window and a chunk."""
    lengths = [1, 2, 9, 17, 31, 44, 70]
    dice.shuffle(lengths)
    return [
        generation(
            [dice.randrange(256) for _ in range(length)],
            choosing=choosing,
            max_tokens=dice.randrange(4, 40),
            end_ids=frozenset(TINY_END_IDS),
        )
        for length, choosing in zip(lengths, CHOOSINGS, strict=True)
    ]


def script(name: str, truth: list[int], dice: random.Random) -> Script:
    """What a drafter that knows the answer does with it."""

    def right(ids: list[int], drafts: int) -> list[int]:
        return truth[len(ids) : len(ids) + drafts]

    def wrong(ids: list[int], drafts: int) -> list[int]:
        return [(token + 1) % WIDTH for token in right(ids, drafts)]

    def half(ids: list[int], drafts: int) -> list[int]:
        return right(ids, drafts // 2) + [dice.randrange(WIDTH) for _ in range(drafts - drafts // 2)]

    def late(ids: list[int], drafts: int) -> list[int] | None:
        return None if drafts > 0 else right(ids, -drafts)

    def anything(ids: list[int], drafts: int) -> list[int] | Lost | None:
        if drafts < 0:
            return right(ids, -drafts)
        return dice.choice([right, wrong, half, late, lambda *_: Lost("script"), lambda *_: []])(ids, drafts)

    scripts: dict[str, Script] = {"right": right, "wrong": wrong, "half": half, "late": late, "anything": anything}
    return scripts[name]


class Company:
    """Runs a mix of cases at once, and looks at the caches while they run."""

    def __init__(self, target: Target, dice: random.Random) -> None:
        self.target = target
        self.dice = dice
        self.ticks = 0
        self.widest = 0
        self.checked = 0
        self.beside = 0
        """Ticks that read prompts as well."""
        self._ticked = asyncio.Condition()
        self._sources: dict[str, DraftSource] = {}
        self._requests: dict[int, Request] = {}
        self._forward = target.engine.forward
        target.scheduler.open_source = lambda sequence: self._sources[sequence.generation.request_id]

    async def forward(
        self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]] | None = None
    ) -> list[Choice]:
        """The engine's, with a look at a cache now and then."""
        if self.dice.random() < 0.15:
            engine = self.target.engine
            before = [engine._slots[window.slot] for window in windows]
            await self._check_cache(self.dice.choice(windows))
            # Another forward of this tick may have failed meanwhile, and all begun anew: the engine, asked at once, would have
            # found what is gone now.
            if any(one.lost or engine._slots[own.slot] is not one for own, one in zip(windows, before, strict=True)):
                raise CacheLost("while the test looked at a cache")
        choices = await self._forward(windows, chunks)
        self.ticks += 1
        self.widest = max(self.widest, len(windows))
        self.beside += bool(chunks)
        async with self._ticked:
            self._ticked.notify_all()
        return choices

    async def run(self, cases: Sequence[Case]) -> None:
        """Every case begins at a tick of its own; some are cancelled on the way."""
        self.target.engine.forward = self.forward  # type: ignore[method-assign]
        spread = self.dice.choice([3, 20])
        try:
            async with asyncio.TaskGroup() as group:
                for number, case in enumerate(cases):
                    group.create_task(
                        self._one(number, case, starts=self.ticks + (number and self.dice.randrange(spread)))
                    )
        finally:
            self.target.engine.forward = self._forward  # type: ignore[method-assign]

    async def _one(self, number: int, case: Case, starts: int) -> None:
        async with self._ticked:
            # Nobody may be left to tick: then it is time as well.
            await self._ticked.wait_for(lambda: self.ticks >= starts or not self.target.scheduler.running)
        name = f"{number}"
        # Without the prefix cache it reads its prompt again, beside the others' windows.
        wanted = replace(case.wanted, request_id=name, cache_disabled=self.dice.random() < 0.5)
        drafter = self.dice.choice(["none", "right", "wrong", "half", "late", "anything"])
        if drafter == "none":
            self._sources[name] = NoDrafts()
        else:
            self._sources[name] = ScriptedSource(script(drafter, case.truth, self.dice))
            wanted = auto(wanted) if self.dice.random() < 0.3 else fixed(wanted, self.dice.choice([1, 2, 3, 5, 8]))
        sequence = self.target.submit(wanted)
        self._requests[id(sequence)] = sequence
        if self.dice.random() < 0.2:
            until = self.ticks + self.dice.randrange(12)
            async with self._ticked:
                await self._ticked.wait_for(lambda: self.ticks >= until or not self.target.scheduler.running)
            self.target.scheduler.cancel(sequence)
            return
        result = await drain(sequence)
        async with self._ticked:
            self._ticked.notify_all()
        assert result.visible == case.plain.visible, f"{drafter} with {wanted.drafting}"
        counts = result.counts
        assert counts.drafted == counts.accepted + counts.rejected + counts.cut

    async def _check_cache(self, window: Window) -> None:
        """L3: the rows of a slot are those of a fresh prefill of committed[:-1]."""
        engine = self.target.engine
        sequence = next(one for one in self._requests.values() if one.slot == window.slot)
        ids = sequence.ledger.ids[:-1]
        slot = engine._slots[window.slot]
        cache = await engine.cached_rows(window.slot)
        if slot.lost:
            return
        assert cache.length == len(ids)
        if ids:
            await engine._compute.run(lambda: _compare(engine._model, cache.layers, ids))
            self.checked += 1


def _compare(model: Any, found: Sequence[Any], ids: Sequence[int]) -> None:
    fresh = prefill_caches(make_prompt_cache(model))
    mx.eval(model(mx.array([list(ids)]), cache=fresh))
    for have, want in zip(flat(found), flat(fresh), strict=True):
        for name in ("keys", "values"):
            ours, theirs = getattr(have, name)[:, :, : len(ids)], getattr(want, name)[:, :, : len(ids)]
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_company_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Random mixes of 1 to 8 sequences: each completion is that of the same request alone with drafts off."""
    asyncio.run(_mixes(kind, tmp_path))


async def _mixes(kind: str, tmp_path: Path) -> None:
    dice = random.Random(f"company of {kind}")
    save_tiny_model(tmp_path / kind, kind, 7, context_length=128, sliding_window=32)  # type: ignore[arg-type]
    async with loaded_target(tmp_path / kind, prefill_step_size=24) as target:
        engine = target.engine
        assert isinstance(engine, BatchEngine), engine.batching
        cases = [Case(wanted, await complete(target, wanted)) for wanted in requests(dice)]
        company = Company(target, dice)
        mixes = 0
        while mixes < 12 or company.widest < 5 or company.checked < 20 or company.beside < 20:
            mixes += 1
            assert mixes <= 100, "the mixes do not test what they are for"
            await company.run(dice.choices(cases, k=dice.randint(1, 8)))
            while target.scheduler.running or target.scheduler.queued:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            await engine._compute.run(lambda: None)
            assert (engine.slots, engine.pool_bytes) == (0, 0)
