"""Who calls, and what they may do: tokens and certificates to callers, callers to methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from draftwire.errors import PermissionDenied, Unauthenticated
from draftwire.files import Stamp, open_to_others, stamp_of
from draftwire.logs import get_logger
from draftwire.tokens import Grant, Role, TokenFileError, find, parse_grants

_log = get_logger("access")

_USER: Final = frozenset({Role.GENERATE})
_LOOK: Final = frozenset({Role.GENERATE, Role.ADMIN})
_PEER: Final = frozenset({Role.DRAFTER})

ROLES: Final[Mapping[str, frozenset[Role]]] = {
    "/draftwire.v1.TargetService/Generate": _USER,
    "/draftwire.v1.TargetService/Abort": _USER,
    "/draftwire.v1.TargetService/Tokenize": _USER,
    "/draftwire.v1.TargetService/Detokenize": _USER,
    "/draftwire.v1.TargetService/GetModelInfo": _LOOK,
    "/draftwire.v1.TargetService/ListDrafters": frozenset({Role.ADMIN}),
    "/draftwire.v1.TargetService/ListRequests": frozenset({Role.ADMIN}),
    "/draftwire.v1.DraftService/Describe": frozenset({Role.DRAFTER, Role.ADMIN}),
    "/draftwire.v1.DraftService/Prefill": _PEER,
    "/draftwire.v1.DraftService/Draft": _PEER,
    "/draftwire.v1.DraftService/Commit": _PEER,
    "/draftwire.v1.DraftService/Release": _PEER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({Role.ADMIN}),
}
"""Method -> roles of which a caller needs one. What is not listed needs a role that does not exist."""

HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
"""Health checks need no token: whoever starts and stops services has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller."""

    name: str
    """For logs."""
    owner: str
    """Owns requests and sessions; no two callers share one."""
    roles: frozenset[Role]


_caller: ContextVar[Caller | None] = ContextVar("draftwire_caller", default=None)


class Peer(Protocol):
    """The part of a gRPC context that tells who calls."""

    def peer_identities(self) -> Any:
        """The names in the client's certificate, or None."""


def owner_of(context: Peer) -> str:
    """Who owns what this call opens: the authenticated caller; one owner for all where nobody is authenticated."""
    caller = _caller.get()
    return caller.owner if caller is not None else _certified_owner(_names(context))


class TokenFile:
    """The grants of a file, read again when it changes. One that has become bad is logged, and the last good one stays."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or TokenFileError, naming the file, where it cannot be used."""
        self._path = path
        self._stamp: Stamp = stamp_of(path)
        try:
            self._grants = self._read()
        except TokenFileError as error:
            raise TokenFileError(f"{path}: {error}") from None

    @property
    def grants(self) -> Sequence[Grant]:
        """The grants as the file has them now."""
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._grants = self._read()
                _log.info("tokens_read", path=str(self._path), names=[grant.name for grant in self._grants])
            except (OSError, TokenFileError) as error:
                # Nobody is let in or put out by half a file. The operator sees it here, and the old lines still hold.
                _log.error("tokens_unreadable", path=str(self._path), reason=str(error))
        return self._grants

    def _read(self) -> tuple[Grant, ...]:
        if open_to_others(self._path):
            _log.warning("token_file_open_to_others", path=str(self._path), remedy="chmod 600")
        try:
            text = self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TokenFileError("it is not UTF-8 text") from None
        return parse_grants(text)


class Access:
    """Decides who a caller is and whether a method may be called. Belongs to the event loop."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        """tokens: None lets everybody in who gets as far; behind a client CA, that is whoever has a certificate of it."""
        self._tokens = tokens

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None, context: Peer) -> Caller:
        """The caller of `method`. Raises Unauthenticated or PermissionDenied (ROLE_REQUIRED)."""
        names = _names(context)
        if self._tokens is None:
            owner = _certified_owner(names)
            return Caller(name=owner, owner=owner, roles=frozenset(Role))
        grant = _granted(self._tokens.grants, metadata or (), names)
        needed = ROLES.get(method, frozenset())
        if not grant.roles & needed:
            roles = " or ".join(sorted(needed)) or "a role that nobody has"
            raise PermissionDenied(
                f"{grant.name!r} is not allowed to call {method.rpartition('/')[2]}; it needs {roles}",
                reason="ROLE_REQUIRED",
            )
        return Caller(name=grant.name, owner=f"name:{grant.name}", roles=grant.roles)


def remember(caller: Caller) -> None:
    """Makes `owner_of` answer with this caller for the rest of the running call."""
    _caller.set(caller)


def _granted(grants: Sequence[Grant], metadata: Iterable[tuple[str, str | bytes]], names: Sequence[str]) -> Grant:
    """By token where one was sent, else by certificate."""
    sent = [value for key, value in metadata if key == "authorization"]
    if not sent:
        for grant in grants:
            if grant.certificate is not None and grant.certificate in names:
                return grant
        raise Unauthenticated("no token: send metadata authorization: Bearer TOKEN")
    value = sent[0] if isinstance(sent[0], str) else sent[0].decode("utf-8", errors="replace")
    scheme, _, token = value.partition(" ")
    found = find(grants, token.strip()) if len(sent) == 1 and scheme.lower() == "bearer" else None
    if found is None:
        raise Unauthenticated("the token is not known here; send metadata authorization: Bearer TOKEN")
    return found


def _names(context: Peer) -> list[str]:
    return sorted(name.decode("utf-8", "replace") for name in context.peer_identities() or ())


def _certified_owner(names: Sequence[str]) -> str:
    return "tls:" + "\n".join(names) if names else "insecure"
