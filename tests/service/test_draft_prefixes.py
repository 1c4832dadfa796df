"""A follow-up turn does not feed the drafter anew, nobody sees what another left, and no draft changes through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from conftest_draft import Running, advance, draft_request, draft_service, prefill_messages

from draft_service import service
from draft_service.sources.base import Ask, SessionSpec
from draft_service.sources.model import ModelDrafter, ModelSource
from draftwire.compute import ComputeThread
from draftwire.errors import Overloaded
from draftwire.loaded import LoadedModel
from draftwire.sampling import Sampler
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model
from draftwire.v1 import draft_pb2
from draftwire.wire import from_rpc_error

FIRST = [i * 7 % 250 for i in range(60)]
KINDS: list[TinyKind] = ["llama", "gemma3", "lfm2", "qwen3_5", "recurrent_gemma"]
"""Keys and values in pools; sliding windows, short convolutions and recurrent state one by one."""


@dataclass(frozen=True)
class Desk:
    """A draft service with a prefix cache, and a count of the ids that its model was fed."""

    running: Running
    loaded: LoadedModel
    fed: list[int]
    compute: ComputeThread

    async def turn(self, name: str, text: Sequence[int], replies: int = 3, **fields: Any) -> tuple[int, list[int]]:
        """One turn: Prefill, some rounds in which every draft is accepted, Release. Returns (ids reused, the text)."""
        stub, written = self.running.stub, list(text)
        opened = await stub.Prefill(
            iter(
                prefill_messages(
                    written, session_id=name, **{"prompt_length": len(text), "max_length": len(text) + 50, **fields}
                )
            )
        )
        sent = len(written)
        for number in range(replies):
            reply = await stub.Draft(draft_request(written, sent, number, session_id=name))
            assert list(reply.token_ids) == await self.alone(written, len(text), 4)
            sent = len(written)
            written += reply.token_ids
        # The answer's last id, which no draft followed.
        commit = draft_pb2.CommitRequest(session_id=name, round=replies, advance=advance([*written, 5], sent))
        await stub.Commit(commit)
        await stub.Release(draft_pb2.ReleaseRequest(session_ids=[name]))
        return opened.reused_length, [*written, 5]

    async def alone(self, text: Sequence[int], prompt_length: int, limit: int) -> list[int]:
        """What a drafter that has just read the text drafts."""

        def work() -> list[int]:
            spec = SessionSpec(prompt_length=prompt_length, max_length=500, sampler=Sampler(), end_ids=frozenset())
            drafter = ModelDrafter(
                self.loaded.model, spec, vocabulary=TINY_VOCAB, context_length=512, prefill_step_size=512
            )
            drafter.advance(text)
            guess = drafter.draft(Ask(limit=limit), lambda: False)
            drafter.close()
            return list(guess.ids)

        return await self.compute.run(work)

    async def load(self) -> draft_pb2.Load:
        await self.running.rounds.idle()
        reply = await self.running.stub.Describe(draft_pb2.DescribeRequest())
        assert isinstance(reply, draft_pb2.DescribeResponse)
        return reply.load


class Counted:
    """A model that counts the ids it is fed."""

    def __init__(self, model: Any, fed: list[int]) -> None:
        self.model = model
        self.layers = model.layers
        self.fed = fed
        if hasattr(model, "make_cache"):
            self.make_cache = model.make_cache

    def __call__(self, ids: Any, cache: Any = None) -> Any:
        self.fed.append(ids.size)
        return self.model(ids, cache=cache)


@asynccontextmanager
async def desk(kind: TinyKind = "llama", *, prompt_cache_bytes: int = 2**24, **limits: Any) -> AsyncIterator[Desk]:
    compute = ComputeThread()
    fed: list[int] = []

    def load() -> tuple[LoadedModel, ModelSource]:
        loaded = make_tiny_model(kind, seed=5)
        source = ModelSource(loaded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")
        source._model = Counted(loaded.model, fed)
        return loaded, source

    loaded, source = await compute.run(load)
    assert (source.batching == "ragged") == (kind == "llama")
    async with draft_service(source, compute, prompt_cache_bytes=prompt_cache_bytes, **limits) as running:
        yield Desk(running, loaded, fed, compute)
    assert running.rounds.prefixes.nbytes == 0
    await compute.run(source.close)
    await asyncio.to_thread(compute.close)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_follow_up_turn_takes_over_what_the_turn_before_computed(kind: TinyKind) -> None:
    async with desk(kind) as at:
        reused, text = await at.turn("session-first-00000", FIRST)
        assert reused == 0
        for turn in range(3):
            at.fed.clear()
            before = len(text)
            text += [9, 8, 7, turn]
            reused, text = await at.turn(f"session-later-{turn:05}", text)
            # All but the answer's last draft and last id; recurrent state may stand a forward further back.
            assert before - 8 <= reused <= before
            assert sum(at.fed) < 60


@pytest.mark.parametrize("kind", KINDS)
async def test_another_continuation_takes_over_the_common_part_where_the_cache_can_go_back(kind: TinyKind) -> None:
    async with desk(kind) as at:
        await at.turn("session-first-00000", FIRST)
        reused, _ = await at.turn("session-later-00000", [*FIRST[:50], 1, 2, 3])
        # State can only stand where it was stored.
        assert reused == (50 if kind in ("llama", "gemma3") else 0)


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "other"}, {"cache_disabled": True}, {"cache_salt": "", "cache_disabled": True}]
)
async def test_another_salt_or_an_opt_out_reads_nothing(fields: dict[str, Any]) -> None:
    async with desk() as at:
        _, text = await at.turn("session-first-00000", FIRST)
        at.fed.clear()
        cold, _ = await at.turn("session-other-00000", text, 0, **fields)
        assert (cold, sum(at.fed)) == (0, len(text) - 1)
        warm, _ = await at.turn("session-later-00000", text, 0)
        assert warm > 60


async def test_an_opt_out_leaves_nothing() -> None:
    async with desk() as at:
        _, text = await at.turn("session-first-00000", FIRST, cache_disabled=True)
        assert (await at.load()).prompt_cache_bytes == 0
        at.fed.clear()
        cold, _ = await at.turn("session-later-00000", text, 0)
        assert (cold, sum(at.fed)) == (0, len(text) - 1)


async def test_another_owner_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk() as at:
        monkeypatch.setattr(service, "owner_of", lambda context: "tls:alice")
        _, text = await at.turn("session-first-00000", FIRST)
        monkeypatch.setattr(service, "owner_of", lambda context: "tls:bob")
        at.fed.clear()
        cold, _ = await at.turn("session-other-00000", text, 0)
        assert (cold, sum(at.fed)) == (0, len(text) - 1)
        monkeypatch.setattr(service, "owner_of", lambda context: "tls:alice")
        assert (await at.turn("session-later-00000", text, 0))[0] > 60


async def test_a_session_whose_lease_is_over_leaves_its_prefix_too() -> None:
    now_s = time.monotonic()
    async with desk(clock=lambda: now_s) as at:
        await at.running.stub.Prefill(iter(prefill_messages(FIRST, session_id="session-first-00000")))
        now_s += 1000
        assert at.running.rounds.table.sweep() == 1
        assert (await at.turn("session-later-00000", [*FIRST, 1], 0))[0] == len(FIRST) - 1


async def test_prefixes_give_way_to_sessions_before_any_session_is_refused() -> None:
    async with desk(kv_bytes=2**30) as at:
        source = at.running.rounds.source
        for number in range(3):
            await at.turn(f"session-{number:011}", [number, *FIRST], 0)
        load = await at.load()
        assert (load.sessions, load.kv_bytes) == (0, 0)
        assert load.prompt_cache_bytes > 0
    charge = source.bytes_for(100)
    async with desk(kv_bytes=2 * charge) as at:
        for number in range(4):
            await at.turn(f"session-{number:011}", [number, *FIRST], 0, max_length=100)
            load = await at.load()
            assert 0 < load.prompt_cache_bytes + load.kv_bytes <= load.kv_bytes_limit
        for number in range(2):
            name = f"session-{number:05}-stays"
            await at.running.stub.Prefill(iter(prefill_messages(FIRST, session_id=name, max_length=100)))
        load = await at.load()
        assert (load.sessions, load.kv_bytes, load.prompt_cache_bytes) == (2, 2 * charge, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await at.running.stub.Prefill(iter(prefill_messages(FIRST, session_id="session-refused-0", max_length=100)))
        assert isinstance(from_rpc_error(caught.value), Overloaded)


async def test_without_a_limit_nothing_is_kept() -> None:
    async with desk(prompt_cache_bytes=0) as at:
        _, text = await at.turn("session-first-00000", FIRST)
        assert (await at.turn("session-later-00000", text, 0))[0] == 0


async def test_a_session_whose_computing_failed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk() as at:
        await at.running.stub.Prefill(iter(prefill_messages(FIRST, session_id="session-first-00000")))
        source: Any = at.running.rounds.source

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no memory for the test")

        with monkeypatch.context() as patched:
            patched.setattr(Counted, "__call__", fail)
            with pytest.raises(grpc.aio.AioRpcError):
                await at.running.stub.Draft(draft_request([*FIRST, 1], len(FIRST), session_id="session-first-00000"))
        assert source.batching == "ragged"
        load = await at.load()
        assert (load.sessions, load.prompt_cache_bytes) == (0, 0)
        assert (await at.turn("session-later-00000", FIRST))[0] == 0


async def test_describe_says_whether_sessions_share_forwards() -> None:
    async with desk() as at:
        assert (await at.running.stub.Describe(draft_pb2.DescribeRequest())).batching == "ragged"
    async with desk("lfm2") as at:
        said = (await at.running.stub.Describe(draft_pb2.DescribeRequest())).batching
        assert said.startswith("one by one: its cache (ArraysCache)")
