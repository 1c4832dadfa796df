"""The books of one request: what is committed, what may leave, when it ends, and what drafts did. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from target_service.accept import Verdict
from target_service.params import Stopping
from target_service.text import Passed, TextGate


class FinishReason(Enum):
    """Why a completion ended. Failures are errors, not reasons."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    GRAMMAR_END = "grammar_end"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a completion ended."""

    reason: FinishReason
    stop_id: int | None = None
    """The id, for EOS and STOP_TOKEN."""
    stop: str | None = None
    """The string, for STOP_STRING."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one step, after processors and before filters."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token."""

    id: int
    from_draft: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What one round lets go: tokens and exactly their text."""

    first_step: int
    """Step of tokens[0]."""
    text: str
    tokens: tuple[Token, ...]
    text_ends: tuple[int, ...]
    """One a token: where its text ends within `text`, in characters."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What one round did."""

    released: Released | None
    finish: Finish | None
    accepted: int
    """Drafts that were delivered, are held to be delivered, or ended the completion."""
    cut: int
    """Drafts that agreed but came after the end."""


class Grammar(Protocol):
    """A constraint that follows what is committed."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but an end token."""

    @property
    def complete(self) -> bool:
        """Whether what is committed satisfies it."""

    def advance(self, token_id: int) -> None:
        """Takes the next committed id."""

    def completes(self, text: str) -> bool:
        """Whether a whole text satisfies it."""


class Ledger:
    """Owns the ids of one request. Belongs to the event loop; the core reads it, only `commit` changes it.

    Ids [0, prompt_length) are the prompt, [prompt_length, len(ids)) the output. ids[-1] is pending: the target's cache holds
    exactly ids[:cached_length] once the round is truncated.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        stopping: Stopping,
        piece: Callable[[int], bytes],
        grammar: Grammar | None = None,
    ) -> None:
        """piece: the bytes that an id adds to the text, none for one that is not shown."""
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.ended_by_token = False
        self.grammar_complete: bool | None = None
        """At the end: whether what was delivered satisfies the constraint; None without one."""
        self._grammar = grammar
        self._text: list[str] = []
        self._stopping = stopping
        self._piece = piece
        self._gate = TextGate(stopping.stops, include_stop=stopping.include_stop, min_tokens=stopping.min_tokens)
        self._held: list[Token] = []
        self._delivered = 0

    @property
    def pending(self) -> int:
        """The last committed id, which heads the next window."""
        return self.ids[-1]

    @property
    def step(self) -> int:
        """The step of the next token, the key of its noise."""
        return len(self.ids) - self.prompt_length

    @property
    def cached_length(self) -> int:
        """Positions that the target's cache keeps: everything but pending."""
        return len(self.ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._stopping.max_tokens - self.step

    @property
    def completion_tokens(self) -> int:
        """Delivered ids, plus one if an end or stop token ended the output."""
        return self._delivered + int(self.ended_by_token)

    def commit(self, verdict: Verdict, logprobs: Sequence[TokenLogprobs] | None) -> Committed:
        """Books a verdict's ids, in order, up to whatever ends the completion first.

        logprobs: one a row, (accepted + 1,) or more; None where the request wants none. Ids after the end are not observed.
        """
        passes: list[Passed] = []
        finish: Finish | None = None
        observed = 0
        for row, token_id in enumerate(verdict.ids):
            observed += 1
            finish = self._end_token(token_id)
            if finish is None:
                token = Token(token_id, row < verdict.accepted, logprobs[row] if logprobs is not None else None)
                self.ids.append(token_id)
                if self._grammar is not None:
                    self._grammar.advance(token_id)
                self._held.append(token)
                passes.append(self._gate.push(self._piece(token_id)))
                finish = self._end_after(passes[-1])
            if finish is not None:
                break
        if finish is not None and finish.reason is not FinishReason.STOP_STRING:
            passes.append(self._gate.finish())
        accepted = min(verdict.accepted, observed)
        released = self._let_go(passes)
        if self._grammar is not None:
            self._judge(self._grammar, released, finish)
        return Committed(released, finish, accepted, verdict.accepted - accepted)

    def _judge(self, grammar: Grammar, released: Released | None, finish: Finish | None) -> None:
        if released is not None:
            self._text.append(released.text)
        if finish is not None:
            # A stop string takes text away again that the grammar has seen.
            stopped = finish.reason is FinishReason.STOP_STRING
            self.grammar_complete = grammar.completes("".join(self._text)) if stopped else grammar.complete

    def _end_token(self, token_id: int) -> Finish | None:
        if token_id in self._stopping.end_ids:
            reason = FinishReason.EOS
        elif token_id in self._stopping.stop_ids:
            reason = FinishReason.STOP_TOKEN
        else:
            return None
        self.ended_by_token = True
        return Finish(reason, stop_id=token_id)

    def _end_after(self, passed: Passed) -> Finish | None:
        if passed.stop is not None:
            return Finish(FinishReason.STOP_STRING, stop=passed.stop)
        if self._grammar is not None and self._grammar.ended:
            return Finish(FinishReason.GRAMMAR_END)
        if self.remaining > 0:
            return None
        return Finish(FinishReason.CONTEXT_LENGTH if self._stopping.capped_by_context else FinishReason.MAX_TOKENS)

    def _let_go(self, passes: Sequence[Passed]) -> Released | None:
        """The tokens and the text of one round; None where no token left the gate. Text never leaves without one."""
        text, ends = "", list[int]()
        for passed in passes:
            ends.extend(len(text) + end for end in passed.ends)
            text += passed.text
        if not ends:
            return None
        first_step = self._delivered
        self._delivered += len(ends)
        gone = tuple(self._held[: len(ends)])
        del self._held[: len(ends)]
        return Released(first_step=first_step, text=text, tokens=gone, text_ends=tuple(ends))
