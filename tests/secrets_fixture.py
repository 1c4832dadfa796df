"""Certificates and tokens for tests: a throw-away authority, files as an operator would have them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import trustme

from draftwire.channels import TLS
from draftwire.tokens import Role, line_of, new_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, file: str, *names: str) -> Pair:
        """Writes file.pem and file.key, replacing them as an operator would: each whole, one after the other."""
        made = self._authority.issue_cert(*names)
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        pair = Pair(certificate=self._folder / f"{file}.pem", key=self._folder / f"{file}.key")
        put(pair.certificate, chain)
        put(pair.key, made.private_key_pem.bytes())
        return pair

    def server(self, file: str = "server") -> Pair:
        """A certificate for services on this machine."""
        return self.issue(file, "localhost", "127.0.0.1")

    def trusting(self, pair: Pair | None = None) -> TLS:
        """What a client of such a server has; with `pair`, it shows a certificate."""
        return TLS.from_files(
            ca=self.ca, certificate=pair.certificate if pair else None, key=pair.key if pair else None
        )


def put(path: Path, content: bytes) -> None:
    """Replaces a file as a whole; only its owner may read it."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.chmod(fresh, 0o600)
    fresh.replace(path)


def token_file(path: Path, **roles: str) -> dict[str, str]:
    """Writes a token file; roles: name -> roles with commas. Returns the tokens by name."""
    tokens = {name: new_token() for name in roles}
    lines = [line_of(name, [Role(role) for role in given.split(",")], tokens[name]) for name, given in roles.items()]
    put(path, "\n".join(lines).encode())
    return tokens
