"""Token files: what a line may say, what is refused and how, and that a file is read again when it changes."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from secrets_fixture import put, token_file

import draftwire.tokens
from draftwire.access import ROLES, Access, TokenFile, owner_of
from draftwire.errors import DraftwireError, PermissionDenied, Unauthenticated
from draftwire.tokens import Role, TokenFileError, find, line_of, new_token, parse_grants
from draftwire.v1 import draft_pb2, target_pb2

TOKENIZE = "/draftwire.v1.TargetService/Tokenize"
HEX = "0" * 64


@dataclass
class Peer:
    """Who calls, as TLS says."""

    names: tuple[bytes, ...] = ()

    def peer_identities(self) -> list[bytes] | None:
        return list(self.names) or None


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "test"), ("authorization", f"Bearer {token}"))


def test_a_line_grants_its_roles_to_the_holder_of_the_token_and_has_only_its_hash() -> None:
    token = new_token()
    line = line_of("alice", [Role.GENERATE, Role.ADMIN], token)
    assert token not in line
    (grant,) = parse_grants(f"# people\n\n  {line}  # since spring\n")
    assert (grant.name, grant.roles) == ("alice", {Role.GENERATE, Role.ADMIN})
    assert grant.digest == hashlib.sha256(token.encode()).digest()
    assert find([grant], token) is grant
    assert find([grant], token + "x") is None
    assert find([grant], "") is None


def test_tokens_are_unguessable_and_never_alike() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith("dw_") and len(token) >= 43 + 3 for token in tokens)


def test_a_token_is_compared_with_every_line_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line that fits does not end the search, and each comparison is hmac's, of digests."""
    tokens = [new_token() for _ in range(3)]
    grants = parse_grants("\n".join(line_of(f"n{i}", [Role.GENERATE], token) for i, token in enumerate(tokens)))
    seen: list[tuple[bytes, bytes]] = []

    class Spy(ModuleType):
        @staticmethod
        def compare_digest(left: bytes, right: bytes) -> bool:
            seen.append((left, right))
            return left == right

    monkeypatch.setattr(draftwire.tokens, "hmac", Spy("hmac"))
    for token in (*tokens, "another"):
        seen.clear()
        find(grants, token)
        assert len(seen) == 3
        assert all(len(left) == len(right) == 32 for left, right in seen)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "draftwire token new"),
        ("# nobody yet", "draftwire token new"),
        ("alice generate", "line 1 has 2 words"),
        (f"\nalice generate sha256:{HEX} more", "line 2 has 4 words"),
        (f"al/ice generate sha256:{HEX}", "name"),
        (f"{'a' * 65} generate sha256:{HEX}", "name"),
        (f"alice everything sha256:{HEX}", "generate, drafter, admin"),
        (f"alice generate, sha256:{HEX}", "generate, drafter, admin"),
        ("alice generate sha256:12", "sha256:"),
        (f"alice generate sha256:{'G' * 64}", "sha256:"),
        ("alice generate cert:", "cert:"),
        ("alice generate dw_plain", "sha256:"),
        (f"alice generate sha256:{HEX}\nbob generate sha256:{HEX}", "'bob'"),
    ],
)
def test_a_bad_file_is_refused_and_no_secret_repeated(text: str, said: str) -> None:
    with pytest.raises(TokenFileError) as caught:
        parse_grants(text)
    assert said in str(caught.value)
    assert "dw_plain" not in str(caught.value)


def test_a_bad_name_has_no_line() -> None:
    with pytest.raises(TokenFileError, match="name"):
        line_of("a b", [Role.ADMIN], new_token())


def test_a_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    old = token_file(path, alice="generate")
    access = Access(TokenFile(path))
    assert access.admit(TOKENIZE, bearer(old["alice"]), Peer()).name == "alice"

    new = token_file(path, alice="generate", bob="generate")
    assert access.admit(TOKENIZE, bearer(new["bob"]), Peer()).name == "bob"
    with pytest.raises(Unauthenticated):
        access.admit(TOKENIZE, bearer(old["alice"]), Peer())

    for bad in (b"nonsense", b"\xff\xfe", b""):
        put(path, bad)
        with structlog.testing.capture_logs() as logs:
            assert access.admit(TOKENIZE, bearer(new["bob"]), Peer()).name == "bob"
            access.admit(TOKENIZE, bearer(new["bob"]), Peer())
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["tokens_unreadable"]
    path.unlink()
    assert access.admit(TOKENIZE, bearer(new["bob"]), Peer()).name == "bob"


def test_a_file_that_others_may_read_is_warned_of_and_a_missing_or_bad_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(OSError, match="tokens"):
        TokenFile(path)
    path.write_text("nonsense")
    with pytest.raises(TokenFileError, match=r"tokens: line 1"):
        TokenFile(path)
    token_file(path, alice="generate")
    for mode, warned in ((0o600, False), (0o640, True), (0o602, True)):
        os.chmod(path, mode)
        with structlog.testing.capture_logs() as logs:
            TokenFile(path)
        assert any(entry["event"] == "token_file_open_to_others" for entry in logs) is warned


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer wrong"),),
        (("authorization", "Basic {token}"),),
        (("authorization", "{token}"),),
        (("authorization", "Bearer {token}"), ("authorization", "Bearer {token}")),
        (("authorization", b"Bearer \xff"),),
        (("x-authorization", "Bearer {token}"),),
    ],
)
def test_whatever_is_not_one_known_bearer_token_is_unauthenticated(
    tmp_path: Path, metadata: tuple[object, ...]
) -> None:
    token = token_file(tmp_path / "tokens", alice="generate")["alice"]
    sent = [(key, value.format(token=token) if isinstance(value, str) else value) for key, value in metadata]  # type: ignore[attr-defined, misc]
    with pytest.raises(Unauthenticated) as caught:
        Access(TokenFile(tmp_path / "tokens")).admit(TOKENIZE, sent, Peer())
    assert token not in str(caught.value)


def test_the_scheme_may_be_in_any_case(tmp_path: Path) -> None:
    token = token_file(tmp_path / "tokens", alice="generate")["alice"]
    access = Access(TokenFile(tmp_path / "tokens"))
    assert access.admit(TOKENIZE, [("authorization", f"bearer {token}")], Peer()).roles == {Role.GENERATE}


def test_a_certificate_in_the_file_needs_no_token_and_a_wrong_token_is_not_made_good_by_it(tmp_path: Path) -> None:
    put(tmp_path / "tokens", b"target-1 drafter cert:target-1.example\n")
    access, describe = Access(TokenFile(tmp_path / "tokens")), "/draftwire.v1.DraftService/Describe"
    known = Peer((b"127.0.0.1", b"target-1.example"))
    caller = access.admit(describe, (), known)
    assert (caller.name, caller.owner) == ("target-1", "name:target-1")
    with pytest.raises(Unauthenticated):
        access.admit(describe, (), Peer((b"target-2.example",)))
    with pytest.raises(Unauthenticated):
        access.admit(describe, bearer("wrong"), known)


def test_without_a_file_everybody_may_and_is_known_by_certificate() -> None:
    access = Access()
    assert access.admit(TOKENIZE, (), Peer()).roles == set(Role)
    owners = {access.admit(TOKENIZE, (), Peer(names)).owner for names in ((), (b"a",), (b"b",), (b"a", b"b"))}
    assert len(owners) == 4
    assert owner_of(Peer((b"a",))) == access.admit(TOKENIZE, (), Peer((b"a",))).owner


def test_every_method_has_its_roles_and_an_unknown_one_has_none(tmp_path: Path) -> None:
    """So that a method that is added is closed until somebody decides who may call it."""
    services = [
        target_pb2.DESCRIPTOR.services_by_name["TargetService"],
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == {method for method in ROLES if method.startswith("/draftwire.")}
    token = token_file(tmp_path / "tokens", root="generate,drafter,admin")["root"]
    access = Access(TokenFile(tmp_path / "tokens"))
    for method in methods:
        assert access.admit(method, bearer(token), Peer()).name == "root"
    with pytest.raises(PermissionDenied) as caught:
        access.admit("/draftwire.v1.TargetService/Later", bearer(token), Peer())
    assert caught.value.reason == "ROLE_REQUIRED"


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("method", list(ROLES))
def test_a_role_opens_its_methods_and_no_others(tmp_path: Path, role: Role, method: str) -> None:
    token = token_file(tmp_path / "tokens", one=role.value)["one"]
    access = Access(TokenFile(tmp_path / "tokens"))
    if role in ROLES[method]:
        assert access.admit(method, bearer(token), Peer()).roles == {role}
        return
    with pytest.raises(DraftwireError) as caught:
        access.admit(method, bearer(token), Peer())
    assert caught.value.reason == "ROLE_REQUIRED"
