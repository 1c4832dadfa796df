"""Drafting in company: what a session gets does not depend on who shares its forwards, when they come and go, what they
commit, supersede, cancel or release, nor on what former sessions left in the prefix cache."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

from draft_service.calls import Outcome, Round
from draft_service.history import Advance, History
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits, SessionTable
from draft_service.sources.base import Ask, DraftEnd, Guess, SessionSpec
from draft_service.sources.benches import Bench, Benches, PooledKv
from draft_service.sources.model import ModelDrafter, ModelSource
from draft_service.sources.together import Together
from draftwire.compute import ComputeThread
from draftwire.errors import NotFound, Superseded
from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model
from draftwire.wire import prefix_hash

pytestmark = pytest.mark.exact

SAMPLERS = (
    Sampler(),
    Sampler(),
    Sampler(temperature=0.8, seed=11),
    Sampler(temperature=1.0, top_p=0.9, top_k=20, seed=3),
    Sampler(temperature=0.7, min_p=0.02, seed=2**63),
)
CONTEXT = 128


def advance(ids: Sequence[int], base: int = 0) -> Advance:
    return Advance(base_length=base, ids=tuple(ids[base:]), prefix_hash=prefix_hash(ids))


def history(ids: Sequence[int]) -> History:
    made = History()
    made.apply(advance(ids))
    return made


@dataclass(eq=False)
class Desk:
    """Rounds over a tiny model whose sessions share forwards, and the same model for answers alone."""

    compute: ComputeThread
    source: ModelSource
    rounds: Rounds
    benches: Benches
    forwards: list[int] = field(default_factory=list)
    """Sessions that took part, a forward."""
    known: dict[Any, Guess] = field(default_factory=dict)

    async def alone(self, spec: SessionSpec, ids: Sequence[int], ask: Ask) -> Guess:
        """What a drafter of its own, without any history, answers."""
        key = (spec.sampler, spec.prompt_length, spec.end_ids, spec.max_length, tuple(ids), ask)
        if key not in self.known:
            self.known[key] = await self.compute.run(lambda: self._alone(spec, ids, ask))
        return self.known[key]

    def _alone(self, spec: SessionSpec, ids: Sequence[int], ask: Ask) -> Guess:
        room = spec.max_length - len(ids) - len(ask.assumed)
        if room <= 0:
            return Guess(end=DraftEnd.MAX_DRAFT_TOKENS)
        drafter = ModelDrafter(
            self.source._model, spec, vocabulary=TINY_VOCAB, context_length=CONTEXT, prefill_step_size=1000
        )
        drafter.advance(ids)
        guess = drafter.draft(replace(ask, limit=min(ask.limit, room)), lambda: False)
        drafter.close()
        return guess


@asynccontextmanager
async def desk(
    kind: TinyKind, monkeypatch: pytest.MonkeyPatch, *, prompt_cache_bytes: int = 0, tight: bool = False
) -> AsyncIterator[Desk]:
    """tight: pools have nothing beyond what their sessions are charged."""
    compute = ComputeThread()

    def load() -> ModelSource:
        loaded = make_tiny_model(kind, seed=3, context_length=CONTEXT, sliding_window=32)
        return ModelSource(loaded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f", prefill_step_size=24)

    source = await compute.run(load)
    assert source.batching == "ragged"
    limits = SessionLimits(sessions=16, kv_bytes=2**30, lease_s=60.0, max_lease_s=60.0, idle_s=0.0)
    rounds = Rounds(
        SessionTable(limits, time.monotonic),
        source,
        compute,
        time.monotonic,
        max_draft_tokens=12,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    together = rounds._computing
    assert isinstance(together, Together)
    assert together._benches is not None
    if tight:
        monkeypatch.setattr(together, "spare", lambda nbytes: None)
    at = Desk(compute, source, rounds, together._benches)
    forward = Bench.forward

    def watched(bench: Bench, work: Sequence[tuple[PooledKv, list[int]]], width: int) -> mx.array:
        at.forwards.append(len(work))
        logits = forward(bench, work, width)
        # Memory: rectangles are never larger than what their sessions are charged and what nobody is.
        paid = sum(kv.charged_bytes for one in at.benches._benches for kv in one.seated)
        assert at.benches.nbytes <= paid + max(0, at.benches.spare_bytes)
        return logits

    monkeypatch.setattr(Bench, "forward", watched)
    try:
        yield at
    finally:
        monkeypatch.setattr(Bench, "forward", forward)
        await rounds.close()
        assert (len(rounds.table), rounds.table.kv_bytes, rounds.prefixes.nbytes, at.benches.nbytes) == (0, 0, 0, 0)
        await compute.run(source.close)
        await asyncio.to_thread(compute.close)


class Writer:
    """A target with one session after another that does what a target may do, and checks each answer."""

    def __init__(self, at: Desk, number: int, dice: random.Random) -> None:
        self.at = at
        self.dice = dice
        self.name = f"session-{number:012}"
        self.number = 0
        self.checked = 0
        self.reused = 0
        self.text: list[int] = []
        self.sent = 0
        self.spec = self._spec([])

    def _spec(self, text: Sequence[int]) -> SessionSpec:
        dice = self.dice
        return SessionSpec(
            prompt_length=max(1, len(text)),
            max_length=max(len(text) + 8, dice.choice([CONTEXT, CONTEXT, CONTEXT + 30, len(text) + 20])),
            sampler=dice.choice(SAMPLERS),
            end_ids=frozenset(dice.sample(range(TINY_VOCAB), 6)),
            cache_salt=dice.choice(["", "salt"]),
            cached=dice.random() < 0.9,
        )

    def some(self, most: int, least: int = 0) -> list[int]:
        return [self.dice.randrange(TINY_VOCAB) for _ in range(self.dice.randint(least, most))]

    async def open(self) -> None:
        if len(self.text) > CONTEXT - 20 or self.dice.random() < 0.4:
            self.text = []
        self.text += self.some(self.dice.choice([3, 20, 60]), least=1)
        self.spec, self.number, self.sent = self._spec(self.text), 0, len(self.text)
        outcome = await self.at.rounds.prefill(
            "me", self.name, spec=self.spec, history=history(self.text), lease_s=None
        )
        assert outcome.committed_length == len(self.text)
        self.reused += outcome.reused_length

    def question(self) -> tuple[list[int], Ask, Round]:
        dice = self.dice
        assumed = self.some(4) if dice.random() < 0.2 else []
        ask = Ask(assumed=tuple(assumed), limit=dice.randint(1, 12), want_confidences=dice.random() < 0.3)
        self.number += 1
        asked = Round(
            session_id=self.name,
            number=self.number,
            advance=advance(self.text, self.sent),
            ask=ask,
            time_budget_s=dice.choice([None, None, None, 0.0, 0.01]),
        )
        return list(self.text), ask, asked

    async def check(self, ids: list[int], ask: Ask, asked: Round, outcome: Outcome) -> Guess:
        """The ids are the same ones; probabilities may differ in their last bits where the masks take another path."""
        truth = await self.at.alone(self.spec, ids, ask)
        guess = outcome.guess
        assert outcome.committed_length == len(ids)
        if guess.end is DraftEnd.TIME_BUDGET:
            assert asked.time_budget_s is not None
            assert guess.ids == truth.ids[: len(guess.ids)]
        else:
            assert (guess.ids, guess.end) == (truth.ids, truth.end)
        assert guess.confidences == pytest.approx(truth.confidences[: len(guess.confidences)], rel=1e-5)
        self.checked += 1
        return guess

    async def round(self) -> None:
        dice = self.dice
        ids, ask, asked = self.question()
        call = asyncio.ensure_future(self.at.rounds.draft("me", asked))
        for _ in range(dice.choice([0, 0, 0, 1, 5, 30])):
            await asyncio.sleep(0)
        fate = dice.random()
        if fate < 0.1:
            call.cancel()
            # It may have committed or not: what is sent twice must agree.
            await asyncio.wait([call])
            return
        if fate < 0.2:
            # The newer round may come before the older one is answered; the ids of both stay.
            self.sent = len(self.text)
            self.text += self.some(3, least=1)
            newer_ids, newer_ask, newer = self.question()
            outcomes = await asyncio.gather(call, self.at.rounds.draft("me", newer), return_exceptions=True)
            if not isinstance(outcomes[0], Superseded):
                assert isinstance(outcomes[0], Outcome)
                await self.check(ids, ask, asked, outcomes[0])
            assert isinstance(outcomes[1], Outcome)
            guess = await self.check(newer_ids, newer_ask, newer, outcomes[1])
            ask = newer_ask
        elif fate < 0.25:
            self.at.rounds.table.release("me", [self.name])
            # It may have been answered just before.
            with suppress(NotFound):
                await self.check(ids, ask, asked, await call)
            await self.open()
            return
        else:
            guess = await self.check(ids, ask, asked, await call)
        self.sent = len(self.text)
        if ask.assumed and dice.random() < 0.5:
            return
        accepted = [*ask.assumed, *guess.ids][: dice.randint(0, 12)]
        self.text += [*accepted, *self.some(1, least=1)]
        if dice.random() < 0.1:
            self.text += self.some(30)

    async def run(self, rounds: int) -> None:
        await self.open()
        for _ in range(rounds):
            if len(self.text) + 8 > self.spec.max_length or self.dice.random() < 0.08:
                if self.dice.random() < 0.7:
                    self.at.rounds.table.release("me", [self.name])
                await self.open()
            await self.round()
        self.at.rounds.table.release("me", [self.name])


@pytest.mark.parametrize(
    ("kind", "tight"), [("llama", False), ("llama", True), ("qwen3", False), ("gemma3", False), ("gemma3", True)]
)
async def test_company_and_cache_change_no_draft(kind: TinyKind, tight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random mixes of 1 to 8 sessions: each answer is that of a drafter of its own that has just read the ids."""
    dice = random.Random(f"drafts of {kind}")
    async with desk(kind, monkeypatch, prompt_cache_bytes=2**22, tight=tight) as at:
        checked = reused = mixes = 0
        while mixes < 6 or max(at.forwards) < (3 if tight else 5) or reused < 100 or checked <= 100:
            mixes += 1
            assert mixes <= 30, f"the mixes do not test what they are for: {max(at.forwards)} {reused}"
            writers = [Writer(at, number, dice) for number in range(dice.choice([1, 2, 4, 8, 8]))]
            async with asyncio.TaskGroup() as group:
                for writer in writers:
                    group.create_task(writer.run(dice.randint(3, 16)))
            checked += sum(writer.checked for writer in writers)
            reused += sum(writer.reused for writer in writers)
        await at.rounds.idle()
        await at.compute.run(lambda: None)
        assert at.benches.nbytes == 0
        assert checked > 100
