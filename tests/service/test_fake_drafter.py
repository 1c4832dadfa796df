"""The fake drafter keeps the contract, its scripts do what they say, and it starts again empty on the same port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from conftest_draft import NAME, advance, connected, draft_request, prefill_messages

from draftwire import testing
from draftwire.errors import Overloaded
from draftwire.testing import FakeDraftService, Script
from draftwire.v1 import draft_pb2
from draftwire.wire import from_rpc_error

PROMPT = [1, 2, 3]
ANSWER = [10, 11, 12, 13, 14, 15, 16]


async def one_draft(script: Script, **fields: Any) -> draft_pb2.DraftResponse:
    """What the script answers to a first Draft of four ids."""
    async with testing.serve(FakeDraftService(script)) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT, prompt_length=3)))
        reply = await stub.Draft(draft_request(PROMPT, 3, 5, **fields))
        assert isinstance(reply, draft_pb2.DraftResponse)
        return reply


@pytest.mark.parametrize(
    ("script", "ids"),
    [
        (testing.perfect(ANSWER), [10, 11, 12, 13]),
        (testing.perfect(ANSWER[:2]), [10, 11]),
        (testing.half_right(ANSWER, right=2), [10, 11, 13, 14]),
        (testing.wrong(ANSWER), [11, 12, 13, 14]),
        (testing.fixed(), []),
        (testing.fixed(7, 7), [7, 7]),
        (testing.outside_vocabulary(), [2**32 - 1] * 4),
        (testing.too_many(ANSWER, count=9), [*ANSWER, 0, 0]),
        (testing.in_turn(testing.fixed(5), testing.fixed(6)), [5]),
    ],
)
async def test_a_script_says_what_is_drafted(script: Script, ids: Sequence[int]) -> None:
    reply = await one_draft(script)
    assert (list(reply.token_ids), reply.first_position, reply.round, reply.committed_length) == (ids, 3, 5, 3)


async def test_drafts_follow_assumed_ids() -> None:
    assert list((await one_draft(testing.perfect(ANSWER), assumed_token_ids=[10, 11])).token_ids) == [12, 13, 14, 15]


async def test_a_reply_can_be_misplaced_or_in_the_name_of_another_round() -> None:
    assert (await one_draft(testing.misplaced(testing.perfect(ANSWER)))).first_position == 4
    assert (await one_draft(testing.other_round(testing.perfect(ANSWER), shift=-1))).round == 4


async def test_a_stale_script_answers_with_what_belonged_to_the_call_before() -> None:
    fake = FakeDraftService(testing.stale(testing.perfect(ANSWER)))
    async with testing.serve(fake) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT, prompt_length=3)))
        assert not (await stub.Draft(draft_request(PROMPT, 3, 1))).token_ids
        reply = await stub.Draft(draft_request([*PROMPT, 10], 3, 2))
        assert (reply.round, reply.first_position, list(reply.token_ids)) == (1, 3, [10, 11, 12, 13])


async def test_a_late_answer_waits_for_its_event_and_a_hanging_one_is_counted_when_given_up() -> None:
    event = asyncio.Event()
    fake = FakeDraftService(testing.in_turn(testing.late(event, testing.perfect(ANSWER)), testing.hang()))
    async with testing.serve(fake) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT, prompt_length=3)))
        waiting = asyncio.ensure_future(stub.Draft(draft_request(PROMPT, 3)))
        while not fake.drafts:
            await stub.Describe(draft_pb2.DescribeRequest())
        assert not waiting.done()
        event.set()
        assert len((await waiting).token_ids) == 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Draft(draft_request(PROMPT, 3, 2), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while not fake.cancelled:
            await stub.Describe(draft_pb2.DescribeRequest())


async def test_a_failing_script_gives_its_status_with_details() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one_draft(testing.failing(Overloaded("full", reason="KV_BUDGET", retry_after_s=1.5)))
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason, error.retry_after_s) == (Overloaded, "KV_BUDGET", 1.5)


async def test_a_caller_that_breaks_the_contract_is_refused_and_noted() -> None:
    fake = FakeDraftService()
    async with testing.serve(fake) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT)))
        await stub.Draft(draft_request([*PROMPT, 10], 3, 5))
        assert not fake.refused
        for request in (
            draft_request([*PROMPT, 10, 11, 12], 5, 6),
            draft_request([*PROMPT, 12], 3, 6),
            draft_request([*PROMPT, 10], 3, 4),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Draft(request)
        await stub.Commit(draft_pb2.CommitRequest(session_id=NAME, round=6, advance=advance([*PROMPT, 10, 11], 4)))
    assert [error.reason for error in fake.refused] == ["POSITION_GAP", "PREFIX_MISMATCH", "SUPERSEDED"]
    assert fake.open_sessions == {NAME: (*PROMPT, 10, 11)}
    assert (fake.prefills, fake.commits) == ([(NAME, tuple(PROMPT))], [(NAME, 5)])
    assert [asked.committed for asked in fake.drafts] == [(*PROMPT, 10)]


async def test_a_restart_on_the_same_port_is_another_instance_without_sessions() -> None:
    first, second = FakeDraftService(), FakeDraftService(tokenizer_fingerprint="f" * 64)
    async with testing.serve(first) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT)))
    async with testing.serve(second, port=int(address.rpartition(":")[2])) as again, connected(again) as stub:
        assert again == address
        reply = await stub.Describe(draft_pb2.DescribeRequest())
        assert (reply.instance_id, reply.tokenizer_fingerprint) == (second.instance_id, "f" * 64)
        assert second.instance_id != first.instance_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Draft(draft_request(PROMPT, 3))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_released_and_forgotten_sessions_are_gone() -> None:
    fake = FakeDraftService()
    async with testing.serve(fake) as address, connected(address) as stub:
        await stub.Prefill(iter(prefill_messages(PROMPT)))
        await stub.Release(draft_pb2.ReleaseRequest(session_ids=[NAME]))
        assert (fake.released, fake.open_sessions) == ([NAME], {})
        await stub.Prefill(iter(prefill_messages(PROMPT)))
        fake.forget()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Draft(draft_request(PROMPT, 3))
