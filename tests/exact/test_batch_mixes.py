"""L1, L3 and L6 for random mixes of sequences, as a property: whoever comes, leaves, drafts or fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import Result, ScriptedSource, auto, complete, drain, fixed, generation, loaded_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batch_invariance import CHOOSINGS, Case, Company, script

from draftwire.testing_models import TINY_END_IDS, save_tiny_model
from target_service.batch_engine import BatchEngine
from target_service.core import Target
from target_service.drafts import DraftSource, NoDrafts
from target_service.params import Generation
from target_service.sequence import Sequence as Request
from target_service.window import Choice, Window

pytestmark = pytest.mark.exact

DRAFTERS = ("none", "right", "wrong", "half", "late", "anything")


@dataclass(frozen=True, slots=True)
class Member:
    """One sequence of a mix."""

    prompt: tuple[int, ...]
    choosing: int
    seed: int
    max_tokens: int
    drafter: str
    drafting: int
    """Drafts a round; 0 leaves the number to the controller."""
    starts: int
    """Tick of its arrival."""
    leaves: int | None
    """Ticks until it is cancelled."""
    reads: bool
    """Its whole prompt, though it was seen before."""

    def wanted(self) -> Generation:
        choosing = CHOOSINGS[self.choosing]
        sampler = choosing.sampler
        if not sampler.greedy:
            choosing = replace(choosing, sampler=replace(sampler, seed=self.seed))
        return generation(self.prompt, choosing=choosing, max_tokens=self.max_tokens, end_ids=frozenset(TINY_END_IDS))


MEMBERS = st.builds(
    Member,
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=60).map(tuple),
    choosing=st.integers(0, len(CHOOSINGS) - 1),
    seed=st.integers(0, 2**32 - 1),
    max_tokens=st.integers(1, 24),
    drafter=st.sampled_from(DRAFTERS),
    drafting=st.sampled_from([0, 0, 0, 1, 3, 7]),
    starts=st.integers(0, 12),
    reads=st.booleans(),
    leaves=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
)


class Mix:
    """Runs members at once; the engine's forward may be made to fail at one tick."""

    def __init__(self, target: Target, company: Company, fails_at: int | None) -> None:
        self.target = target
        self.company = company
        self.fails_at = fails_at
        self.failed = False
        self._forward = company._forward

    async def forward(
        self, windows: Sequence[Window], chunks: Mapping[int, Sequence[int]] | None = None
    ) -> list[Choice]:
        """The engine's, but for one tick of several, whose arrays it loses."""
        if self.fails_at is not None and self.company.ticks >= self.fails_at and not self.failed and len(windows) > 1:
            self.failed = True
            engine = self.target.engine

            def fail() -> None:
                engine._lose_all()  # type: ignore[attr-defined]
                for slot in (*(window.slot for window in windows), *(chunks or ())):
                    engine._slots[slot].lost = True
                raise RuntimeError("a kernel")

            await engine._compute.run(fail)
        return await self._forward(windows, chunks)


async def _run(target: Target, members: Sequence[Member], fails_at: int | None, dice: random.Random) -> None:
    target.scheduler.open_source = lambda _: NoDrafts()
    cases = []
    for member in members:
        wanted = member.wanted()
        cases.append(Case(wanted, await complete(target, wanted)))
    company = Company(target, dice)
    mix = Mix(target, company, fails_at)
    company._forward = mix.forward  # type: ignore[method-assign]
    company.target.engine.forward = company.forward  # type: ignore[method-assign]
    try:
        async with asyncio.TaskGroup() as group:
            for number, (member, case) in enumerate(zip(members, cases, strict=True)):
                group.create_task(_one(company, number, member, case))
    finally:
        target.engine.forward = mix._forward  # type: ignore[method-assign]
    while target.scheduler.running or target.scheduler.queued:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    engine = target.engine
    assert isinstance(engine, BatchEngine)
    await engine._compute.run(lambda: None)
    assert (engine.slots, engine.pool_bytes) == (0, 0)


async def _one(company: Company, number: int, member: Member, case: Case) -> None:
    scheduler = company.target.scheduler
    async with company._ticked:
        await company._ticked.wait_for(lambda: company.ticks >= member.starts or not scheduler.running)
    wanted = replace(case.wanted, request_id=f"{number}", cache_disabled=member.reads)
    source: DraftSource = NoDrafts()
    if member.drafter != "none":
        source = ScriptedSource(script(member.drafter, case.truth, company.dice))
        wanted = fixed(wanted, member.drafting) if member.drafting else auto(wanted)
    company._sources[wanted.request_id] = source
    sequence: Request = company.target.submit(wanted)
    company._requests[id(sequence)] = sequence
    if member.leaves is not None:
        until = company.ticks + member.leaves
        async with company._ticked:
            await company._ticked.wait_for(lambda: company.ticks >= until or not scheduler.running)
        scheduler.cancel(sequence)
    else:
        result: Result = await drain(sequence)
        assert result.visible == case.plain.visible, member
        counts = result.counts
        assert counts.drafted == counts.accepted + counts.rejected + counts.cut
    async with company._ticked:
        company._ticked.notify_all()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_any_mix_gives_each_what_it_gets_alone(
    kind: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 8 sequences, the controller in charge of half of them, and in half of the mixes a forward that fails; also where the
    longer ones stay beside the pool."""
    if beside:
        monkeypatch.setattr("target_service.batch_engine._MOST_COPIED", 30)
        monkeypatch.setattr("draftwire.ragged.CAPACITY_STEP", 16)
    save_tiny_model(tmp_path / kind, kind, 7, context_length=128, sliding_window=32)  # type: ignore[arg-type]
    runner = asyncio.Runner()
    loaded = loaded_target(tmp_path / kind, prefill_step_size=24)
    target = runner.run(loaded.__aenter__())
    failures: list[bool] = []

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        members=st.lists(MEMBERS, min_size=1, max_size=8),
        fails_at=st.one_of(st.none(), st.integers(0, 10)),
        seed=st.integers(0, 2**32),
    )
    def check(members: list[Member], fails_at: int | None, seed: int) -> None:
        runner.run(_run(target, members, fails_at, random.Random(seed)))
        failures.append(fails_at is not None)

    try:
        check()
        assert any(failures)
    finally:
        runner.run(loaded.__aexit__(None, None, None))
        runner.close()
