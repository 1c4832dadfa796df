"""Prompt rows beside decode rows in one forward: the weights are read once for both.

The model gets one packed row of ids, (1, rows x width + prompt rows). What works on each position by itself (embedding, norms,
MLPs, experts, head) sees all of them together; each attention module is called once a segment, with that segment's own
cache and mask. Behind the last layer only the decode rows go on: nobody needs a prompt's logits.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn import Module  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Segments:
    """What stands in for a cache or a mask where a forward has segments: one of each, the decode rows' first."""

    rows: int
    """Decode rows of the forward, each of `width` positions."""
    width: int
    lengths: tuple[int, ...]
    """Positions of each prompt segment."""
    parts: tuple[Any, ...]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Segments:
        """mlx-lm's interface: each segment's own mask."""
        masks = [
            cache.make_mask(count, window_size=window_size, return_array=return_array)
            for cache, count in zip(self.parts, (self.width, *self.lengths), strict=True)
        ]
        return Segments(self.rows, self.width, self.lengths, tuple(masks))

    def cut(self, x: mx.array) -> list[mx.array]:
        """(1, positions, dim) as the segments' own arrays: (rows, width, dim), then (1, length, dim) each."""
        decode = self.rows * self.width
        cut = [x[:, :decode].reshape(self.rows, self.width, -1)]
        begin = decode
        for length in self.lengths:
            cut.append(x[:, begin : begin + length])
            begin += length
        return cut


def forward_beside(
    model: Any, ids: mx.array, caches: Sequence[Any], chunks: Sequence[tuple[Sequence[int], Sequence[Any]]]
) -> mx.array:
    """One forward of a model that `teach` has taught. Returns the decode rows' logits, (rows, width, vocab).

    ids: (rows, width) with `caches`, a layer each; chunks: ids of a prompt and the caches of its sequence, batch 1.
    """
    rows, width = ids.shape
    lengths = tuple(len(chunk) for chunk, _ in chunks)
    packed = mx.concatenate([ids.reshape(1, -1), *(mx.array([list(chunk)]) for chunk, _ in chunks)], axis=1)
    layers = [Segments(rows, width, lengths, parts) for parts in zip(caches, *(own for _, own in chunks), strict=True)]
    logits: mx.array = model(packed, cache=layers)
    return logits.reshape(rows, width, -1)


def teach(model: Any) -> Callable[[], None]:
    """Makes a model's layers understand `Segments`; other calls pass through. Returns what takes it back.

    Raises ValueError for a model whose layers have no `self_attn`, or several.
    """
    layers = list(model.layers)
    modules = [(getattr(layer, "self_attn", None), _attention) for layer in layers]
    modules.append((layers[-1] if layers else None, _last_layer))
    if not all(isinstance(module, Module) for module, _ in modules):
        raise ValueError("its layers have no self_attn")
    # A class of its own a module's class, so that parameters, attributes and isinstance stay as they are.
    before = [(module, type(module)) for module, _ in modules]
    for module, make in modules:
        module.__class__ = make(type(module))

    def untaught() -> None:
        for module, kind in before:
            module.__class__ = kind

    return untaught


def _attention(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, *args: Any, **named: Any) -> mx.array:
        segments = _segments(args, named)
        if segments is None:
            return kind.__call__(self, x, *args, **named)  # type: ignore[no-any-return]
        out = []
        for number, part in enumerate(segments.cut(x)):
            own = [_part(value, number) for value in args]
            heads = kind.__call__(self, part, *own, **{name: _part(value, number) for name, value in named.items()})
            out.append(heads.reshape(1, -1, heads.shape[-1]))
        return mx.concatenate(out, axis=1)

    return type(kind.__name__, (kind,), {"__call__": call})


def _last_layer(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, *args: Any, **named: Any) -> mx.array:
        out: mx.array = kind.__call__(self, x, *args, **named)
        segments = _segments(args, named)
        return out if segments is None else out[:, : segments.rows * segments.width]

    return type(kind.__name__, (kind,), {"__call__": call})


def _segments(args: Sequence[Any], named: dict[str, Any]) -> Segments | None:
    return next((value for value in (*args, *named.values()) if isinstance(value, Segments)), None)


def _part(value: Any, number: int) -> Any:
    return value.parts[number] if isinstance(value, Segments) else value
