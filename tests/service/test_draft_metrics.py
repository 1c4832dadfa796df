"""What a scrape of a drafter with a model shows is what its model was fed, and what its replies said of kept prefixes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from metrics_table import Scrape
from service.conftest_draft import Running, connected, draft_request, draft_service, prefill_messages, program
from service.target_fixture import happens

from draft_service.metrics import draft_collector
from draft_service.sessions import SessionLimits
from draft_service.sources.model import ModelSource
from draft_service.tally import Tally
from draftwire.compute import ComputeThread
from draftwire.metrics import metrics_endpoint
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model
from draftwire.v1 import draft_pb2

ROWS, BATCH, CACHE = "draftwire_draft_forward_rows_total", "draftwire_draft_batch_size", "draftwire_draft_prefix_cache_"
MAX_LENGTH = 100


class Watched:
    """A model that notes the (sessions, ids) of each forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        self.shapes: list[tuple[int, int]] = []
        if hasattr(model, "make_cache"):
            self.make_cache = model.make_cache

    def __call__(self, ids: Any, cache: Any = None) -> Any:
        self.shapes.append(tuple(ids.shape))
        return self.model(ids, cache=cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """A drafter with a model, and its endpoint."""

    running: Running
    model: Watched
    compute: ComputeThread
    port: int
    reused: list[int] = field(default_factory=list)
    """`reused_length` of each Prefill."""

    async def scrape(self) -> Scrape:
        """Once nothing runs any more."""
        await self.running.rounds.idle()
        return await asyncio.to_thread(Scrape.of, self.port)

    async def prefill(self, name: str, text: Sequence[int], **fields: Any) -> None:
        wanted = {"prompt_length": len(text), "max_length": MAX_LENGTH, **fields}
        opened = await self.running.stub.Prefill(iter(prefill_messages(text, session_id=name, **wanted)))
        self.reused.append(opened.reused_length)

    async def release(self, *names: str) -> None:
        await self.running.stub.Release(draft_pb2.ReleaseRequest(session_ids=names))
        await self.running.rounds.idle()

    async def draft_at_once(self, texts: dict[str, list[int]], limit: int) -> list[list[int]]:
        """Drafts of sessions whose calls have all arrived before the first of them is computed."""
        held = threading.Event()
        blocked = self.compute.submit(held.wait)
        calls = [
            asyncio.ensure_future(
                self.running.stub.Draft(draft_request(text, len(text), session_id=name, max_draft_tokens=limit))
            )
            for name, text in texts.items()
        ]
        try:
            await happens(lambda: self.running.rounds.queue_depth == len(texts))
        finally:
            held.set()
        await asyncio.wrap_future(blocked)
        return [list((await call).token_ids) for call in calls]


@asynccontextmanager
async def scraped(kind: TinyKind = "llama", *, kv_bytes: int = 2**30) -> AsyncIterator[Scraped]:
    """kv_bytes: of all sessions; sessions that are charged for MAX_LENGTH where it is below 100."""
    compute = ComputeThread()

    def load() -> tuple[ModelSource, Watched]:
        loaded = make_tiny_model(kind, seed=5)
        source = ModelSource(loaded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")
        source._model = watched = Watched(loaded.model)
        return source, watched

    source, model = await compute.run(load)
    kv_bytes = kv_bytes * source.bytes_for(MAX_LENGTH) if kv_bytes < 100 else kv_bytes
    tally = Tally()
    limits = SessionLimits(sessions=8, kv_bytes=kv_bytes, lease_s=60.0, max_lease_s=600.0)
    async with draft_service(source, compute, recorder=tally, kv_bytes=kv_bytes, prompt_cache_bytes=2**24) as running:
        collector = draft_collector(running.lifecycle, lambda: running.rounds, limits, tally)
        async with metrics_endpoint("127.0.0.1:0", [collector]) as port:
            assert port is not None
            yield Scraped(running=running, model=model, compute=compute, port=port)
    await compute.run(source.close)
    await asyncio.to_thread(compute.close)


async def test_sessions_that_draft_together_are_one_forward_of_that_size() -> None:
    """Three at once, then one alone: sessions of each forward, and the rows that the model was fed, padding included."""
    async with scraped() as at:
        texts = {f"session-{number:011}": [number, *range(10, 40 + number)] for number in range(3)}
        for name, text in texts.items():
            await at.prefill(name, text)
        before = await at.scrape()
        assert before.by(ROWS, "kind") == {"prefill": sum(len(text) - 1 for text in texts.values())}
        assert before.value(f"{BATCH}_count") == 0
        drafts = await at.draft_at_once(texts, 4)
        assert [len(ids) for ids in drafts] == [4, 4, 4]
        scrape = await at.scrape()
        # The last committed id, then each drafted one but the last.
        assert (scrape.value(f"{BATCH}_count"), scrape.value(f"{BATCH}_sum")) == (4, 12)
        assert scrape.value(f"{BATCH}_bucket", le="2.0") == 0
        assert scrape.value(f"{BATCH}_bucket", le="4.0") == 4
        assert scrape.by(ROWS, "kind")["draft"] == sum(len(ids) for ids in drafts)
        alone = "session-alone-00000"
        await at.prefill(alone, [1, 2, 3])
        await at.running.stub.Draft(draft_request([1, 2, 3], 3, session_id=alone, max_draft_tokens=5))
        scrape = await at.scrape()
        assert scrape.value(f"{BATCH}_bucket", le="1.0") == 5
        assert (scrape.value(f"{BATCH}_count"), scrape.value(f"{BATCH}_sum")) == (9, 17)
        assert scrape.total(ROWS) == sum(sessions * ids for sessions, ids in at.model.shapes)
        assert scrape.by(ROWS, "kind")["padding"] > 0


@pytest.mark.parametrize("kind", ["lfm2", "gemma3"])
async def test_sessions_that_cannot_share_forwards_are_counted_one_by_one(kind: TinyKind) -> None:
    async with scraped(kind) as at:
        for number in range(2):
            name, text = f"session-{number:011}", [number, *range(10, 40)]
            await at.prefill(name, text)
            reply = await at.running.stub.Draft(draft_request(text, len(text), session_id=name, max_draft_tokens=4))
            assert len(reply.token_ids) == 4
        scrape = await at.scrape()
        assert scrape.value(f"{BATCH}_bucket", le="1.0") == scrape.value(f"{BATCH}_sum") == 8
        assert scrape.by(ROWS, "kind") == {"draft": 8, "prefill": 60}
        assert scrape.total(ROWS) == sum(sessions * ids for sessions, ids in at.model.shapes)


async def test_what_a_follow_up_prompt_finds_is_what_its_reply_says() -> None:
    """Tokens looked up and found; entries and bytes; a session that opted out counts for nothing."""
    async with scraped() as at:
        text = list(range(60))
        await at.prefill("session-first-00000", text)
        await at.release("session-first-00000")
        scrape = await at.scrape()
        assert scrape.value(f"{CACHE}queries_total") == 60
        assert scrape.value(f"{CACHE}hits_total") == 0
        assert scrape.value(f"{CACHE}entries") == 1
        load = (await at.running.stub.Describe(draft_pb2.DescribeRequest())).load
        assert scrape.value(f"{CACHE}bytes") == load.prompt_cache_bytes > 0
        assert scrape.value(f"{CACHE}capacity_bytes") == 2**24
        await at.prefill("session-later-00000", [*text, 9, 8])
        await at.prefill("session-other-00000", [*text[:40], 9, 8])
        await at.prefill("session-cold-000000", text, cache_disabled=True)
        await at.prefill("session-salted-0000", text, cache_salt="other")
        scrape = await at.scrape()
        assert at.reused == [0, 59, 40, 0, 0]
        assert scrape.value(f"{CACHE}hits_total") == sum(at.reused)
        assert scrape.value(f"{CACHE}queries_total") == 60 + 62 + 42 + 60
        assert scrape.total(f"{CACHE}evictions_total") == 0
        reused = scrape.by("draftwire_prefill_tokens_total", "source")["reused"]
        assert reused == scrape.value(f"{CACHE}hits_total")


async def test_prefixes_that_go_for_sessions_are_evictions() -> None:
    async with scraped(kv_bytes=2) as at:
        for number in range(4):
            name = f"session-{number:011}"
            await at.prefill(name, [number, *range(10, 60)])
            await at.release(name)
        scrape = await at.scrape()
        entries, evicted = scrape.value(f"{CACHE}entries"), scrape.by(f"{CACHE}evictions_total", "reason")
        assert entries > 0
        assert entries + sum(evicted.values()) == 4
        for number in range(2):
            await at.prefill(f"session-{number:05}-stays", [200 + number, 1, 2])
        scrape = await at.scrape()
        assert scrape.value(f"{CACHE}entries") == scrape.value(f"{CACHE}bytes") == 0
        assert scrape.by(f"{CACHE}evictions_total", "reason") == {"session": 4}


async def test_prefixes_that_go_for_newer_ones_are_evictions_of_another_reason() -> None:
    async with scraped() as at:
        for number in range(5):
            name = f"session-{number:011}"
            await at.prefill(name, [number, *range(10, 60)])
            await at.release(name)
            if number == 1:
                two = (await at.scrape()).value(f"{CACHE}bytes")
                # As if --prompt-cache-bytes had room for two of them.
                at.running.rounds.prefixes.limit_bytes = int(two)
        scrape = await at.scrape()
        assert (scrape.value(f"{CACHE}entries"), scrape.value(f"{CACHE}bytes")) == (2, two)
        assert scrape.by(f"{CACHE}evictions_total", "reason") == {"prefix": 3}


async def test_a_lookup_drafter_looks_nothing_up_in_a_cache_that_it_never_fills() -> None:
    """The program with its default --prompt-cache-bytes: a share of hits over all drafters must not sink through it."""
    async with program("--metrics-listen", "127.0.0.1:0") as drafter:
        metrics = await drafter.until("metrics")
        await drafter.until("state", state="serving")
        async with connected(drafter.address) as stub:
            for number in range(2):
                name = f"session-{number:011}"
                await stub.Prefill(iter(prefill_messages([1, 2, 3, 4], session_id=name)))
                await stub.Release(draft_pb2.ReleaseRequest(session_ids=[name]))
        scrape = await asyncio.to_thread(Scrape.of, int(metrics["address"].rpartition(":")[2]))
    assert scrape.value("draftwire_sessions_opened_total") == 2
    assert scrape.value(f"{CACHE}queries_total") == scrape.value(f"{CACHE}capacity_bytes") == 0
    assert scrape.value(f"{BATCH}_count") == scrape.total(ROWS) == 0
