"""Choosing for a whole batch: one pass over all rows where nothing but the best logit counts, else sequence by sequence.

Runs on the compute thread. Everything is read back at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from draftwire.errors import InternalError
from target_service.choose import Chosen, PendingChoice, choose, close_scores, read
from target_service.params import Choosing
from target_service.window import Window


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's share of a batch."""

    index: int
    """Its row of the logits."""
    choosing: Choosing
    window: Window

    @property
    def plain(self) -> bool:
        """Whether the largest logit is all that is asked for."""
        choosing = self.choosing
        bans = bool(choosing.banned) and self.window.first_step < choosing.min_tokens
        processed = bool(choosing.logit_bias) or choosing.penalties.on or bans or self.window.limits is not None
        return choosing.sampler.greedy and choosing.top_logprobs is None and not processed


class PendingBatch:
    """The choices of a batch that mlx has not computed yet."""

    def __init__(self, logits: mx.array, parts: Sequence[Part], gap: float = 0.0) -> None:
        """logits: (slots, width, vocab); a part's window takes the first rows of its slot. gap: as `choose` has it."""
        self._slots = logits.shape[0]
        self.parts = parts
        self._single: dict[int, PendingChoice] = {}
        self._best: mx.array | None = None
        self._scores: mx.array | None = None
        self._close: mx.array | None = None
        if any(part.plain for part in parts):
            self._best = mx.argmax(logits, axis=-1)
            self._scores = mx.take_along_axis(logits, self._best[:, :, None], axis=-1)[:, :, 0].astype(mx.float32)
            self._close = close_scores(logits, self._best, gap) if gap else None
        for number, part in enumerate(parts):
            if not part.plain:
                own = logits[part.index, : part.window.rows]
                self._single[number] = choose(own, part.choosing, part.window, gap)

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        every = [array for array in (self._best, self._scores, self._close) if array is not None]
        return every + [array for choice in self._single.values() for array in choice.arrays()]

    def first_ids(self) -> mx.array:
        """(slots, 1) lazy ids of each window's row 0: the input of a forward that is begun ahead; 0 in other slots."""
        if not self._single and self._best is not None:
            return self._best[:, :1]
        column = [mx.zeros((1,), dtype=mx.uint32)] * self._slots
        for number, part in enumerate(self.parts):
            choice = self._single.get(number)
            if choice is not None:
                column[part.index] = choice.ids[:1]
            elif self._best is not None:
                column[part.index] = self._best[part.index, :1]
        return mx.stack(column)

    def read(self) -> list[Chosen | InternalError]:
        """Blocks until everything is computed. One entry a part; an error where its logits are not finite."""
        mx.eval(self.arrays())
        best = cast("list[list[int]]", self._best.tolist()) if self._best is not None else []
        scores = cast("list[list[float]]", self._scores.tolist()) if self._scores is not None else []
        close = cast("list[list[int]]", self._close.tolist()) if self._close is not None else []
        read_back: list[Chosen | InternalError] = []
        for number, part in enumerate(self.parts):
            choice = self._single.get(number)
            try:
                if choice is not None:
                    read_back.append(read(choice))
                    continue
            except InternalError as error:
                read_back.append(error)
                continue
            rows = part.window.rows
            if all(math.isfinite(score) for score in scores[part.index][:rows]):
                near = tuple(count > 1 for count in close[part.index][:rows]) if close else ()
                read_back.append(Chosen(tuple(best[part.index][:rows]), None, settled=True, near=near))
            else:
                read_back.append(InternalError("the model's logits are not finite", reason="LOGITS_NOT_FINITE"))
        return read_back
