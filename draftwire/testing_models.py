"""Tiny random models of mlx-lm's real classes, for tests: fast, float32, the same for the same kind and seed.

The weights are scaled so that greedy text neither repeats one token nor depends on rounding. A model with the
same kind, seed and sizes is a perfect drafter for its twin.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from draftwire.loaded import LoadedModel, describe
from draftwire.testing_kinds import CacheKind, config_of

TinyKind: TypeAlias = Literal["llama", "qwen2", "qwen3", "gemma3", "phi3", CacheKind]

TINY_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_VOCAB: Final = 256 + len(TINY_SPECIAL)
"""Ids [0, 256) are the bytes themselves; the special tokens follow."""
TINY_END_IDS: Final = (256, 258)

_MODULES: Final[Mapping[str, str]] = {"gemma3": "gemma3_text"}
_LOGIT_SCALE: Final = 3.0
_TEMPLATE: Final = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    kind: TinyKind,
    *,
    seed: int,
    vocab_size: int = TINY_VOCAB,
    hidden_size: int = 64,
    num_layers: int | None = None,
    context_length: int = 512,
    sliding_window: int = 16,
    head_dim: int = 16,
) -> LoadedModel:
    """A random model in memory, for the calling thread. Layers: 2 by default, 4 for gemma3 (every second slides).

    `hidden_size` must be a multiple of 16; `head_dim` counts for llama, qwen3 and gemma3 only, it is 16 for the others.
    Raises ValueError for an unknown kind or size.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = _config(
        kind,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        context_length=context_length,
        window=sliding_window,
        head_dim=head_dim,
    )
    module_name = _MODULES.get(kind, kind)
    classes = importlib.import_module(f"mlx_lm.models.{module_name}")
    module = classes.Model(classes.ModelArgs.from_dict(config))
    drawn: dict[str, Any] = dict(tree_flatten(module.parameters()))
    module.load_weights([(name, mx.array(_weight(kind, seed, name, old.shape))) for name, old in drawn.items()])
    module.eval()
    mx.eval(module.parameters())
    return describe(module, config, model_id=f"tiny-{kind}-{seed}")


def save_tiny_model(out_dir: Path, kind: TinyKind, seed: int, **sizes: Any) -> Path:
    """Write the model of `make_tiny_model(kind, seed=seed, **sizes)` as a directory that services can load.

    Its tokenizer is byte-level with `TINY_VOCAB` ids and a chat template that knows tools. The end ids stand in two
    files, one in each, as real models have it. `out_dir` is made. Returns it.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    loaded = make_tiny_model(kind, seed=seed, **sizes)
    out_dir.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Any] = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(out_dir / "model.safetensors"), weights, {"format": "mlx"})
    roles = {"eos_token_id": TINY_END_IDS[1], "pad_token_id": TINY_END_IDS[0]}
    _write_json(out_dir / "config.json", {**loaded.config, **roles})
    _write_json(out_dir / "generation_config.json", {"eos_token_id": [TINY_END_IDS[0]]})
    _save_tiny_tokenizer(out_dir)
    return out_dir


def _save_tiny_tokenizer(out_dir: Path) -> None:
    from draftwire.gguf_llama import added_token, tokenizer_json
    from draftwire.pieces import byte_alphabet

    characters = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [characters[byte] for byte in range(256)] + list(TINY_SPECIAL)
    added = [added_token(256 + i, content) for i, content in enumerate(TINY_SPECIAL)]
    _write_json(out_dir / "tokenizer.json", tokenizer_json(tokens, [], added))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TINY_SPECIAL[2]}
    _write_json(out_dir / "tokenizer_config.json", {**roles, "clean_up_tokenization_spaces": False})
    (out_dir / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _config(
    kind: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int | None,
    context_length: int,
    window: int,
    head_dim: int,
) -> dict[str, Any]:
    if kind not in get_args(TinyKind):
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(get_args(TinyKind))}")
    if hidden_size < 32 or hidden_size % 16:
        raise ValueError(f"hidden_size is {hidden_size}, expected a multiple of 16 from 32 on")
    heads = hidden_size // 16
    config: dict[str, Any] = {
        "model_type": _MODULES.get(kind, kind),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers or (4 if kind == "gemma3" else 2),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else 1,
        "intermediate_size": 2 * hidden_size,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": False,
    }
    if kind in get_args(CacheKind):
        return config_of(kind, config, window)
    if kind in ("llama", "qwen3", "gemma3"):
        config["head_dim"] = head_dim
    if kind == "gemma3":
        config |= {
            "query_pre_attn_scalar": 16,
            "sliding_window": window,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 1_000.0,
        }
    if kind == "phi3":
        config["original_max_position_embeddings"] = context_length
    return config


def _weight(kind: str, seed: int, name: str, shape: tuple[int, ...]) -> Any:
    import numpy as np

    # One stream for each name: the values do not depend on the order or number of other weights.
    draw = np.random.default_rng([seed, zlib.crc32(f"{kind}/{name}".encode())]).standard_normal(shape)
    if "norm" in name:
        # Gemma stores the distance from one.
        draw = 0.1 * draw + (0.0 if "gemma" in kind else 1.0)
    elif len(shape) == 1:
        draw = 0.1 * draw
    elif name.startswith("lm_head"):
        draw = draw * _LOGIT_SCALE / shape[1] ** 0.5
    elif "embed_tokens" not in name:
        draw = draw / shape[1] ** 0.5
    return draw.astype(np.float32)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
