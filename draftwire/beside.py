"""Rows that lie in caches of different kinds in one forward: the weights are read once for all.

The model gets one packed row of ids, (1, decode rows x width + prompt rows). What works on each position by itself (embedding,
norms, linear layers, experts, head) sees all of them together; positions, caches and attention are each segment's own. A
segment is a pool's rows, a sequence beside the pool, or a chunk of a prompt. Nobody needs a prompt's logits: of its rows the
last layer computes keys and values, nothing else.

Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType
from typing import Any, Final

import mlx.core as mx
from mlx.nn import Module  # type: ignore[attr-defined]

from draftwire.lean import LeanRoPE

_ATTENTION: Final = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Segments:
    """What stands in for a cache or a mask where a forward has segments: one of each, the prompts' behind the others."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, positions of each) of every segment."""
    heard: int
    """Positions at the head of the packed row whose logits are wanted."""
    parts: tuple[Any, ...]
    eager: bool = False
    """Whether mlx gets a forward layer by layer while Python builds it."""

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Segments:
        """mlx-lm's interface: each segment's own mask."""
        return self.of(
            cache.make_mask(width, window_size=window_size, return_array=return_array)
            for cache, (_, width) in zip(self.parts, self.shapes, strict=True)
        )

    @property
    def offset(self) -> Segments:
        """mlx-lm's interface: each segment's own positions."""
        return self.of(cache.offset for cache in self.parts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Segments, Segments]:
        """mlx-lm's interface: from packed keys and values each segment's, and those behind it."""
        pairs = zip(self.parts, self.heads(keys), self.heads(values), strict=True)
        every = [cache.update_and_fetch(own, its) for cache, own, its in pairs]
        if self.eager:
            mx.async_eval(*every[0])  # type: ignore[no-untyped-call]
        return self.of(pair[0] for pair in every), self.of(pair[1] for pair in every)

    def of(self, parts: Iterable[Any]) -> Segments:
        """Something else of the same segments."""
        return Segments(self.shapes, self.heard, tuple(parts))

    def cut(self, x: mx.array) -> list[mx.array]:
        """(1, positions, dim) as the segments' own arrays, (rows, width, dim) each."""
        return [
            part.reshape(rows, width, -1) for part, (rows, width) in zip(self._slices(x, 1), self.shapes, strict=True)
        ]

    def heads(self, x: mx.array) -> list[mx.array]:
        """(1, heads, positions, dim) as the segments' own arrays, (rows, heads, width, dim) each."""
        heads, dim = x.shape[1], x.shape[3]
        return [
            part if rows == 1 else part.reshape(heads, rows, width, dim).swapaxes(0, 1)
            for part, (rows, width) in zip(self._slices(x, 2), self.shapes, strict=True)
        ]

    def packed(self, parts: Iterable[mx.array]) -> mx.array:
        """What `heads` gives, as one array again."""
        rows = [
            part if part.shape[0] == 1 else part.swapaxes(0, 1).reshape(1, part.shape[1], -1, part.shape[3])
            for part in parts
        ]
        return mx.concatenate(rows, axis=2)

    def _slices(self, x: mx.array, axis: int) -> list[mx.array]:
        ends = list(accumulate(rows * width for rows, width in self.shapes))
        slices: list[mx.array] = mx.split(x, ends[:-1], axis=axis)  # type: ignore[assignment]
        return slices


Group = tuple[int, Sequence[Any]]
"""How many rows share a cache, and that cache, layer by layer."""
Chunk = tuple[Sequence[int], Sequence[Any]]
"""Ids of a prompt, and the caches of its sequence, batch 1."""


def forward_beside(
    model: Any, ids: mx.array, groups: Sequence[Group], chunks: Sequence[Chunk] = (), *, eager: bool = False
) -> mx.array:
    """One forward of a model that `teach` has taught. Returns the decode rows' logits, (rows, width, vocab).

    ids: (rows, width), the rows of all groups in order. eager: begins to compute it, layer by layer; a pool does so itself.
    """
    rows, width = ids.shape
    if len(groups) == 1 and not chunks and not eager:
        return model(ids, cache=groups[0][1])  # type: ignore[no-any-return]
    shapes = (*((count, width) for count, _ in groups), *((1, len(chunk)) for chunk, _ in chunks))
    packed = mx.concatenate([ids.reshape(1, -1), *(mx.array([list(chunk)], ids.dtype) for chunk, _ in chunks)], axis=1)
    every = [caches for _, caches in (*groups, *chunks)]
    layers = [Segments(shapes, rows * width, parts, eager) for parts in zip(*every, strict=True)]
    logits: mx.array = model(packed, cache=layers)
    return logits.reshape(rows, width, -1)


def teach(model: Any, *, once: bool) -> Callable[[], None]:
    """Makes a model's layers understand `Segments`; other calls pass through. Returns what takes it back.

    once: each attention module is called once, so that its own weights too are read once for all segments; else once for
    each segment, which more kinds of attention can do. Raises ValueError for a model whose layers do not have what that takes.
    """
    layers = list(model.layers)
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if not layers or not all(isinstance(module, Module) for module in (*attentions, layers[-1])):
        raise ValueError("its layers have no self_attn")
    kinds = [(module, _attention_once if once else _attention_each) for module in attentions]
    if once:
        ropes = {id(rope): rope for module in attentions if isinstance(rope := getattr(module, "rope", None), Module)}
        kinds += [(rope, _rope) for rope in ropes.values()]
    kinds.append((layers[-1], _last_layer))
    # A class of its own a module's class, so that parameters, attributes and isinstance stay as they are.
    classes = [(module, type(module), make(type(module))) for module, make in kinds]
    for module, _, taught in classes:
        module.__class__ = taught

    def untaught() -> None:
        for module, kind, _ in classes:
            module.__class__ = kind

    return untaught


def _attention_once(kind: type[Any]) -> type[Any]:
    call = kind.__call__
    plain = call.__globals__.get(_ATTENTION) if isinstance(call, FunctionType) else None
    if plain is None or _ATTENTION not in call.__code__.co_names:
        raise ValueError("its attention is not mlx-lm's function")

    def attention(queries: Any, keys: Any, values: Any, cache: Any, *args: Any, **named: Any) -> mx.array:
        if not isinstance(keys, Segments):
            return plain(queries, keys, values, cache, *args, **named)  # type: ignore[no-any-return]
        out = []
        for number, own in enumerate(keys.heads(queries)):
            parts = [_part(value, number) for value in (keys, values, cache, *args)]
            out.append(plain(own, *parts, **{name: _part(value, number) for name, value in named.items()}))
        return keys.packed(out)

    # A copy of the function with a name of its own: the module that others import stays untouched.
    names = {**call.__globals__, _ATTENTION: attention}
    own_call = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own_call.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own_call})


def _rope(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        if not isinstance(offset, Segments):
            return kind.__call__(self, x, offset)  # type: ignore[no-any-return]
        if isinstance(self, LeanRoPE) and self.turns(x):
            widths = (width for _, width in offset.shapes)
            turned: mx.array = self.turn(x, *self.angles.joined(self, list(zip(offset.parts, widths, strict=True))))
            return turned
        pairs = zip(offset.heads(x), offset.parts, strict=True)
        return offset.packed(kind.__call__(self, part, own) for part, own in pairs)

    return type(kind.__name__, (kind,), {"__call__": call})


def _attention_each(kind: type[Any]) -> type[Any]:
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
        segments = _segments(args, named)
        if segments is None or segments.heard == x.shape[1]:
            return kind.__call__(self, x, *args, **named)  # type: ignore[no-any-return]
        out = []
        for which, rows in (True, x[:, : segments.heard]), (False, x[:, segments.heard :]):
            own = [_some(value, heard=which) for value in args]
            out.append(kind.__call__(self, rows, *own, **{k: _some(value, heard=which) for k, value in named.items()}))
        # Of the prompts only keys and values are ever computed: what else is lazy and nobody's.
        return out[0]  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"__call__": call})


def _some(value: Any, *, heard: bool) -> Any:
    if not isinstance(value, Segments):
        return value
    ends = list(accumulate(rows * width for rows, width in value.shapes))
    first = ends.index(value.heard) + 1
    which = slice(first) if heard else slice(first, None)
    return Segments(value.shapes[which], value.heard if heard else 0, value.parts[which], value.eager and heard)


def _segments(args: Sequence[Any], named: dict[str, Any]) -> Segments | None:
    return next((value for value in (*args, *named.values()) if isinstance(value, Segments)), None)


def _part(value: Any, number: int) -> Any:
    return value.parts[number] if isinstance(value, Segments) else value
