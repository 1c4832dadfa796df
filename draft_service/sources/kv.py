"""The KV cache of one draft session: mlx-lm's, with a length that is checked after every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from draft_service.sources.base import SourceError

if TYPE_CHECKING:
    import mlx.core as mx

# mlx-lm grows a cache by this many tokens at a time.
_STEP = 256


class KvCache:
    """Keys and values of the ids in `fed`, for one sequence. Belongs to the compute thread."""

    def __init__(self, model: Any) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.fed: list[int] = []
        self._model = model
        self._layers: list[Any] = make_prompt_cache(model)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(int(layer.nbytes) for layer in _flat(self._layers))

    def extend(self, ids: Sequence[int]) -> None:
        """Feeds ids for their keys and values alone; their logits are never computed."""
        import mlx.core as mx

        self._model(mx.array([list(ids)], mx.uint32), cache=self._layers)
        mx.eval([layer.state for layer in self._layers])
        self.fed += ids
        self.check()

    def logits(self, ids: Sequence[int]) -> mx.array:
        """Feeds ids, at least one. Returns what follows the last, (1, head width), not computed yet."""
        import mlx.core as mx

        row = self.logits_lazily(mx.array(list(ids), mx.uint32))
        self.fed += ids
        self.check()
        return row

    def logits_lazily(self, ids: mx.array) -> mx.array:
        """As `logits`, for ids (n,) that are not computed yet: the caller adds them to `fed` when it knows them."""
        rows: mx.array = self._model(ids[None], cache=self._layers)
        return rows[:, -1]

    def cut(self, length: int) -> None:
        """Keeps the first `length` ids. Raises SourceError if the cache did not follow."""
        from mlx_lm.models.cache import trim_prompt_cache

        if length < len(self.fed):
            trim_prompt_cache(self._layers, len(self.fed) - length)
            del self.fed[length:]
            self.check()

    def check(self) -> None:
        """Raises SourceError unless every layer holds exactly the fed ids: mlx-lm may refuse to trim without a word."""
        lengths = {int(layer.offset) for layer in _flat(self._layers)}
        if lengths != {len(self.fed)}:
            raise SourceError(f"the KV cache holds {sorted(lengths)} tokens, expected {len(self.fed)}")


def kv_bytes_for(length: int, bytes_per_token: int) -> int:
    """Most bytes that a cache of `length` tokens allocates."""
    return (length + _STEP - 1) * bytes_per_token


def require_rollback(model: Any, *, name: str, context_length: int) -> None:
    """Raises SourceError unless the model's cache can always give back its last tokens."""
    from mlx_lm.models.cache import make_prompt_cache

    for layer in _flat(make_prompt_cache(model)):
        kind = type(layer).__name__
        if not hasattr(layer, "offset") or not layer.is_trimmable():
            raise SourceError(
                f"{name} cannot draft: its {kind} cannot take back a rejected draft; "
                "choose a draft model with plain attention in every layer"
            )
        window = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
        if window is not None and window <= context_length:
            raise SourceError(
                f"{name} cannot draft: its {kind} takes nothing back once {window} tokens have passed; choose a draft "
                f"model with plain attention in every layer, or set --context-length below {window}"
            )
    _probe_rollback(model, name)


def _probe_rollback(model: Any, name: str) -> None:
    """What a cache says of itself is not enough: fed, cut and fed again, it must give the same logits."""
    import mlx.core as mx

    straight, cut = KvCache(model), KvCache(model)
    straight.extend([1, 2])
    expected = straight.logits([3, 4])
    cut.extend([1, 2, 5, 6, 7])
    cut.cut(2)
    found = cut.logits([3, 4])
    gap = _number(mx.max(mx.abs(expected.astype(mx.float32) - found.astype(mx.float32))))
    spread = _number(mx.max(mx.abs(expected)))
    if not gap <= 1e-3 * max(1.0, spread):
        raise SourceError(
            f"{name} cannot draft: after a roll-back its logits differ by {gap:.3g}; choose another draft model"
        )


def _number(value: mx.array) -> float:
    return cast("float", value.item())


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from _flat(layer.caches)
        else:
            yield layer
