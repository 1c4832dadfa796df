"""How a target reaches its drafters: TLS with its own certificate, a token, channel options. Files are read again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from draftwire.channels import TLS
from draftwire.errors import InvalidRequest
from draftwire.files import Stamp, open_to_others, stamp_of
from draftwire.logs import get_logger
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.wire import MAX_MESSAGE_BYTES, invalid
from target_service.config import TargetSettings

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_log = get_logger("drafters")

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Replies are a few ids. Reading a large one would hold the event loop, each round anew.
    ("grpc.max_receive_message_length", 256 * 1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCredentials:
    """Whom a target trusts as a drafter, and how it shows who it is. The default is plain text without a token."""

    ca: Path | None = None
    """Authorities of drafters' certificates; turns TLS on."""
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    """Name in the drafters' certificates, where it is not the host of their address."""
    token_file: Path | None = None
    """A file with nothing but this target's token."""
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def stamps(self) -> tuple[Stamp, ...]:
        """What changes when one of the files is replaced."""
        paths = (self.ca, self.certificate, self.key, self.token_file)
        return tuple(stamp_of(path) for path in paths if path is not None)

    def read(self) -> Secrets:
        """What the files hold now. Raises InvalidRequest naming a file that cannot be used."""
        tls = None
        if self.ca is not None:
            tls = TLS.from_files(ca=self.ca, certificate=self.certificate, key=self.key, server_name=self.server_name)
        token = None
        if self.token_file is not None:
            try:
                token = self.token_file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise invalid("drafter_token_file", f"cannot read {self.token_file}: {error}") from None
            if not token or not token.isprintable() or " " in token:
                raise invalid("drafter_token_file", f"{self.token_file} must hold one token and nothing else")
        return Secrets(tls=tls, token=token)

    def checked(self) -> None:
        """Looks at the files once, at the start. Raises OSError where one cannot be used."""
        try:
            self.read()
        except InvalidRequest as error:
            raise OSError(error.message) from None
        for path in (self.key, self.token_file):
            if path is not None and open_to_others(path):
                _log.warning("file_open_to_others", path=str(path), remedy="chmod 600")


def credentials_of(settings: TargetSettings) -> DrafterCredentials:
    """Those that the settings name."""
    return DrafterCredentials(
        ca=settings.drafter_tls_ca,
        certificate=settings.drafter_tls_cert,
        key=settings.drafter_tls_key,
        server_name=settings.drafter_tls_server_name,
        token_file=settings.drafter_token_file,
        max_message_bytes=settings.max_message_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """What the files hold."""

    tls: TLS | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def channel(self, address: str, max_message_bytes: int, authority: str) -> grpc.aio.Channel:
        """A channel to a drafter. authority: the name, with port, whose address this is, or ""."""
        options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS, ("grpc.max_send_message_length", max_message_bytes)]
        tls = self.tls
        if authority:
            # An address found under a name is spoken to, and its certificate checked, by that name.
            options.append(("grpc.default_authority", authority))
        if tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        if name := tls.server_name or authority.rpartition(":")[0]:
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)


class DraftCalls:
    """The calls to one drafter, with this target's token, over a channel that is made anew when its files change.

    Belongs to the event loop.
    """

    def __init__(self, address: str, credentials: DrafterCredentials, authority: str = "") -> None:
        """authority: the name, with port, whose address this is; empty where the address is all there is."""
        self._address = address
        self._authority = authority
        self._credentials = credentials
        self._replaced: grpc.aio.Channel | None = None
        self._stamps = credentials.stamps()
        self._use(credentials.read())

    def _use(self, secrets: Secrets) -> None:
        self._metadata: Metadata = (("authorization", f"Bearer {secrets.token}"),) if secrets.token else ()
        self._channel = secrets.channel(self._address, self._credentials.max_message_bytes, self._authority)
        self._stub: draft_pb2_grpc.DraftServiceAsyncStub = draft_pb2_grpc.DraftServiceStub(self._channel)

    async def renew(self) -> None:
        """Takes up files that have changed. What runs on the old channel may end there, until the next change."""
        stamps = self._credentials.stamps()
        if stamps == self._stamps:
            return
        try:
            secrets = self._credentials.read()
        except InvalidRequest as error:
            _log.warning("drafter_files_unusable", address=self._address, reason=error.message)
            return
        self._stamps = stamps
        older, self._replaced = self._replaced, self._channel
        self._use(secrets)
        if older is not None:
            await older.close()
        _log.info("drafter_files_read", address=self._address)

    async def close(self) -> None:
        """Closes the channels."""
        if self._replaced is not None:
            await self._replaced.close()
        await self._channel.close()

    def Describe(
        self, request: draft_pb2.DescribeRequest, *, timeout: float
    ) -> grpc.aio.UnaryUnaryCall[draft_pb2.DescribeRequest, draft_pb2.DescribeResponse]:
        """Asks what the drafter is."""
        return self._stub.Describe(request, timeout=timeout, metadata=self._metadata)

    def Prefill(
        self, parts: AsyncIterator[draft_pb2.PrefillRequest], *, timeout: float, metadata: Metadata = ()
    ) -> grpc.aio.StreamUnaryCall[draft_pb2.PrefillRequest, draft_pb2.PrefillResponse]:
        """Opens a session. metadata: beside the token."""
        return self._stub.Prefill(parts, timeout=timeout, metadata=self._metadata + metadata)

    def Draft(
        self, request: draft_pb2.DraftRequest, *, timeout: float, metadata: Metadata = ()
    ) -> grpc.aio.UnaryUnaryCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]:
        """Commits and asks for drafts. metadata: beside the token."""
        return self._stub.Draft(request, timeout=timeout, metadata=self._metadata + metadata)

    def Commit(
        self, request: draft_pb2.CommitRequest, *, timeout: float
    ) -> grpc.aio.UnaryUnaryCall[draft_pb2.CommitRequest, draft_pb2.CommitResponse]:
        """Commits."""
        return self._stub.Commit(request, timeout=timeout, metadata=self._metadata)

    def Release(
        self, request: draft_pb2.ReleaseRequest, *, timeout: float
    ) -> grpc.aio.UnaryUnaryCall[draft_pb2.ReleaseRequest, draft_pb2.ReleaseResponse]:
        """Ends sessions."""
        return self._stub.Release(request, timeout=timeout, metadata=self._metadata)
