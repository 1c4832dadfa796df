"""Settings of the target service. Each is a flag and an environment variable DRAFTWIRE_...; names follow mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from draftwire.settings import Port, Seconds, ServiceSettings


class TargetSettings(ServiceSettings):
    """Serve a language model over gRPC, with drafts from other processes."""

    model: str = Field("smollm2-135m", description="Bundled name, mlx-lm model directory, or Hugging Face id.")
    revision: str | None = Field(None, description="Revision of a Hugging Face model.")
    context_length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Longest text in tokens, prompt and output together; the model's own limit when absent."
    )
    port: Port = Field(50051, description="Port to listen on; 0 lets the system choose.")
    drafter: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="host:port of a draft service; repeatable (in the environment: commas)."
    )
    drafting: Literal["auto", "off", "fixed"] = Field(
        "auto", description="How requests that do not say otherwise use drafts."
    )
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        16, description="Most drafts a round for 'auto', the number of them for 'fixed'."
    )
    draft_timeout_s: Seconds = Field(
        0.5, description="Longest that a round ever waits for drafts, and the deadline of a Draft call, in seconds."
    )
    max_running: Annotated[int, Field(ge=1)] = Field(8, description="Requests that run at once.")
    batching: Literal["auto", "off"] = Field(
        "auto", description="'auto' runs all requests in one forward where the model can; 'off' runs them one by one."
    )
    max_queued: Annotated[int, Field(ge=0)] = Field(64, description="Requests that may wait; more are refused.")
    kv_bytes_limit: Annotated[int, Field(ge=1)] = Field(
        4 << 30, description="KV cache of all running requests, in bytes, charged at admission."
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
    prefill_step_size: Annotated[int, Field(ge=1)] = Field(256, description="Prompt tokens read between two rounds.")
    max_tokens: Annotated[int, Field(ge=1)] = Field(512, description="Tokens to make where a request does not say.")
    temp: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="Temperature where a request does not say; 0 is greedy."
    )
    cache_dir: Path | None = Field(
        None, description="Where bundled models lie; the user's cache directory when absent."
    )

    @field_validator("kv_bits")
    @classmethod
    def _bits(cls, value: int | None) -> int | None:
        if value not in (None, 4, 8):
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
            if not host or not port.isdigit():
                raise ValueError(f"{address!r} is not host:port, as 127.0.0.1:50052")
        return value
