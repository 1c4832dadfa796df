"""What stands between a port and the handlers: TLS, who may call, and limits that are the same for all methods."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwire.access import Access, TokenFile
from draftwire.logs import get_logger
from draftwire.server_tls import ServerTLS, ServerTLSFiles
from draftwire.settings import ServiceSettings
from draftwire.tokens import TokenFileError
from draftwire.wire import MAX_MESSAGE_BYTES

_log = get_logger("guard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """How a service is guarded. The default is that of tests on loopback: no TLS, no tokens, no limits of time."""

    tls: ServerTLS | None = None
    access: Access = field(default_factory=Access)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_deadline_s: float | None = None
    """Longest that a call may run, whatever deadline it has."""
    stalled_reader_timeout_s: float | None = None
    """Longest that one message may wait for its reader."""


def guard_of(settings: ServiceSettings) -> Guard:
    """The guard that the settings ask for. Raises OSError where a file that they name cannot be used."""
    tls = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        files = ServerTLSFiles(certificate=settings.tls_cert, key=settings.tls_key, client_ca=settings.tls_ca)
        tls = ServerTLS(files)
    tokens = None
    if settings.token_file is not None:
        try:
            tokens = TokenFile(settings.token_file)
        except TokenFileError as error:
            raise OSError(str(error)) from None
    if not settings.on_loopback and tokens is None and settings.tls_ca is None:
        _log.warning("open_to_everybody", host=settings.host, remedy="--token-file or --tls-ca")
    return Guard(
        tls=tls,
        access=Access(tokens),
        max_message_bytes=settings.max_message_bytes,
        max_deadline_s=settings.max_deadline_s,
        stalled_reader_timeout_s=settings.stalled_reader_timeout_s,
    )
