"""Loads an mlx-lm model: where it is, in which precision, and the numbers that serving needs.

mlx is imported at call time only, so that `load_blas` can come first. Arrays belong to the thread that makes them:
call `load_model` on the thread that will compute, drop the model there, and end it with `mx.clear_streams()`.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from draftwire.blas import multiplies_small
from draftwire.loaded import LoadedModel, ModelLoadError, describe
from draftwire.models import MANIFEST, resolve

__all__ = ["Dtype", "LoadedModel", "ModelLoadError", "describe", "load_model"]

Dtype: TypeAlias = Literal["auto", "float32", "as-stored"]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# No *.py: code of a model repository is never fetched, so it can never run.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")


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
    loaded = describe(
        module, config, model_id=model_id, revision=found_revision, path=path, context_length=context_length
    )
    if _computes_on_cpu():
        _suit_cpu(module)
    return loaded


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
        importlib.import_module("mlx.core")
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
    return utils


def _restore_open_files(before: tuple[int, int]) -> None:
    # Importing mlx_lm.utils lowers the limit to 2048 files, too few for a server with many connections.
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    except ValueError:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], hard), hard))


def _backend_remedy() -> str:
    if sys.platform != "linux":
        return "install it with: pip install 'draftwire[target]'"
    return (
        "mlx has no backend of its own on Linux: pip install 'draftwire[target,cpu]', or "
        "'draftwire[target,cuda]' with an NVIDIA GPU"
    )


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


def _suit_cpu(module: Any) -> None:
    """Has mlx compute in the ways that are fastest on this CPU."""
    from draftwire.blocks import lay_out
    from draftwire.lean import slim
    from draftwire.vector_exp import teach

    if multiplies_small():
        lay_out(module)
    teach(module)
    slim(module)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
