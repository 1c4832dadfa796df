"""The seam between sessions and whatever guesses ahead."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

from draft_service.forwards import ForwardCounts
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
    cache_salt: str = ""
    """Prefixes are shared only with sessions of equal salt and owner."""
    cached: bool = True
    """Whether it may read and fill the prefix cache."""


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


class Prefix(Protocol):
    """What a session computed, kept beyond its end for sessions that begin with the same ids. Never changed."""

    ids: array[int]
    """The ids that it holds, exactly."""
    nbytes: int

    def reach(self, length: int) -> int:
        """How many of the first `length` ids, at most, a session can take over."""

    def drop(self) -> None:
        """Frees what it holds. Idempotent; whoever takes it over afterwards gets nothing."""


class Drafter(Protocol):
    """What a source keeps for one session. Calls never overlap.

    `feed`, `draft`, `keep`, `adopt` and `close` compute; the others only note things.
    """

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

    def keep(self) -> Prefix | None:
        """Hands over what it computed of the committed ids; None where that is nothing. Only `close` follows."""

    def adopt(self, prefix: Prefix, length: int) -> None:
        """Takes over the first `length` ids, before it was told any; `reach` named that length."""

    def close(self) -> None:
        """Frees what it holds. Idempotent; nothing else is called afterwards."""


class Work(Protocol):
    """A call, as far as those who compute for it must know it."""

    computed_s: float
    """Seconds of computing that it took part in, so far."""

    def should_stop(self) -> bool:
        """As `Stop`."""


class Computing(Protocol):
    """How the drafters of a source compute: each for itself, or many at once. Belongs to the event loop."""

    @property
    def waiting(self) -> int:
        """Calls or jobs whose computing has not begun."""

    async def catch_up(self, drafter: Drafter, work: Work) -> None:
        """Computes, chunk by chunk, what a draft would have to wait for, until nothing is behind or the work stops."""

    async def draft(self, drafter: Drafter, ask: Ask, work: Work) -> Guess:
        """Catches up and drafts; returns what it has once the work stops."""

    def spare(self, nbytes: int) -> None:
        """So many bytes may be used beyond what sessions are charged; now, not for ever."""

    async def run(self, job: Callable[[], T]) -> T:
        """Runs anything else where drafters compute, between steps of theirs."""


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
    batching: str
    """"ragged" where sessions draft in one forward, "one by one: ..." with the reason, empty where there are no forwards."""
    draws: bool
    """Whether it follows the shared noise; else it drafts greedily."""
    forwards: ForwardCounts
    """What its forwards were; all zero where there are none."""

    def bytes_for(self, length: int) -> int:
        """Bytes that a session of this many tokens may hold at most."""

    def open(self, spec: SessionSpec) -> Drafter:
        """An empty drafter. Cheap: memory is taken by `feed` and `draft`."""

    def computing(self, runner: Runner, clock: Callable[[], float]) -> Computing:
        """How its drafters compute. clock: seconds."""

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
