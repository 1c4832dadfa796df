"""Drawing tokens from logits: filters and noise that both services share, so that a drafter guesses sampled tokens too.

Sampler version 1. For a row of log-probabilities lp, with p = exp(lp), a token t is *kept* when

    mass of tokens more likely than t  <  top_p,      lp[t] >= max(lp) + log(min_p),      tokens more likely than t  <  top_k

(the meaning of mlx-lm's filters, with ties kept together), and the draw is argmax over kept tokens of lp / temperature +
gumbel(seed, step, id). Kept tokens are a prefix of the order by likelihood, so nothing is sorted: take the best token
of all; if it is not kept, neither is any token at most as likely, so drop those and take the best of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from draftwire.noise import gumbel, step_keys

if TYPE_CHECKING:
    import mlx.core as mx

SAMPLER_VERSION = 1

# Below it, logits / temperature overflow float32 before they reach the draw; the most likely token has all the mass anyway.
_GREEDY_BELOW = 1e-6
# Each pass of the search halves the mass that is left, or better; most rows are done after the first.
_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How one sequence draws. A value, not a stream: a step can be drawn again, elsewhere, or never."""

    temperature: float = 0.0
    """0, or anything below 1e-6, means greedy; then the other fields have no effect."""
    top_p: float = 1.0
    """Kept mass, (0, 1]."""
    top_k: int = 0
    """Kept number of tokens; 0 keeps all."""
    min_p: float = 0.0
    """Kept share of the largest probability, [0, 1]."""
    seed: int = 0
    """[0, 2**64)."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always drawn."""
        return self.temperature < _GREEDY_BELOW

    @property
    def filters(self) -> bool:
        """Whether any token can be left out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw that mlx has not computed yet. `rest` is what remains to be searched in rows that are not `done`."""

    ids: mx.array
    """(n,) uint32."""
    done: mx.array
    """(n,) bool: false where the search needs more passes."""
    rest: mx.array
    """(n, vocab): perturbed log-probabilities, -inf where dropped."""
    logprobs: mx.array
    """(n, vocab) float32."""


def log_softmax(logits: mx.array) -> mx.array:
    """Row-wise natural log-probabilities. logits: (n, vocab). Returns (n, vocab) float32."""
    import mlx.core as mx

    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def draw(logits: mx.array, sampler: Sampler, steps: Sequence[int]) -> Draw | mx.array:
    """Draws one token a row. logits: (n, vocab), already processed; steps: (n,), the key of each row's noise.

    Returns (n,) ids, or a `Draw` where filters are on; then evaluate `ids` and `done`, and call `settle`.
    """
    import mlx.core as mx

    if sampler.greedy:
        return mx.argmax(logits, axis=-1)
    if not sampler.filters:
        return mx.argmax(perturbed(logits, sampler, steps), axis=-1)
    logprobs = log_softmax(logits)
    return _search(perturbed(logprobs, sampler, steps), logprobs, sampler)


def perturbed(logits: mx.array, sampler: Sampler, steps: Sequence[int]) -> mx.array:
    """(n, vocab) float32 scores whose best is drawn where nothing is left out: logits / temperature plus noise."""
    import mlx.core as mx

    noise = gumbel([step_keys(sampler.seed, step) for step in steps], logits.shape[-1])
    return logits.astype(mx.float32) / sampler.temperature + noise


def settle(pending: Draw, sampler: Sampler) -> list[int]:
    """The ids of a `Draw`, after as many more passes as it needs. Blocks until they are computed."""
    import mlx.core as mx

    while not mx.all(pending.done).item():
        pending = _search(pending.rest, pending.logprobs, sampler)
    return host_ids(pending.ids)


def draw_ids(logits: mx.array, sampler: Sampler, steps: Sequence[int]) -> list[int]:
    """`draw` and `settle` in one call. Blocks until the ids are computed."""
    drawn = draw(logits, sampler, steps)
    return settle(drawn, sampler) if isinstance(drawn, Draw) else host_ids(drawn)


def host_ids(ids: mx.array) -> list[int]:
    """(n,) ids as Python integers. Blocks until they are computed."""
    return cast("list[int]", ids.tolist())


def _search(rest: mx.array, logprobs: mx.array, sampler: Sampler) -> Draw:
    import mlx.core as mx

    probabilities = mx.exp(logprobs)
    floor = mx.max(logprobs, axis=-1, keepdims=True) + (math.log(sampler.min_p) if sampler.min_p > 0 else -math.inf)
    # The whole mass rounds to 1 long before the last token: 1 must mean all of them.
    mass_limit = sampler.top_p if sampler.top_p < 1.0 else math.inf
    rank_limit = sampler.top_k if sampler.top_k > 0 else logprobs.shape[-1]
    for _ in range(_PASSES):
        ids = mx.argmax(rest, axis=-1, keepdims=True)
        own = mx.take_along_axis(logprobs, ids, axis=-1)
        above = logprobs > own
        mass = mx.sum(mx.where(above, probabilities, 0.0), axis=-1, keepdims=True)
        rank = mx.sum(above, axis=-1, keepdims=True)
        kept = (mass < mass_limit) & (own >= floor) & (rank < rank_limit)
        # The most likely token is always kept, whatever rounding did to the floor.
        kept = kept | (rank == 0)
        rest = mx.where(kept | above, rest, -math.inf)
    return Draw(ids[:, 0], kept[:, 0], rest, logprobs)
