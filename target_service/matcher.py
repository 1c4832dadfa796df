"""Where one sequence stands in its grammar: which drafts may be tried, what each row may choose, what text is forced.

At rest a matcher stands exactly at the end of the committed ids. The event loop moves it and tries drafts; during a forward the
compute thread alone uses it, and leaves it where it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import DraftwireError, FailedPrecondition, InternalError

_SLOWEST_CALL_S: Final = 1.0
_CHARS_A_TOKEN: Final = 8
_CONTROL: Final = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")

# Of a byte of a bit mask, the limits of its eight ids, lowest bit first: nothing where the id may be chosen, else -inf.
_LIMITS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool), np.inf, -np.inf
).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What all matchers of a target share."""

    width: int
    """Logits a row has."""
    pieces: Sequence[bytes]
    """The bytes of each id that has a token; empty for special ones."""
    end_ids: frozenset[int]
    encode: Callable[[str], list[int]]
    """A text in the middle of others to ids. Safe on any thread."""
    control: bool = True
    """Whether text may have control characters other than line ends. JSON has none; bounded strings of xgrammar do."""
    content: NDArray[np.uint8] = field(init=False)
    """One an id, padded to whole words: 1 where it has text."""

    def __post_init__(self) -> None:
        content = np.zeros(-(-self.width // 32) * 32, np.uint8)
        known = (token for token, piece in enumerate(self.pieces) if piece)
        content[[token for token in known if self.control or not _CONTROL.search(self.pieces[token])]] = 1
        object.__setattr__(self, "content", content)

    def has_text(self, token_id: int) -> bool:
        """Whether the id stands for text, as a grammar sees it."""
        return 0 <= token_id < self.width and bool(self.content[token_id])


class Matcher:
    """One sequence's state in its grammar."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        make: Callable[[list[int]], Any],
        *,
        stop_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
    ) -> None:
        """make: xgrammar's matcher for a list of stop tokens.

        Stop ids without text end the output where the grammar is complete, as end ids do; those with text are content.
        """
        self._vocabulary = vocabulary
        silent = frozenset(token for token in stop_ids if not vocabulary.has_text(token) and token < vocabulary.width)
        self._closing = vocabulary.end_ids | silent
        self._refused = vocabulary.end_ids - silent if ignore_eos else frozenset()
        self._make = make
        self._handle: Any = make(sorted(self._closing))
        self._content = _packed(vocabulary.content, self._closing, 0)
        self._everything = _packed(vocabulary.content, self._closing, 1)
        self._words = np.zeros((1, len(self._content)), np.int32)
        self._buffer: NDArray[np.float32] = np.empty((0, len(vocabulary.content)), np.float32)
        self.ended = False
        """Whether nothing may follow but an end id."""
        self._slowest_s = 0.0
        self.seconds = 0.0
        """Time spent here so far, on whichever thread."""

    @property
    def complete(self) -> bool:
        """Whether the committed text satisfies the grammar as it stands."""
        return bool(self._handle.is_completed())

    def completes(self, text: str) -> bool:
        """Whether a whole text satisfies the grammar."""
        handle = self._make(sorted(self._closing))
        return bool(handle.accept_string(text)) and bool(handle.is_completed())

    def advance(self, token_id: int) -> None:
        """Takes a committed id.

        Raises InternalError where the grammar does not allow it, which the mask prevents; FailedPrecondition where following
        the grammar took so long that it would hold others up.
        """
        began = _now()
        if self._slowest_s > _SLOWEST_CALL_S:
            raise FailedPrecondition(
                f"following the constraint took {self._slowest_s:.1f} s for one round; simplify its repetitions",
                reason="CONSTRAINT_TOO_SLOW",
            )
        if not self._accept(token_id):
            raise InternalError(f"the grammar refuses the committed id {token_id}", reason="CONSTRAINT_VIOLATED")
        self.ended = self._at_end()
        self._count(began)

    def fitting(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """The drafts up to the first that the grammar does not allow here, or to the one that ends it."""
        began = _now()
        fit = self._walk(drafts)
        self._handle.rollback(len(fit))
        self._count(began)
        return fit

    def forced(self, after: Sequence[int], most: int) -> tuple[int, ...]:
        """Ids, at most so many, of the text that must follow once `after` were committed; empty where there is a choice.

        The model may write the same text in other tokens: these are drafts like any others.
        """
        if most <= 0:
            return ()
        began = _now()
        walked = self._walk(after)
        found: Sequence[int] = ()
        if len(walked) == len(after) and not self._handle.is_terminated():
            found = self._continuation(most)
            # Tokens of its text can still be wrong here: where the vocabulary writes one text in several ways.
            found = self._walk(found)
            self._handle.rollback(len(found))
        self._handle.rollback(len(walked))
        self._count(began)
        return tuple(found)

    def limits(self, drafts: Sequence[int]) -> NDArray[np.float32]:
        """(1 + len(drafts), width): row i has inf for what may follow drafts[:i], else -inf. To be used at once.

        drafts: as `fitting` gave them. Runs while the forward computes; the array is overwritten by the next call.
        """
        began = _now()
        rows, walked = 1 + len(drafts), 0
        if len(self._buffer) < rows:
            self._buffer = np.empty((rows, self._buffer.shape[1]), np.float32)
        masks = np.zeros((rows, self._words.shape[1]), np.int32)
        try:
            for row in range(rows):
                if row and not self._accept(drafts[row - 1]):
                    # Not after `fitting`; if it were so, nothing may be chosen here, which ends this sequence alone.
                    break
                walked = row
                # Behind an end id nobody looks; and where everything may follow, the mask is not written.
                if self._handle.is_terminated() or not self._handle.fill_next_token_bitmask(masks, row):
                    masks[row] = -1
        finally:
            self._handle.rollback(walked)
        masks &= self._everything
        limits = self._buffer[:rows]
        np.take(_LIMITS, masks.view(np.uint8), axis=0, out=limits.reshape(rows, -1, 8), mode="clip")
        for token in self._refused:
            limits[:, token] = -np.inf
        self._count(began)
        return limits[:, : self._vocabulary.width]

    def _continuation(self, most: int) -> Sequence[int]:
        text = self._handle.find_jump_forward_string()[: most * _CHARS_A_TOKEN]
        if text:
            ids = self._vocabulary.encode(text)[:most]
            joined = b"".join(self._vocabulary.pieces[token] for token in ids if self._vocabulary.has_text(token))
            if text.encode().startswith(joined):
                return ids
        # Inside a character, or with a tokenizer that puts a space in front: exact, if not how the model would write it.
        found: list[int] = self._handle.find_jump_forward_tokens()
        return found[:most]

    def _walk(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Moves on over ids as far as the grammar goes, and returns those."""
        for count, token_id in enumerate(ids):
            if self._handle.is_terminated() or (count and self._at_end()):
                return tuple(ids[:count])
            if token_id in self._refused or not self._accept(token_id):
                return tuple(ids[:count])
        return tuple(ids)

    def _accept(self, token_id: int) -> bool:
        # Ids without text are asked for here first: the matcher writes a line to standard error for each.
        known = token_id in self._closing or self._vocabulary.has_text(token_id)
        return known and not self._handle.is_terminated() and bool(self._handle.accept_token(token_id))

    def _at_end(self) -> bool:
        if not self._handle.is_completed():
            return False
        if self._handle.is_terminated():
            return True
        self._handle.fill_next_token_bitmask(self._words, 0)
        return not np.any(self._words[0] & self._content)

    def _count(self, began: tuple[float, float]) -> None:
        wall_s, own_s = _now()
        self.seconds += wall_s - began[0]
        # The thread's own time: a busy machine makes no grammar slow.
        self._slowest_s = max(self._slowest_s, own_s - began[1])


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _packed(content: NDArray[np.uint8], ids: frozenset[int], bit: int) -> NDArray[np.int32]:
    """A mask of ids with text, with the bits of `ids` set to `bit`."""
    bits = content.copy()
    bits[sorted(ids)] = bit
    return np.packbits(bits, bitorder="little").view(np.int32)


def dead_end(step: int) -> DraftwireError:
    """The error of a sequence that has nothing left to choose at a step."""
    return FailedPrecondition(
        f"the constraint and the other options leave no token to choose at step {step}; "
        "look at stop_token_ids with min_tokens, or at what the vocabulary cannot write",
        reason="CONSTRAINT_DEAD_END",
    )
