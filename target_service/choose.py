"""Choosing tokens from logits: the only place with bias, penalties, bans and logprobs. Runs on the compute thread.

Order: logit_bias, repetition, presence, frequency, bans, what a constraint allows, then log-softmax, filters and draw
(`draftwire.sampling`). Row i is processed with the ids committed plus drafts[:i], all known before the forward, so every
row is chosen in one go and rows after a disagreement are simply never looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from draftwire.errors import InternalError
from draftwire.sampling import Draw, draw, host_ids, log_softmax, perturbed, settle
from target_service.ledger import TokenLogprobs
from target_service.params import Choosing, Penalties
from target_service.window import Window

NEAR_TIE_GAPS = {"float32": 1e-4, "float16": 0.03}
"""Logits of the same text in windows of another shape differ by less; by the number format of the weights."""
NEAR_TIE_GAP_OTHERS = 0.25
"""bfloat16 and few bits: two steps of a bfloat16 between 16 and 32."""

_LARGEST = float(mx.finfo(mx.float32).max)


@dataclass(frozen=True, slots=True)
class _Report:
    """What is read back of a window besides `Draw.done`."""

    ids: mx.array
    """(rows,)"""
    scores: mx.array
    """(rows, 1) processed logits of the ids, or their log-probabilities where filters are on: not finite for a bad row."""
    logprobs: mx.array | None
    """(rows, 1)"""
    top_ids: mx.array | None
    """(rows, n), most likely first."""
    top_logprobs: mx.array | None
    """(rows, n)"""
    peaks: mx.array | None = None
    """(rows, 1) the largest processed logit, under a constraint: -inf where nothing is left."""
    close: mx.array | None = None
    """(rows,) scores that came close to the best, itself included."""

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        every = (
            self.ids,
            self.scores,
            self.logprobs,
            self.top_ids,
            self.top_logprobs,
            self.peaks,
            self.close,
        )
        return [array for array in every if array is not None]


@dataclass(frozen=True, slots=True)
class PendingChoice:
    """A window's choice that mlx has not computed yet."""

    drawn: Draw | mx.array
    processed: mx.array
    """(rows, vocab) logits after processors."""
    report: _Report
    choosing: Choosing
    constrained: bool = False
    gap: float = 0.0
    """Scores closer than this are a near tie; 0 where nobody looks."""

    @property
    def ids(self) -> mx.array:
        """(rows,) lazy ids; final unless filters need more passes (`Chosen.settled`)."""
        return self.report.ids

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate for `read`."""
        return [*self.report.arrays(), *([self.drawn.done] if isinstance(self.drawn, Draw) else [])]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice that was read back."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    settled: bool
    """Whether `PendingChoice.ids` were final when first computed."""
    dead_row: int | None = None
    """As in `Choice`."""
    near: tuple[bool, ...] = ()
    """(rows,) whether another score came close; empty where nobody looked."""


def choose(logits: mx.array, choosing: Choosing, window: Window, gap: float = 0.0) -> PendingChoice:
    """Builds the choice of every row. logits: (rows, vocab) of the window's forward.

    gap: two logits closer than this are a near tie; 0 does not look for any.
    """
    logits = process(logits.astype(mx.float32), choosing, window)
    sampler, steps = choosing.sampler, range(window.first_step, window.first_step + logits.shape[0])
    drawn: Draw | mx.array
    if sampler.greedy or sampler.filters:
        drawn = draw(logits, sampler, steps)
        scores = drawn.rest if isinstance(drawn, Draw) else logits
    else:
        scores = perturbed(logits, sampler, steps)
        drawn = mx.argmax(scores, axis=-1)
    ids = drawn.ids if isinstance(drawn, Draw) else drawn
    # Noise is added to logits / temperature: a logit that moves by `gap` moves its score by this.
    gap = gap if sampler.greedy else gap / sampler.temperature
    close = close_scores(scores, ids, gap) if gap else None
    constrained = window.limits is not None
    report = replace(_report(logits, drawn, ids, choosing, constrained), close=close)
    return PendingChoice(drawn, logits, report, choosing, constrained, gap)


def close_scores(scores: mx.array, ids: mx.array, gap: float) -> mx.array:
    """How many scores of each row are less than `gap` below the chosen one's, itself included: 2 or more are a near tie.

    scores: (..., vocab), ids: (...). One pass over the scores, where finding the second best would sort them.
    """
    best = mx.take_along_axis(scores, ids[..., None], axis=-1)
    return mx.sum(scores > best - gap, axis=-1)


def read(choice: PendingChoice) -> Chosen:
    """Blocks until the choice is computed.

    Raises InternalError where a row holds NaN or has no finite logit; under a constraint the latter is a dead row instead.
    """
    mx.eval(choice.arrays())
    report, settled = choice.report, True
    if isinstance(choice.drawn, Draw) and not mx.all(choice.drawn.done).item():
        settled = False
        ids = mx.array(settle(choice.drawn, choice.choosing.sampler), dtype=mx.uint32)
        report = _report(choice.processed, choice.drawn, ids, choice.choosing, choice.constrained)
        if choice.gap:
            rest = choice.drawn.rest
            # What was above the id was left out by the later passes.
            standing = mx.where(rest > mx.take_along_axis(rest, ids[:, None], axis=-1), -math.inf, rest)
            report = replace(report, close=close_scores(standing, ids, choice.gap))
    # argmax answers id 0 for a row of -inf, and the id of a NaN: both must be loud. Filters turn a row that holds one NaN
    # into a row of NaN, whose argmax may be an id with a good logit: there the log-probabilities tell.
    scores = [score for (score,) in _floats(report.scores)]
    peaks = [peak for (peak,) in _floats(report.peaks)] if report.peaks is not None else scores
    dead = [row for row, peak in enumerate(peaks) if peak == -math.inf] if choice.constrained else []
    if not all(
        math.isfinite(scores[row]) and math.isfinite(peaks[row]) for row in range(len(scores)) if row not in dead
    ):
        raise InternalError("the model's logits are not finite", reason="LOGITS_NOT_FINITE")
    near = tuple(count > 1 for count in host_ids(report.close)) if report.close is not None else ()
    return Chosen(tuple(host_ids(report.ids)), _logprobs(report), settled, dead[0] if dead else None, near)


def _report(
    processed: mx.array, drawn: Draw | mx.array, ids: mx.array, choosing: Choosing, constrained: bool
) -> _Report:
    column = ids[:, None]
    judged = drawn.logprobs if isinstance(drawn, Draw) else processed
    scores = mx.take_along_axis(judged, column, axis=-1)
    peaks = mx.max(processed, axis=-1, keepdims=True) if constrained else None
    if choosing.top_logprobs is None:
        return _Report(ids, scores, None, None, None, peaks)
    every = log_softmax(processed)
    own = mx.take_along_axis(every, column, axis=-1)
    if choosing.top_logprobs == 0:
        return _Report(ids, scores, own, None, None, peaks)
    best = mx.argpartition(-every, choosing.top_logprobs - 1, axis=-1)[:, : choosing.top_logprobs]
    order = mx.argsort(-mx.take_along_axis(every, best, axis=-1), axis=-1)
    top = mx.take_along_axis(best, order, axis=-1)
    return _Report(ids, scores, own, top, mx.take_along_axis(every, top, axis=-1), peaks)


def _logprobs(report: _Report) -> tuple[TokenLogprobs, ...] | None:
    if report.logprobs is None:
        return None
    own = [value for (value,) in _floats(report.logprobs)]
    if report.top_ids is None or report.top_logprobs is None:
        return tuple(TokenLogprobs(value, (), ()) for value in own)
    ids = cast("list[list[int]]", report.top_ids.tolist())
    values = _floats(report.top_logprobs)
    return tuple(_possible(one, top, row) for one, top, row in zip(own, ids, values, strict=True))


def _possible(own: float, ids: Sequence[int], values: Sequence[float]) -> TokenLogprobs:
    """Without the ids that a constraint rules out, where fewer are left than were asked for."""
    count = next((i for i, value in enumerate(values) if value == -math.inf), len(values))
    return TokenLogprobs(own, tuple(ids[:count]), tuple(values[:count]))


def _floats(rows: mx.array) -> list[list[float]]:
    return cast("list[list[float]]", rows.tolist())


def process(logits: mx.array, choosing: Choosing, window: Window) -> mx.array:
    """Applies bias, penalties, bans and a constraint. logits: (rows, vocab) float32; returns the same shape.

    With a constraint it takes the host a while: hand the logits to mlx before.
    """
    rows = logits.shape[0]
    if choosing.logit_bias:
        ids = _ids([list(choosing.logit_bias)] * rows)
        values = mx.array([list(choosing.logit_bias.values())])
        logits = _update(logits, ids, mx.take_along_axis(logits, ids, axis=-1) + values)
    if choosing.penalties.on:
        logits = _penalize(logits, choosing.penalties, [*window.history, *window.drafts], len(window.history))
    banned_rows = min(rows, max(0, choosing.min_tokens - window.first_step))
    if banned_rows and choosing.banned:
        ids = _ids([sorted(choosing.banned)] * banned_rows)
        ban = mx.full(ids.shape, -math.inf, dtype=mx.float32)
        logits = mx.concatenate([_update(logits[:banned_rows], ids, ban), logits[banned_rows:]])
    if window.limits is not None:
        # The smaller of the two: a NaN stays one also where nothing may be chosen.
        logits = mx.minimum(logits, mx.array(window.limits()))
    return logits


def _penalize(logits: mx.array, penalties: Penalties, ids: Sequence[int], committed: int) -> mx.array:
    """Row i looks at the last `window` of ids[:committed + i]; each distinct id is changed once."""
    counts = []
    for row in range(logits.shape[0]):
        seen = ids[: committed + row]
        counts.append(Counter(seen[-penalties.window :] if penalties.window else seen))
    width = max(len(count) for count in counts)
    # Rows are padded by repeating an entry: writing the same value twice changes nothing.
    keys = [_padded(list(count), width) for count in counts]
    times = [_padded([float(n) for n in count.values()], width) for count in counts]
    columns = _ids(keys)
    values = mx.take_along_axis(logits, columns, axis=-1)
    if penalties.repetition != 1.0:
        values = mx.where(values < 0, values * penalties.repetition, values / penalties.repetition)
        # A penalty near 0 is allowed and must not make a good logit infinite.
        values = mx.minimum(values, _LARGEST)
    if penalties.presence != 0.0:
        values = values - penalties.presence
    if penalties.frequency != 0.0:
        values = values - mx.array(times) * penalties.frequency
    return _update(logits, columns, values)


def _padded(values: list[int] | list[float], width: int) -> list[float]:
    return [*values, *([values[0]] * (width - len(values)))]


def _ids(rows: Sequence[Sequence[float]]) -> mx.array:
    return mx.array([list(row) for row in rows], dtype=mx.uint32)


def _update(logits: mx.array, columns: mx.array, values: mx.array) -> mx.array:
    """Writes values at columns. The caller has checked that ids lie inside the vocabulary (mlx does not)."""
    return mx.put_along_axis(logits, columns, values, axis=-1)
