"""Attention and SwiGLU for CPUs with an exponential that the compiler vectorises.

mlx's own exponential takes one element at a time on a CPU without Accelerate, 9 to 10 ns each, which was 10 of the 14 ns of
an attention score and most of a SwiGLU. Here 2^x is built of additions and products only (`_halves`), 1 to 2 ns. Its relative
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

# 2^f on [-1/2, 1/2]: least squares of the relative error at Chebyshev nodes; it stays below 7.7e-8.
_POLYNOMIAL: Final = (1.0000000728, 0.6931469475, 0.2402212172, 0.0555074306, 0.0096754600, 0.0013266970)
_LOG2_E: Final = 1 / math.log(2)
# Added and taken off again, it leaves a float32 below 2^22 rounded to an integer.
_ROUND: Final = 1.5 * 2.0**23
_EXPONENT_BIAS: Final = 127
_EXPONENT_UNIT: Final = 2**23
# The bits of 2^-127 are those of 0: what is masked has no weight at all.
_LIMIT: Final = 127.0
_MASKED: Final = -1e30
# Scores computed at a time: 2 MiB, for the cache and for memory that malloc keeps between the passes.
_BLOCK: Final = 1 << 19
_TOLERANCE: Final = 1e-5

_compiled = partial(mx.compile, shapeless=True)


@_compiled
def _halves(x: mx.array) -> tuple[mx.array, mx.array]:
    """2^x as two factors: 2^f, and the bits of the float 2^n, where x = n + f and |f| <= 1/2."""
    x = mx.minimum(mx.maximum(x, -_LIMIT), _LIMIT)
    n = (x + _ROUND) - _ROUND
    f = x - n
    c0, c1, c2, c3, c4, c5 = _POLYNOMIAL
    return (
        c0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * c5)))),
        (n.astype(mx.int32) + _EXPONENT_BIAS) * _EXPONENT_UNIT,
    )


@_compiled
def _product(a: mx.array, b: mx.array) -> mx.array:
    return a * b


@_compiled
def _gated(gate: mx.array, x: mx.array, fraction: mx.array, power: mx.array) -> mx.array:
    return gate * x / (1.0 + fraction * power)


@_compiled
def _exponents(gate: mx.array) -> tuple[mx.array, mx.array]:
    halves: tuple[mx.array, mx.array] = _halves(gate * -_LOG2_E)
    return halves


def exp2(x: mx.array) -> mx.array:
    """2^x of float32, elementwise. 0 below -126.5, 2^127 from 127 on; NaN stays NaN."""
    fraction, bits = _halves(x)
    product: mx.array = _product(fraction, bits.view(mx.float32))
    return product


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """gate * sigmoid(gate) * x, as mlx-lm's function of this name."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32 or gate.shape != x.shape:
        plain: mx.array = plain_swiglu(gate, x)
        return plain
    fraction, bits = _exponents(gate)
    out: mx.array = _gated(gate, x, fraction, bits.view(mx.float32))
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
    rows = max(1, _BLOCK // (heads * length * seen))
    columns = length if rows > 1 else max(1, _BLOCK // (heads * seen))
    blocks = []
    for row in range(0, batch, rows):
        own = slice(row, row + rows)
        lines = []
        for begin in range(0, length, columns):
            end = min(begin + columns, length)
            # Nobody in this block sees further than its last position.
            last = seen - length + end if mask == "causal" else seen
            part = None if added is None else added[own if added.shape[0] > 1 else slice(None), :, :, begin:end, :last]
            lines.append(_attend(queries[own, :, begin:end], keys[own, :, :last], values[own, :, :last], part))
        blocks.append(lines[0] if len(lines) == 1 else mx.concatenate(lines, axis=2))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=0)


def _added(mask: mx.array | str | None, kv_heads: int, length: int, seen: int) -> mx.array | None:
    """A mask as what is added to scores of (B, KV heads, heads of each, L, S); its first three may be 1."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    added = mx.where(mask, 0.0, _MASKED) if mask.dtype == mx.bool_ else mask.astype(mx.float32) * _LOG2_E
    if added.ndim == 2:
        added = added[None, None, None]
    elif added.shape[1] == 1:
        added = added[:, None]
    else:
        added = added.reshape(added.shape[0], kv_heads, -1, *added.shape[2:])
    return mx.broadcast_to(added, (*added.shape[:3], length, seen))


def _attend(queries: mx.array, keys: mx.array, values: mx.array, added: mx.array | None) -> mx.array:
    batch, heads, length, dim = queries.shape
    kv_heads, seen = keys.shape[1:3]
    # The query heads of a KV head are rows of one product.
    scores = queries.reshape(batch, kv_heads, -1, dim) @ keys.swapaxes(-1, -2)
    if added is not None:
        grouped = scores.reshape(batch, kv_heads, -1, length, seen) + added
        scores = grouped.reshape(batch, kv_heads, -1, seen)
    weights = exp2(scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.sum(weights, axis=-1, keepdims=True)
    return ((weights @ values) / total).reshape(batch, heads, length, -1)


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
    except RuntimeError:  # no C++ compiler
        return False
    return apart <= _TOLERANCE


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
