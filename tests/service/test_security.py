"""Both services behind TLS and tokens: who gets in, whose sessions are whose, and what nobody ever sees."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from conftest_draft import draft_request, draft_service, prefill_messages
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from secrets_fixture import Authority, Pair, put, token_file
from service.target_fixture import LOCAL, Running, target_service, until

from draftwire.access import ROLES, Access, TokenFile
from draftwire.aio_client import AsyncClient
from draftwire.channels import TLS, Endpoint
from draftwire.client import Client
from draftwire.errors import DraftwireError, InternalError, Unauthenticated, Unavailable
from draftwire.events import DrafterState
from draftwire.guard import Guard
from draftwire.logs import configure
from draftwire.server_tls import ServerTLS, ServerTLSFiles, TLSError
from draftwire.testing_models import save_tiny_model
from draftwire.tokens import Role
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import from_rpc_error
from target_service.drafter_channel import DraftCalls, DrafterCredentials

SERVING = health_pb2.HealthCheckResponse.SERVING
TEXT = [5, 6, 7, 8, 9, 1, 5, 6]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def connected(address: str, tls: TLS | None = None) -> AsyncIterator[grpc.aio.Channel]:
    async with Endpoint(address=address, tls=tls).aio_channel() as channel:
        yield channel


def guard(authority: Authority, pair: Pair, *, tokens: Path | None = None, mutual: bool = False) -> Guard:
    files = ServerTLSFiles(certificate=pair.certificate, key=pair.key, client_ca=authority.ca if mutual else None)
    return Guard(tls=ServerTLS(files), access=Access(TokenFile(tokens) if tokens else None))


async def reason_of(address: str, method: str, metadata: Any, tls: TLS | None = None) -> str:
    """Calls a method by name with an empty message, whatever its kind: the reason of the refusal, or "OK"."""
    # A refusal may overtake the message of a streaming caller; grpc's client then says that it could not send it.
    for _ in range(5):
        found = await _reason_of(address, method, metadata, tls)
        if found != "INTERNAL":
            break
    return found


async def _reason_of(address: str, method: str, metadata: Any, tls: TLS | None) -> str:
    async with connected(address, tls) as channel:
        call: Any = (
            channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
            if method == REFLECTION
            else channel.stream_unary(method)(iter([b""]), metadata=metadata, timeout=20)
            if method.endswith("/Prefill")
            else channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
            if method.endswith("/Generate")
            else channel.unary_unary(method)(b"", metadata=metadata, timeout=20)
        )
        try:
            await (call.read() if hasattr(call, "read") else call)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return "OK"


class TestRoles:
    @pytest.mark.parametrize("service", ["TargetService", "DraftService"])
    async def test_nobody_without_a_role_of_a_method_gets_past_it_and_health_is_for_all(
        self, service: str, model: Path, tmp_path: Path
    ) -> None:
        """Each method of the service and reflection, by nobody, by a stranger, and by each role."""
        tokens = token_file(tmp_path / "tokens", generate="generate", drafter="drafter", admin="admin")
        callers = {"": (), "stranger": bearer("dw_x"), **{role: bearer(tokens[role]) for role in Role}}
        methods = [method for method in ROLES if service in method or method == REFLECTION]
        async with serving(service, model, tmp_path / "tokens") as address:
            for method in methods:
                for name, metadata in callers.items():
                    found = await reason_of(address, method, metadata)
                    if name in ("", "stranger"):
                        assert found == "AUTH_REQUIRED", (method, name)
                    elif Role(name) in ROLES[method]:
                        assert found not in ("AUTH_REQUIRED", "ROLE_REQUIRED"), (method, name)
                    else:
                        assert found == "ROLE_REQUIRED", (method, name)
            async with connected(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
                watch = stub.Watch(health_pb2.HealthCheckRequest())
                assert (await watch.read()).status == SERVING
                watch.cancel()

    async def test_reflection_answers_an_admin(self, tmp_path: Path) -> None:
        token = token_file(tmp_path / "tokens", admin="admin")["admin"]
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async with (
            draft_service(guard=Guard(access=Access(TokenFile(tmp_path / "tokens")))) as drafter,
            connected(drafter.address) as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([ask]), metadata=bearer(token))
            names = {found.name for found in (await call.read()).list_services_response.service}
        assert "draftwire.v1.DraftService" in names

    async def test_both_clients_send_their_token_and_a_revoked_one_ends_at_the_next_call(
        self, model: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "tokens"
        tokens = token_file(path, alice="generate")
        async with target_service(model, token_file=path, token=tokens["alice"]) as target:
            assert await target.client.tokenize("ab") == (97, 98)

            def in_thread() -> tuple[int, ...]:
                with Client(target.address, token=tokens["alice"]) as client:
                    return client.tokenize("ab")

            assert await asyncio.to_thread(in_thread) == (97, 98)
            renewed = token_file(path, alice="generate")
            with pytest.raises(Unauthenticated):
                await target.client.tokenize("ab")
            async with AsyncClient(target.address, token=renewed["alice"]) as client:
                assert await client.tokenize("ab") == (97, 98)
                assert tokens["alice"] not in repr(client) + repr(target.client)

    async def test_abort_ends_only_requests_of_the_same_name(self, model: Path, tmp_path: Path) -> None:
        tokens = token_file(tmp_path / "tokens", alice="generate", bob="generate")
        async with target_service(model, token_file=tmp_path / "tokens", token=tokens["alice"]) as target:
            brake = target.brake()
            stream = target.client.generate("x", request_id="mine", max_tokens=4, ignore_eos=True)
            await anext(aiter(stream))
            async with AsyncClient(target.address, token=tokens["bob"]) as bob:
                assert await bob.abort("mine") == ()
            brake.release()
            assert len((await stream.collect()).tokens) == 4


class TestTLS:
    async def test_a_target_over_tls_answers_who_trusts_it_and_nobody_in_clear(
        self, model: Path, authority: Authority, tmp_path: Path
    ) -> None:
        pair = authority.server()
        settings = {"tls_cert": pair.certificate, "tls_key": pair.key}
        async with target_service(model, tls=authority.trusting(), **settings) as target:
            assert (await target.client.complete("x", max_tokens=2, ignore_eos=True)).tokens
            for other in (None, Authority(tmp_path, "other").trusting()):
                async with AsyncClient(target.address, tls=other, timeout_s=2.0) as stranger:
                    with pytest.raises(Unavailable):
                        await stranger.tokenize("x")

    async def test_with_a_client_ca_only_its_certificates_get_in_and_each_is_an_owner(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        """Another target's session is PERMISSION_DENIED; a certificate of another authority does not even connect."""
        pair = authority.server()
        one, two = authority.issue("one", "target-1.example"), authority.issue("two", "target-2.example")
        stranger = Authority(tmp_path, "other").issue("stranger", "target-1.example")
        async with draft_service(guard=guard(authority, pair, mutual=True)) as drafter:
            async with connected(drafter.address, authority.trusting(one)) as channel:
                stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
                await stub.Prefill(iter(prefill_messages(TEXT)))
            async with connected(drafter.address, authority.trusting(two)) as channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                for call in (
                    lambda: stub.Draft(draft_request(TEXT, len(TEXT))),
                    lambda: stub.Prefill(iter(prefill_messages(TEXT))),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call()
                    assert from_rpc_error(caught.value).reason == "NOT_OWNER"
            for tls in (authority.trusting(), authority.trusting(stranger)):
                async with connected(drafter.address, tls) as channel:
                    stub = draft_pb2_grpc.DraftServiceStub(channel)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.Describe(draft_pb2.DescribeRequest(), timeout=2)
                    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            # The same certificate again, over another connection: the same owner.
            async with connected(drafter.address, authority.trusting(one)) as channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                assert (await stub.Draft(draft_request(TEXT, len(TEXT)))).committed_length == len(TEXT)

    async def test_a_replaced_certificate_is_shown_to_new_connections_and_old_ones_go_on(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        """No restart; a certificate whose key has not come yet is passed over; then the client's authority changes too."""
        pair = authority.server()
        async with draft_service(guard=guard(authority, pair, mutual=True)) as drafter:
            client = authority.issue("client", "target")
            async with connected(drafter.address, authority.trusting(client)) as old:
                before: Any = draft_pb2_grpc.DraftServiceStub(old)
                assert (await before.Describe(draft_pb2.DescribeRequest())).instance_id
                other = Authority(tmp_path, "other")
                fresh = other.issue("fresh", "localhost", "127.0.0.1")
                put(pair.certificate, fresh.certificate.read_bytes())
                with structlog.testing.capture_logs() as logs:
                    assert await describes(drafter.address, authority.trusting(client))
                assert "certificates_unusable" in [entry["event"] for entry in logs]
                put(pair.key, fresh.key.read_bytes())
                mixed = TLS.from_files(ca=other.ca, certificate=client.certificate, key=client.key)
                assert await describes(drafter.address, mixed)
                assert not await describes(drafter.address, authority.trusting(client))
                put(authority.ca, other.ca.read_bytes())
                assert await describes(drafter.address, other.trusting(other.issue("late", "target")))
                assert not await describes(drafter.address, mixed)
                assert (await before.Describe(draft_pb2.DescribeRequest())).instance_id

    @pytest.mark.parametrize("broken", ["missing", "other key", "nonsense", "no ca"])
    def test_files_that_do_not_fit_are_refused_at_the_start(
        self, authority: Authority, tmp_path: Path, broken: str
    ) -> None:
        pair = authority.server()
        certificate, key, ca = pair.certificate, pair.key, authority.ca
        match broken:
            case "missing":
                key = tmp_path / "nowhere.key"
            case "other key":
                key = authority.issue("another", "localhost").key
            case "nonsense":
                certificate.write_text("nonsense")
            case "no ca":
                ca = tmp_path / "nowhere.pem"
        with pytest.raises(TLSError) as caught:
            ServerTLS(ServerTLSFiles(certificate=certificate, key=key, client_ca=ca))
        assert str(key) in str(caught.value)

    def test_a_key_that_others_may_read_is_warned_of(self, authority: Authority) -> None:
        pair = authority.server()
        pair.key.chmod(0o644)
        with structlog.testing.capture_logs() as logs:
            ServerTLS(ServerTLSFiles(certificate=pair.certificate, key=pair.key))
        assert [entry["event"] for entry in logs] == ["key_open_to_others"]


class TestHop:
    async def test_a_target_drafts_over_mutual_tls_with_a_token_and_takes_up_new_ones(
        self, model: Path, authority: Authority, tmp_path: Path
    ) -> None:
        """From the first Describe to drafts; then certificate, authority and token are all replaced, without a restart."""
        pair, own = authority.server(), authority.issue("own", "target-1")
        token = token_file(tmp_path / "tokens", **{"target-1": "drafter"})["target-1"]
        put(tmp_path / "token", f"{token}\n".encode())
        trusted = tmp_path / "trusted.pem"
        put(trusted, authority.ca.read_bytes())
        settings = {
            "drafter_tls_ca": trusted,
            "drafter_tls_cert": own.certificate,
            "drafter_tls_key": own.key,
            "drafter_token_file": tmp_path / "token",
            "num_draft_tokens": 4,
        }
        drafter_guard = guard(authority, pair, tokens=tmp_path / "tokens", mutual=True)
        async with (
            draft_service(guard=drafter_guard) as drafter,
            target_service(model, drafters=[drafter.address], **settings) as target,
        ):
            await target.drafter_is(DrafterState.READY)
            await drafts(target)
            assert {session.owner for session in drafter.rounds.table._sessions.values()} <= {"name:target-1"}
            await target.at_rest()

            other = Authority(tmp_path, "other")
            fresh, late = other.issue("fresh", "localhost", "127.0.0.1"), other.issue("late", "target-1")
            renewed = token_file(tmp_path / "tokens", **{"target-1": "drafter"})["target-1"]
            for path, content in (
                (pair.certificate, fresh.certificate.read_bytes()),
                (pair.key, fresh.key.read_bytes()),
                (authority.ca, other.ca.read_bytes()),
                (trusted, other.ca.read_bytes()),
                (own.certificate, late.certificate.read_bytes()),
                (own.key, late.key.read_bytes()),
                (tmp_path / "token", renewed.encode()),
            ):
                put(path, content)
            link = target.target.pool.links[0]
            link.suspect("the test says so")
            await target.drafter_is(DrafterState.READY)
            await drafts(target)

    @pytest.mark.parametrize("wrong", ["token", "role", "certificate", "clear"])
    async def test_a_target_that_is_not_let_in_answers_without_drafts_and_says_why(
        self, model: Path, authority: Authority, tmp_path: Path, wrong: str
    ) -> None:
        tokens = token_file(tmp_path / "tokens", one="generate" if wrong == "role" else "drafter")
        put(tmp_path / "token", (b"dw_another" if wrong == "token" else tokens["one"].encode()))
        own = (Authority(tmp_path, "other") if wrong == "certificate" else authority).issue("own", "target-1")
        settings: dict[str, Any] = {"drafter_token_file": tmp_path / "token"}
        if wrong != "clear":
            settings |= {
                "drafter_tls_ca": authority.ca,
                "drafter_tls_cert": own.certificate,
                "drafter_tls_key": own.key,
            }
        drafter_guard = guard(authority, authority.server(), tokens=tmp_path / "tokens", mutual=True)
        async with (
            draft_service(guard=drafter_guard) as drafter,
            target_service(model, drafters=[drafter.address], **settings) as target,
        ):
            await until(target.drafter, lambda found: bool(found.refused_reason))
            assert (await target.drafter()).state is not DrafterState.READY
            answer = await target.client.complete("abcabcabc", max_tokens=8, ignore_eos=True)
            assert answer.speculation.no_draft_reason is not None
            assert len(drafter.rounds.table) == 0

    async def test_an_address_that_a_name_has_led_to_is_checked_by_the_name(self, authority: Authority) -> None:
        pair = authority.issue("named", "drafter.example")
        credentials = DrafterCredentials(ca=authority.ca)
        async with draft_service(guard=guard(authority, pair)) as drafter:
            for name, good in (("drafter.example:50052", True), ("another.example:50052", False), ("", False)):
                calls = DraftCalls(drafter.address, credentials, name)
                try:
                    assert (await calls.Describe(draft_pb2.DescribeRequest(), timeout=1.5)).instance_id
                    assert good
                except grpc.aio.AioRpcError:
                    assert not good
                finally:
                    await calls.close()


class TestSilence:
    @pytest.mark.parametrize("style", ["json", "console"])
    async def test_prompts_tokens_and_paths_are_in_no_log_and_no_reply(
        self, model: Path, tmp_path: Path, style: Any
    ) -> None:
        """Not even where a forward, the tokenizer or the draft source fails in the middle of one, with a traceback."""
        secret, ids = "the launch code is tulip", [ord(letter) for letter in "the launch code is tulip"]
        token = token_file(tmp_path / "tokens", alice="generate,admin,drafter")["alice"]
        previous, said = structlog.get_config(), io.StringIO()
        handlers, level = logging.root.handlers[:], logging.root.level
        try:
            with redirect_stderr(said):
                configure("debug", style)
                async with target_service(model, token_file=tmp_path / "tokens", token=token) as target:
                    await target.client.complete(secret, max_tokens=3, ignore_eos=True)
                    with pytest.raises(DraftwireError):
                        await target.client.complete(secret, top_p=3.0)
                    errors = [
                        await failing(target, "_encode", secret),
                        await failing(target.target.engine, "forward", secret, target),
                        await failing(target.target.engine, "open", secret, target),
                        await failing(target.target.scheduler, "open_source", secret, target),
                        await failing(target.target, "submit", secret, target),
                    ]
                async with draft_service() as drafter:
                    drafter.rounds.source.open = broken  # type: ignore[method-assign]
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await drafter.stub.Prefill(iter(prefill_messages(ids)))
                    errors.append(from_rpc_error(caught.value))
        finally:
            structlog.configure(**previous)
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
        log = said.getvalue()
        for error in errors:
            assert isinstance(error, InternalError)
            assert error.message == f"internal error {error.metadata['error_id']}"
            assert error.metadata["error_id"] in log
        assert log.count("/models/private") >= len(errors), "the log has the exception's text, as operators need it"
        assert secret not in log
        assert token not in log
        numbers = re.compile(r"[^0-9]+".join(map(str, ids[:6])))
        assert not numbers.search(log)

    async def test_log_prompts_logs_the_beginning_of_prompts_of_both_services(self, model: Path) -> None:
        with all_logs() as logs:
            async with target_service(model, log_prompts=True) as target:
                await target.client.complete("ab" * 500, max_tokens=1)
                await target.client.complete(messages=[{"role": "user", "content": "hello"}], max_tokens=1)
                await target.client.complete(token_ids=[97] * 100, max_tokens=1)
        shown = [entry for entry in logs if entry["event"] == "prompt"]
        assert [entry["prompt_tokens"] for entry in shown][::2] == [1000, 100]
        assert shown[0]["text"] == "ab" * 100 + "..."
        assert shown[1]["text"] == "user: hello"
        assert shown[2]["token_ids"] == [97] * 64
        with all_logs() as logs:
            async with draft_service(log_prompts=True) as drafter:
                await drafter.stub.Prefill(iter(prefill_messages(TEXT)))
        assert [entry["token_ids"] for entry in logs if entry["event"] == "prompt"] == [TEXT]

    @pytest.mark.parametrize("method", ["Tokenize", "Generate"])
    async def test_bytes_that_are_no_message_are_the_callers_fault_and_not_repeated(
        self, model: Path, method: str
    ) -> None:
        kind = pb.GenerateRequest if method == "Generate" else pb.TokenizeRequest
        good = kind(text="zzzz").SerializeToString()
        async with target_service(model) as target, grpc.aio.insecure_channel(target.address, options=LOCAL) as channel:
            name = f"/draftwire.v1.TargetService/{method}"
            for raw in (good.replace(b"zzzz", b"\xff\xfeab"), good[:-1]):
                call: Any = (
                    channel.unary_stream(name)(raw).read() if method == "Generate" else channel.unary_unary(name)(raw)
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"
            assert target.lifecycle.refusals.snapshot() == {"MALFORMED_MESSAGE": 2}

    async def test_an_exception_in_health_or_reflection_has_no_text_either(self) -> None:
        async with (
            draft_service() as drafter,
            grpc.aio.insecure_channel(drafter.address, options=LOCAL) as channel,
        ):
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff\xff")
            assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"
            stream = channel.stream_stream(REFLECTION)(iter([b"\xff\xff"]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"


@contextmanager
def all_logs() -> Iterator[list[Any]]:
    """Captures information too, which tests leave out otherwise."""
    previous = structlog.get_config()
    try:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
        with structlog.testing.capture_logs() as logs:
            yield logs
    finally:
        structlog.configure(**previous)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def serving(service: str, model: Path, tokens: Path) -> AsyncIterator[str]:
    if service == "TargetService":
        async with target_service(model, token_file=tokens) as target:
            yield target.address
    else:
        async with draft_service(guard=Guard(access=Access(TokenFile(tokens)))) as drafter:
            yield drafter.address


async def describes(address: str, tls: TLS) -> bool:
    """Whether a new connection gets through."""
    async with connected(address, tls) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        try:
            return bool((await stub.Describe(draft_pb2.DescribeRequest(), timeout=1.5)).instance_id)
        except grpc.aio.AioRpcError as error:
            # A failed handshake; what was let in and then refused would be another fault.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            raise


async def drafts(target: Running) -> None:
    """A request with fixed drafts has some."""

    async def tried() -> int:
        answer = await target.client.complete(
            "abcabcabcabc", max_tokens=24, ignore_eos=True, drafting="fixed", num_draft_tokens=4
        )
        return answer.speculation.num_draft_tokens

    await until(tried, lambda drafted: drafted > 0)


def broken(*args: object) -> Any:
    """Has the prompt among its locals, as real code does."""
    prompt = args
    raise RuntimeError(f"cannot read /models/private with {len(prompt)} arguments")


async def failing(owner: Any, name: str, prompt: str, target: Running | None = None) -> DraftwireError:
    """What the client sees where this part fails."""
    target = target or owner
    place = owner.service if name == "_encode" else owner
    kept = getattr(place, name)

    async def broken_later(*args: object, **named: object) -> Any:
        broken(prompt, *args)

    setattr(place, name, broken_later if asyncio.iscoroutinefunction(kept) else broken)
    try:
        with pytest.raises(InternalError) as caught:
            await target.client.complete(prompt, max_tokens=3, ignore_eos=True)
        return caught.value
    finally:
        setattr(place, name, kept)
