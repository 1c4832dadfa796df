"""Drafters behind a name: the target finds new ones, spreads its sessions, and lets go of those that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from service.conftest_draft import draft_service
from service.target_fixture import Brake, Running, happens, reconciled, target_service, until, visible

from draftwire import testing
from draftwire.events import Completion, DrafterState
from draftwire.testing import Asked, FakeDraftService, FakeResolver, Reply, Script, serve
from draftwire.testing_models import save_tiny_model
from target_service.drafter_link import Identity, LinkState
from target_service.drafter_pool import DrafterPool

NAME = "dns:///draft:50052"
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "num_draft_tokens": 4}
IDENTITY = Identity(instance_id="test", fingerprint="")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@asynccontextmanager
async def behind(model: Path, resolver: FakeResolver, *static: str) -> AsyncIterator[Running]:
    """A target that looks a name up a hundred times a second."""
    drafters = [*static, NAME]
    async with target_service(model, drafters=drafters, resolver=resolver, drafter_resolve_s=0.01) as target:
        yield target


async def ready(target: Running, *addresses: str) -> None:
    """Waits until ListDrafters shows exactly these, all READY."""
    await until(
        target.client.drafters,
        lambda found: (
            {drafter.address for drafter in found} == set(addresses)
            and all(drafter.state is DrafterState.READY for drafter in found)
        ),
    )


async def answer(target: Running, drafting: Any = "fixed") -> Completion:
    return await target.client.complete("once upon", drafting=drafting, **LONG)


async def steps(brake: Brake, condition: Any, most: int = 180) -> None:
    """Single forwards until a condition holds."""
    for _ in range(most):
        if condition():
            return
        before = brake.forwards
        brake.allow(1)
        await happens(lambda before=before: brake.forwards > before or condition())  # type: ignore[misc]
    raise AssertionError("never seen")


class TestPlaces:
    async def test_a_drafter_that_appears_under_the_name_is_used(self, model: Path) -> None:
        """From none over one to two, with real draft services; before the first one, requests run without drafts."""
        resolver = FakeResolver()
        async with behind(model, resolver) as target, draft_service() as one, draft_service() as two:
            plain = await answer(target)
            assert plain.speculation.no_draft_reason is not None
            assert not await target.client.drafters()
            for addresses in ((one.address,), (one.address, two.address)):
                resolver.addresses = frozenset(addresses)
                await ready(target, *addresses)
                drafted = await answer(target)
                assert visible(drafted) == visible(plain)
                assert drafted.speculation.drafter_id in addresses
            assert resolver.asked[0] == ("draft", 50052)

    async def test_a_request_that_began_without_drafters_uses_the_first_that_appears(self, model: Path) -> None:
        resolver = FakeResolver()
        async with behind(model, resolver) as target:
            plain = await answer(target, "off")
            fake = FakeDraftService(testing.perfect(plain.token_ids))
            async with serve(fake) as address:
                brake = target.brake()
                brake.allow(3)
                task = asyncio.ensure_future(answer(target))
                await happens(lambda: brake.forwards > 3)
                resolver.addresses = frozenset({address})
                await happens(lambda: fake.open_sessions)
                brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert result.speculation.num_accepted_draft_tokens > 100

    async def test_sessions_are_spread_over_all(self, model: Path) -> None:
        fakes = [FakeDraftService() for _ in range(3)]
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(serve(fake)) for fake in fakes]
            target = await stack.enter_async_context(behind(model, FakeResolver(*addresses)))
            await ready(target, *addresses)
            brake = target.brake()
            tasks = [asyncio.ensure_future(answer(target)) for _ in range(6)]
            # They come one by one, and each is admitted between two forwards.
            await steps(brake, lambda: sum(len(fake.open_sessions) for fake in fakes) == 6)
            assert [len(fake.open_sessions) for fake in fakes] == [2, 2, 2]
            brake.release()
            await asyncio.gather(*tasks)
            await target.at_rest()

    async def test_static_drafters_stay_beside_a_name_and_come_first_as_configured(self, model: Path) -> None:
        async with serve(FakeDraftService()) as static, serve(FakeDraftService()) as found:
            resolver = FakeResolver(found, static)
            async with behind(model, resolver, static) as target:
                await ready(target, static, found)
                assert [drafter.address for drafter in await target.client.drafters()] == [static, found]
                resolver.addresses = frozenset({found})
                seen = len(resolver.asked)
                await happens(lambda: len(resolver.asked) > seen + 1)
                await ready(target, static, found)


class TestLeaves:
    async def test_sessions_of_one_that_leaves_move_without_a_lost_round_and_then_it_is_dropped(
        self, model: Path
    ) -> None:
        async with target_service(model) as alone:
            plain = await answer(alone, "off")
        one, two = (FakeDraftService(testing.perfect(plain.token_ids)) for _ in range(2))
        async with serve(one) as first, serve(two) as second:
            resolver = FakeResolver(first)
            async with behind(model, resolver) as target:
                await ready(target, first)
                brake = target.brake()
                task = asyncio.ensure_future(answer(target))
                await steps(brake, lambda: len(one.drafts) > 3)
                resolver.addresses = frozenset({second})
                await steps(brake, lambda: two.drafts)
                assert one.released, "the old session is given back"
                await ready(target, second)
                brake.release()
                result = await task
                assert visible(result) == visible(plain)
                reconciled(result)
                stats = result.speculation
                assert (stats.failovers, stats.reseeds, stats.drafter_id) == (1, 1, second)
                assert "lost" not in stats.rounds_without_draft
                assert not one.refused
                assert not two.refused
                await target.at_rest()
                assert not two.open_sessions

    async def test_the_only_one_drafts_on_until_its_request_ends(self, model: Path) -> None:
        """Its address is gone, but it answers: it gets no new session, and is dropped after the last."""
        async with target_service(model) as alone:
            plain = await answer(alone, "off")
        fake = FakeDraftService(testing.perfect(plain.token_ids))
        async with serve(fake) as address, serve(FakeDraftService(tokenizer_fingerprint="f" * 64)) as other:
            resolver = FakeResolver(address)
            async with behind(model, resolver) as target:
                await ready(target, address)
                brake = target.brake()
                task = asyncio.ensure_future(answer(target))
                await steps(brake, lambda: len(fake.drafts) > 3)
                resolver.addresses = frozenset({other})
                await happens(lambda: len(target.target.pool.links) == 2)
                drafters = {drafter.address: drafter for drafter in await target.client.drafters()}
                assert drafters[address].state is DrafterState.DRAINING
                assert NAME in drafters[address].refused_reason
                assert target.target.pool.best() is None
                brake.release()
                result = await task
                assert visible(result) == visible(plain)
                assert (result.speculation.reseeds, "lost" in result.speculation.rounds_without_draft) == (0, False)
                await happens(lambda: [link.address for link in target.target.pool.links] == [other])
                assert not fake.open_sessions

    async def test_one_whose_address_comes_back_in_time_stays(self, model: Path) -> None:
        async with target_service(model) as alone:
            plain = await answer(alone, "off")
        fake = FakeDraftService(testing.perfect(plain.token_ids))
        async with serve(fake) as address, serve(FakeDraftService(tokenizer_fingerprint="f" * 64)) as other:
            resolver = FakeResolver(address)
            async with behind(model, resolver) as target:
                await ready(target, address)
                brake = target.brake()
                task = asyncio.ensure_future(answer(target))
                await steps(brake, lambda: len(fake.drafts) > 3)
                link = target.target.pool.links[0]
                resolver.addresses = frozenset({other})
                await happens(lambda: link.leaving)
                resolver.addresses = frozenset({address})
                await ready(target, address)
                brake.release()
                result = await task
                assert visible(result) == visible(plain)
                assert result.speculation.reseeds == 0
                assert target.target.pool.links == [link]

    async def test_a_lookup_that_fails_changes_nothing_and_is_told_once(self, model: Path) -> None:
        async with serve(FakeDraftService()) as address:
            resolver = FakeResolver(address)
            with structlog.testing.capture_logs() as logs:
                async with behind(model, resolver) as target:
                    await ready(target, address)
                    for fault in (OSError("no name server"), None):
                        resolver.fault, resolver.addresses = fault, frozenset()
                        seen = len(resolver.asked)
                        await happens(lambda seen=seen: len(resolver.asked) > seen + 5)  # type: ignore[misc]
                        await ready(target, address)
            told = [(line["log_level"], line["reason"]) for line in logs if line["event"] == "lookup_failed"]
            assert told == [("warning", "no name server"), ("warning", "it has no addresses")]


def slow(seconds: float, script: Script) -> Script:
    async def later(asked: Asked) -> Reply:
        await asyncio.sleep(seconds)
        return await script(asked)

    return later


class TestBest:
    """Placement, on links without their life."""

    @staticmethod
    def pool(*addresses: str) -> DrafterPool:
        pool = DrafterPool(addresses, IDENTITY)
        for index, link in enumerate(pool.links):
            link.state = LinkState.READY
            link.description = described(f"instance-{index}")
        return pool

    async def test_the_cost_is_sessions_times_the_time_of_a_call(self) -> None:
        pool = self.pool("a:1", "b:1")
        quick, slow_one = pool.links
        quick.succeeded(0.002)
        slow_one.succeeded(0.009)
        chosen = []
        for _ in range(6):
            link = pool.best()
            assert link is not None
            link.join(asyncio.Event())
            chosen.append(link.address)
        assert chosen == ["a:1", "a:1", "a:1", "a:1", "b:1", "a:1"]
        for link in pool.links:
            await link.close()

    async def test_one_that_was_not_measured_lately_is_taken_for_an_average_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = self.pool("a:1", "b:1")
        quick, other = pool.links
        other.succeeded(0.4)
        monkeypatch.setattr(other, "_last_rpc_s", -1e6)
        quick.succeeded(0.002)
        quick.join(asyncio.Event())
        assert pool.best() is other
        for link in pool.links:
            await link.close()

    async def test_one_drafter_at_two_addresses_counts_once(self) -> None:
        pool = self.pool("127.0.0.1:1", "[::1]:1", "c:1")
        first, second, _ = pool.links
        first.description = second.description = described("the same")
        first.join(asyncio.Event())
        best = pool.best()
        assert best is not None
        assert best.address == "c:1"
        first.state = LinkState.OPEN_BREAKER
        assert pool.best() is second, "it is still reached by the other address"
        for link in pool.links:
            await link.close()

    async def test_a_slow_drafter_gets_fewer_sessions_of_a_running_target(self, model: Path) -> None:
        quick, slack = FakeDraftService(), FakeDraftService(slow(0.05, testing.fixed(1)))
        async with serve(quick) as first, serve(slack) as second, behind(model, FakeResolver(first, second)) as target:
            await ready(target, first, second)
            for _ in range(2):
                await asyncio.gather(answer(target), answer(target))
            brake = target.brake()
            tasks = [asyncio.ensure_future(answer(target)) for _ in range(4)]
            await steps(brake, lambda: len(quick.open_sessions) + len(slack.open_sessions) == 4)
            assert len(quick.open_sessions) >= 3
            brake.release()
            await asyncio.gather(*tasks)


def described(instance_id: str) -> Any:
    from target_service.drafter_link import Description

    return Description(
        instance_id=instance_id, source_kind="fake", model_id="", max_drafts=8, context_length=None, shares_noise=True
    )
