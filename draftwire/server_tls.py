"""The server's side of TLS: certificates from files, replaced without a restart."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from draftwire.files import Stamp, open_to_others, stamp_of
from draftwire.logs import get_logger

_log = get_logger("tls")


class TLSError(OSError):
    """Certificate files that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTLSFiles:
    """PEM files of a server."""

    certificate: Path
    """The chain, the server's own certificate first."""
    key: Path
    client_ca: Path | None = None
    """Authorities of client certificates; where it is given, clients without one are not let in."""

    def stamps(self) -> tuple[Stamp, ...]:
        """What changes when one of them is replaced."""
        return tuple(stamp_of(path) for path in (self.certificate, self.key, self.client_ca) if path is not None)


class ServerTLS:
    """Credentials of a server port. Each new connection looks whether the files have changed; open ones go on as they are."""

    def __init__(self, files: ServerTLSFiles) -> None:
        """Raises TLSError where the files cannot be used."""
        self._files = files
        self._stamps = files.stamps()
        self._first = self._read()
        if open_to_others(files.key):
            _log.warning("key_open_to_others", path=str(files.key), remedy="chmod 600")

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            # None, for "as before", is not in the types of its parameter, but in its documentation.
            self._renewed,  # type: ignore[arg-type]
            require_client_authentication=self._files.client_ca is not None,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new files where they have changed and belong together, else None. Called by gRPC for each connection."""
        stamps = self._files.stamps()
        if stamps == self._stamps:
            return None
        try:
            found = self._read()
        except TLSError as error:
            # Between the replacement of the certificate and that of its key: the next connection looks again.
            _log.warning("certificates_unusable", reason=str(error))
            return None
        self._stamps = stamps
        _log.info("certificates_read", certificate=str(self._files.certificate))
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        try:
            # gRPC takes a key that does not belong to the certificate, and then fails every handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # With a password that is wrong for sure, else OpenSSL would ask for one on the terminal.
            context.load_cert_chain(files.certificate, files.key, password="")
            if files.client_ca is not None:
                context.load_verify_locations(files.client_ca)
            pair = (files.key.read_bytes(), files.certificate.read_bytes())
            ca = files.client_ca.read_bytes() if files.client_ca is not None else None
        except (OSError, ValueError) as error:
            names = ", ".join(str(path) for path in (files.certificate, files.key, files.client_ca) if path)
            raise TLSError(f"{names}: {_why(error)}") from None
        return grpc.ssl_server_certificate_configuration([pair], ca)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate with its own unencrypted key, as PEM ({error.reason or error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
