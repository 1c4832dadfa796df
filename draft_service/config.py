"""What the draft service is told: each setting is a flag and an environment variable DRAFTWIRE_..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from draftwire.settings import Port, Seconds, ServiceSettings, refuses

SourceKind = Literal["lookup", "model"]
Count = Annotated[int, Field(ge=1)]


class DraftSettings(ServiceSettings):
    """Settings of `python -m draft_service`."""

    port: Port = Field(50052, description="Port to listen on; 0 lets the system choose.")
    source: SourceKind | None = Field(
        None, description="What drafts; 'model' when --draft-model is given, else 'lookup', which needs no model."
    )
    draft_model: str | None = Field(
        None, validate_default=True, description="Draft model: a bundled name, a directory or a Hugging Face id."
    )
    cache_dir: Path | None = Field(None, description="Where bundled models lie; draftwire's own folder when absent.")
    num_draft_tokens: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="Most ids that one Draft returns.")
    lookup_min_match: Count = Field(2, description="Shortest match, in tokens, that lookup copies from.")
    session_limit: Count = Field(
        256, description="Most sessions that are open at once.", json_schema_extra=refuses("SESSION_LIMIT")
    )
    sessions_per_target: Count | None = Field(
        None,
        description="Most sessions that one target has open at once; as many as there may be when absent.",
        json_schema_extra=refuses("OWNER_LIMIT"),
    )
    kv_bytes_limit: Count = Field(
        2 * 1024**3,
        description="Most bytes of KV cache (or index) of all sessions.",
        json_schema_extra=refuses("KV_BUDGET"),
    )
    prompt_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        256 * 1024**2,
        description="Most bytes of KV kept after their sessions, within --kv-bytes-limit; sessions come first; 0: none.",
    )
    batching: Literal["auto", "off"] = Field(
        "auto", description="Whether sessions of the draft model share forwards; 'auto' does where the model can."
    )
    max_calls: Count = Field(
        256,
        description="Calls that may run or wait at once; more are refused.",
        json_schema_extra=refuses("QUEUE_FULL"),
    )
    lease_s: Seconds = Field(
        60.0,
        description="Idle time after which a session may be dropped, in seconds.",
        json_schema_extra=refuses("SESSION_UNKNOWN", "NOT_FOUND"),
    )
    max_lease_s: Seconds = Field(
        600.0,
        description="Longest lease that a target can ask for, in seconds; a longer wish gets this.",
        json_schema_extra=refuses("SESSION_UNKNOWN", "NOT_FOUND"),
    )
    prefill_step_size: Count = Field(256, description="Tokens computed at a time, between other sessions' drafts.")
    context_length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Longest text to draft for, in tokens; the model's own limit when absent."
    )

    @property
    def source_kind(self) -> SourceKind:
        """What drafts, as far as it was left open."""
        return self.source or ("model" if self.draft_model else "lookup")

    @field_validator("draft_model")
    @classmethod
    def _model_fits_source(cls, value: str | None, info: ValidationInfo) -> str | None:
        source = info.data.get("source")
        if source == "model" and not value:
            raise ValueError("is missing: source 'model' needs a draft model, such as smollm2-135m")
        if source == "lookup" and value:
            raise ValueError("has no effect with source 'lookup': leave one of the two out")
        return value or None
