"""Linear layers whose weights lie in blocks, for a BLAS that multiplies small matrices without copying them first.

A BLAS packs a weight matrix before it multiplies, which costs as much for one row as for hundreds: half of a decode step.
OpenBLAS leaves that out below a size (`SMALL_PRODUCT`, where `draftwire.blas.multiplies_small` says so). So here a layer's
weights are blocks of 64 outputs, and its rows tiles, each product small enough. A weight is read once, at the speed of memory.

Such a product adds up its terms one after another, so a row's bits do not depend on how many rows there are, nor on its place.
docs/adr/0306 has the figures. Importing this module imports mlx. Everything here runs on the compute thread.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from mlx import nn

SMALL_PRODUCT: Final = 10**6
"""rows x inputs x outputs up to which OpenBLAS's AVX-512 kernels do not pack (kernel/x86_64/sgemm_small_kernel_permit)."""
_WIDTH: Final = 64
_MOST_ROWS: Final = 16
_ROWS: Final = 8

_layers: Any = nn


def tile_rows(inputs: int) -> int:
    """Rows of a tile of a layer with so many inputs a block, at most `_MOST_ROWS`; 0 where not even one fits."""
    return min(_MOST_ROWS, SMALL_PRODUCT // (inputs * _WIDTH))


def block(weight: mx.array) -> mx.array:
    """(outputs, inputs) as (blocks, inputs, 64), where missing outputs are zeros.

    Inputs are split where fewer than `_ROWS` rows would fit, (parts, blocks, inputs / parts, 64); the parts' products are
    added up.
    """
    outputs, inputs = weight.shape
    parts = next(count for count in range(1, inputs + 1) if inputs % count == 0 and tile_rows(inputs // count) >= _ROWS)
    weight = mx.pad(weight, [(0, -outputs % _WIDTH), (0, 0)])
    blocks = weight.reshape(-1, _WIDTH, parts, inputs // parts).transpose(2, 0, 3, 1)
    return mx.contiguous(blocks if parts > 1 else mx.squeeze(blocks, 0))


def unblock(blocks: mx.array, outputs: int) -> mx.array:
    """What `block` was given, (outputs, inputs)."""
    count, inputs, width = blocks.shape[-3:]
    return blocks.reshape(-1, count, inputs, width).transpose(1, 3, 0, 2).reshape(count * width, -1)[:outputs]


def multiply(x: mx.array, blocks: mx.array, outputs: int) -> mx.array:
    """x @ weight^T: (..., inputs) to (..., outputs)."""
    inputs = blocks.shape[-2]
    parts = 1 if blocks.ndim == 3 else blocks.shape[0]
    rows = x.size // (parts * inputs)
    most = tile_rows(inputs)
    if parts == 1 and rows <= most:
        # Most decode steps: as few operations as possible.
        out = (x.reshape(1, rows, inputs) @ blocks).swapaxes(0, 1).reshape(*x.shape[:-1], -1)
        return out if out.shape[-1] == outputs else out[..., :outputs]
    tiles = -(-rows // most)
    height = -(-rows // tiles)
    flat = x.reshape(rows, parts * inputs)
    if tiles * height > rows:
        flat = mx.pad(flat, [(0, tiles * height - rows), (0, 0)])
    # A block stays in the cache while all tiles pass by: the last batch axis is the tiles'.
    if parts == 1:
        out = flat.reshape(1, tiles, height, inputs) @ blocks[:, None]
    else:
        split = mx.contiguous(flat.reshape(tiles, height, parts, inputs).transpose(2, 0, 1, 3))
        out = mx.sum(split[:, None] @ blocks[:, :, None], axis=0)
    out = out.transpose(1, 2, 0, 3).reshape(tiles * height, -1)
    if out.shape != (rows, outputs):
        out = out[:rows, :outputs]
    return out.reshape(*x.shape[:-1], outputs)


class _Blocked:
    """What a layer in blocks has."""

    blocks: mx.array
    """As `block` makes them."""
    outputs: int

    @property
    def weight(self) -> mx.array:
        """The matrix, or the table of ids, (outputs, inputs), put together anew."""
        return unblock(self.blocks, self.outputs)


class BlockedLinear(_Blocked, _layers.Linear):  # type: ignore[misc]
    """A Linear in blocks; `lay_out` makes them."""

    def __call__(self, x: mx.array) -> mx.array:
        out = multiply(x, self.blocks, self.outputs)
        return out + self["bias"] if "bias" in self else out


class BlockedEmbedding(_Blocked, _layers.Embedding):  # type: ignore[misc]
    """An Embedding in blocks, for a model whose head it is."""

    def __call__(self, ids: mx.array) -> mx.array:
        if self.blocks.ndim == 3:
            return self.blocks[ids // _WIDTH, :, ids % _WIDTH]
        rows = self.blocks[:, ids // _WIDTH, :, ids % _WIDTH]
        return rows.reshape(*ids.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(x, self.blocks, self.outputs)


def lay_out(model: Any) -> int:
    """Puts the float32 weights of a model's linear layers in blocks, one layer at a time. Returns how many layers that were.

    Embeddings stay as they are where the model has a head of its own. Quantised layers and experts stay as they are.
    """
    named = list(model.named_modules())
    tied = not any(name.rpartition(".")[2] == "lm_head" for name, _ in named)
    kinds: dict[type[Any], type[Any]] = {_layers.Linear: BlockedLinear}
    if tied:
        kinds[_layers.Embedding] = BlockedEmbedding
    laid_out = 0
    for _, layer in named:
        blocked = kinds.get(type(layer))
        if blocked is None or layer.weight.dtype != mx.float32:
            continue
        weight = layer.pop("weight")
        layer.outputs = weight.shape[0]
        layer.blocks = block(weight)
        # Before the next one, so that only one matrix is in memory twice.
        mx.eval(layer.blocks)
        layer.__class__ = blocked
        laid_out += 1
    return laid_out
