"""How the target opens a session at a drafter: what it says of caches, and how long it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from service.target_fixture import happens, target_service, visible

from draftwire import testing
from draftwire.testing import FakeDraftService, serve
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2
from target_service import remote_drafts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7)


class Noting(FakeDraftService):
    """Keeps what sessions were opened with; with `hangs`, opens none."""

    def __init__(self, script: testing.Script | None = None, *, hangs: bool = False) -> None:
        super().__init__(script)
        self.opened: list[draft_pb2.SessionOpen] = []
        self.hangs = hangs

    async def Prefill(self, request_iterator: Any, context: Any) -> Any:
        async def noted() -> Any:
            async for message in request_iterator:
                if message.HasField("open"):
                    self.opened.append(message.open)
                yield message

        reply = await super().Prefill(noted(), context)
        if self.hangs:
            await asyncio.Event().wait()
        return reply


@pytest.mark.parametrize(
    ("options", "salt", "disabled"),
    [({}, "", False), ({"cache_salt": "s"}, "s", False), ({"cache": False}, "", True), ({"cache": True}, "", False)],
)
async def test_salt_and_opt_out_of_a_request_reach_the_drafter(
    model: Path, options: dict[str, Any], salt: str, disabled: bool
) -> None:
    fake = Noting()
    async with serve(fake) as address, target_service(model, drafters=[address]) as target:
        await happens(target.target.pool.best)
        await target.client.complete("once", max_tokens=30, ignore_eos=True, drafting="fixed", **options)
        assert [(one.cache_salt, one.cache_disabled) for one in fake.opened] == [(salt, disabled)]


async def test_a_prefill_that_hangs_leaves_the_request_to_another_drafter(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_drafts, "_PREFILL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(remote_drafts, "_PREFILL_ID_S", 0.0)
    options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    async with target_service(model) as alone:
        plain = await alone.client.complete("once", drafting="off", **options)
    hung, other = Noting(hangs=True), Noting(testing.perfect(plain.token_ids))
    async with (
        serve(hung) as first,
        serve(other) as second,
        target_service(model, drafters=[first, second]) as target,
    ):
        await happens(lambda: len([link for link in target.target.pool.links if link.description]) == 2)
        brake = target.brake()
        task = asyncio.ensure_future(target.client.complete("once", drafting="fixed", **options))
        await happens(lambda: hung.opened)
        await happens(lambda: other.opened)
        brake.release()
        assert visible(await task) == visible(plain)
        assert other.drafts
        assert not hung.drafts
