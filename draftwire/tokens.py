"""Bearer tokens and roles: the file that lists them. Needs nothing but the standard library; both services read it.

A line is `NAME ROLE[,ROLE] SECRET`; `#` begins a comment. NAME is who it is, in logs and as the owner of requests and
sessions. SECRET is either

    sha256:<64 hex digits>    the hash of a bearer token; the token itself is nowhere on the server
    cert:<name>               a client certificate with this name, for callers that have one and send no token
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "dw_"
"""Of tokens made here, so that scanners of leaked secrets can know one."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_BAD_NAME = "a name begins with a letter or digit and has at most 64 letters, digits and . _ @ -"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class Role(StrEnum):
    """What a caller may do."""

    GENERATE = "generate"
    """Use the model of a target: generate, tokenize, read what is served."""
    DRAFTER = "drafter"
    """Use a draft service, as a target does."""
    ADMIN = "admin"
    """Look at the service itself: its drafters, its description, reflection."""


class TokenFileError(ValueError):
    """A token file that cannot be read; the message names the line and what is expected. It never repeats a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One line: who may do what, known by which secret."""

    name: str
    roles: frozenset[Role]
    digest: bytes | None = None
    """SHA-256 of the token."""
    certificate: str | None = None
    """Name in a client certificate."""


def new_token() -> str:
    """A token of 256 random bits. That much needs no slow hash: nobody can guess it."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> bytes:
    """SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogateescape")).digest()


def line_of(name: str, roles: Iterable[Role], token: str) -> str:
    """The line of a token file that grants `roles` to the holder of `token`. Raises TokenFileError for a bad name."""
    if not _NAME.fullmatch(name):
        raise TokenFileError(_BAD_NAME)
    return f"{name} {','.join(sorted(set(roles)))} sha256:{digest_of(token).hex()}"


def find(grants: Sequence[Grant], token: str) -> Grant | None:
    """The grant of a token. Compares with every line, whatever it finds: how long that takes tells nothing."""
    digest, found = digest_of(token), None
    for grant in grants:
        if grant.digest is not None and hmac.compare_digest(grant.digest, digest):
            found = grant
    return found


def parse_grants(text: str) -> tuple[Grant, ...]:
    """The grants of a token file, in order. Raises TokenFileError for the first bad line, and for a file without any."""
    grants: list[Grant] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            grants.append(_grant(words, f"line {number}"))
    if not grants:
        raise TokenFileError("it has no line: make one with `draftwire token new --role generate --name NAME`")
    secrets_seen: set[bytes | str | None] = set()
    for grant in grants:
        secret = grant.digest or grant.certificate
        if secret in secrets_seen:
            raise TokenFileError(f"{grant.name!r} has the secret of another line: each needs its own")
        secrets_seen.add(secret)
    return tuple(grants)


def _grant(words: Sequence[str], where: str) -> Grant:
    if len(words) != 3:
        raise TokenFileError(f"{where} has {len(words)} words, expected 3: NAME ROLE[,ROLE] sha256:HEX or cert:NAME")
    name, roles, secret = words
    if not _NAME.fullmatch(name):
        raise TokenFileError(f"{where}: {_BAD_NAME}")
    try:
        granted = frozenset(Role(role) for role in roles.split(","))
    except ValueError:
        known = ", ".join(Role)
        raise TokenFileError(f"{where}: the roles of {name!r} are not all of {known}, with commas between") from None
    kind, _, value = secret.partition(":")
    if kind == "cert" and value:
        return Grant(name=name, roles=granted, certificate=value)
    found = _DIGEST.fullmatch(secret)
    if found is None:
        raise TokenFileError(
            f"{where}: the secret of {name!r} is neither sha256: with 64 lower-case hex digits nor cert: with a name"
        )
    return Grant(name=name, roles=granted, digest=bytes.fromhex(found[1]))
