"""Addresses, TLS files, tokens and deadlines of a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwire.channels import SERVICE_CONFIG, TLS, Endpoint, channel_options, is_loopback
from draftwire.errors import InvalidRequest


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/target.sock", True),
        ("10.0.0.1:1", False),
        ("target.example:1", False),
        ("localhost.example:1", False),
        ("dns:///target:1", False),
    ],
)
def test_a_proxy_is_never_used_on_this_machine(address: str, loopback: bool) -> None:
    """Only addresses that leave the machine may go through the proxy of the environment."""
    assert is_loopback(address) is loopback
    assert (dict(channel_options(address, None)).get("grpc.enable_http_proxy") == 0) is loopback


def test_only_unavailable_is_retried_and_never_abort() -> None:
    """The service config repeats calls that change nothing, and Generate before its first message."""
    (entry,) = json.loads(SERVICE_CONFIG)["methodConfig"]
    assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert "Abort" not in {name["method"] for name in entry["name"]}


@pytest.mark.parametrize("address", ["", "localhost", "50051"])
def test_an_address_needs_a_port(address: str) -> None:
    """The error shows what an address looks like."""
    with pytest.raises(InvalidRequest, match="host:port"):
        Endpoint(address=address)


@pytest.mark.parametrize("token", ["", " ", "a\nb", "é"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    """And the error does not repeat the token."""
    with pytest.raises(InvalidRequest) as caught:
        Endpoint(address="a:1", token=token)
    assert caught.value.violations[0].field == "token"


def test_the_deadline_of_a_call_wins_over_the_clients() -> None:
    """Call, then client, then default; zero is refused because it can never succeed."""
    assert Endpoint(address="a:1", timeout_s=5.0).timeout(1.0, 30.0) == 1.0
    assert Endpoint(address="a:1", timeout_s=5.0).timeout(None, 30.0) == 5.0
    assert Endpoint(address="a:1").timeout(None, 30.0) == 30.0
    assert Endpoint(address="a:1").timeout(None) is None
    with pytest.raises(InvalidRequest, match="timeout_s"):
        Endpoint(address="a:1").timeout(0.0)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        Endpoint(address="a:1", timeout_s=float("nan"))


def test_tls_files_are_read_and_the_key_is_not_shown(tmp_path: Path) -> None:
    """A missing file is named; certificate and key go together; no repr has the key."""
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_bytes(f"pem {name}".encode())
    tls = TLS.from_files(ca=tmp_path / "ca", certificate=tmp_path / "cert", key=tmp_path / "key", server_name="target")
    assert (tls.ca, tls.certificate, tls.key) == (b"pem ca", b"pem cert", b"pem key")
    assert "pem key" not in repr(tls)
    assert dict(channel_options("a:1", tls))["grpc.ssl_target_name_override"] == "target"
    with pytest.raises(InvalidRequest, match=r"tls\.ca: cannot read"):
        TLS.from_files(ca=tmp_path / "none")
    with pytest.raises(InvalidRequest, match="go together"):
        TLS(certificate=b"x")
