"""The seam between sessions and whatever guesses ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

from draftwire.sampling import Sampler

T = TypeVar("T")

Stop: TypeAlias = Callable[[], bool]
"""Asked between tokens, from any thread: true once the answer is worthless or the time is over."""


class SourceError(RuntimeError):
    """This source cannot draft here; the message has the reason and the remedy."""


class DraftEnd(Enum):
    """Why a draft ends where it ends; the names are those of the contract."""

    MAX_DRAFT_TOKENS = "as many ids as asked, or as the limits allow"
    END_TOKEN = "the last id is an end token"
    NO_MATCH = "nothing (more) is known that may follow"
    LOW_CONFIDENCE = "the next id is not believed in"
    CONTEXT_FULL = "the drafter's context is full"
    TIME_BUDGET = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What stays the same for a session."""

    prompt_length: int
    """Prompt tokens, >= 1; the noise of position p has step p - prompt_length."""
    max_length: int
    """Longest committed length, in tokens, that the session will reach."""
    sampler: Sampler
    """How the target draws; greedy where its noise or sampler version is unknown here."""
    end_ids: frozenset[int]
    """Ids after which nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one round wants."""

    assumed: tuple[int, ...] = ()
    """Guessed ids behind the committed ones."""
    limit: int
    """Most ids wanted, >= 1."""
    want_confidences: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A draft."""

    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """For each id the chance that it and all before it are accepted; empty unless asked for."""
    end: DraftEnd


class Drafter(Protocol):
    """What a source keeps for one session. Calls never overlap; all but `feed`, `draft` and `close` only note things."""

    @property
    def length(self) -> int:
        """Committed ids that it was told."""

    @property
    def behind(self) -> int:
        """Committed ids that it was told and that a draft must wait for."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that it holds now."""

    def advance(self, ids: Sequence[int]) -> None:
        """These ids were committed, behind all others."""

    def rewrite(self, ids: Sequence[int]) -> int:
        """The committed ids are exactly these. Returns how many need not be computed anew."""

    def feed(self, stop: Stop) -> None:
        """Computes one chunk of what is behind."""

    def draft(self, ask: Ask, stop: Stop) -> Guess:
        """Drafts behind committed + assumed ids. Returns what it has once `stop` says so."""

    def close(self) -> None:
        """Frees what it holds. Idempotent; nothing else is called afterwards."""


class Source(Protocol):
    """What drafts, for all sessions."""

    kind: str
    model_id: str
    """Empty where there is no model."""
    model_revision: str
    """Empty where unknown."""
    tokenizer_fingerprint: str
    """Empty fits any vocabulary."""
    tokenizer_size: int
    """0 means any id."""
    context_length: int
    """Most tokens that can be drafted for; 0 means no limit."""
    weights_bytes: int
    draws: bool
    """Whether it follows the shared noise; else it drafts greedily."""

    def bytes_for(self, length: int) -> int:
        """Bytes that a session of this many tokens may hold at most."""

    def open(self, spec: SessionSpec) -> Drafter:
        """An empty drafter. Cheap: memory is taken by `feed` and `draft`."""

    def close(self) -> None:
        """Frees what it holds, after all of its drafters."""


class Runner(Protocol):
    """Where drafters compute."""

    @property
    def queue_depth(self) -> int:
        """Jobs that wait."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job without waiting for it."""

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job and returns its result."""
