"""Whether rejected drafts can be taken back from a model's caches: decided at load, by looking at them and by trying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from draftwire.errors import InternalError

if TYPE_CHECKING:
    import mlx.core as mx

    from draftwire.caches import KvQuantisation, SequenceCache

# Enough ids that a short convolution's state, and a tiny window, are full of them.
_PROMPT = (1, 2, 3, 4, 5)
# Rows of a window that are no drafts: pending, one forward begun ahead, and ids that are computed again.
_OTHER_ROWS = 16
_KEPT, _WRONG, _NEXT = 6, (7, 8, 9), 10


@dataclass(frozen=True, slots=True)
class Rollback:
    """What a model's caches can take back. Plain numbers, for any thread."""

    kind: str
    """"trim", "slide" (with sliding windows), "replay" (with recurrent state), or "" where drafts cannot be taken back."""
    reason: str
    """Why not; "" where they can."""
    most: int = 1 << 30
    """Rows that can be taken back at any time."""
    widest: int = 1 << 30
    """Rows that a window has at most, whatever can be taken back."""

    def room(self, length: int) -> int:
        """Drafts that a window may hold when `length` positions are cached: 0 says that this round has to be plain."""
        return max(0, min(self.most - _OTHER_ROWS, self.widest - 1)) if self.kind else 0


def rollback_of(model: Any, quantisation: KvQuantisation | None = None) -> Rollback:
    """Looks at the caches that the model really makes, then takes rows back and compares.

    Raises CacheFormatError where the model's cache cannot be quantised as asked.
    """
    from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

    from draftwire.caches import SEQUENCE_KINDS, flat, make_layers
    from draftwire.sliding import SlidingKVCache

    leaves = list(flat(make_layers(model, quantisation)))
    for leaf in leaves:
        if type(leaf) not in SEQUENCE_KINDS:
            return Rollback("", f"its cache ({type(leaf).__name__}) cannot take rejected drafts back")
    forms = {(leaf.bits, leaf.group_size) if isinstance(leaf, QuantizedKVCache) else None for leaf in leaves}
    if len(forms) > 1:
        return Rollback("", "its layers quantise their caches differently, which is not kept exact with drafts")
    fault = _fault(model, quantisation)
    if fault:
        return Rollback("", fault)
    most = min((leaf.slack for leaf in leaves if isinstance(leaf, SlidingKVCache)), default=1 << 30)
    if any(isinstance(leaf, ArraysCache) for leaf in leaves):
        return Rollback("replay", "", most)
    return Rollback("slide" if most < 1 << 30 else "trim", "", most)


def _fault(model: Any, quantisation: KvQuantisation | None) -> str:
    """What a cache says of itself is not enough: fed, taken back and fed again, it must give the same logits."""
    import mlx.core as mx

    from draftwire.caches import CacheFormatError, SequenceCache

    straight, cut = SequenceCache(model, quantisation), SequenceCache(model, quantisation)
    try:
        _feed(model, straight, _PROMPT)
        expected = _feed(model, straight, (_KEPT, _NEXT))
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        if quantisation is None:
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CacheFormatError(f"its attention cannot use a quantised cache ({first})") from error
    _feed(model, cut, _PROMPT)
    cut.begin(len(_WRONG))
    _feed(model, cut, (_KEPT, *_WRONG))
    if not cut.counted():
        return "its cache does not count the tokens that it holds"
    kept = len(_PROMPT) + 1
    try:
        stand = cut.truncate(kept)
    except InternalError as error:
        return error.message
    found = _feed(model, cut, (*(*_PROMPT, _KEPT)[stand:], _NEXT))
    gap = _largest(mx.abs(expected.astype(mx.float32) - found.astype(mx.float32)))
    spread = max(1.0, _largest(mx.abs(expected)))
    if not (math.isfinite(gap) and math.isfinite(spread)):
        return "its logits are not finite"
    # Recurrent layers sum in another order for another number of rows; in 16 bits that is seen.
    tolerance = 1e-3 if expected.dtype == mx.float32 else 5e-2
    return "" if gap <= tolerance * spread else f"after a roll-back its logits differ by {gap:.3g}"


def _feed(model: Any, cache: SequenceCache, ids: Sequence[int]) -> mx.array:
    """Logits (head width,) of the last row, computed."""
    import mlx.core as mx

    row: mx.array = model(mx.array([list(ids)]), cache=cache.layers)[0, -1]
    cache.written(len(ids))
    mx.eval(row)
    cache.evaluate()
    return row


def _largest(array: mx.array) -> float:
    import mlx.core as mx

    return cast("float", mx.max(array).item())
