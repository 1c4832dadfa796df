"""The prefix cache behind a real gRPC server: what users are told of it, and what happens when reading it goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from service.target_fixture import PATIENCE_S, Running, happens, program, target_service, visible
from structlog.testing import capture_logs

from draftwire.aio_client import AsyncClient
from draftwire.errors import Cancelled
from draftwire.events import Started
from draftwire.testing_models import save_tiny_model
from target_service.prefix.disk import Disk
from target_service.prefix.keys import BLOCK
from target_service.prefix.layout import Prefix

TEXT = "The lighthouse stood on a narrow spit of rock at the northern end of the bay. " * 3
LENGTH = len(TEXT)
"""Tokens: the tiny tokenizer's are bytes."""
ON_DISK = (LENGTH - 1) // BLOCK * BLOCK
"""What a restart leaves of it: on disk, blocks serve as a whole, and the last one has the reply in it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@pytest.fixture
async def target(model: Path, tmp_path: Path) -> AsyncIterator[Running]:
    async with target_service(model, prompt_cache_dir=tmp_path / "kept") as running:
        yield running
        await running.at_rest()


async def ask(running: Running, text: str = TEXT, **options: Any) -> int:
    """Cached tokens, which both events must tell alike."""
    done = await running.client.complete(text, max_tokens=4, ignore_eos=True, **options)
    assert done.started.cached_tokens == done.usage.cached_tokens
    assert done.usage.prompt_tokens == len(text)
    return done.usage.cached_tokens


async def test_both_events_say_how_much_was_cached(target: Running) -> None:
    assert await ask(target) == 0
    assert await ask(target) == LENGTH - 1
    assert await ask(target, TEXT + "more") == LENGTH
    assert await ask(target, TEXT[:100] + "#") == 100
    assert await ask(target, "x") == 0
    assert target.target.prefixes is not None
    counts = target.target.prefixes.snapshot()
    assert (counts.lookups, counts.hits, counts.misses) == (5, 3, 2)
    assert counts.reused_tokens == 2 * LENGTH - 1 + 100
    assert counts.prompt_tokens == 3 * LENGTH + 4 + 101 + 1


async def test_a_hit_changes_the_speed_and_nothing_else(target: Running) -> None:
    first = await target.client.complete(TEXT, max_tokens=12, temperature=0.9, seed=4, top_logprobs=2)
    second = await target.client.complete(TEXT, max_tokens=12, temperature=0.9, seed=4, top_logprobs=2)
    assert second.usage.cached_tokens == LENGTH - 1
    assert second.token_ids == first.token_ids
    # In another process of the same kind the logprobs are those of a prefill; here they may differ in the last bits.
    assert visible(first)[:3] == visible(second)[:3]
    assert second.speculation.target_calls == first.speculation.target_calls - 1, "no forward read the prompt"


async def test_a_request_may_opt_out_and_salts_are_strangers(target: Running) -> None:
    assert await ask(target, cache=False) == 0
    assert await ask(target) == 0
    assert await ask(target, cache=False) == 0
    assert await ask(target, cache_salt="a") == 0
    assert await ask(target, cache_salt="b") == 0
    assert await ask(target, cache_salt="a") == LENGTH - 1
    assert await ask(target) == LENGTH - 1


async def test_the_model_info_says_how_full_it_is(target: Running, model: Path) -> None:
    before = await target.client.model_info()
    assert (before.prompt_cache_bytes, before.prompt_cache_bytes_limit) == (0, 1 << 30)
    await ask(target)
    assert (
        await target.client.model_info()
    ).prompt_cache_bytes > LENGTH * target.target.parts.loaded.kv_bytes_per_token
    async with target_service(model, prompt_cache_bytes=0) as off:
        assert (await off.client.model_info()).prompt_cache_bytes_limit == 0
        assert [await ask(off), await ask(off)] == [0, 0]


async def test_a_full_cache_never_keeps_a_request_out(model: Path) -> None:
    """Its bytes are counted apart from those that admission charges."""
    room = 512 * 512
    async with target_service(model, kv_bytes_limit=room, prompt_cache_bytes=64 * room) as running:
        assert running.target.parts.loaded.kv_bytes_per_token == 512
        for number in range(8):
            await ask(running, f"{number}{TEXT}")
        assert running.target.prefixes is not None
        assert running.target.prefixes.counts.memory_bytes > room


async def test_a_follow_up_at_once_finds_the_turn_before(target: Running) -> None:
    """The copy is made before the next request is looked up, however soon it comes."""
    ids, cached = list(TEXT.encode()), 0
    for _ in range(12):
        done = await target.client.complete(token_ids=ids, max_tokens=9, ignore_eos=True)
        assert done.usage.cached_tokens == cached
        ids += done.token_ids
        cached = len(ids) - 1
        ids += b"and"


@contextmanager
def held_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(a read has begun, it may go on): the disk is as slow as the test wants."""
    begun, free = threading.Event(), threading.Event()
    read = Disk.read

    def slow(self: Disk, key: bytes) -> Any:
        begun.set()
        assert free.wait(PATIENCE_S)
        return read(self, key)

    monkeypatch.setattr(Disk, "read", slow)
    try:
        yield begun, free
    finally:
        free.set()


async def kept(model: Path, folder: Path) -> None:
    """Leaves a prefix on disk."""
    async with target_service(model, prompt_cache_dir=folder) as running:
        assert await ask(running) == 0


async def test_a_slow_disk_delays_its_own_request_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept(model, tmp_path)
    with held_reads(monkeypatch) as (begun, free):
        async with target_service(model, prompt_cache_dir=tmp_path) as running:
            waiting = asyncio.create_task(ask(running))
            await happens(begun.is_set)
            assert await ask(running, "another text") == 0
            assert not waiting.done()
            free.set()
            assert await waiting == ON_DISK
            await running.at_rest()


async def test_a_client_that_leaves_while_its_prefix_is_read_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept(model, tmp_path)
    with held_reads(monkeypatch) as (begun, free):
        async with target_service(model, prompt_cache_dir=tmp_path) as running:
            stream = running.client.generate(TEXT, request_id="slow", max_tokens=4)
            reading = asyncio.create_task(anext(stream))
            await happens(begun.is_set)
            assert await running.client.abort("slow") == ("slow",)
            with pytest.raises(Cancelled):
                await reading
            await happens(lambda: not running.target.engine.slots)
            free.set()
            assert await ask(running) == ON_DISK
            await running.at_rest()


async def test_a_prefix_that_cannot_be_restored_is_read_instead(
    target: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(slot: int, prefix: Prefix) -> None:
        raise ValueError("no")

    assert await ask(target) == 0
    engine = target.target.engine
    monkeypatch.setattr(engine, "restore", broken)
    assert await ask(target) == 0
    monkeypatch.undo()
    # One whose shapes are wrong is found out before anything is changed.
    real = engine.restore

    async def odd(slot: int, prefix: Prefix) -> None:
        await real(slot, Prefix(length=prefix.length - 1, rows=prefix.rows))

    monkeypatch.setattr(engine, "restore", odd)
    assert await ask(target) == 0
    monkeypatch.undo()
    assert await ask(target) == LENGTH - 1


async def test_started_comes_first_also_on_a_hit(target: Running) -> None:
    for _ in range(2):
        async with target.client.generate(TEXT, max_tokens=3) as stream:
            assert isinstance(await anext(stream), Started)


async def test_sigterm_writes_what_is_queued_and_the_next_process_finds_it(model: Path, tmp_path: Path) -> None:
    """Real processes; beside the second, another target gets no share of the directory, which is free once it is killed."""
    flags = ["--model", str(model), "--prompt-cache-dir", str(tmp_path / "kept")]
    async with program("target_service", *flags) as first:
        await first.until("state", state="serving")
        async with AsyncClient(first.address) as client:
            done = await client.complete(TEXT, max_tokens=4, ignore_eos=True)
            assert done.usage.cached_tokens == 0
        first.process.terminate()
        assert await first.end() == 0
    async with program("target_service", *flags) as second:
        await second.until("state", state="serving")
        async with AsyncClient(second.address) as client:
            again = await client.complete(TEXT, max_tokens=4, ignore_eos=True)
            assert again.usage.cached_tokens == ON_DISK
            assert again.token_ids == done.token_ids
        with capture_logs() as logs:
            async with target_service(model, prompt_cache_dir=tmp_path / "kept") as third:
                assert (await third.client.complete(TEXT, max_tokens=4)).usage.cached_tokens == 0
        (told,) = [entry for entry in logs if entry["event"] == "prefix_cache_in_memory_only"]
        assert "used by another process" in told["reason"]
        second.process.kill()
        await second.end()
    async with program("target_service", *flags) as last:
        await last.until("state", state="serving")
        async with AsyncClient(last.address) as client:
            assert (await client.complete(TEXT, max_tokens=4)).usage.cached_tokens == ON_DISK


async def test_a_directory_that_cannot_be_written_costs_the_disk_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with target_service(model, prompt_cache_dir=tmp_path / "file") as running:
        assert [await ask(running), await ask(running)] == [0, LENGTH - 1]
