"""Attention and SwiGLU for CPUs with an exponential that the compiler vectorises.

mlx's own exponential takes one element at a time on a CPU without Accelerate, 9 to 10 ns each, which was 10 of the 14 ns of
an attention score and most of a SwiGLU. Here 2^x is built of additions and products only (`_bits`), 1.1 ns. Its relative
error is 3e-7 at most, mlx's 1.8e-6. docs/adr/0305 has the figures.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Final, cast

import mlx.core as mx
from mlx.nn import Module  # type: ignore[attr-defined]
from mlx_lm.models.activations import swiglu as plain_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as plain_attention
from mlx_lm.models.cache import KVCache

from draftwire.ragged import RaggedLayer

# 2^f - 1 over f on [0, 1]: least squares of the relative error of 2^f at Chebyshev nodes; it stays below 8.4e-8.
_POLYNOMIAL: Final = (0.69315136, 0.24016415, 0.05580045, 0.00901669, 0.00186718)
_LOG2_E: Final = 1 / math.log(2)
# Added and taken off again, it leaves a float32 below 2^22 rounded to an integer.
_ROUND: Final = 1.5 * 2.0**23
_EXPONENT_BIAS: Final = 127.0
_EXPONENT_UNIT: Final = 2.0**23
_LIMIT: Final = 127.0
_MASKED: Final = -1e30
# Scores computed at a time: 2 MiB, for the cache and for memory that malloc keeps between the passes.
_BLOCK: Final = 1 << 19
# Sums and maxima run down so many columns at a time, which the compiler vectorises. The pool's extents are multiples of it.
_LANES: Final = 32
_TOLERANCE: Final = 1e-5

_compiled = partial(mx.compile, shapeless=True)


def _bits(x: mx.array) -> mx.array:
    """The bits of the float 2^x for x < 128, where x = n + f, n an integer: n and 2^f - 1 fall into the float's two fields."""
    n = (x - 0.5 + _ROUND) - _ROUND
    f = x - n
    mantissa = f * (_EXPONENT_UNIT * _POLYNOMIAL[-1])
    for coefficient in _POLYNOMIAL[-2::-1]:
        mantissa = f * (_EXPONENT_UNIT * coefficient + mantissa)
    exponent = (n + _EXPONENT_BIAS) * _EXPONENT_UNIT
    # What is below 2^-127, and no number, converts to the least integer: no weight at all.
    return mx.maximum(exponent.astype(mx.int32) + (mantissa + 0.5).astype(mx.int32), 0)


_weight_bits = _compiled(_bits)


@_compiled
def _limited_bits(x: mx.array) -> mx.array:
    return _bits(mx.minimum(x, _LIMIT))


@_compiled
def _gate_bits(gate: mx.array) -> mx.array:
    return _bits(mx.minimum(gate * -_LOG2_E, _LIMIT))


@_compiled
def _gated(gate: mx.array, x: mx.array, exponential: mx.array) -> mx.array:
    return gate * x / (1.0 + exponential)


def exp2(x: mx.array) -> mx.array:
    """2^x of float32, elementwise. 0 below -127, 2^127 from 127 on; what is no number gives 0: keep it elsewhere."""
    bits: mx.array = _limited_bits(x)
    return bits.view(mx.float32)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """gate * sigmoid(gate) * x, as mlx-lm's function of this name."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32 or gate.shape != x.shape:
        plain: mx.array = plain_swiglu(gate, x)
        return plain
    bits: mx.array = _gate_bits(gate)
    out: mx.array = _gated(gate, x, bits.view(mx.float32))
    return out


def attention(  # noqa: PLR0917 -- mlx-lm's signature
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(queries keys^T * scale) values, as mlx-lm's `scaled_dot_product_attention`.

    queries: (B, heads, L, dim); keys and values: (B, KV heads, S, dim), or quantised; mask: "causal", bool (True is seen) or
    to be added, (L, S) or (B, 1 or heads, L, S). Returns (B, heads, L, values' dim).
    """
    ours = sinks is None and not hasattr(cache, "bits") and queries.dtype == mx.float32
    ours = ours and (not isinstance(mask, mx.array) or mask.ndim in (2, 4))
    if not ours:
        out: mx.array = plain_attention(queries, keys, values, cache, scale, mask, sinks)
        return out
    batch, heads, length, _ = queries.shape
    seen = keys.shape[2]
    added = _added(mask, keys.shape[1], length, seen)
    # log2 of e in the scale, so that softmax is made of 2^x.
    queries = queries * (scale * _LOG2_E)
    # A cache that forgets its first keys has the others elsewhere each time.
    total = _total if cache is None or isinstance(cache, KVCache | RaggedLayer) else mx.sum
    rows, kv_heads, columns = _block(batch, keys.shape[1], heads // keys.shape[1] * length * seen, length)
    group = heads // keys.shape[1]
    blocks = []
    for row in range(0, batch, rows):
        own = slice(row, row + rows)
        bands = []
        for head in range(0, keys.shape[1], kv_heads):
            its = slice(head, head + kv_heads)
            lines = []
            for begin in range(0, length, columns):
                end = min(begin + columns, length)
                if isinstance(mask, str):
                    # Nobody in this block sees further than its last position, and all see as far as its first.
                    last = seen - length + end
                    part = _triangle(begin - end + last, last) if end - begin > 1 else None
                else:
                    last = seen
                    part = None if added is None else _of(added, own, its)[..., begin:end, :]
                some = queries[own, head * group : (head + kv_heads) * group, begin:end]
                out = _weighed(_scores(some, keys[own, its, :last], part), values[own, its, :last], total)
                lines.append(out.reshape(-1, some.shape[1], end - begin, values.shape[3]))
            bands.append(_joined(lines, 2))
        blocks.append(_joined(bands, 1))
    return _joined(blocks, 0)


def _block(batch: int, kv_heads: int, scores: int, length: int) -> tuple[int, int, int]:
    """Batch rows, KV heads and queries of a block of at most `_BLOCK` scores, where one query has no more.

    scores: of a KV head.

    Heads are split before queries are: keys and values are read once for all queries of a block. Blocks are of one size: a
    last one of a few queries would read all keys again for next to nothing.
    """
    if kv_heads * scores <= _BLOCK:
        return max(1, _BLOCK // (kv_heads * scores)), kv_heads, length
    if scores <= _BLOCK:
        parts = -(-kv_heads // (_BLOCK // scores))
        return 1, -(-kv_heads // parts), length
    return 1, 1, -(-length // -(-scores // _BLOCK))


def _of(added: mx.array, rows: slice, heads: slice) -> mx.array:
    """Of (B, KV heads, ...), of which either may be 1 for all."""
    return added[rows if added.shape[0] > 1 else slice(None), heads if added.shape[1] > 1 else slice(None)]


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _triangle(first: int, last: int) -> mx.array:
    """What is added to the last keys' scores of queries at positions [first, last): (queries, last - first), causal."""
    positions = mx.arange(first, last)
    return mx.where(positions[:, None] >= positions[None], 0.0, _MASKED)


def _added(mask: mx.array | str | None, kv_heads: int, length: int, seen: int) -> mx.array | None:
    """A mask as what is added to scores of (B, KV heads, heads of each, L, S); its first three may be 1. None where there is
    none, or a name."""
    if mask is None or isinstance(mask, str):
        return None
    added = mx.where(mask, 0.0, _MASKED) if mask.dtype == mx.bool_ else mask.astype(mx.float32) * _LOG2_E
    if added.ndim == 2:
        added = added[None, None, None]
    elif added.shape[1] == 1:
        added = added[:, None]
    else:
        added = added.reshape(added.shape[0], kv_heads, -1, *added.shape[2:])
    return mx.broadcast_to(added, (*added.shape[:3], length, seen))


def _scores(queries: mx.array, keys: mx.array, added: mx.array | None) -> mx.array:
    """(B, KV heads, heads of each x L, S). added: to the scores of as many keys as it has columns, the last ones."""
    batch, _, length, dim = queries.shape
    kv_heads, seen = keys.shape[1:3]
    # The query heads of a KV head are rows of one product.
    scores = queries.reshape(batch, kv_heads, -1, dim) @ keys.swapaxes(-1, -2)
    if added is None:
        return scores
    return _masked(scores.reshape(batch, kv_heads, -1, length, seen), added).reshape(batch, kv_heads, -1, seen)


def _weighed(scores: mx.array, values: mx.array, total: Callable[..., mx.array]) -> mx.array:
    """softmax(scores) values with 2^x: (B, KV heads, heads of each x L, values' dim). total: `mx.sum`, or one like it."""
    bits: mx.array = _weight_bits(scores - _greatest(scores))
    weights = bits.view(mx.float32)
    return (weights @ values) / total(weights, axis=-1, keepdims=True)


def _masked(scores: mx.array, added: mx.array) -> mx.array:
    """Adds to the last columns of scores (..., L, S), as many as `added` has."""
    first = scores.shape[-1] - added.shape[-1]
    if first == 0:
        return scores + added
    # In place: nobody else has the scores.
    scores[..., first:] = scores[..., first:] + added
    return scores


def _lanes(x: mx.array) -> tuple[mx.array, mx.array]:
    """The last axis as (..., n, _LANES), and what is left of it."""
    whole = x.shape[-1] // _LANES * _LANES
    return x[..., :whole].reshape(*x.shape[:-1], -1, _LANES), x[..., whole:]


def _greatest(x: mx.array) -> mx.array:
    """Maximum over the last axis, which stays."""
    if x.shape[-1] < _LANES:
        return mx.max(x, axis=-1, keepdims=True)
    lanes, rest = _lanes(x)
    found = mx.max(mx.max(lanes, axis=-2), axis=-1, keepdims=True)
    return mx.maximum(found, mx.max(rest, axis=-1, keepdims=True)) if rest.shape[-1] else found


def _total(x: mx.array, *, axis: int, keepdims: bool) -> mx.array:
    """`mx.sum` over the last axis, a third as long: each lane from first to last, then the lanes. In the same order whatever
    number of zeros comes behind, as keys do that others see; not where zeros come before, as in a cache that rotates."""
    lanes, rest = _lanes(x)
    sums = mx.sum(lanes, axis=-2)
    if rest.shape[-1]:
        sums = sums + mx.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, _LANES - rest.shape[-1])])
    return mx.sum(sums, axis=axis, keepdims=keepdims)


def teach(model: Any) -> int:
    """Makes a model's modules call this module's `attention` and `swiglu`. Returns how many modules do so from now on.

    0 where mlx has a fast exponential (GPUs, macOS), where the result would be wrong or where nothing can be compiled. Other
    models of the process, of the same classes too, stay as they are. Tensors that are not float32 take mlx's way.
    """
    if mx.default_device() != mx.Device(mx.cpu) or sys.platform == "darwin":
        return 0
    # Without a compiler mlx runs each addition on its own, and its own exponential is faster.
    if shutil.which("g++") is None or not _works():
        return 0
    taught = 0
    for module in model.modules():
        kind = _taught(type(module))
        if kind is not None:
            module.__class__ = kind
            taught += 1
    return taught


def _works() -> bool:
    """Whether what the compiler made of `exp2` is 2^x: an option such as -ffast-math would undo the rounding."""
    x = mx.linspace(1 - _LIMIT, _LIMIT, 4099)
    expected = mx.power(2.0, x)
    try:
        apart = cast("float", mx.max(mx.abs(exp2(x) / expected - 1)).item())
        # What is masked, however far: conversions of what no integer holds are the compiler's to define.
        least = cast("float", mx.max(mx.abs(exp2(mx.array([-127.0, -200.0, -300.0, _MASKED, -math.inf])))).item())
    except RuntimeError:  # no C++ compiler
        return False
    return apart <= _TOLERANCE and least == 0.0


_OURS: Final[Mapping[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]]] = {
    "scaled_dot_product_attention": (plain_attention, attention),
    "swiglu": (plain_swiglu, swiglu),
}


def _taught(kind: type[Any]) -> type[Any] | None:
    """A class like `kind` whose `__call__` finds our functions under mlx-lm's names; None where it calls none of them."""
    call = kind.__call__
    if not issubclass(kind, Module) or not isinstance(call, FunctionType):
        return None
    ours = {
        name: own
        for name, (plain, own) in _OURS.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is plain
    }
    if not ours:
        return None
    # A copy of the function with names of its own: the module that others import stays untouched.
    own_call = FunctionType(
        call.__code__, {**call.__globals__, **ours}, call.__name__, call.__defaults__, call.__closure__
    )
    own_call.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own_call})
