"""Which model the stored rows belong to: a digest of its files. No mlx, for a helper thread."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PATTERNS: Final = ("*.json", "*.safetensors")
_MEMO: Final = "models.json"


def files_digest(model: Path, memo_dir: Path) -> str:
    """SHA-256 (hex) over the names and contents of a model's config and weights.

    A file is read once: its digest is remembered in memo_dir under its size, times and inode. Raises OSError where one cannot
    be read.
    """
    known = _known(memo_dir / _MEMO)
    digests: dict[str, str] = {}
    whole = hashlib.sha256()
    for path in _files(model):
        stat = path.stat()
        # The change time cannot be set, so a file that was replaced is read again whatever its other times say.
        mark = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"
        digest = known.get(mark)
        if digest is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[mark] = digest
        whole.update(f"{path.name}\0{digest}\n".encode())
    if digests.items() - known.items():
        _remember(memo_dir / _MEMO, known | digests)
    return whole.hexdigest()


def _files(model: Path) -> Iterable[Path]:
    found = {path for pattern in _PATTERNS for path in model.glob(pattern) if path.is_file()}
    # Tokenizers and templates decide which ids a prompt has, not what their rows are.
    return sorted(path for path in found if not path.name.startswith(("tokenizer", "special_tokens", "generation")))


def _known(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _remember(path: Path, digests: dict[str, str]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    # It only saves reading; without it the next start takes longer.
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps(digests, indent=1), encoding="utf-8")
        os.replace(part, path)
