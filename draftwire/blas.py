"""Chooses the BLAS of this process, before mlx is imported.

The mlx wheel for Linux CPUs links the reference BLAS, about ten times slower than OpenBLAS. A library that
is in the process's global symbol scope when `mlx.core` is loaded takes its place, so the choice is one for
each process and cannot be changed later. With Metal or CUDA mlx brings fast kernels of its own and nothing
is loaded.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

BlasChoice: TypeAlias = Literal["auto", "openblas", "reference"]

_CHOICES: Final = ("auto", "openblas", "reference")
_WHEEL: Final = "cmeel-openblas"
_SYSTEM_LIBRARY: Final = "libopenblas.so.0"
_GPU_WHEELS: Final = ("mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
_REMEDY: Final = "install it with: pip install 'draftwire[cpu]'"
_FORTRAN: Final = "libgfortran.so.5"
# A build for one fixed core runs only where the CPU has that core's instructions.
_CORE_NEEDS: Final[Mapping[str, str]] = {
    "HASWELL": "avx2",
    "ZEN": "avx2",
    "SKYLAKEX": "avx512f",
    "COOPERLAKE": "avx512_bf16",
    "SAPPHIRERAPIDS": "avx512_bf16",
}

_SMALL_PRODUCT_CORES: Final = ("SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS")


class BlasError(RuntimeError):
    """The wanted BLAS cannot be had in this process; the message has the reason and the remedy."""


class BlasNotFound(BlasError):
    """OpenBLAS was asked for and no usable library is installed."""


class BlasTooLate(BlasError):
    """OpenBLAS was asked for after `mlx.core` had bound the reference BLAS."""


class BlasConflict(BlasError):
    """The reference BLAS was asked for in a process that has OpenBLAS already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasInfo:
    """What this process computes with."""

    kind: Literal["openblas", "reference", "builtin"]
    """builtin: mlx's own kernels (Metal, CUDA, Accelerate), nothing was loaded."""
    path: str | None = None
    """File of the loaded library."""
    version: str | None = None
    """The library's own description of itself."""
    threads: int | None = None
    """Threads the loaded library uses; None where it has no say."""
    reason: str
    """Why this kind, in one sentence for a log."""


def default_threads() -> int:
    """One core less than this process may use, at least 1.

    OpenBLAS's threads wait for each other by spinning: where any of them must share its core, with a drafter, a client or
    anything else, each product waits for a time slice. Measured on 2 cores beside one busy process: a decode step took
    720 ms with two threads, 45 ms with one, and 38 ms with two where nothing else ran.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1) if hasattr(os, "sched_getaffinity") else 1


def load_blas(choice: BlasChoice, *, threads: int | None) -> BlasInfo:
    """Load the chosen BLAS into the global symbol scope; call it before anything imports `mlx.core`.

    "auto" takes OpenBLAS where it can and says in `reason` why it could not. A second call with the same
    choice changes the thread count only. `threads` None keeps the library's default.
    Raises ValueError for an unknown choice or threads < 1; BlasNotFound, BlasTooLate for "openblas";
    BlasConflict for "reference" after OpenBLAS.
    """
    if choice not in _CHOICES:
        raise ValueError(f"blas is {choice!r}, expected one of {', '.join(_CHOICES)}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}, expected 1 or more")
    if builtin := _builtin_reason():
        return BlasInfo(kind="builtin", reason=builtin)
    loaded = _already_global()
    if choice == "reference":
        if loaded:
            raise BlasConflict("this process has loaded OpenBLAS already; start another process for the reference BLAS")
        return BlasInfo(kind="reference", reason="asked for")
    try:
        if not loaded and "mlx.core" in sys.modules:
            raise BlasTooLate("mlx.core was imported before OpenBLAS could be loaded; call load_blas first")
        return _load_openblas(threads)
    except BlasError as error:
        if choice == "openblas":
            raise
        return BlasInfo(kind="reference", reason=str(error))


def load_blas_from_env(environ: Mapping[str, str] | None = None) -> BlasInfo:
    """For tests and scripts: `load_blas` as DRAFTWIRE_BLAS (default auto) and DRAFTWIRE_THREADS say.

    Raises ValueError naming the variable, and as `load_blas` does.
    """
    variables = os.environ if environ is None else environ
    choice = variables.get("DRAFTWIRE_BLAS") or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"DRAFTWIRE_BLAS={choice!r} is not one of {', '.join(_CHOICES)}")
    count = variables.get("DRAFTWIRE_THREADS")
    try:
        threads = int(count) if count else None
    except ValueError:
        raise ValueError(f"DRAFTWIRE_THREADS={count!r} is not a whole number") from None
    return load_blas(cast(BlasChoice, choice), threads=threads)


def multiplies_small() -> bool:
    """Whether this process's BLAS takes small products as they lie, without packing them, and so is fastest with these.

    So do OpenBLAS's kernels for AVX-512 (its SMALL_MATRIX_OPT); with several threads it shares out large products instead.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "openblas_get_corename") or int(library.openblas_get_num_threads()) > 1:
        return False
    return _text(library.openblas_get_corename).upper() in _SMALL_PRODUCT_CORES


def _builtin_reason() -> str | None:
    if sys.platform != "linux":
        return f"mlx on {sys.platform} has its own BLAS"
    for wheel in _GPU_WHEELS:
        if _installed(wheel):
            return f"{wheel} is installed: mlx computes on the GPU"
    return None


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _files(package: str, prefix: str) -> Iterator[Path]:
    installed = _installed(package)
    for file in (installed.files if installed else None) or ():
        if file.name.startswith(prefix):
            yield Path(str(file.locate())).resolve()


def _already_global() -> bool:
    return hasattr(ctypes.CDLL(None), "openblas_set_num_threads")


def _candidates() -> Iterator[str]:
    # The wheel has the same library under three names; the one with the soname is the one to take.
    yield from (str(path) for path in _files(_WHEEL, _SYSTEM_LIBRARY) if path.name == _SYSTEM_LIBRARY)
    yield _SYSTEM_LIBRARY


def _load_openblas(threads: int | None) -> BlasInfo:
    faults = []
    for path in _candidates():
        try:
            library = _open(path)
        except (OSError, AttributeError) as error:
            faults.append(f"{path}: {error}")
            continue
        if threads is not None:
            library.openblas_set_num_threads(ctypes.c_int(threads))
        return BlasInfo(
            kind="openblas",
            path=path,
            version=_text(library.openblas_get_config),
            threads=int(library.openblas_get_num_threads()),
            reason="OpenBLAS was loaded before mlx",
        )
    raise BlasNotFound(f"no usable OpenBLAS ({'; '.join(faults)}); {_REMEDY}")


def _open(path: str) -> ctypes.CDLL:
    """Raises OSError where it does not load or cannot run here, AttributeError for a missing symbol."""
    # Look at it in a scope of its own first: what is global once stays global.
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        if _FORTRAN not in str(error):
            raise
        _lend_fortran(error)
        library = ctypes.CDLL(path)
    for symbol in ("cblas_sgemm", "openblas_set_num_threads", "openblas_get_num_threads"):
        getattr(library, symbol)
    config, core = _text(library.openblas_get_config), _text(library.openblas_get_corename)
    needed = None if "DYNAMIC_ARCH" in config else _CORE_NEEDS.get(core.upper())
    if needed is not None and needed not in _cpu_flags():
        # Unload it: the next candidate has the same soname and would be taken for this one.
        _ctypes.dlclose(library._handle)
        raise OSError(f"it was built for {core} and this CPU lacks {needed}")
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _lend_fortran(error: OSError) -> None:
    """Give OpenBLAS the Fortran runtime that mlx's CPU wheel carries under another name.

    Slim systems lack libgfortran.so.5, and the loader finds a library by its soname only. So a copy in memory
    gets that soname: the string is shorter, and is replaced in place.
    """
    runtime = next(_files("mlx-cpu", "libgfortran-"), None)
    if runtime is None:
        raise error
    for helper in _files("mlx-cpu", "libquadmath-"):
        ctypes.CDLL(str(helper))
    old = b"\0" + runtime.name.encode() + b"\0"
    new = b"\0" + _FORTRAN.encode().ljust(len(old) - 2, b"\0") + b"\0"
    image = runtime.read_bytes()
    if image.count(old) != 1:
        raise error
    with os.fdopen(os.memfd_create(_FORTRAN), "wb") as file:
        file.write(image.replace(old, new))
        file.flush()
        ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _text(function: Callable[[], bytes]) -> str:
    function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return function().decode("ascii", errors="replace")
