"""The flags that several commands share. Names follow mlx-lm where it has the same thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from draftwire.channels import TLS
from draftwire.client import Client
from draftwire.request import GenerateOptions
from draftwire.wire import MAX_MESSAGE_BYTES

Texts: TypeAlias = list[str] | None
SAMPLING = "Sampling"
STOPPING = "Stopping"
DRAFTS = "Drafts and caches"
CONSTRAINT = "Constraint"
CONNECTION = "Connection"
OUTPUT = "Output"
SECURITY = "Security"
_TOKEN = "DRAFTWIRE_TOKEN"
# Not DRAFTWIRE_TLS_...: the services read those, also as children of `up`.
_TLS = "DRAFTWIRE_CLIENT_TLS_"


class Drafting(StrEnum):
    """How drafts are used."""

    AUTO = "auto"
    OFF = "off"
    FIXED = "fixed"


def option(
    text: str, panel: str, *names: str, envvar: str | None = None, metavar: str | None = None, show: bool = False
) -> object:
    """A typer option in a panel of the help; `show` prints its default there."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=show, envvar=envvar, metavar=metavar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where the target service is, and who asks."""

    address: Annotated[
        str,
        option(
            "host:port of the target service.", CONNECTION, "--address", "-a", envvar="DRAFTWIRE_ADDRESS", show=True
        ),
    ] = "127.0.0.1:50051"
    token: Annotated[
        str | None,
        option("Bearer token. Others see arguments: prefer the variable or --token-file.", CONNECTION, envvar=_TOKEN),
    ] = None
    token_file: Annotated[
        Path | None,
        option("File with the bearer token and nothing else.", CONNECTION, envvar="DRAFTWIRE_CLIENT_TOKEN_FILE"),
    ] = None
    tls_ca: Annotated[
        Path | None,
        option("PEM file of authorities to trust; turns TLS on.", CONNECTION, envvar=_TLS + "CA"),
    ] = None
    tls_cert: Annotated[
        Path | None, option("PEM file of the client's certificate.", CONNECTION, envvar=_TLS + "CERT")
    ] = None
    tls_key: Annotated[Path | None, option("PEM file of the client's key.", CONNECTION, envvar=_TLS + "KEY")] = None
    tls_server_name: Annotated[
        str | None, option("Name in the server's certificate.", CONNECTION, envvar=_TLS + "SERVER_NAME")
    ] = None
    timeout: Annotated[float | None, option("Deadline of each call, in seconds.", CONNECTION)] = None
    max_message_bytes: Annotated[int, option("Most bytes of one message, sent or received.", CONNECTION, show=True)] = (
        MAX_MESSAGE_BYTES
    )

    def client(self) -> Client:
        """A client for it."""
        return Client(
            self.address,
            tls=tls_of(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name),
            token=token_of(self.token, self.token_file),
            timeout_s=self.timeout,
            max_message_bytes=self.max_message_bytes,
        )


def tls_of(*, ca: Path | None, cert: Path | None, key: Path | None, server_name: str | None) -> TLS | None:
    """TLS where any of its flags was given."""
    if not any((ca, cert, key, server_name)):
        return None
    return TLS.from_files(ca=ca, certificate=cert, key=key, server_name=server_name)


def token_of(token: str | None, file: Path | None) -> str | None:
    """The token itself, of whichever flag was given."""
    if token is not None and file is not None:
        raise typer.BadParameter("--token (or DRAFTWIRE_TOKEN) and --token-file exclude each other")
    found = _text(file, "--token-file")
    return token if found is None else found.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """How the target service of `up` is guarded, and how `up` itself looks whether it serves."""

    tls_cert: Annotated[Path | None, option("PEM file of the target service's certificate.", SECURITY)] = None
    tls_key: Annotated[Path | None, option("PEM file of its key.", SECURITY)] = None
    tls_ca: Annotated[
        Path | None, option("PEM file of authorities that clients' certificates must come from.", SECURITY)
    ] = None
    token_file: Annotated[Path | None, option("File of names, roles and hashed tokens.", SECURITY)] = None
    insecure: Annotated[
        bool, option("Allows a --host that other machines reach, without TLS.", SECURITY, "--insecure")
    ] = False
    client_tls_ca: Annotated[
        Path | None,
        option("Authorities that `up` trusts; --tls-cert itself when absent.", SECURITY, envvar=_TLS + "CA"),
    ] = None
    client_tls_cert: Annotated[
        Path | None, option("Certificate that `up` shows, with --tls-ca.", SECURITY, envvar=_TLS + "CERT")
    ] = None
    client_tls_key: Annotated[Path | None, option("Its key.", SECURITY, envvar=_TLS + "KEY")] = None
    client_tls_server_name: Annotated[
        str | None, option("Name in --tls-cert, where it is not the host.", SECURITY, envvar=_TLS + "SERVER_NAME")
    ] = None

    def arguments(self) -> tuple[str, ...]:
        """Flags of the target service."""
        files = (
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
            ("--tls-ca", self.tls_ca),
            ("--token-file", self.token_file),
        )
        given = [word for flag, path in files if path is not None for word in (flag, str(path))]
        return (*given, "--insecure") if self.insecure else tuple(given)

    def client_tls(self) -> TLS | None:
        """How to reach it. Raises InvalidRequest naming a file that cannot be read."""
        if self.tls_cert is None:
            return None
        return tls_of(
            ca=self.client_tls_ca or self.tls_cert,
            cert=self.client_tls_cert,
            key=self.client_tls_key,
            server_name=self.client_tls_server_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to make. An absent flag takes the server's default."""

    temp: Annotated[float | None, option("Temperature; 0 is greedy.", SAMPLING, "--temp", "-t")] = None
    top_p: Annotated[float | None, option("Kept probability mass.", SAMPLING)] = None
    top_k: Annotated[int | None, option("Most likely tokens that are kept; 0 keeps all.", SAMPLING)] = None
    min_p: Annotated[float | None, option("Least share of the largest probability.", SAMPLING)] = None
    seed: Annotated[int | None, option("Seed of the noise.", SAMPLING)] = None
    repetition_penalty: Annotated[float | None, option("Divides logits of recent tokens.", SAMPLING)] = None
    presence_penalty: Annotated[float | None, option("Subtracted once for recent tokens.", SAMPLING)] = None
    frequency_penalty: Annotated[float | None, option("Subtracted for each recent occurrence.", SAMPLING)] = None
    penalty_window: Annotated[int | None, option("Tokens that penalties look back; 0 is all.", SAMPLING)] = None
    logit_bias: Annotated[
        Texts, option("Added to the logit of an id; may be repeated.", SAMPLING, metavar="ID=BIAS")
    ] = None
    max_tokens: Annotated[int | None, option("Most tokens to make.", STOPPING, "--max-tokens", "-m")] = None
    min_tokens: Annotated[int | None, option("No end before this many tokens.", STOPPING)] = None
    stop: Annotated[Texts, option("Text that ends the output; may be repeated.", STOPPING)] = None
    stop_token_id: Annotated[list[int] | None, option("Id that ends the output; may be repeated.", STOPPING)] = None
    ignore_eos: Annotated[bool, option("Goes on past end tokens.", STOPPING, "--ignore-eos")] = False
    drafting: Annotated[Drafting | None, option("How drafts are used.", DRAFTS)] = None
    num_draft_tokens: Annotated[int | None, option("Drafts a round; 0 turns them off.", DRAFTS)] = None
    cache: Annotated[bool, option("Whether prefix caches are used.", DRAFTS, show=True)] = True
    cache_salt: Annotated[str | None, option("Shares caches only with the same salt.", DRAFTS)] = None
    json_schema: Annotated[Path | None, option("File with a JSON schema to obey.", CONSTRAINT)] = None
    json_object: Annotated[bool, option("Any JSON object.", CONSTRAINT, "--json-object")] = False
    regex: Annotated[str | None, option("Regular expression to obey.", CONSTRAINT)] = None
    grammar: Annotated[Path | None, option("File with an EBNF grammar to obey.", CONSTRAINT, "--grammar", "--ebnf")] = (
        None
    )
    choice: Annotated[Texts, option("One of these texts; may be repeated.", CONSTRAINT)] = None
    structural_tag: Annotated[Path | None, option("File with a structural tag to obey.", CONSTRAINT)] = None
    any_whitespace: Annotated[
        bool, option("Whether JSON may have whitespace of any kind.", CONSTRAINT, "--any-whitespace")
    ] = False
    top_logprobs: Annotated[int | None, option("Logprobs of this many ids (see --json).", OUTPUT)] = None
    priority: Annotated[int | None, option("Higher ones start first.", CONNECTION)] = None

    def options(self) -> GenerateOptions:
        """The library's keyword arguments."""
        return GenerateOptions(
            temperature=self.temp,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            penalty_window=self.penalty_window,
            logit_bias=dict(_bias(text) for text in self.logit_bias or ()),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_id,
            ignore_eos=self.ignore_eos or None,
            drafting=None if self.drafting is None else self.drafting.value,
            num_draft_tokens=self.num_draft_tokens,
            cache=None if self.cache else False,
            cache_salt=self.cache_salt,
            json_schema=_text(self.json_schema, "--json-schema"),
            json_object=self.json_object or None,
            regex=self.regex,
            ebnf=_text(self.grammar, "--grammar"),
            choice=self.choice or None,
            structural_tag=_text(self.structural_tag, "--structural-tag"),
            any_whitespace=self.any_whitespace or None,
            top_logprobs=self.top_logprobs,
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How an answer is shown."""

    tint: Annotated[bool, option("Tints accepted drafts on a terminal.", OUTPUT, show=True)] = True
    json: Annotated[bool, option("One JSON event a line instead of text.", OUTPUT, "--json")] = False
    stats: Annotated[bool, option("Statistics on stderr after each answer.", OUTPUT, show=True)] = True


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text!r} is not ID=BIAS, as 42=-100") from None


def _text(path: Path | None, flag: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{flag} {path}: {error}") from None
