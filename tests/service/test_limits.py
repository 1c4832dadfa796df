"""Each limit of docs/limits.md: what is at it goes, what is beyond it is refused with its reason, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest_draft import draft_request, draft_service, prefill_messages
from google.protobuf.duration_pb2 import Duration
from limit_tables import PAGE, filled, limits
from secrets_fixture import token_file
from service.target_fixture import LOCAL, Brake, Running, happens, target_service

from draft_service.config import DraftSettings
from draftwire.aio_client import AsyncClient, AsyncGenerateStream
from draftwire.errors import DraftwireError
from draftwire.events import DrafterState, Started
from draftwire.guard import Guard
from draftwire.settings import ServiceSettings
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2, target_pb2_grpc
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import from_rpc_error
from target_service.config import TargetSettings

LIMITS: dict[str, dict[str, Callable[[Path, Path], Awaitable[None]]]] = {"target": {}, "draft": {}, "both": {}}
SETTINGS = {"target": TargetSettings, "draft": DraftSettings, "both": ServiceSettings}
TEXT = [5, 6, 7, 8, 9, 1, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


def limit(service: str, name: str) -> Callable[[Any], Any]:
    """Registers the check of a limit."""

    def register(check: Any) -> Any:
        LIMITS[service][name] = check
        return check

    return register


CASES = [(service, name) for service, cls in SETTINGS.items() for name, _, _ in limits(cls)]


@pytest.mark.parametrize(("service", "name"), CASES)
async def test_the_limit_holds(service: str, name: str, model: Path, tmp_path: Path) -> None:
    """The check itself asserts the reason of the table, and the count."""
    await LIMITS[service][name](model, tmp_path)


def test_the_tables_are_those_of_the_settings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "stale: run `python tests/limit_tables.py`"
    assert set(CASES) == {(service, name) for service, checks in LIMITS.items() for name in checks}
    assert len(CASES) > 20


async def refused(call: Awaitable[Any], reason: str) -> DraftwireError:
    """The error of a call that has to fail with this reason."""
    try:
        await call
    except grpc.RpcError as error:
        found = from_rpc_error(error)
    except DraftwireError as error:
        found = error
    else:
        raise AssertionError(f"nothing was refused; expected {reason}")
    assert found.reason == reason, found
    return found


def in_request(name: str, reason: str, value: int, good: dict[str, Any], bad: dict[str, Any]) -> None:
    """A limit of a field: the setting's value, a request at it, a request beyond."""

    @limit("target", name)
    async def check(model: Path, folder: Path) -> None:
        async with target_service(model, **{name: value}) as target:
            await target.client.complete(**{"prompt": "x", "max_tokens": 1, **good})
            error = await refused(target.client.complete(**{"prompt": "x", "max_tokens": 1, **bad}), reason)
            assert any(str(value) in violation.description for violation in error.violations)
            assert target.lifecycle.refusals.snapshot() == {reason: 1}
            await target.at_rest()


in_request("max_prompt_bytes", "OUT_OF_BOUNDS", 40, {"prompt": "x" * 40}, {"prompt": "ü" * 21})
in_request("max_prompt_tokens", "CONTEXT_LENGTH_EXCEEDED", 8, {"prompt": "x" * 8}, {"prompt": "x" * 9})
in_request("context_length", "CONTEXT_LENGTH_EXCEEDED", 9, {"prompt": "x" * 8}, {"prompt": "x" * 9})
in_request("max_output_tokens", "OUT_OF_BOUNDS", 5, {"max_tokens": 5}, {"max_tokens": 6})
in_request("max_stops", "OUT_OF_BOUNDS", 2, {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]})
in_request("max_stop_chars", "OUT_OF_BOUNDS", 3, {"stop": ["abc"]}, {"stop": ["abcd"]})
in_request("max_stop_token_ids", "OUT_OF_BOUNDS", 2, {"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]})
in_request("max_logit_bias", "OUT_OF_BOUNDS", 1, {"logit_bias": {1: 1.0}}, {"logit_bias": {1: 1.0, 2: 1.0}})


async def test_a_long_conversation_is_refused_before_it_is_tokenized(model: Path) -> None:
    """By Generate and by Tokenize alike; and a default max_tokens over the limit is lowered to it."""
    async with target_service(model, max_prompt_bytes=100, max_output_tokens=3) as target:
        target.target.parts.tokenizer.apply_chat_template = None  # type: ignore[assignment, method-assign]
        long = [{"role": "user", "content": "x" * 101}]
        await refused(target.client.complete(messages=long), "OUT_OF_BOUNDS")
        await refused(target.client.tokenize(messages=long), "OUT_OF_BOUNDS")
        await refused(target.client.tokenize("x" * 101), "OUT_OF_BOUNDS")
        assert len((await target.client.complete("x", ignore_eos=True)).tokens) == 3


async def begun(stream: AsyncGenerateStream) -> AsyncGenerateStream:
    """The stream, once its request runs."""
    assert isinstance(await anext(aiter(stream)), Started)
    return stream


async def is_admitted(target: Running, brake: Brake, running: int, queued: int) -> None:
    """Lets rounds pass until so many run and wait."""

    def look() -> bool:
        brake.allow(1)
        scheduler = target.target.scheduler
        return (scheduler.running, scheduler.queued) == (running, queued)

    await happens(look)


@limit("target", "max_running")
async def _(model: Path, folder: Path) -> None:
    await queue_full(model, max_running=2, max_queued=0)


@limit("target", "max_queued")
async def _(model: Path, folder: Path) -> None:
    await queue_full(model, max_running=1, max_queued=1)


async def queue_full(model: Path, **settings: int) -> None:
    """Two requests fit, a third does not, and does as soon as one has left."""
    async with target_service(model, **settings) as target:
        brake = target.brake()
        first = await begun(target.client.generate("x", max_tokens=300, ignore_eos=True))
        second = asyncio.create_task(begun(target.client.generate("x", max_tokens=300, ignore_eos=True)))
        await happens(lambda: target.target.scheduler.running + target.target.scheduler.queued == 2)
        error = await refused(target.client.complete("x"), "QUEUE_FULL")
        assert error.retry_after_s
        assert target.lifecycle.refusals.snapshot() == {"QUEUE_FULL": 1}
        brake.release()
        first.close()
        (await second).close()
        await target.at_rest()
        assert (await target.client.complete("x", max_tokens=1)).finished


@limit("target", "kv_bytes_limit")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model) as target:
        bytes_per_token = target.target.parts.loaded.kv_bytes_per_token
    async with target_service(model, kv_bytes_limit=256 * bytes_per_token) as target:
        assert (await target.client.complete("x", max_tokens=255)).finished
        error = await refused(target.client.complete("x", max_tokens=256), "KV_BUDGET")
        # Waiting would not help.
        assert error.retry_after_s is None
        assert target.lifecycle.refusals.snapshot() == {"KV_BUDGET": 1}


@limit("target", "max_tokenizing")
async def _(model: Path, folder: Path) -> None:
    async with target_service(model, max_tokenizing=2) as target:
        service, free = target.service, asyncio.Event()
        loop = asyncio.get_running_loop()
        held = service._encoder.submit(lambda: asyncio.run_coroutine_threadsafe(free.wait(), loop).result())
        both = [asyncio.create_task(target.client.tokenize("ab")) for _ in range(2)]
        await happens(lambda: service._encoding == 2)
        await refused(target.client.detokenize([97]), "QUEUE_FULL")
        await refused(target.client.complete("x"), "QUEUE_FULL")
        assert target.lifecycle.refusals.snapshot() == {"QUEUE_FULL": 2}
        free.set()
        assert await asyncio.gather(*both) == [(97, 98)] * 2
        held.result(10)
        assert await target.client.tokenize("ab") == (97, 98)


@asynccontextmanager
async def two_clients(model: Path, folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, AsyncClient]]:
    """A target with its own client, alice, and another one, bob."""
    tokens = token_file(folder / "tokens", alice="generate", bob="generate")
    async with (
        target_service(model, token_file=folder / "tokens", token=tokens["alice"], **settings) as target,
        AsyncClient(target.address, token=tokens["bob"], timeout_s=30) as bob,
    ):
        yield target, bob


@limit("target", "max_running_per_client")
async def _(model: Path, folder: Path) -> None:
    """Three of alice: one runs. Bob, who came last, runs beside it. With the default, one place stays for others."""
    for settings in ({"max_running_per_client": 1}, {}):
        share = settings.get("max_running_per_client", 2)
        async with two_clients(model, folder, max_running=3, max_queued=3, **settings) as (target, bob):
            brake = target.brake()
            hers = [
                asyncio.create_task(begun(target.client.generate("x", max_tokens=300, ignore_eos=True)))
                for _ in range(3)
            ]
            await is_admitted(target, brake, share, 3 - share)
            his = asyncio.create_task(begun(bob.generate("x", max_tokens=300, ignore_eos=True)))
            await is_admitted(target, brake, share + 1, 3 - share)
            owners = sorted(sequence.generation.owner for sequence in target.target.scheduler._running)
            assert owners == ["name:alice"] * share + ["name:bob"]
            (await his).close()
            brake.release()
            # Each place that alice gives back goes to the next of hers.
            for task in hers:
                (await task).close()
    await past_a_full_queue(model, folder)


async def past_a_full_queue(model: Path, folder: Path) -> None:
    """A queue full of one client's requests, which wait for its own share, does not keep another from a free place."""
    async with two_clients(
        model, folder, max_running=2, max_queued=1, max_running_per_client=1, max_requests_per_client=9
    ) as (target, bob):
        brake = target.brake()
        hers = [
            asyncio.create_task(begun(target.client.generate("x", max_tokens=300, ignore_eos=True))) for _ in range(2)
        ]
        await is_admitted(target, brake, 1, 1)
        await refused(target.client.complete("x"), "QUEUE_FULL")
        his = asyncio.create_task(begun(bob.generate("x", max_tokens=300, ignore_eos=True)))
        await is_admitted(target, brake, 2, 1)
        assert target.lifecycle.refusals.snapshot() == {"QUEUE_FULL": 1}
        brake.release()
        for task in (his, *hers):
            (await task).close()


@limit("target", "max_requests_per_client")
async def _(model: Path, folder: Path) -> None:
    """With two places and two in the queue, half of four is each one's, unless something else is said."""
    for settings, most in (({}, 2), ({"max_requests_per_client": 3}, 3)):
        await one_too_many(model, folder, settings, most)


async def one_too_many(model: Path, folder: Path, settings: dict[str, int], most: int) -> None:
    """So many of alice run or wait; one more does not, one of bob does."""
    async with two_clients(model, folder, max_running=2, max_queued=2, **settings) as (target, bob):
        brake = target.brake()
        hers = [
            asyncio.create_task(begun(target.client.generate("x", max_tokens=300, ignore_eos=True)))
            for _ in range(most)
        ]
        await happens(lambda: len(target.service._live) == len(hers))
        await refused(target.client.complete("x"), "CLIENT_LIMIT")
        assert target.lifecycle.refusals.snapshot() == {"CLIENT_LIMIT": 1}
        brake.release()
        assert (await bob.complete("x", max_tokens=1)).finished
        for task in hers:
            (await task).close()
        await happens(lambda: not target.service._live)
        assert (await target.client.complete("x", max_tokens=1)).finished


@limit("target", "client_rate")
@limit("target", "client_burst")
async def _(model: Path, folder: Path) -> None:
    """A burst of two, then none; another client is not concerned, nor are health and GetModelInfo."""
    async with two_clients(model, folder, client_rate=0.001, client_burst=2) as (target, bob):
        await target.client.complete("x", max_tokens=1)
        await target.client.tokenize("ab")
        for call in (target.client.complete("x"), target.client.tokenize("ab"), target.client.detokenize([97])):
            error = await refused(call, "RATE_LIMIT")
            assert error.retry_after_s is not None
            assert 900 < error.retry_after_s <= 1000
        assert target.lifecycle.refusals.snapshot() == {"RATE_LIMIT": 3}
        await bob.tokenize("ab")
        await target.client.model_info()
        for _ in range(5):
            await target.client.health()


def drafter_refuses(name: str, reason: str, value: dict[str, int], calls: int) -> None:
    """A limit of the draft service, of which so many openings fit."""

    @limit("draft", name)
    async def check(model: Path, folder: Path) -> None:
        async with draft_service(**value) as drafter:
            for number in range(calls):
                await drafter.stub.Prefill(iter(prefill_messages(TEXT, session_id=f"session-{number:010}")))
            await refused(drafter.stub.Prefill(iter(prefill_messages(TEXT))), reason)
            assert drafter.lifecycle.refusals.snapshot() == {reason: 1}
            assert len(drafter.rounds.table) == calls


drafter_refuses("session_limit", "SESSION_LIMIT", {"sessions": 2}, 2)
drafter_refuses("sessions_per_target", "OWNER_LIMIT", {"sessions_per_owner": 2}, 2)
drafter_refuses("kv_bytes_limit", "KV_BUDGET", {"kv_bytes": 640 * 1000 * 3 - 1}, 2)


@limit("draft", "max_calls")
async def _(model: Path, folder: Path) -> None:
    async with draft_service(max_calls=1) as drafter:
        await drafter.stub.Prefill(iter(prefill_messages(TEXT)))
        waiting = drafter.stub.Prefill()
        await waiting.write(prefill_messages([], session_id="another-0123456789")[0])

        async def until_refused() -> None:
            # The first of these may come before the one that waits.
            for number in range(1, 1000):
                await drafter.stub.Draft(draft_request(TEXT, len(TEXT), number=number))

        await refused(until_refused(), "QUEUE_FULL")
        assert drafter.lifecycle.refusals.snapshot() == {"QUEUE_FULL": 1}
        await drafter.stub.Release(draft_pb2.ReleaseRequest(session_ids=["none"]))
        waiting.cancel()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@limit("draft", "lease_s")
async def _(model: Path, folder: Path) -> None:
    await lease(10.0, None, 10.0)


@limit("draft", "max_lease_s")
async def _(model: Path, folder: Path) -> None:
    await lease(10.0, 1000.0, 20.0)


async def lease(default_s: float, asked_s: float | None, granted_s: float) -> None:
    """The session is there until its lease is over, and then is not."""
    clock = Clock()
    wish = {} if asked_s is None else {"lease": Duration(seconds=int(asked_s))}
    async with draft_service(clock=clock, lease_s=default_s, max_lease_s=20.0) as drafter:
        reply = await drafter.stub.Prefill(iter(prefill_messages(TEXT, **wish)))
        assert reply.lease.seconds == granted_s
        clock.now_s += granted_s - 0.5
        await drafter.stub.Draft(draft_request(TEXT, len(TEXT)))
        clock.now_s += granted_s + 0.5
        await refused(drafter.stub.Draft(draft_request(TEXT, len(TEXT), number=2)), "SESSION_UNKNOWN")
        assert drafter.lifecycle.refusals.snapshot() == {"SESSION_UNKNOWN": 1}


async def test_a_session_that_can_never_fit_is_refused_before_its_ids_are_read(model: Path) -> None:
    """Else a peer could send four billion ids."""
    async with draft_service(kv_bytes=640 * 1000) as drafter:
        call = drafter.stub.Prefill()
        await call.write(prefill_messages([], max_length=2**32 - 1)[0])
        # The stream stays open: the answer comes all the same.
        error = await refused(call, "KV_BUDGET")
        assert error.retry_after_s is None


@limit("both", "max_message_bytes")
async def _(model: Path, folder: Path) -> None:
    """On both hops and on both sides: a client that may not send so much, and services that do not take it."""
    size = 64 * 1024
    async with target_service(model, max_message_bytes=size) as target:
        assert len(await target.client.tokenize("x" * (size - 100))) == size - 100
        await refused(target.client.tokenize("x" * size), "MESSAGE_TOO_LARGE")
        async with AsyncClient(target.address, max_message_bytes=1000) as client:
            assert await client.tokenize("x" * 100)
            await refused(client.tokenize("x" * 1000), "MESSAGE_TOO_LARGE")
            # What comes back counts too.
            await refused(client.tokenize("é" * 450), "MESSAGE_TOO_LARGE")
    guard = Guard(max_message_bytes=size)
    async with draft_service(guard=guard) as drafter:
        await refused(
            drafter.stub.Prefill(iter(prefill_messages(list(range(200, 60_000)), chunk=60_000, max_length=70_000))),
            "MESSAGE_TOO_LARGE",
        )
        async with target_service(model, drafters=[drafter.address], max_message_bytes=size) as target:
            await target.drafter_is(DrafterState.READY)
            prompt = "ab" * 1000
            answer = await target.client.complete(prompt, max_tokens=8, ignore_eos=True, drafting="fixed")
            assert answer.speculation.no_draft_reason is None


@limit("both", "max_deadline_s")
async def _(model: Path, folder: Path) -> None:
    """In the queue as well as while it runs, with a later deadline of the caller's or none; health is watched on."""
    async with target_service(model, max_deadline_s=0.3, max_running=1) as target:
        brake = target.brake()
        runs = asyncio.create_task(target.client.generate("x", max_tokens=9, ignore_eos=True).collect())
        await happens(lambda: target.target.scheduler.running == 1)
        waiting = asyncio.create_task(target.client.generate("x", timeout_s=60).collect())
        for task in (runs, waiting):
            await refused(task, "DEADLINE_CAP")
        assert target.lifecycle.refusals.snapshot() == {"DEADLINE_CAP": 2}
        brake.release()
        await target.at_rest()
        assert (await target.client.complete("x", max_tokens=1)).finished


@limit("both", "stalled_reader_timeout_s")
async def _(model: Path, folder: Path) -> None:
    """The only place goes to somebody else; the one who stalled reads what was sent, and then why it ended."""
    async with target_service(model, stalled_reader_timeout_s=0.4, max_running=1) as target:
        # Else gRPC would take megabytes for a reader that reads nothing.
        options = [*LOCAL, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(target.address, options=options) as channel:
            request = pb.GenerateRequest(
                text="x",
                stopping=pb.StoppingParams(max_tokens=3000, ignore_eos=True),
                response=pb.ResponseOptions(top_logprobs=20),
            )
            call = target_pb2_grpc.TargetServiceStub(channel).Generate(request)
            await call.read()
            answer = await target.client.complete("y", max_tokens=2, ignore_eos=True)
            assert len(answer.tokens) == 2
            assert target.lifecycle.refusals.snapshot() == {"READER_STALLED": 1}

            async def rest() -> None:
                while await call.read() is not grpc.aio.EOF:
                    pass

            await refused(rest(), "READER_STALLED")
        await target.at_rest()


async def test_a_reader_that_is_slow_but_reads_is_not_ended(model: Path) -> None:
    async with target_service(model, stalled_reader_timeout_s=0.3) as target:
        options = [*LOCAL, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(target.address, options=options) as channel:
            request = pb.GenerateRequest(
                text="x",
                stopping=pb.StoppingParams(max_tokens=400, ignore_eos=True),
                response=pb.ResponseOptions(top_logprobs=20),
            )
            call = target_pb2_grpc.TargetServiceStub(channel).Generate(request)
            last = None
            while (event := await call.read()) is not grpc.aio.EOF:
                last = event
                await asyncio.sleep(0.005)
            assert last is not None
            assert last.HasField("finished")
        assert target.lifecycle.refusals.snapshot() == {}
