"""RoPE and RMSNorm of fewer operations, bit for bit those of mlx, for CPUs.

There mlx makes each of them of one to two dozen operations, and each costs about 2 microseconds whatever its size: together
they were a tenth of a decode step. RoPE's angles are the same in all layers of a forward; they are computed once.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import mlx.core as mx
from mlx import nn

_layers: Any = nn
# A forward may have windows, and prompts beside them, each with an offset of its own.
_REMEMBERED: Final = 8


class Angles:
    """Cosines and sines of the positions that were asked for last. One for all layers of a model."""

    def __init__(self) -> None:
        self._found: list[tuple[tuple[Any, ...], Any, tuple[mx.array, mx.array]]] = []
        self._joined: tuple[list[tuple[mx.array, mx.array]], tuple[mx.array, mx.array]] | None = None

    def of(self, rope: Any, offset: Any, length: int) -> tuple[mx.array, mx.array]:
        """(length, dims), or (B, 1, length, dims) for an offset a row: cosines, and sines of which the first half is negative.

        offset: a number; or an array, which is known by its identity and must not be changed in place.
        """
        array = offset if isinstance(offset, mx.array) else None
        key = (rope.dims, rope.base, rope.scale, length, None if array is not None else offset)
        for known, of, angles in self._found:
            if known == key and of is array:
                return angles
        angles = _angles(rope, offset, length)
        # The array is held, else another might come to lie at its place.
        self._found = [(key, array, angles), *self._found[: _REMEMBERED - 1]]
        return angles

    def joined(self, rope: Any, segments: Sequence[tuple[Any, int]]) -> tuple[mx.array, mx.array]:
        """(positions, dims), one behind the other: of segments that each have an offset, and a length."""
        parts = [self.of(rope, offset, length) for offset, length in segments]
        if (
            self._joined is None
            or len(parts) != len(self._joined[0])
            or any(one is not known for one, known in zip(parts, self._joined[0], strict=True))
        ):
            cosines, sines = (
                mx.concatenate([part[which].reshape(-1, rope.dims) for part in parts]) for which in (0, 1)
            )
            self._joined = parts, (cosines, sines)
        return self._joined[1]


def _angles(rope: Any, offset: Any, length: int) -> tuple[mx.array, mx.array]:
    half = rope.dims // 2
    if isinstance(offset, mx.array) and offset.size > 1:
        offset = offset[:, None, None]
    positions = (mx.arange(length, dtype=mx.float32) + offset) * rope.scale
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half))
    theta = positions[..., None] * frequencies
    cosines, sines = mx.cos(theta), mx.sin(theta)
    return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


class LeanRoPE(_layers.RoPE):  # type: ignore[misc]
    """A RoPE that has its angles from `Angles`; `slim` makes them."""

    angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not self.turns(x):
            plain: mx.array = super().__call__(x, offset)
            return plain
        return self.turn(x, *self.angles.of(self, offset, x.shape[2]))

    def turns(self, x: mx.array) -> bool:
        """Whether `turn` knows how."""
        return not self.traditional and x.dtype == mx.float32 and x.ndim == 4

    def turn(self, x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
        """x: (B, heads, length, dim)."""
        dims, half = self.dims, self.dims // 2
        whole = dims == x.shape[-1]
        turned = mx.concatenate([x[..., half:dims], x[..., :half]], axis=-1)
        out = (x if whole else x[..., :dims]) * cosines + turned * sines
        return out if whole else mx.concatenate([out, x[..., dims:]], axis=-1)


class LeanRMSNorm(_layers.RMSNorm):  # type: ignore[misc]
    """An RMSNorm of six operations; `slim` makes them."""

    factor: Callable[[mx.array], mx.array]
    """Of a sum of squares."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            plain: mx.array = super().__call__(x)
            return plain
        out: mx.array = self["weight"] * (x * self.factor(mx.sum(mx.square(x), axis=-1, keepdims=True)))
        return out


def slim(model: Any) -> int:
    """Makes a model's RoPE and RMSNorm lean, in place. Returns how many modules that were; variants of them stay."""
    angles = Angles()
    factors: dict[tuple[int, float], Any] = {}
    changed = 0
    for module in model.modules():
        if type(module) is _layers.RoPE:
            # Around Module's own bookkeeping: no parameter, and not to be listed as a child.
            object.__setattr__(module, "angles", angles)
            module.__class__ = LeanRoPE
        elif type(module) is _layers.RMSNorm:
            key = module.weight.size, module.eps
            if key not in factors:
                factors[key] = mx.compile(partial(_factor, share=1 / key[0], eps=key[1]), shapeless=True)
            object.__setattr__(module, "factor", factors[key])
            module.__class__ = LeanRMSNorm
        else:
            continue
        changed += 1
    return changed


def _factor(total: mx.array, *, share: float, eps: float) -> mx.array:
    return mx.rsqrt(total * share + eps)
