"""Cuts a llama directory down to its first layers: a cheap drafter for the whole model, used in tests.

It works on the bytes of the safetensors files (an 8-byte length, a JSON header, the data), so any dtype
passes through unchanged and no array library is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, Final

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COPY_BYTES: Final = 1 << 22
# They describe the whole model, not the cut one.
_LEFT_OUT: Final = ("model.safetensors.index.json", "draftwire.json")


def cut_layers(model_dir: Path, out_dir: Path, num_layers: int) -> None:
    """Write a copy of the llama directory `model_dir` that has layers [0, num_layers) only.

    `out_dir` must not exist. Raises ValueError if `num_layers` is not in 1..layers of the model,
    FileExistsError if `out_dir` exists.
    """
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists; choose a folder that does not")
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    if not 1 <= num_layers <= layers:
        raise ValueError(f"num_layers is {num_layers}, {model_dir} has {layers} layers: choose 1..{layers}")
    config["num_hidden_layers"] = num_layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:num_layers]
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.tmp-", dir=out_dir.parent) as work:
        new = Path(work) / "new"
        new.mkdir()
        for source in sorted(model_dir.iterdir()):
            if source.suffix == ".safetensors":
                _cut_file(source, new / source.name, num_layers)
            elif source.is_file() and source.name not in _LEFT_OUT:
                shutil.copyfile(source, new / source.name)
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        new.rename(out_dir)


def _cut_file(source: Path, target: Path, num_layers: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        header_bytes = struct.unpack("<Q", read.read(8))[0]
        header: dict[str, Any] = json.loads(read.read(header_bytes))
        data_start = 8 + header_bytes
        kept: dict[str, Any] = {}
        ranges = []
        end = 0
        for name, entry in sorted(header.items(), key=_place):
            layer = _LAYER.search(name)
            if name == "__metadata__":
                kept[name] = entry
            elif layer is None or int(layer[1]) < num_layers:
                begin, stop = entry["data_offsets"]
                ranges.append((data_start + begin, stop - begin))
                kept[name] = {**entry, "data_offsets": [end, end + stop - begin]}
                end += stop - begin
        text = json.dumps(kept, separators=(",", ":")).encode()
        # Data begins at a multiple of 8, so that a reader may map it.
        text += b" " * (-len(text) % 8)
        write.write(struct.pack("<Q", len(text)) + text)
        for position, count in ranges:
            read.seek(position)
            while count:
                part = read.read(min(count, _COPY_BYTES))
                if not part:
                    raise ValueError(f"{source} is truncated")
                write.write(part)
                count -= len(part)


def _place(item: tuple[str, Any]) -> int:
    name, entry = item
    return -1 if name == "__metadata__" else int(entry["data_offsets"][0])
