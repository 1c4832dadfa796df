"""Settings that both services have: each is a flag and an environment variable DRAFTWIRE_..., parsed once at `__main__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from draftwire.blas import default_threads
from draftwire.channels import is_loopback
from draftwire.wire import MAX_MESSAGE_BYTES

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def refuses(reason: str, status: str = "RESOURCE_EXHAUSTED") -> dict[str, Any]:
    """`json_schema_extra` of a setting that is a limit: how what goes beyond it is refused. docs/limits.md is made of it."""
    return {"reason": reason, "status": status}


class ServiceSettings(BaseSettings):
    """What the target service and the draft service are told alike."""

    model_config = SettingsConfigDict(
        env_prefix="DRAFTWIRE_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    threads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Threads of the BLAS on a CPU; one core less than there are when absent."
    )
    blas: Literal["auto", "openblas", "reference"] = Field(
        "auto", description="BLAS on a Linux CPU; 'reference' is slow but sums alike for any number of rows."
    )
    dtype: Literal["auto", "float32", "as-stored"] = Field(
        "auto", description="Number format of the weights; 'auto' is float32 on a CPU, as stored elsewhere."
    )
    drain_s: Seconds = Field(20.0, description="Time that running requests get to finish after SIGTERM, in seconds.")
    watchdog_s: Seconds = Field(
        60.0, description="A computation that takes longer than this turns health to NOT_SERVING, in seconds."
    )
    metrics_listen: str | None = Field(
        None, description="host:port of the Prometheus endpoint, over plain HTTP; without it there is none."
    )
    otlp_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over gRPC) for traces; needs the extra [otel]."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="'auto' is for people on a terminal and JSON elsewhere."
    )

    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate chain; turns TLS on. Read again when it changes."
    )
    tls_key: Path | None = Field(None, description="PEM file of the key of --tls-cert.")
    tls_ca: Path | None = Field(
        None, description="PEM file of authorities; clients must then have a certificate of one of them."
    )
    token_file: Path | None = Field(
        None, description="File of names, roles and hashed bearer tokens; callers must then be in it. Read again."
    )
    insecure: bool = Field(False, description="Allows to listen beyond loopback without TLS.")
    log_prompts: bool = Field(False, description="Logs the beginning of each prompt; else no prompt is ever logged.")
    max_message_bytes: Annotated[int, Field(ge=64 * 1024, le=1 << 30)] = Field(
        MAX_MESSAGE_BYTES,
        description="Most bytes of one message, received or sent.",
        json_schema_extra=refuses("MESSAGE_TOO_LARGE"),
    )
    max_deadline_s: Seconds = Field(
        3600.0,
        description="Longest that a call may run, in seconds; also the deadline of calls that have none.",
        json_schema_extra=refuses("DEADLINE_CAP", "DEADLINE_EXCEEDED"),
    )
    stalled_reader_timeout_s: Seconds = Field(
        60.0,
        description="A stream whose reader takes no message for this long is ended, in seconds.",
        json_schema_extra=refuses("READER_STALLED", "DEADLINE_EXCEEDED"),
    )

    @model_validator(mode="after")
    def _secured(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or none")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca asks clients for certificates, which needs --tls-cert and --tls-key")
        if not self.on_loopback and self.tls_cert is None and not self.insecure:
            raise ValueError(
                f"--host {self.host} can be reached from other machines: give --tls-cert and --tls-key, or say --insecure"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(f"{self.host}:0")

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_address(cls, value: str | None) -> str | None:
        if not value:
            return None
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("is not host:port, as 127.0.0.1:9464")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if not value:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("is not a URL, as http://127.0.0.1:4317")
        if not _has_opentelemetry():
            raise ValueError("traces need OpenTelemetry: pip install 'draftwire[otel]', or leave the flag out")
        return value

    @property
    def blas_threads(self) -> int | None:
        """Threads for `load_blas`; None leaves OpenBLAS's own variable in charge, where somebody has set it."""
        if self.threads is None and "OPENBLAS_NUM_THREADS" in os.environ:
            return None
        return self.threads or default_threads()


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.sdk.trace") is not None and find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False


S = TypeVar("S", bound=ServiceSettings)


def parse(cls: type[S], argv: Sequence[str], *, program: str) -> S:
    """Settings from flags, then environment, then defaults. Prints the faults and exits with 2 when one is bad."""
    if "--version" in argv:
        print(f"{program} {version('draftwire')}")
        sys.exit(0)
    source: CliSettingsSource[Any] = CliSettingsSource(cls, cli_prog_name=program, cli_parse_args=False)
    try:
        return CliApp.run(cls, cli_args=list(argv), cli_settings_source=source)
    except ValidationError as error:
        for fault in error.errors():
            if not fault["loc"]:
                # About several settings together: the message names them.
                print(f"{program}: {fault['msg'].removeprefix('Value error, ')}", file=sys.stderr)
                continue
            name = str(fault["loc"][0])
            flag, variable = f"--{name.replace('_', '-')}", f"DRAFTWIRE_{name.upper()}"
            print(f"{program}: {flag} (or {variable}) = {fault['input']!r}: {fault['msg']}", file=sys.stderr)
        sys.exit(2)
