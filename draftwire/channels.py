"""How a client reaches a service: channel options, TLS, the token, and what may be tried again."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from draftwire.errors import FailedPrecondition, Unavailable
from draftwire.propagation import trace_metadata
from draftwire.wire import MAX_MESSAGE_BYTES, invalid

DEFAULT_UNARY_TIMEOUT_S: Final = 30.0
"""Deadline of calls that answer at once, where neither the client nor the call has one."""

READY_POLL_S: Final = 0.1
"""Pause between two health checks of `wait_ready`."""

_TARGET: Final = "draftwire.v1.TargetService"
# Calls that change nothing, and Generate: gRPC itself never repeats a call whose first message has arrived.
_REPEATABLE: Final = ("Generate", "Tokenize", "Detokenize", "GetModelInfo", "ListDrafters", "ListRequests")

SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": _TARGET, "method": method} for method in _REPEATABLE],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """How to trust the server and be known to it; everything as PEM. `TLS()` trusts the system's authorities."""

    ca: bytes | None = None
    """Authorities that may have signed the server's certificate."""
    certificate: bytes | None = None
    """The client's own chain, for servers that want one."""
    key: bytes | None = field(default=None, repr=False)
    """Private key of `certificate`."""
    server_name: str | None = None
    """Name that the server's certificate has, where it is not the address."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise invalid("tls", "certificate and key go together; give both or none")

    @classmethod
    def from_files(
        cls,
        *,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> TLS:
        """Reads PEM files. Raises InvalidRequest naming a file that cannot be read."""
        return cls(
            ca=_read("tls.ca", ca),
            certificate=_read("tls.certificate", certificate),
            key=_read("tls.key", key),
            server_name=server_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a client connects, and as whom. Makes channels of either stack."""

    address: str
    tls: TLS | None = None
    token: str | None = field(default=None, repr=False)
    timeout_s: float | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Most bytes of one message, sent or received; the server has a limit of its own."""

    def __post_init__(self) -> None:
        if self.max_message_bytes < 1:
            raise invalid("max_message_bytes", f"expected 1 or more; got {self.max_message_bytes}")
        if not self.address or ":" not in self.address:
            raise invalid("address", f"expected host:port, as 127.0.0.1:50051; got {self.address!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise invalid("timeout_s", f"expected more than 0 seconds; got {self.timeout_s}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise invalid("token", "expected printable ASCII characters")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call that is made now."""
        owner = (("authorization", f"Bearer {self.token}"),) if self.token else ()
        return (*owner, *trace_metadata())

    def timeout(self, timeout_s: float | None, default_s: float | None = None) -> float | None:
        """Deadline of one call in seconds: its own, else the client's, else the default."""
        if timeout_s is not None and not timeout_s > 0:
            raise invalid("timeout_s", f"expected more than 0 seconds; got {timeout_s}")
        return next((value for value in (timeout_s, self.timeout_s) if value is not None), default_s)

    def sync_channel(self) -> grpc.Channel:
        """A channel of the sync stack. It connects at the first call."""
        options = channel_options(self.address, self.tls, self.max_message_bytes)
        if self.tls is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, _credentials(self.tls), options)

    def aio_channel(self) -> grpc.aio.Channel:
        """A channel of grpc.aio, bound to the running event loop."""
        options = channel_options(self.address, self.tls, self.max_message_bytes)
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, _credentials(self.tls), options)

    def describe(self, kind: str) -> str:
        """What repr shows: everything but the secret."""
        token = "'***'" if self.token else None
        return f"{kind}({self.address!r}, tls={self.tls!r}, token={token}, timeout_s={self.timeout_s})"


def channel_options(address: str, tls: TLS | None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Options of a channel to `address`."""
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # A long prefill sends nothing, and must not look like a dead connection.
        ("grpc.http2.max_pings_without_data", 0),
        # Else a new client inherits the reconnect backoff of an older one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if is_loopback(address):
        # A proxy in the environment would divert even 127.0.0.1.
        options.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def is_loopback(address: str) -> bool:
    """Whether host:port (with or without a scheme) stays on this machine."""
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rsplit("/", 1)[-1]
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def not_ready(address: str, timeout_s: float, seen: str) -> Unavailable:
    """The error of `wait_ready`; `seen` is the last answer."""
    return Unavailable(f"{address} is not ready after {timeout_s:g} s: {seen}", reason="NOT_READY")


def closed_client() -> FailedPrecondition:
    """The error of a call on a closed client."""
    return FailedPrecondition("this client is closed; make another one", reason="CLIENT_CLOSED")


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def _read(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(name, f"cannot read {path}: {error.strerror}") from None
