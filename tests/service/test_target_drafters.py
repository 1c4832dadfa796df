"""The target beside drafters of every kind of bad behaviour: requests go on, drafting comes back, nothing is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from service.target_fixture import Running, drafted, happens, target_service, visible

from draftwire import testing
from draftwire.errors import (
    FailedPrecondition,
    InternalError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PositionGap,
    Superseded,
    Unavailable,
    Unsupported,
)
from draftwire.events import Completion, DrafterState, NoDraftReason
from draftwire.testing import Asked, FakeDraftService, Reply, Script, serve
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import draft_pb2
from target_service import drafter_link
from target_service.drafter_link import LinkState

LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


async def answer(target: Running, drafting: Any = "fixed", **options: Any) -> Completion:
    return await target.client.complete("once upon", drafting=drafting, **{**LONG, **options})


async def no_session_left(target: Running, *fakes: FakeDraftService) -> None:
    await target.at_rest()
    for fake in fakes:
        await happens(lambda fake=fake: not fake.open_sessions)  # type: ignore[misc]


class Held:
    """Lets a request pass `count` forwards, shows what then stands, and lets it go on."""

    def __init__(self, target: Running) -> None:
        self.brake = target.brake()
        self.target = target

    @asynccontextmanager
    async def at(self, count: int, **options: Any) -> AsyncIterator[asyncio.Task[Completion]]:
        self.brake.allow(count)
        task = asyncio.ensure_future(answer(self.target, **options))
        await happens(lambda: self.brake.forwards > count)
        yield task

    async def step(self, seen: Callable[[], object], most: int = 150) -> None:
        """Single forwards, until something is seen."""
        for _ in range(most):
            if seen():
                return
            before = self.brake.forwards
            self.brake.allow(1)
            await happens(lambda: self.brake.forwards > before or seen())  # noqa: B023
        raise AssertionError("never seen")


class Custom(FakeDraftService):
    """A drafter of which single calls are replaced: each hook gets the reply that the contract asks for."""

    def __init__(self, script: Script | None = None, **hooks: Callable[[Any], Any]) -> None:
        super().__init__(script)
        self.hooks = hooks

    async def Describe(self, request: Any, context: Any) -> Any:
        return self._hooked("describe", await super().Describe(request, context))

    async def Prefill(self, request_iterator: Any, context: Any) -> Any:
        return self._hooked("prefill", await super().Prefill(request_iterator, context))

    async def Draft(self, request: Any, context: Any) -> Any:
        return self._hooked("draft", await super().Draft(request, context))

    def _hooked(self, name: str, reply: Any) -> Any:
        return self.hooks.get(name, lambda same: same)(reply)


class TestRestarts:
    @pytest.fixture
    async def plain(self, model: Path) -> Completion:
        async with target_service(model) as alone:
            return await answer(alone, "off")

    async def test_a_drafter_that_restarts_empty_drafts_again_in_the_same_request(
        self, model: Path, plain: Completion
    ) -> None:
        first, second = (FakeDraftService(testing.perfect(plain.token_ids)) for _ in range(2))
        async with place(first) as spot, target_service(model, drafters=[spot.address]) as target:
            await target.drafter_is(DrafterState.READY)
            held = Held(target)
            async with held.at(1) as task:
                await held.step(lambda: len(first.drafts) > 3)
                await spot.put(second)
                await held.step(lambda: second.drafts)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert (result.speculation.reseeds, result.speculation.failovers) == (1, 0)
            assert result.speculation.num_accepted_draft_tokens > len(first.drafts) * 4
            assert not first.refused
            assert not second.refused
            await no_session_left(target, second)

    async def test_a_drafter_that_forgot_its_sessions_is_seeded_again(self, model: Path, plain: Completion) -> None:
        fake = FakeDraftService(testing.perfect(plain.token_ids))
        async with drafted(model, fake) as (target, _):
            held = Held(target)
            async with held.at(1) as task:
                await held.step(lambda: len(fake.drafts) > 3)
                seen, described = len(fake.drafts), fake.describes
                fake.forget()
                await held.step(lambda: len(fake.drafts) > seen)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert result.speculation.reseeds == 1
            assert fake.describes > described, "it may be another model by now: Describe comes first"
            assert [ids for _, ids in fake.prefills][1][: len(b"once upon")] == tuple(b"once upon")

    async def test_a_drafter_that_comes_back_with_another_tokenizer_is_refused_and_the_request_goes_on(
        self, model: Path, plain: Completion
    ) -> None:
        first, other = FakeDraftService(testing.perfect(plain.token_ids)), FakeDraftService(testing.fixed(1))
        other.described["tokenizer_fingerprint"] = "f" * 64
        async with place(first) as spot, target_service(model, drafters=[spot.address]) as target:
            await target.drafter_is(DrafterState.READY)
            held = Held(target)
            async with held.at(1) as task:
                await held.step(lambda: len(first.drafts) > 3)
                await spot.put(other)
                link = target.target.pool.links[0]
                await held.step(lambda: link.state is not LinkState.READY)
                refused = await target.drafter_is(DrafterState.REFUSED)
                assert "tokenizer" in refused.refused_reason
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert (other.prefills, other.drafts) == ([], [])
            later = await answer(target)
            assert later.finished.no_draft_reason is NoDraftReason.TOKENIZER_MISMATCH
            assert later.text == plain.text

    async def test_a_drafter_that_is_not_there_yet_is_used_once_it_comes(self, model: Path, plain: Completion) -> None:
        fake = FakeDraftService(testing.perfect(plain.token_ids))
        async with place(FakeDraftService()) as spot:
            await spot.clear()
            async with target_service(model, drafters=[spot.address]) as target:
                alone = await answer(target)
                assert alone.finished.no_draft_reason is NoDraftReason.NO_DRAFTER
                assert alone.text == plain.text
                held = Held(target)
                async with held.at(3) as task:
                    await spot.put(fake)
                    await happens(lambda: fake.open_sessions)
                    held.brake.release()
                    result = await task
                assert visible(result) == visible(plain)
                assert result.speculation.num_accepted_draft_tokens > 0
                assert result.speculation.rounds_without_draft["no_drafter"] >= 3

    async def test_when_one_of_two_dies_the_other_takes_over(self, model: Path, plain: Completion) -> None:
        one, two = (FakeDraftService(testing.perfect(plain.token_ids)) for _ in range(2))
        async with place(one) as first, place(two) as second, beside(model, first.address, second.address) as target:
            held = Held(target)
            async with held.at(1) as task:
                await held.step(lambda: len(one.drafts) > 3)
                assert not two.drafts
                await first.clear()
                await held.step(lambda: two.drafts)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            stats = result.speculation
            assert (stats.failovers, stats.reseeds, stats.drafter_id) == (1, 1, second.address)
            await no_session_left(target, two)

    async def test_when_one_of_two_hangs_again_and_again_the_other_takes_over(
        self, model: Path, plain: Completion
    ) -> None:
        one, two = FakeDraftService(testing.hang()), FakeDraftService(testing.perfect(plain.token_ids))
        async with (
            serve(one) as first,
            serve(two) as second,
            beside(model, first, second, draft_timeout_s=0.05) as target,
        ):
            held = Held(target)
            async with held.at(1) as task:
                for count in (1, 2, 3):
                    await held.step(lambda count=count: one.cancelled >= count)  # type: ignore[misc]
                await held.step(lambda: two.drafts)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert result.speculation.failovers == 1
            await no_session_left(target, one, two)

    async def test_a_full_drafter_leaves_the_request_to_another(self, model: Path, plain: Completion) -> None:
        class Full(FakeDraftService):
            async def Prefill(self, request_iterator: Any, context: Any) -> Any:
                raise Overloaded("full", reason="SESSION_LIMIT", retry_after_s=60.0)

        full, other = Full(), FakeDraftService(testing.perfect(plain.token_ids))
        async with serve(full) as first, serve(other) as second, beside(model, first, second) as target:
            held = Held(target)
            async with held.at(1) as task:
                await happens(lambda: other.open_sessions)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert result.speculation.num_accepted_draft_tokens > 0
            assert (await target.drafter()).state is DrafterState.READY, "full is not broken"

    @pytest.mark.parametrize("name", ["Prefill", "Draft", "Describe"])
    async def test_a_call_that_grpc_ends_as_if_we_had_cancelled_it_is_a_lost_connection(
        self, model: Path, plain: Completion, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """grpc.aio raises CancelledError where a connection breaks while a stream is sent: that must not end our own tasks."""
        monkeypatch.setattr(drafter_link, "_RECHECK_S", 0.05)
        fake = FakeDraftService(testing.perfect(plain.token_ids))
        async with drafted(model, fake) as (target, _):
            (link,) = target.target.pool.links
            call, broken = getattr(link.stub, name), []

            async def breaks() -> None:
                raise asyncio.CancelledError

            def once(*args: Any, **options: Any) -> Any:
                if broken:
                    return call(*args, **options)
                broken.append(name)
                return breaks()

            setattr(link.stub, name, once)
            held = Held(target)
            async with held.at(1) as task:
                await happens(lambda: broken and link.state is LinkState.READY) if name != "Draft" else None
                await held.step(lambda: broken and len(fake.drafts) > 3)
                held.brake.release()
                result = await task
            assert visible(result) == visible(plain)
            assert result.speculation.num_accepted_draft_tokens > 0

    async def test_an_idle_target_notices_that_a_drafter_is_gone(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter_link, "_RECHECK_S", 0.05)
        async with place(FakeDraftService()) as spot, beside(model, spot.address) as target:
            await spot.clear()
            await target.drafter_is(DrafterState.OPEN_BREAKER)
            await spot.put(FakeDraftService())
            await target.drafter_is(DrafterState.READY)


class Spot:
    """A port at which one drafter after another listens."""

    def __init__(self) -> None:
        self.address = ""
        self._serving: Any = None

    async def put(self, fake: FakeDraftService) -> None:
        """Kills the one that is there and starts this one, empty, on the same port."""
        await self.clear()
        self._serving = serve(fake, port=int(self.address.rpartition(":")[2] or 0))
        self.address = await self._serving.__aenter__()

    async def clear(self) -> None:
        """Kills the one that is there."""
        if self._serving is not None:
            serving, self._serving = self._serving, None
            await serving.__aexit__(None, None, None)


@asynccontextmanager
async def place(fake: FakeDraftService) -> AsyncIterator[Spot]:
    spot = Spot()
    await spot.put(fake)
    try:
        yield spot
    finally:
        await spot.clear()


@asynccontextmanager
async def beside(model: Path, *drafters: str, **options: Any) -> AsyncIterator[Running]:
    """A target that has found all its drafters."""
    async with target_service(model, drafters=drafters, **options) as target:
        for index in range(len(drafters)):
            await target.drafter_is(DrafterState.READY, index)
        yield target


def stranger(reply: Any) -> Any:
    """Each reply in the name of a new instance."""
    reply.instance_id = "somebody else"
    return reply


def with_computed(seconds: int) -> Callable[[Any], Any]:
    def change(reply: Any) -> Any:
        reply.timings.computed.CopyFrom(Duration(seconds=seconds))
        return reply

    return change


def wrong_length(reply: Any) -> Any:
    reply.committed_length += 1
    return reply


BAD_SCRIPTS: dict[str, Callable[[], Script]] = {
    "hangs": testing.hang,
    "answers in the name of another round": lambda: testing.other_round(testing.fixed(1, 2)),
    "answers for another position": lambda: testing.misplaced(testing.fixed(1, 2)),
    "answers with the draft before": lambda: testing.stale(testing.fixed(1, 2)),
    "drafts ids outside the vocabulary": lambda: testing.outside_vocabulary(259),
    "drafts a million ids": lambda: testing.too_many([1, 2], count=1_000_000),
    "is unavailable": lambda: testing.failing(Unavailable("gone")),
    "has lost the session": lambda: testing.failing(NotFound("gone", reason="SESSION_EXPIRED")),
    "is overloaded": lambda: testing.failing(Overloaded("full", retry_after_s=1.0)),
    "says superseded": lambda: testing.failing(Superseded("newer")),
    "says another prefix": lambda: testing.failing(FailedPrecondition("differs", reason="PREFIX_MISMATCH")),
    "says a gap": lambda: testing.failing(PositionGap("gap", metadata={"committed_length": "x"})),
    "says not yours": lambda: testing.failing(PermissionDenied("no")),
    "says unsupported": lambda: testing.failing(Unsupported("no")),
    "fails": lambda: testing.failing(InternalError("oh")),
    "raises": lambda: _raising,
}
BAD_HOOKS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "drafts in the name of another instance": {"draft": stranger},
    "prefills in the name of another instance": {"prefill": stranger},
    "describes itself as another instance": {"describe": stranger},
    "holds another number of ids": {"prefill": wrong_length},
    "says it computed for ever": {"draft": with_computed(2**50)},
    "says it computed before it was asked": {"draft": with_computed(-(2**50))},
}


async def _raising(asked: Asked) -> Reply:
    raise ValueError("a bug")


class TestBadDrafters:
    """One request beside each, fixed and auto: it ends in time with the plain text, and its sessions are released."""

    @pytest.mark.parametrize("name", [*BAD_SCRIPTS, *BAD_HOOKS])
    async def test_a_request_beside_a_drafter_that(self, model: Path, name: str) -> None:
        fake = Custom(BAD_SCRIPTS[name]()) if name in BAD_SCRIPTS else Custom(testing.fixed(1, 2), **BAD_HOOKS[name])
        async with drafted(model, fake, draft_timeout_s=0.05) as (target, _):
            plain = await answer(target, "off", top_logprobs=2)
            for drafting in ("fixed", "auto"):
                result = await asyncio.wait_for(answer(target, drafting, top_logprobs=2), 10)
                assert result.text == plain.text
                assert visible(result)[2:5] == visible(plain)[2:5]
            await no_session_left(target, fake)
            # Reading the text again and again must not be what a fault costs.
            assert len(fake.prefills) < 40

    @pytest.mark.parametrize(
        "described",
        [
            {"min_protocol_version": 2, "max_protocol_version": 3},
            {"taps": draft_pb2.TapSpec(layers=[1])},
            {"tokenizer_fingerprint": "0" * 64},
        ],
    )
    async def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
        self, model: Path, described: dict[str, Any]
    ) -> None:
        fake = FakeDraftService(**described)
        async with serve(fake) as address, target_service(model, drafters=[address]) as target:
            drafter = await target.drafter_is(DrafterState.REFUSED)
            assert drafter.refused_reason
            await answer(target)
            assert not fake.prefills

    async def test_a_drafter_that_talks_too_much_does_not_break_list_drafters(self, model: Path) -> None:
        fakes = [FakeDraftService(model_id="m" * (200 << 10)) for _ in range(2)]
        async with serve(fakes[0]) as one, serve(fakes[1]) as two, target_service(model, drafters=[one, two]) as target:
            for index in range(2):
                drafter = await target.drafter_is(DrafterState.READY, index)
                assert 3 < len(drafter.model_id) <= 500

    async def test_bytes_that_are_no_reply_cost_drafts_only_and_a_good_drafter_is_taken_afterwards(
        self, model: Path
    ) -> None:
        class Noise(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                return grpc.unary_unary_rpc_method_handler(_garbage)

        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((Noise(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with target_service(model, drafters=[f"127.0.0.1:{port}"]) as target:
            await happens(lambda: "contract" in target.target.pool.links[0].reason)
            assert len((await answer(target)).tokens) == 200
            await server.stop(None)
            async with serve(FakeDraftService(testing.fixed(1)), port=port):
                await target.drafter_is(DrafterState.READY)
                assert (await answer(target)).speculation.num_draft_tokens > 0

    async def test_error_details_that_cannot_be_read_cost_drafts_only(self, model: Path) -> None:
        class Mangled(FakeDraftService):
            async def Draft(self, request: Any, context: Any) -> Any:
                bad = AnyProto(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
                status = status_pb2.Status(code=9, message="no", details=[bad])
                metadata = (("grpc-status-details-bin", status.SerializeToString()),)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no", metadata)

        fake = Mangled()
        async with drafted(model, fake) as (target, _):
            result = await answer(target)
            assert len(result.tokens) == 200
            assert (await target.drafter()).sessions == 0
            await no_session_left(target, fake)

    async def test_a_drafter_that_answers_prefill_before_reading_it_is_only_a_drafter_without_the_text(
        self, model: Path
    ) -> None:
        class Hasty(FakeDraftService):
            async def Prefill(self, request_iterator: Any, context: Any) -> Any:
                return draft_pb2.PrefillResponse(instance_id=self.instance_id, committed_length=9)

        fake = Hasty(testing.fixed(1))
        async with drafted(model, fake) as (target, _):
            assert len((await answer(target)).tokens) == 200
            await target.at_rest()

    async def test_a_session_whose_opening_failed_is_released(self, model: Path) -> None:
        fake = Custom(testing.fixed(1), prefill=wrong_length)
        async with drafted(model, fake) as (target, _):
            await answer(target)
            await no_session_left(target, fake)
            assert {name for name, _ in fake.prefills} <= set(fake.released)

    async def test_a_drafter_whose_first_answer_never_comes_delays_nobody_else(self, model: Path) -> None:
        """Also with a patience of half a minute: the next request comes in while the first one waits."""
        fake = FakeDraftService(testing.hang())
        async with drafted(model, fake, draft_timeout_s=30.0) as (target, _):
            waiting = asyncio.ensure_future(answer(target))
            await happens(lambda: fake.drafts)
            other = await asyncio.wait_for(answer(target, "off"), 5)
            assert len(other.tokens) == 200
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await no_session_left(target, fake)


async def _garbage(request: Any, context: Any) -> bytes:
    return b"\xff\xff\xff"


async def test_a_request_without_drafts_opens_no_session(model: Path) -> None:
    async with drafted(model, FakeDraftService()) as (target, fake):
        result = await answer(target, "off")
        assert result.finished.no_draft_reason is NoDraftReason.OFF_BY_REQUEST
        assert fake.prefills == []


async def test_the_drafter_learns_of_the_request_what_it_needs(model: Path) -> None:
    """The noise, the length that memory is charged for, the end ids, and never more than was committed."""
    openings: list[Any] = []

    class Listening(FakeDraftService):
        async def Prefill(self, request_iterator: Any, context: Any) -> Any:
            async def seen() -> AsyncIterator[Any]:
                async for message in request_iterator:
                    if message.HasField("open"):
                        openings.append(message.open)
                    yield message

            return await super().Prefill(seen(), context)

    fake = Listening(testing.fixed(1, 2))
    async with drafted(model, fake) as (target, _):
        result = await answer(
            target, temperature=0.7, top_p=0.9, seed=5, stop_token_ids=[300 - 45], cache_salt="s", ignore_eos=False
        )
        (opening,) = openings
        assert len(opening.session_id) >= 16
        assert (opening.sampling.seed, round(opening.sampling.top_p, 3)) == (5, 0.9)
        assert opening.prompt_length == len(b"once upon")
        assert opening.max_length == opening.prompt_length + 200
        assert set(opening.end_token_ids) == {255, 256, 258}
        assert (opening.cache_salt, opening.expected_instance_id) == ("s", fake.instance_id)
        text = (*b"once upon", *result.token_ids)
        assert all(asked.committed == text[: len(asked.committed)] for asked in fake.drafts)
        assert not fake.refused
