"""Settings of the target service. Each is a flag and an environment variable DRAFTWIRE_...; names follow mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode

from draftwire.channels import is_loopback
from draftwire.settings import Port, Seconds, ServiceSettings, refuses
from draftwire.tiles import TILE_ROWS
from target_service.resolver import parse_name

Count = Annotated[int, Field(ge=1)]


class TargetSettings(ServiceSettings):
    """Serve a language model over gRPC, with drafts from other processes."""

    model: str = Field("smollm2-135m", description="Bundled name, mlx-lm model directory, or Hugging Face id.")
    revision: str | None = Field(None, description="Revision of a Hugging Face model.")
    context_length: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Longest text in tokens, prompt and output together; the model's own limit when absent.",
        json_schema_extra=refuses("CONTEXT_LENGTH_EXCEEDED", "INVALID_ARGUMENT"),
    )
    port: Port = Field(50051, description="Port to listen on; 0 lets the system choose.")
    drafter: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="host:port of a draft service, or dns:///name:port for all that a name stands for; repeatable "
        "(in the environment: commas).",
    )
    drafter_resolve_s: Seconds = Field(5.0, description="Time between two lookups of a dns:///name:port, in seconds.")
    drafting: Literal["auto", "off", "fixed"] = Field(
        "auto", description="How requests that do not say otherwise use drafts."
    )
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        16, description="Most drafts a round for 'auto', the number of them for 'fixed'."
    )
    draft_timeout_s: Seconds = Field(
        0.5, description="Longest that a round ever waits for drafts, and the deadline of a Draft call, in seconds."
    )
    max_running: Annotated[int, Field(ge=1)] = Field(
        8, description="Requests that run at once; more wait.", json_schema_extra=refuses("QUEUE_FULL")
    )
    batching: Literal["auto", "off"] = Field(
        "auto", description="'auto' runs all requests in one forward where the model can; 'off' runs them one by one."
    )
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="'exact' gives the same bits with and without drafts, alone and in company, in forwards of one shape; "
        "'fast' takes any shape and counts near ties.",
    )
    exact_rows: int | None = Field(
        None,
        description="Rows of a forward with --numerics exact, 4 or 8; the larger that suits the model when absent.",
    )
    max_queued: Annotated[int, Field(ge=0)] = Field(
        64, description="Requests that may wait; more are refused.", json_schema_extra=refuses("QUEUE_FULL")
    )
    kv_bytes_limit: Annotated[int, Field(ge=1)] = Field(
        4 << 30,
        description="KV cache of all running requests, in bytes, charged at admission.",
        json_schema_extra=refuses("KV_BUDGET"),
    )
    max_tokenizing: Count = Field(
        64,
        description="Texts that may be tokenized or wait for it; more are refused.",
        json_schema_extra=refuses("QUEUE_FULL"),
    )
    max_running_per_client: Count | None = Field(
        None,
        description="Running requests of one client, others of it wait; when absent and clients are told apart "
        "(--token-file or --tls-ca), all places but one.",
        json_schema_extra=refuses("QUEUE_FULL"),
    )
    max_requests_per_client: Count | None = Field(
        None,
        description="Running and waiting requests of one client; when absent and clients are told apart, half of all.",
        json_schema_extra=refuses("CLIENT_LIMIT"),
    )
    client_rate: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Generate, Tokenize and Detokenize calls of one client a second; any number when absent.",
        json_schema_extra=refuses("RATE_LIMIT"),
    )
    client_burst: Count = Field(
        10, description="Calls that --client-rate lets come at once.", json_schema_extra=refuses("RATE_LIMIT")
    )
    max_prompt_bytes: Count = Field(
        1 << 20,
        description="Bytes of a text or conversation, looked at before it is tokenized.",
        json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT"),
    )
    max_prompt_tokens: Count | None = Field(
        None,
        description="Tokens of a prompt; one less than the context when absent.",
        json_schema_extra=refuses("CONTEXT_LENGTH_EXCEEDED", "INVALID_ARGUMENT"),
    )
    max_output_tokens: Count | None = Field(
        None,
        description="Most that a request's max_tokens may be; any number when absent, and the context ends it.",
        json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT"),
    )
    max_stops: Annotated[int, Field(ge=0)] = Field(
        16, description="Stop texts of a request.", json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT")
    )
    max_stop_chars: Count = Field(
        256, description="Characters of a stop text.", json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT")
    )
    max_stop_token_ids: Annotated[int, Field(ge=0)] = Field(
        64, description="Stop token ids of a request.", json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT")
    )
    max_logit_bias: Annotated[int, Field(ge=0)] = Field(
        1024,
        description="Entries of a request's logit_bias.",
        json_schema_extra=refuses("OUT_OF_BOUNDS", "INVALID_ARGUMENT"),
    )
    drafter_tls_ca: Path | None = Field(
        None, description="PEM file of authorities that drafters' certificates must come from; turns TLS to them on."
    )
    drafter_tls_cert: Path | None = Field(None, description="PEM file of the certificate that drafters are shown.")
    drafter_tls_key: Path | None = Field(None, description="PEM file of the key of --drafter-tls-cert.")
    drafter_tls_server_name: str | None = Field(
        None, description="Name in the drafters' certificates, where it is not the host of their address."
    )
    drafter_token_file: Path | None = Field(
        None, description="File with the token that drafters are sent, and nothing else. Read again when it changes."
    )
    kv_bits: int | None = Field(
        None,
        description="Bits of a stored key or value, 4 or 8, from the first token; as the model computes when absent.",
    )
    kv_group_size: int = Field(64, description="Keys or values that share a scale with --kv-bits: 32, 64 or 128.")
    prompt_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        1 << 30,
        description="Memory for prefixes of earlier prompts and answers, in bytes, beside --kv-bytes-limit; 0 is off.",
    )
    prompt_cache_dir: Path | None = Field(
        None, description="Directory that keeps those prefixes over a restart; in memory only when absent."
    )
    prompt_cache_disk_bytes: Annotated[int, Field(ge=1)] = Field(
        8 << 30, description="Most that --prompt-cache-dir takes, in bytes."
    )
    prefill_step_size: Annotated[int, Field(ge=1)] = Field(256, description="Most prompt tokens read at a time.")
    grammar_timeout_s: Seconds = Field(10.0, description="Longest that a constraint may take to compile, in seconds.")
    grammar_max_bytes: Annotated[int, Field(ge=1)] = Field(
        65_536, description="Longest constraint (schema, regex, grammar, choices), in bytes."
    )
    grammar_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        64 << 20, description="Compiled constraints that are kept for later requests, in bytes."
    )
    max_tokens: Annotated[int, Field(ge=1)] = Field(512, description="Tokens to make where a request does not say.")
    temp: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="Temperature where a request does not say; 0 is greedy."
    )
    cache_dir: Path | None = Field(
        None, description="Where bundled models lie; the user's cache directory when absent."
    )

    @model_validator(mode="after")
    def _drafters_secured(self) -> Self:
        if (self.drafter_tls_cert is None) != (self.drafter_tls_key is None):
            raise ValueError("--drafter-tls-cert and --drafter-tls-key go together: give both or none")
        if self.drafter_tls_ca is None and (self.drafter_tls_cert or self.drafter_tls_server_name):
            raise ValueError("--drafter-tls-cert and --drafter-tls-server-name need --drafter-tls-ca")
        far = [address for address in self.drafter if not is_loopback(address)]
        if far and self.drafter_token_file and self.drafter_tls_ca is None and not self.insecure:
            raise ValueError(
                f"the token would travel to {far[0]} unencrypted: give --drafter-tls-ca, or say --insecure"
            )
        return self

    @property
    def tells_apart(self) -> bool:
        """Whether clients are authenticated, so that each has its own share."""
        return self.token_file is not None or self.tls_ca is not None

    @property
    def running_per_client(self) -> int:
        """Places that one client may hold."""
        share = max(1, self.max_running - 1) if self.tells_apart else self.max_running
        return self.max_running_per_client or share

    @property
    def requests_per_client(self) -> int | None:
        """Requests that one client may have; None is any number."""
        share = max(1, (self.max_running + self.max_queued) // 2) if self.tells_apart else None
        return self.max_requests_per_client or share

    @field_validator("kv_bits")
    @classmethod
    def _bits(cls, value: int | None) -> int | None:
        if value not in (None, 4, 8):
            raise ValueError(f"{value} is neither 4 nor 8")
        return value

    @field_validator("exact_rows")
    @classmethod
    def _rows(cls, value: int | None) -> int | None:
        if value not in (None, *TILE_ROWS):
            raise ValueError(f"{value} is neither 4 nor 8")
        return value

    @field_validator("kv_group_size")
    @classmethod
    def _group(cls, value: int) -> int:
        if value not in (32, 64, 128):
            raise ValueError(f"{value} is none of 32, 64 and 128")
        return value

    @field_validator("prompt_cache_dir")
    @classmethod
    def _has_memory(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("prompt_cache_bytes") == 0:
            raise ValueError("needs --prompt-cache-bytes above 0: what is on disk passes through memory")
        return value

    @field_validator("drafter", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The environment has no lists: commas separate addresses there."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return value

    @field_validator("drafter")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            host, _, port = address.rpartition(":")
            if parse_name(address) is None and (not host or not port.isdigit()):
                raise ValueError(f"{address!r} is not host:port, as 127.0.0.1:50052")
        return value
