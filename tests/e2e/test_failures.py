"""A drafter that is killed, stopped and started again while a real target streams: same text, and drafting comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from service.target_fixture import Program, program, reconciled, until, visible

from draftwire.aio_client import AsyncClient, AsyncGenerateStream
from draftwire.errors import Unavailable
from draftwire.events import Chunk, Completion, Drafter, DrafterState
from draftwire.testing_models import save_tiny_model

REQUEST: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=8192)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the client that watches it."""

    target: Program
    client: AsyncClient

    async def drafter_is(self, state: DrafterState) -> Drafter:
        """Waits until the target thinks so of its drafter."""
        await until(self.client.drafters, lambda found: found[0].state is state)
        return (await self.client.drafters())[0]


@asynccontextmanager
async def drafter(model: Path | str, port: int = 0) -> AsyncIterator[Program]:
    """A draft service with the target's own weights, so that what it says is worth something."""
    flags = ["--draft-model", str(model), "--blas", "reference", "--port", str(port)]
    async with program("draft_service", *flags) as running:
        await running.until("state", state="serving")
        yield running


@asynccontextmanager
async def pair(model: Path | str, address: str) -> AsyncIterator[Pair]:
    """A target beside a drafter. The reference BLAS: same bits for any window."""
    flags = ["--model", str(model), "--drafter", address, "--drafting", "fixed", "--num-draft-tokens", "4"]
    async with program("target_service", *flags, "--blas", "reference", "--draft-timeout-s", "0.2") as target:
        await target.until("state", state="serving")
        async with AsyncClient(target.address) as client:
            both = Pair(target, client)
            await both.drafter_is(DrafterState.READY)
            yield both


async def read(stream: AsyncGenerateStream, tokens: int) -> None:
    """Reads so many tokens, or a few more."""
    while tokens > 0:
        event = await anext(stream)
        tokens -= len(event.tokens) if isinstance(event, Chunk) else 0


async def rest(stream: AsyncGenerateStream) -> Completion:
    return await asyncio.wait_for(stream.collect(), 60)


async def test_a_killed_drafter_costs_speed_only_and_its_successor_drafts_in_the_same_request(model: Path) -> None:
    tokens = 2000
    async with drafter(model) as first, pair(model, first.address) as both:
        plain = await both.client.complete("a long story", drafting="off", max_tokens=tokens, **REQUEST)
        stream = both.client.generate("a long story", max_tokens=tokens, **REQUEST)
        await read(stream, 100)
        # The target runs far ahead of a reader that waits, so it is held until its drafter is back.
        first.process.send_signal(signal.SIGKILL)
        assert await first.end() == -signal.SIGKILL
        await read(stream, 200)
        both.target.process.send_signal(signal.SIGSTOP)
        async with drafter(model, first.port) as second:
            both.target.process.send_signal(signal.SIGCONT)
            result = await rest(stream)
            assert visible(result) == visible(plain)
            reconciled(result)
            assert result.speculation.reseeds >= 1
            assert result.speculation.rounds_without_draft["lost"] > 0
            late = [token.from_draft for token in result.tokens[-tokens // 4 :]]
            assert sum(late) > len(late) // 2, "drafting did not come back"
            found = await both.drafter_is(DrafterState.READY)
            assert second.address == found.address
            await until(both.client.drafters, lambda drafters: drafters[0].sessions == 0)


async def test_a_stopped_drafter_does_not_stop_the_stream_and_helps_again_when_it_wakes(model: Path) -> None:
    async with drafter(model) as running, pair(model, running.address) as both:
        plain = await both.client.complete("a long story", drafting="off", max_tokens=1500, **REQUEST)
        stream = both.client.generate("a long story", max_tokens=1500, **REQUEST)
        await read(stream, 100)
        running.process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        await read(stream, 800)
        # Patience halves with each question in vain: a fifth of a second and its half and so on, and what decoding takes.
        assert time.monotonic() - began_s < 20.0
        running.process.send_signal(signal.SIGCONT)
        result = await rest(stream)
        assert visible(result) == visible(plain)
        reconciled(result)
        assert sum(count for reason, count in result.speculation.rounds_without_draft.items() if reason == "late") > 0
        again = await both.client.complete("a long story", max_tokens=500, **REQUEST)
        assert again.token_ids == plain.token_ids[:500]
        assert again.speculation.draft_acceptance_rate > 0.9


async def test_a_target_that_is_killed_leaves_a_drafter_that_serves_the_next_one(model: Path) -> None:
    async with drafter(model) as running:
        async with pair(model, running.address) as both:
            stream = both.client.generate("a long story", max_tokens=3000, **REQUEST)
            await read(stream, 50)
            both.target.process.send_signal(signal.SIGKILL)
            assert await both.target.end() == -signal.SIGKILL
        async with pair(model, running.address) as both:
            answer = await both.client.complete("x", max_tokens=50, ignore_eos=True)
            assert answer.speculation.num_accepted_draft_tokens > 0


@pytest.mark.model
async def test_smollm2_goes_on_without_its_drafter_and_with_it_again_and_ends_with_0_in_the_middle_of_a_stream() -> (
    None
):
    """One start of a model that takes long to load, for three claims."""
    # Long enough for another draft service to start meanwhile.
    request: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    prompt = "List the numbers from one to forty in words, separated by commas: one, two, three, four,"
    async with program("draft_service") as first:
        await first.until("state", state="serving")
        flags = ["--drafter", first.address, "--drafting", "fixed", "--num-draft-tokens", "3", "--drain-s", "0.5"]
        async with program("target_service", *flags) as target:
            await target.until("state", state="serving")
            async with AsyncClient(target.address) as client:
                both = Pair(target, client)
                await both.drafter_is(DrafterState.READY)
                plain = await client.complete(prompt, drafting="off", **request)
                stream = client.generate(prompt, **request)
                await read(stream, 10)
                first.process.send_signal(signal.SIGKILL)
                await first.end()
                await read(stream, 20)
                async with program("draft_service", "--port", str(first.port)) as second:
                    await second.until("state", state="serving")
                    result = await rest(stream)
                    assert replace(result.usage, cached_tokens=0) == replace(plain.usage, cached_tokens=0)
                    assert result.speculation.reseeds >= 1
                    await both.drafter_is(DrafterState.READY)
                    stream = client.generate(prompt, max_tokens=500, ignore_eos=True)
                    await read(stream, 1)
                    target.process.send_signal(signal.SIGTERM)
                    with pytest.raises(Unavailable) as cut:
                        await rest(stream)
                    assert cut.value.reason == "DRAINING"
                    assert await target.end() == 0
