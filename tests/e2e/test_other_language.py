"""The contract is enough: a drafter in JavaScript that knows only protos/ and docs/protocol.md serves a real target."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import complete, fixed, generation, loaded_target

from draftwire.errors import (
    DraftwireError,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    PositionGap,
    Superseded,
)
from draftwire.sampling import Sampler
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.wire import from_rpc_error, prefix_hash
from target_service.core import Target
from target_service.drafter_link import LinkState
from target_service.ledger import Released, Token
from target_service.params import Choosing
from target_service.sequence import Done
from target_service.sequence import Sequence as Request

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "node-drafter"
NAME = "session-0123456789"
PROMPT = [7, 8, 9, 1, 2, 3, 7, 8, 9]
# Text of few different ids repeats itself, so that a lookup has something to copy.
FEW = {token: 100.0 for token in (10, 11, 12, 13)}
GREEDY = Choosing(logit_bias=FEW)
WARM = Choosing(logit_bias=FEW, sampler=Sampler(temperature=1.0, seed=5))

pytestmark = pytest.mark.exact


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: the JavaScript drafter is NOT tested here")
    folder = tmp_path_factory.mktemp("node-drafter")
    for file in (*EXAMPLE.glob("*.mjs"), EXAMPLE / "package.json"):
        shutil.copy(file, folder)
    argv = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--prefer-offline"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        pytest.skip(f"npm cannot install the packages, the JavaScript drafter is NOT tested here: {last}")
    return folder


@contextmanager
def drafter(folder: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The example as a process; gives its address. A timer ends a process that never says where it listens."""
    argv = ["node", "drafter.mjs", "--port", str(port), "--protos", str(ROOT / "protos")]
    environ = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        try:
            assert line.startswith("listening on "), line
            yield line.split()[-1], process
        finally:
            process.kill()


@asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(installed: Path) -> Iterator[str]:
    """A drafter that all contract tests share; each opens the session anew."""
    with drafter(installed) as (where, _):
        yield where


def advance(ids: Sequence[int], base_length: int = 0) -> draft_pb2.Advance:
    return draft_pb2.Advance(base_length=base_length, token_ids=ids[base_length:], prefix_hash=prefix_hash(ids))


def prefill(ids: Sequence[int], *, base_length: int = 0, **fields: Any) -> list[draft_pb2.PrefillRequest]:
    """open, then one chunk with the ids behind base_length."""
    opening = {"session_id": NAME, "protocol_version": 1, "prompt_length": len(PROMPT), "max_length": 100, **fields}
    return [
        draft_pb2.PrefillRequest(open=draft_pb2.SessionOpen(**opening)),
        draft_pb2.PrefillRequest(chunk=advance(ids, base_length)),
    ]


def question(ids: Sequence[int], base_length: int, number: int = 1, **fields: Any) -> draft_pb2.DraftRequest:
    values = {"session_id": NAME, "round": number, "advance": advance(ids, base_length), "max_draft_tokens": 4}
    return draft_pb2.DraftRequest(**{**values, **fields})


async def refusal(call: Any) -> DraftwireError:
    """The typed error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_it_describes_itself_and_is_healthy(address: str) -> None:
    async with channel(address) as opened:
        reply = await draft_pb2_grpc.DraftServiceStub(opened).Describe(draft_pb2.DescribeRequest(protocol_version=1))
        assert (reply.source_kind, reply.max_draft_tokens, reply.tokenizer_fingerprint) == ("lookup-js", 16, "")
        assert reply.min_protocol_version == reply.max_protocol_version == 1
        assert reply.instance_id
        health = health_pb2_grpc.HealthStub(opened)
        for service in ("", "draftwire.v1.DraftService"):
            status = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
            assert status == health_pb2.HealthCheckResponse.SERVING


async def test_it_copies_what_followed_and_keeps_guesses_out_of_its_state(address: str) -> None:
    async with channel(address) as opened:
        stub = draft_pb2_grpc.DraftServiceStub(opened)
        assert (await stub.Prefill(iter(prefill(PROMPT)))).committed_length == len(PROMPT)
        reply = await stub.Draft(question(PROMPT, len(PROMPT)))
        assert (list(reply.token_ids), reply.first_position, reply.round) == ([1, 2, 3, 7], len(PROMPT), 1)
        assert await stub.Draft(question(PROMPT, len(PROMPT))) is not None  # a retry of the round
        guessed = await stub.Draft(question(PROMPT, len(PROMPT), 2, assumed_token_ids=[1, 2]))
        assert (list(guessed.token_ids), guessed.first_position) == ([3, 7, 8, 9], len(PROMPT) + 2)
        assert guessed.committed_length == len(PROMPT)
        # The text took another way than the guess.
        text = [*PROMPT, 5]
        assert (await stub.Draft(question(text, len(PROMPT), 3))).committed_length == len(text)
        held = await stub.Commit(draft_pb2.CommitRequest(session_id=NAME, round=4, advance=advance([*text, 7], 10)))
        assert held.committed_length == len(text) + 1
        ended = await stub.Draft(question([*text, 7, 8], 11, 5, max_draft_tokens=2))
        assert list(ended.token_ids) == [9, 5]


async def test_it_ends_a_draft_at_an_end_token(address: str) -> None:
    async with channel(address) as opened:
        stub = draft_pb2_grpc.DraftServiceStub(opened)
        await stub.Prefill(iter(prefill(PROMPT, end_token_ids=[2])))
        reply = await stub.Draft(question(PROMPT, len(PROMPT)))
        assert (list(reply.token_ids), reply.end) == ([1, 2], draft_pb2.DRAFT_END_END_TOKEN)


async def test_its_errors_are_those_of_the_contract(address: str) -> None:
    """Status, reason in google.rpc.ErrorInfo, and where to resume."""
    async with channel(address) as opened:
        stub = draft_pb2_grpc.DraftServiceStub(opened)
        await stub.Prefill(iter(prefill(PROMPT)))
        gap = await refusal(stub.Draft(question([*PROMPT, 1, 2], len(PROMPT) + 1)))
        assert (type(gap), gap.reason, gap.metadata["committed_length"]) == (PositionGap, "POSITION_GAP", "9")
        for bad in (question([*PROMPT[:-1], 4], 0), question([4, *PROMPT[1:], 5], len(PROMPT))):
            mismatch = await refusal(stub.Draft(bad))
            assert (type(mismatch), mismatch.reason) == (FailedPrecondition, "PREFIX_MISMATCH")
        await stub.Draft(question([*PROMPT, 6], len(PROMPT), 5))
        older = await refusal(stub.Draft(question([*PROMPT, 6], len(PROMPT), 4)))
        assert (type(older), older.reason) == (Superseded, "SUPERSEDED")
        unknown = await refusal(stub.Draft(question(PROMPT, 0, session_id="another-session-name")))
        assert (type(unknown), unknown.reason) == (NotFound, "SESSION_UNKNOWN")
        stranger = await refusal(stub.Prefill(iter(prefill(PROMPT, expected_instance_id="another"))))
        assert stranger.reason == "INSTANCE_MISMATCH"
        none = await refusal(stub.Draft(question(PROMPT, 0, 6, max_draft_tokens=0)))
        assert (type(none), [violation.field for violation in none.violations]) == (
            InvalidRequest,
            ["max_draft_tokens"],
        )
        await stub.Release(draft_pb2.ReleaseRequest(session_ids=[NAME, "never-opened-session"]))
        assert (await refusal(stub.Draft(question(PROMPT, 0, 7)))).reason == "SESSION_UNKNOWN"


async def test_a_prefill_resumes_and_one_that_breaks_off_changes_nothing(address: str) -> None:
    async with channel(address) as opened:
        stub = draft_pb2_grpc.DraftServiceStub(opened)
        await stub.Prefill(iter(prefill(PROMPT)))

        async def broken() -> AsyncIterator[draft_pb2.PrefillRequest]:
            for message in prefill([4, 4, 4]):
                yield message
            await asyncio.Event().wait()

        call = stub.Prefill(broken())
        await call.wait_for_connection()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        text = [*PROMPT, 1, 2]
        resumed = await stub.Prefill(iter(prefill(text, base_length=len(PROMPT))))
        assert (resumed.committed_length, resumed.reused_length) == (len(text), len(PROMPT))
        shorter = await stub.Prefill(iter(prefill(PROMPT[:4])))
        assert shorter.committed_length == 4
        early = await refusal(stub.Draft(question(PROMPT[:4], 4)))
        assert (early.reason, early.metadata["committed_length"]) == ("POSITION_GAP", "4")


async def until(condition: Callable[[], bool]) -> None:
    """Waits until it holds; another process makes it so, and nothing here could be awaited instead."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about within 30 s")


def described(target: Target) -> bool:
    return target.pool.links[0].state is LinkState.READY


@pytest.mark.parametrize("choosing", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_target_gets_accepted_drafts_and_writes_the_plain_text(
    installed: Path, tmp_path: Path, choosing: Choosing
) -> None:
    """Law L1 with a drafter of another language."""
    save_tiny_model(tmp_path / "tiny", "llama", 7)

    async def run(address: str) -> None:
        async with loaded_target(tmp_path / "tiny", drafter=[address], draft_timeout_s=5.0) as target:
            await until(lambda: described(target))
            wanted = generation(PROMPT, choosing=choosing, max_tokens=300)
            plain = await complete(target, wanted)
            sequence = target.submit(fixed(wanted, 4))
            # Nobody reads yet, so the request waits once its outbox is full, and the session opens in time.
            await until(lambda: sequence.source.ready)
            tokens = await read(target, sequence)
            assert tuple(token.id for token in tokens) == plain.ids
            assert sequence.counts.accepted > 0
            assert sequence.counts.forwards < plain.counts.forwards == 300
            assert target.pool.links[0].state is LinkState.READY, target.pool.links[0].reason

    with drafter(installed) as (address, _):
        asyncio.run(run(address))


def test_drafting_resumes_in_the_same_request_after_a_restart(installed: Path, tmp_path: Path) -> None:
    """Law L2: killed half-way and started empty at the same address, it changes nothing but the speed."""
    save_tiny_model(tmp_path / "tiny", "llama", 7)

    async def run() -> None:
        with drafter(installed) as (address, first):
            async with loaded_target(tmp_path / "tiny", drafter=[address], draft_timeout_s=5.0) as target:
                await until(lambda: described(target))
                wanted = generation(PROMPT, choosing=GREEDY, max_tokens=480)
                plain = await complete(target, wanted)
                sequence = target.submit(fixed(wanted, 4))
                tokens = await read(target, sequence, lambda tokens: any(token.from_draft for token in tokens))
                first.kill()
                await asyncio.to_thread(first.wait)
                # Nobody reads meanwhile: the outbox fills, and the request waits with most of its rounds to come.
                with drafter(installed, int(address.rpartition(":")[2])):
                    tokens += await read(target, sequence, lambda _: sequence.source.report().missing == "lost")
                    await until(lambda: sequence.source.report().reseeds == 1)
                    accepted = sequence.counts.accepted
                    tokens += await read(target, sequence)
                assert tuple(token.id for token in tokens) == plain.ids
                assert sequence.counts.accepted > accepted > 0
                assert sequence.source.report().reseeds == 1

    asyncio.run(run())


async def read(
    target: Target, sequence: Request, enough: Callable[[list[Token]], bool] = lambda _: False
) -> list[Token]:
    """Tokens of a request, up to a round after which it is enough, or all of them."""
    tokens: list[Token] = []
    while not isinstance(outcome := await sequence.outbox.get(), Done):
        target.scheduler.wake()  # there is room again
        if isinstance(outcome, DraftwireError):
            raise outcome
        if isinstance(outcome, Released):
            tokens += outcome.tokens
            if enough(tokens):
                break
    return tokens
