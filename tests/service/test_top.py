"""`draftwire top` and ListRequests on a real target with a real drafter."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from service.conftest_draft import draft_service
from service.target_fixture import Running, happens, target_service

from draftwire.events import DrafterState, RequestInfo, RequestState
from draftwire.testing_models import save_tiny_model

TEXT = "a b c d e f a b c d e f a b c d"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


async def top(address: str, *flags: str) -> str:
    """What the program writes into a pipe."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "client", "top", "--address", address, "--once", "--interval", "0.2", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def one_of(running: Running, name: str) -> RequestInfo | None:
    return next((one for one in (await running.client.activity()).requests if one.request_id == name), None)


async def shows(running: Running, name: str, state: RequestState) -> RequestInfo:
    """Waits until a request is in a state."""
    for _ in range(2000):
        found = await one_of(running, name)
        if found is not None and found.state is state:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"{name} is {found}, never {state}")


async def test_each_state_of_a_request_shows(model: Path) -> None:
    """Queued, prefilling with what is read, decoding with what is made, and gone; never a word of its text."""
    secret = "the secret word is swordfish"
    async with target_service(model, max_running=1, prefill_step_size=8) as running:
        brake = running.brake(prefill=True)
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "priority": 3}
        first = asyncio.ensure_future(running.client.complete(secret, request_id="first", **options))
        found = await shows(running, "first", RequestState.PREFILLING)
        length = found.prompt_tokens
        assert (found.prefilled_tokens, found.priority) == (0, 3)
        second = asyncio.ensure_future(running.client.complete("x", request_id="second", max_tokens=1))
        await shows(running, "second", RequestState.QUEUED)
        brake.allow(1)
        await happens(lambda: brake.prefills == 2)
        assert (await shows(running, "first", RequestState.PREFILLING)).prefilled_tokens == 8
        brake.allow(length // 8 + 4)
        found = await shows(running, "first", RequestState.DECODING)
        await happens(lambda: brake.forwards > 2)
        found = await shows(running, "first", RequestState.DECODING)
        assert 0 < found.completion_tokens < found.max_tokens == 12
        assert found.decode_tokens_per_second > 0
        assert found.age_s > 0
        reply = await running.client.activity()
        assert "swordfish" not in repr(reply)
        brake.release()
        await asyncio.gather(first, second)
        await running.at_rest()
        assert (await running.client.activity()).requests == ()


async def test_top_shows_a_target_at_work(model: Path) -> None:
    """The program against a real target: its numbers are those of the replies, as a page and as JSON."""
    async with draft_service() as drafter, target_service(model, drafters=[drafter.address]) as running:
        await running.drafter_is(DrafterState.READY)
        options: dict[str, Any] = {"drafting": "fixed", "num_draft_tokens": 4, "max_tokens": 60, "ignore_eos": True}
        done = await running.client.complete(TEXT, **options)
        brake = running.brake()
        held = asyncio.ensure_future(running.client.complete(TEXT, request_id="held", **options))
        brake.allow(6)
        await happens(lambda: brake.forwards > 6)
        page, shown = await top(running.address), json.loads(await top(running.address, "--json"))
        brake.release()
        await held
    request = next(one for one in shown["requests"] if one["request_id"] == "held")
    assert request["state"] == "decoding"
    assert request["drafter_id"] == drafter.address
    assert 0 < request["completion_tokens"] < 60
    totals = shown["totals"]
    assert totals["requests_finished"] == 1
    assert totals["completion_tokens"] == done.usage.completion_tokens + request["completion_tokens"]
    assert totals["num_draft_tokens"] == done.speculation.num_draft_tokens + request["num_draft_tokens"] > 0
    assert sum(totals["accepted_by_position"]) == totals["num_accepted_draft_tokens"]
    assert shown["drafters"][0]["state"] == "ready"
    assert 0 < shown["model"]["kv_bytes"] < shown["model"]["kv_bytes_limit"]
    for part in ("held", drafter.address, "running 1/8", "acceptance by position", "█"):
        assert part in page, page
