"""The noise of sampling: a fixed hash of (seed, step, token id), the same in every process, batch and language.

Noise version 1, all arithmetic modulo 2**32 (docs/noise.md writes it out with golden vectors):

    mix(x):  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16      (MurmurHash3's finalizer)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    key(salt) = mix(mix(mix(salt ^ low) ^ high) ^ step)                 salts 0x9E3779B9 and 0x7F4A7C15
    h         = mix(mix(id ^ key(0x9E3779B9)) ^ key(0x7F4A7C15))
    v         = min((h + 0.5) / 2**32, 1 - 2**-24) in float32
    gumbel    = -log(-log1p(-v))

A draw is argmax(logits / temperature + gumbel): the Gumbel-max trick, so it follows softmax(logits / temperature). The value
for an id does not depend on the width of the head, nor on which other rows are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

NOISE_VERSION = 1

_SALTS = (0x9E3779B9, 0x7F4A7C15)
_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """The 32-bit finalizer on a Python integer in [0, 2**32)."""
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _MASK
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def step_keys(seed: int, step: int) -> tuple[int, int]:
    """The two 32-bit keys of one step. seed: [0, 2**64), step: [0, 2**32)."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first, second = (mix(mix(mix(salt ^ low) ^ high) ^ (step & _MASK)) for salt in _SALTS)
    return first, second


def hash_id(keys: tuple[int, int], token_id: int) -> int:
    """The 32-bit hash of one token id under the keys of a step; the reference that `gumbel` follows bit for bit."""
    return mix(mix((token_id & _MASK) ^ keys[0]) ^ keys[1])


def gumbel(keys: Sequence[tuple[int, int]], width: int) -> mx.array:
    """Gumbel noise for one row per key pair. Returns (len(keys), width) float32; column = token id."""
    import mlx.core as mx

    pairs = mx.array(list(keys), dtype=mx.uint32)
    h = _hash(pairs[:, 0:1], pairs[:, 1:2], mx.arange(width, dtype=mx.uint32)[None])
    # Not under mx.compile: a fused kernel may contract differently from backend to backend, and gains nothing here.
    v = mx.minimum((h.astype(mx.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    return -mx.log(-mx.log1p(-v))


def hashes(keys: Sequence[tuple[int, int]], width: int) -> mx.array:
    """The hashes behind `gumbel`. Returns (len(keys), width) uint32."""
    import mlx.core as mx

    pairs = mx.array(list(keys), dtype=mx.uint32)
    return _hash(pairs[:, 0:1], pairs[:, 1:2], mx.arange(width, dtype=mx.uint32)[None])


def _mix_rows(x: mx.array) -> mx.array:
    import mlx.core as mx

    x = x ^ (x >> 16)
    x = x * mx.array(0x85EBCA6B, mx.uint32)
    x = x ^ (x >> 13)
    x = x * mx.array(0xC2B2AE35, mx.uint32)
    return x ^ (x >> 16)


def _hash(first: mx.array, second: mx.array, ids: mx.array) -> mx.array:
    return _mix_rows(_mix_rows(ids ^ first) ^ second)
