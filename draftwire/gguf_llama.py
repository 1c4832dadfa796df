"""Turns a llama GGUF file with a byte-level BPE tokenizer into a directory that mlx-lm and transformers load.

The weights become float32: on a CPU only float32 goes through a fast BLAS. Nothing here imports mlx.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from draftwire.gguf import Floats, GgufError, GgufFile

if TYPE_CHECKING:
    from collections.abc import Mapping

ConvertProgress = Callable[[int, int], None]
"""Called with (float32 bytes converted, float32 bytes in all)."""

_ROOT_NAMES: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# SmolLM splits digits one by one before the GPT-2 split; other pre-tokenizers need other rules.
_PRE_TOKENIZER: Final = "smollm"
_CONTROL_TOKEN: Final = 3


def convert(source: GgufFile, out_dir: Path, progress: ConvertProgress) -> None:
    """Write config, weights and tokenizer files of `source` into the existing `out_dir`.

    Raises GgufError for another architecture or tokenizer than llama with SmolLM's byte-level BPE.
    """
    _require(source, "general.architecture", "llama")
    _require(source, "tokenizer.ggml.model", "gpt2")
    _require(source, "tokenizer.ggml.pre", _PRE_TOKENIZER)
    _write_json(out_dir / "config.json", llama_config(source))
    _write_tokenizer(source, out_dir)
    _write_weights(source, out_dir / "model.safetensors", progress)


def llama_config(source: GgufFile) -> dict[str, Any]:
    """The config.json of transformers' LlamaForCausalLM for this file."""
    heads = _integer(source, "llama.attention.head_count")
    hidden = _integer(source, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _integer(source, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(source, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "intermediate_size": _integer(source, "llama.feed_forward_length"),
        "rope_theta": _number(source, "llama.rope.freq_base"),
        "rms_norm_eps": _number(source, "llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _integer(source, "llama.context_length"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": _integer(source, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(source, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _integer(source, "tokenizer.ggml.padding_token_id"),
    }


def half_split_rows(weight: Floats, heads: int) -> Floats:
    """Undo GGUF's order of query and key rows.  weight: (heads * head_dim, hidden), same shape out.

    GGUF rotates neighbours (row 2i with row 2i + 1 of a head), transformers rotates halves (row i with row
    i + head_dim / 2); so the even rows of each head come first, then the odd ones.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_weights(source: GgufFile, path: Path, progress: ConvertProgress) -> None:
    from safetensors.numpy import save_file

    total = sum(4 * math.prod(info.shape) for info in source.tensors.values())
    done = 0
    progress(done, total)
    converted: dict[str, Floats] = {}
    for name, weight in _converted(source):
        converted[name] = weight
        done += weight.nbytes
        progress(done, total)
    save_file(converted, path, metadata={"format": "mlx"})
    # The writer makes the file private; it should be as readable as its neighbours.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _converted(source: GgufFile) -> Iterator[tuple[str, Floats]]:
    heads = {
        "attn_q": _integer(source, "llama.attention.head_count"),
        "attn_k": _integer(source, "llama.attention.head_count_kv"),
    }
    for name in source.tensors:
        if name in _ROOT_NAMES:
            yield _ROOT_NAMES[name], source.tensor(name)
            continue
        match name.split("."):
            case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
                weight = source.tensor(name)
                if part in heads:
                    weight = half_split_rows(weight, heads[part])
                yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", weight
            case _:
                raise GgufError(f"{source.path}: tensor {name!r} has no place in a llama model")


def _write_tokenizer(source: GgufFile, out_dir: Path) -> None:
    tokens = _strings(source, "tokenizer.ggml.tokens")
    kinds = source.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError(f"{source.path}: tokenizer.ggml.token_type must have one entry for each token")
    added = [added_token(i, tokens[i]) for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    roles = {
        "bos_token": tokens[_integer(source, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_integer(source, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[_integer(source, "tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[_integer(source, "tokenizer.ggml.padding_token_id")],
    }
    named = set(roles.values())
    others = [token["content"] for token in added if token["content"] not in named]
    _write_json(out_dir / "tokenizer.json", tokenizer_json(tokens, _strings(source, "tokenizer.ggml.merges"), added))
    config = {
        # A class of a model family would rebuild the pre-tokenizer and lose the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(source, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **roles,
        "additional_special_tokens": others,
    }
    _write_json(out_dir / "tokenizer_config.json", config)
    _write_json(out_dir / "special_tokens_map.json", {**roles, "additional_special_tokens": others})
    ends = {f"{role}_token_id": _integer(source, f"tokenizer.ggml.{key}_token_id") for role, key in _ROLE_KEYS.items()}
    _write_json(out_dir / "generation_config.json", ends)
    template = source.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


_ROLE_KEYS: Final[Mapping[str, str]] = {"bos": "bos", "eos": "eos", "pad": "padding"}


def tokenizer_json(tokens: list[str], merges: list[str], added: list[dict[str, Any]]) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE with SmolLM's pre-tokenizer; the list index of a token is its id."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def added_token(token_id: int, content: str) -> dict[str, Any]:
    """An entry of "added_tokens" for a special token."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require(source: GgufFile, key: str, expected: str) -> None:
    found = source.metadata.get(key)
    if found != expected:
        raise GgufError(f"{source.path}: {key} is {found!r}, only {expected!r} can be converted")


def _integer(source: GgufFile, key: str) -> int:
    value = source.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise GgufError(f"{source.path}: {key} is {value!r}, expected an integer")
    return value


def _number(source: GgufFile, key: str) -> float:
    import numpy as np

    value = source.metadata.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise GgufError(f"{source.path}: {key} is {value!r}, expected a number")
    # The file holds a float32; its shortest decimal is what the author wrote (1e-05, not 9.99999974e-06).
    return float(str(np.float32(value)))


def _strings(source: GgufFile, key: str) -> list[str]:
    value = source.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise GgufError(f"{source.path}: {key} must be a list of strings")
    return [str(item) for item in value]
