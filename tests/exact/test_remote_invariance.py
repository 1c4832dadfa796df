"""L1 and L2 over real sockets: whatever a drafter in another process does, a user sees plain decoding, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from service.conftest_draft import draft_service
from service.target_fixture import PATIENCE_S, Running, drafted, happens, reconciled, target_service, visible

from draft_service.sources.model import load_model_source
from draftwire import testing
from draftwire.compute import ComputeThread
from draftwire.errors import (
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PositionGap,
    Superseded,
    Unavailable,
    Unsupported,
)
from draftwire.events import Completion, DrafterState, FinishReason
from draftwire.testing import FakeDraftService, Script
from draftwire.testing_models import TINY_VOCAB, TinyKind, save_tiny_model

pytestmark = pytest.mark.exact

PROMPT = "The drafter was lost, and the text went on."
DRAFTING: dict[str, dict[str, Any]] = {
    "fixed 1": {"drafting": "fixed", "num_draft_tokens": 1},
    "fixed 4": {"drafting": "fixed", "num_draft_tokens": 4},
    "fixed 8": {"drafting": "fixed", "num_draft_tokens": 8},
    "auto": {"drafting": "auto"},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 48, "top_logprobs": 3},
    "warm": {"max_tokens": 48, "temperature": 0.8, "seed": 11, "top_logprobs": 0, "ignore_eos": True},
    "filtered": {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 12},
    "stopped": {"max_tokens": 48, "temperature": 0.8, "seed": 13, "stop": ["e", "\n"], "ignore_eos": True},
}
FAILURES = (
    Unavailable("gone"),
    Overloaded("full", retry_after_s=0.5),
    NotFound("lost", reason="SESSION_EVICTED"),
    Superseded("newer"),
    FailedPrecondition("differs", reason="PREFIX_MISMATCH"),
    PositionGap("gap"),
    PermissionDenied("no"),
    Unsupported("no"),
    InvalidRequest("no"),
    InternalError("oh"),
)
Scripts = dict[str, Callable[[Sequence[int]], Script]]
SCRIPTS: Scripts = {
    "perfect": testing.perfect,
    "wrong": testing.wrong,
    "half right": lambda truth: testing.half_right(truth, right=2),
    "nothing": lambda truth: testing.fixed(),
    "always the same": lambda truth: testing.fixed(7, 7, 7),
    "outside vocabulary": lambda truth: testing.outside_vocabulary(),
    "just outside vocabulary": lambda truth: testing.outside_vocabulary(TINY_VOCAB),
    "too many": lambda truth: testing.too_many(truth, count=200),
    "misplaced": lambda truth: testing.misplaced(testing.perfect(truth)),
    "other round": lambda truth: testing.other_round(testing.perfect(truth), shift=-1),
    "stale": lambda truth: testing.stale(testing.perfect(truth)),
    "hanging": lambda truth: testing.hang(),
    "now this, now that": lambda truth: _in_a_circle(
        testing.perfect(truth),
        testing.wrong(truth),
        testing.fixed(),
        testing.failing(NotFound("lost")),
        testing.half_right(truth),
        testing.hang(),
        testing.too_many(truth, count=70),
        testing.outside_vocabulary(),
        testing.failing(InternalError("oh")),
        testing.misplaced(testing.perfect(truth)),
        testing.failing(Overloaded("full")),
    ),
    **{f"fails with {type(error).__name__}": lambda truth, error=error: testing.failing(error) for error in FAILURES},  # type: ignore[misc]
}


def _in_a_circle(*scripts: Script) -> Script:
    async def script(asked: testing.Asked) -> testing.Reply:
        return await scripts[asked.number % len(scripts)](asked)

    return script


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=1024)


async def complete(target: Running, request: dict[str, Any], **drafting: Any) -> Completion:
    return await target.client.complete(PROMPT, **request, **drafting)


@pytest.mark.parametrize("name", SCRIPTS)
async def test_whatever_a_drafter_does_the_answer_is_the_plain_one(model: Path, name: str) -> None:
    fake = FakeDraftService()
    # Short where the drafter is silent; else long, for a busy machine is no fault of the drafter's.
    timeout_s = {"hanging": 0.05, "now this, now that": 0.3}.get(name, 5.0)
    # What fails does so whatever it is asked for.
    ways = {how: DRAFTING[how] for how in ("fixed 4", "auto")} if name.startswith("fails") else DRAFTING
    async with drafted(model, fake, draft_timeout_s=timeout_s) as (target, _):
        for request in REQUESTS.values():
            plain = await complete(target, request, drafting="off")
            assert plain.speculation.num_draft_tokens == 0
            truth = [*plain.token_ids, *([0] * 64)]
            for how, drafting in ways.items():
                fake.script = SCRIPTS[name](truth)
                began = len(fake.drafts)
                result = await asyncio.wait_for(complete(target, request, **drafting), PATIENCE_S)
                assert visible(result) == visible(plain), how
                reconciled(result)
                stats = result.speculation
                if name == "perfect" and how != "auto":
                    assert stats.num_draft_tokens > 0
                    # The script does not know the end token.
                    assert stats.num_rejected_draft_tokens <= (8 if result.finish_reason is FinishReason.EOS else 0)
                if name in ("wrong", "outside vocabulary", "just outside vocabulary", "misplaced", "other round"):
                    assert stats.num_accepted_draft_tokens == 0
                if name == "hanging":
                    # One question at a time, each given up at its deadline.
                    assert stats.num_draft_tokens == 0
                    assert len(fake.drafts) - began <= 48
        if name in ("perfect", "wrong", "half right", "too many"):
            assert fake.refused == [], "the target broke the contract"
            assert {len(asked.committed) >= len(PROMPT) for asked in fake.drafts} == {True}
        await target.at_rest()
        await happens(lambda: not fake.open_sessions)


async def test_late_answers_are_used_where_they_still_fit_and_never_where_not(model: Path) -> None:
    fake = FakeDraftService()
    async with drafted(model, fake, draft_timeout_s=5.0) as (target, _):
        request: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        plain = await complete(target, request, drafting="off")
        brake = target.brake()
        for right in (True, False):
            event = asyncio.Event()
            script = testing.perfect(plain.token_ids) if right else testing.wrong(plain.token_ids)
            fake.script = testing.in_turn(testing.late(event, script), testing.fixed())
            asked = len(fake.drafts)
            running = asyncio.ensure_future(complete(target, request, drafting="auto", num_draft_tokens=16))
            while len(fake.drafts) == asked:
                brake.allow(1)
                await asyncio.sleep(0)
            # Three rounds go by, with nothing there yet.
            forwards = brake.forwards
            while brake.forwards < forwards + 3:
                brake.allow(1)
                await asyncio.sleep(0)
            event.set()
            while not running.done():
                brake.allow(1)
                await asyncio.sleep(0)
            result = await running
            assert visible(result) == visible(plain)
            if not right:
                assert result.speculation.num_accepted_draft_tokens == 0
            fake.script = testing.fixed()


class TestSharedNoise:
    """A drafter with the target's own weights guesses every token: greedy ones, and sampled ones with filters as well."""

    @pytest.mark.parametrize("kind", ["llama", "qwen3"])
    @pytest.mark.parametrize("request_name", ["greedy", "warm", "filtered"])
    async def test_the_same_model_drafts_what_the_target_will_say(
        self, tmp_path: Path, kind: TinyKind, request_name: str
    ) -> None:
        request: dict[str, Any] = {**REQUESTS[request_name], "max_tokens": 120, "ignore_eos": True}
        path = save_tiny_model(tmp_path / kind, kind, 7, context_length=512)
        async with model_drafter(path) as drafter, target_service(path, drafters=[drafter]) as target:
            await target.drafter_is(DrafterState.READY)
            plain = await complete(target, request, drafting="off")
            for drafting in (DRAFTING["fixed 4"], DRAFTING["auto"]):
                result = await complete(target, request, **drafting)
                assert visible(result) == visible(plain)
                reconciled(result)
            fixed = await complete(target, request, drafting="fixed", num_draft_tokens=4)
            assert fixed.speculation.num_draft_tokens > 60
            assert fixed.speculation.draft_acceptance_rate > 0.97

    async def test_with_another_seed_the_same_drafts_would_be_wrong(self, tmp_path: Path) -> None:
        """The control: at this temperature it takes the noise to guess."""
        path = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=512)
        request: dict[str, Any] = {**REQUESTS["warm"], "max_tokens": 120}
        async with target_service(path) as alone:
            other = await complete(alone, {**request, "seed": 99}, drafting="off")
        fake = FakeDraftService(testing.perfect(other.token_ids))
        async with drafted(path, fake) as (target, _):
            result = await complete(target, request, drafting="fixed", num_draft_tokens=4)
            assert result.speculation.num_draft_tokens > 60
            assert result.speculation.draft_acceptance_rate < 0.5

    async def test_another_model_drafts_worse_and_changes_nothing(self, tmp_path: Path) -> None:
        path = save_tiny_model(tmp_path / "target", "llama", 7, context_length=512)
        other = save_tiny_model(tmp_path / "draft", "qwen2", 8, context_length=256)
        async with model_drafter(other) as drafter, target_service(path, drafters=[drafter]) as target:
            await target.drafter_is(DrafterState.READY)
            for request in REQUESTS.values():
                plain = await complete(target, request, drafting="off")
                for drafting in DRAFTING.values():
                    result = await complete(target, request, **drafting)
                    assert visible(result) == visible(plain)
                    reconciled(result)

    async def test_a_drafter_with_a_shorter_context_only_stops_drafting(self, tmp_path: Path) -> None:
        path = save_tiny_model(tmp_path / "target", "llama", 7, context_length=512)
        short = save_tiny_model(tmp_path / "draft", "llama", 7, context_length=80)
        async with model_drafter(short) as drafter, target_service(path, drafters=[drafter]) as target:
            await target.drafter_is(DrafterState.READY)
            request: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
            plain = await complete(target, request, drafting="off")
            result = await complete(target, request, drafting="fixed", num_draft_tokens=4)
            assert visible(result) == visible(plain)
            assert 0 < result.speculation.num_accepted_draft_tokens <= 80 - len(PROMPT)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
async def test_lookup_repeats_what_the_text_repeats(tmp_path: Path, kind: TinyKind) -> None:
    path = save_tiny_model(tmp_path / kind, kind, 7, context_length=512, sliding_window=256)
    async with draft_service() as lookup, target_service(path, drafters=[lookup.address]) as target:
        await target.drafter_is(DrafterState.READY)
        for request in REQUESTS.values():
            plain = await complete(target, request, drafting="off")
            # The answer in the prompt: lookup finds it there.
            again = {**request, "token_ids": [*plain.token_ids, *PROMPT.encode()] * 2}
            plain = await target.client.complete(**again, drafting="off")
            for drafting in DRAFTING.values():
                result = await target.client.complete(**again, **drafting)
                assert visible(result) == visible(plain)
                reconciled(result)
        biased: dict[str, Any] = {
            "token_ids": [97, 98, 99] * 8,
            "logit_bias": {97: 60.0},
            "max_tokens": 60,
            "drafting": "fixed",
        }
        repeated = await target.client.complete(**biased)
        assert repeated.speculation.num_accepted_draft_tokens > 30


class TestSeeds:
    async def test_a_seed_repeats_and_another_one_does_not(self, model: Path) -> None:
        async with drafted(model, FakeDraftService(testing.fixed(1, 2))) as (target, _):
            request: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
            for drafting in ({"drafting": "off"}, *DRAFTING.values()):
                first = await complete(target, {**request, "seed": 7}, **drafting)
                again = await complete(target, {**request, "seed": 7}, **drafting)
                other = await complete(target, {**request, "seed": 8}, **drafting)
                assert visible(first) == visible(again)
                assert first.token_ids != other.token_ids

    async def test_requests_beside_a_request_do_not_change_it(self, model: Path) -> None:
        """Four of different kinds at once, with a drafter that is right, wrong or fails for all of them alike."""
        fake = FakeDraftService()
        async with drafted(model, fake, draft_timeout_s=0.05, prefill_step_size=16) as (target, _):
            mixed = [
                {**request, **drafting, "ignore_eos": True}
                for request, drafting in zip(REQUESTS.values(), DRAFTING.values(), strict=True)
            ]
            alone = [await complete(target, {**request, "drafting": "off"}) for request in mixed]
            for script in (testing.perfect(alone[1].token_ids), testing.fixed(3, 4), testing.failing(NotFound("x"))):
                fake.script = script
                for _ in range(3):
                    together = await asyncio.gather(*(complete(target, request) for request in mixed))
                    for result, plain in zip(together, alone, strict=True):
                        assert visible(result) == visible(plain)
                        reconciled(result)
            await target.at_rest()


@asynccontextmanager
async def model_drafter(path: Path) -> AsyncIterator[str]:
    """The draft service with this model, in this process; gives its address."""
    compute = ComputeThread("draft")
    try:
        source = await compute.run(
            lambda: load_model_source(
                str(path), dtype="float32", cache_dir=None, context_length=None, prefill_step_size=64
            )
        )
        async with draft_service(source, compute) as running:
            yield running.address
        await compute.run(source.close)
    finally:
        await asyncio.to_thread(compute.close)
