"""What a request asks for, in the terms of the core: validated, complete, frozen. Made by `requests.py` from the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from draftwire.sampling import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """mlx-lm's meaning: prompt and output alike count, as far as the window reaches; rejected drafts never do."""

    repetition: float = 1.0
    """Divides positive and multiplies negative logits; 1 is off."""
    presence: float = 0.0
    """Subtracted once; 0 is off."""
    frequency: float = 0.0
    """Subtracted for each occurrence; 0 is off."""
    window: int = 20
    """Last tokens that count; 0 means all."""

    @property
    def on(self) -> bool:
        """Whether any penalty has an effect."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a completion ends."""

    max_tokens: int
    """Most tokens, at least 1, already lowered to what the context holds."""
    capped_by_context: bool = False
    """Whether the context, not the request, set max_tokens."""
    min_tokens: int = 0
    """Tokens before which nothing but the budget ends the completion."""
    end_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty with ignore_eos."""
    stop_ids: frozenset[int] = frozenset()
    """The request's stop token ids."""
    stops: tuple[str, ...] = ()
    """Stop strings."""
    include_stop: bool = False
    """Whether the stop string is delivered."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must look like. Equal ones have the same grammar."""

    kind: str
    """The request's field: "json_schema", "json_object", "regex", "ebnf", "choice" or "structural_tag"."""
    text: str = ""
    """Schema, expression, grammar or tag; empty for json_object and choice."""
    values: tuple[str, ...] = ()
    """The texts of a choice."""
    any_whitespace: bool = False
    """Whether JSON may have whitespace of any kind; else one space after ":" and ","."""


class DraftingMode(Enum):
    """How drafts are used."""

    AUTO = "auto"
    OFF = "off"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Drafting:
    """How drafts are used: speed only."""

    mode: DraftingMode = DraftingMode.AUTO
    max_drafts: int = 16
    """Drafts a round: the number for FIXED, the most for AUTO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How tokens are chosen from logits."""

    sampler: Sampler = field(default_factory=Sampler)
    penalties: Penalties = field(default_factory=Penalties)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """id -> what is added to its logit."""
    banned: frozenset[int] = frozenset()
    """Ids that cannot be chosen before min_tokens."""
    min_tokens: int = 0
    """Steps [0, min_tokens) have `banned` banned."""
    top_logprobs: int | None = None
    """Most likely ids to report; None reports no logprobs at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    choosing: Choosing
    stopping: Stopping
    drafting: Drafting
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    cache_salt: str = ""
    cache_disabled: bool = False
    """Neither reads nor fills prefix caches, the drafter's included."""
    priority: int = 0
    owner: str = ""
    """The client that it belongs to. Cached prefixes are shared within one owner and salt only."""
