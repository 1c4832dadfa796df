"""Settings that both services have: each is a flag and an environment variable DRAFTWIRE_..., parsed once at `__main__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from draftwire.blas import default_threads

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


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
            name = str(fault["loc"][0]) if fault["loc"] else ""
            flag, variable = f"--{name.replace('_', '-')}", f"DRAFTWIRE_{name.upper()}"
            print(f"{program}: {flag} (or {variable}) = {fault['input']!r}: {fault['msg']}", file=sys.stderr)
        sys.exit(2)
