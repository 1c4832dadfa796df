"""The BLAS is one choice for each process, so every case runs in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from draftwire import blas
from draftwire.blas import BlasError, BlasNotFound, load_blas, load_blas_from_env

linux_cpu = pytest.mark.skipif(
    blas._builtin_reason() is not None, reason="only mlx's CPU build for Linux has a BLAS to choose"
)


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from draftwire.blas import *\n" + code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@linux_cpu
def test_products_of_mlx_go_to_openblas_once_it_is_loaded() -> None:
    code = "load_blas('openblas', threads=1)\nimport mlx.core as mx\nmx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))"
    done = run(code, LD_DEBUG="bindings")
    bound = [line for line in done.stderr.splitlines() if "`cblas_sgemm'" in line and "libmlx.so" in line]
    assert bound
    assert all("libopenblas" in line.split(" to ")[1] for line in bound)


@linux_cpu
def test_reference_loads_nothing() -> None:
    code = "print(load_blas('reference', threads=2))\nprint('openblas' in open('/proc/self/maps').read())"
    lines = run(code).stdout.splitlines()
    assert "kind='reference'" in lines[0]
    assert "threads=None" in lines[0]
    assert lines[1] == "False"


@linux_cpu
def test_thread_count_can_change_later_and_the_module_does_not_import_mlx() -> None:
    code = (
        "import sys\n"
        "print(load_blas('openblas', threads=2).threads, load_blas('openblas', threads=1).threads)\n"
        "print(load_blas('auto', threads=None).threads, 'mlx' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run(code).stdout.split() == ["2", "1", "1", "False", "False"]


@linux_cpu
def test_openblas_after_mlx_is_an_error_and_auto_says_why_it_is_slow() -> None:
    code = (
        "import mlx.core\n"
        "try:\n    load_blas('openblas', threads=1)\n"
        "except BlasTooLate as error:\n    print('late', error)\n"
        "info = load_blas('auto', threads=1)\nprint(info.kind, info.reason)"
    )
    late, auto = run(code).stdout.splitlines()
    assert late.startswith("late mlx.core was imported before")
    assert auto.startswith("reference mlx.core was imported before")


@linux_cpu
def test_reference_after_openblas_is_refused() -> None:
    code = (
        "load_blas('openblas', threads=1)\n"
        "try:\n    load_blas('reference', threads=1)\n"
        "except BlasConflict:\n    print('refused')"
    )
    assert run(code).stdout.strip() == "refused"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on Linux without OpenBLAS and before mlx."""
    monkeypatch.setattr(blas, "_builtin_reason", lambda: None)
    monkeypatch.setattr(blas, "_already_global", lambda: False)
    monkeypatch.setattr(blas, "_candidates", lambda: iter(["/does/not/exist/libopenblas.so.0"]))
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)


@pytest.mark.usefixtures("bare")
def test_missing_openblas_names_the_remedy_and_auto_falls_back() -> None:
    with pytest.raises(BlasNotFound, match=r"pip install 'draftwire\[cpu\]'"):
        load_blas("openblas", threads=None)
    info = load_blas("auto", threads=None)
    assert info.kind == "reference"
    assert "/does/not/exist" in info.reason


def test_a_build_for_another_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        _handle = 17
        cblas_sgemm = openblas_set_num_threads = openblas_get_num_threads = None

        def openblas_get_config(self) -> bytes:
            return b"OpenBLAS 0.3.31"

        def openblas_get_corename(self) -> bytes:
            return b"SkylakeX"

    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode=0: Library())
    closed: list[int] = []
    monkeypatch.setattr(blas._ctypes, "dlclose", closed.append)
    monkeypatch.setattr(blas, "_text", lambda function: function().decode())
    monkeypatch.setattr(blas, "_cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(OSError, match="lacks avx512f"):
        blas._open("libopenblas.so.0")
    assert closed == [17]


@pytest.mark.parametrize("reason", ["mlx-cuda-13 is installed", "mlx on darwin has its own BLAS"])
def test_nothing_is_loaded_where_mlx_has_its_own_kernels(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(blas, "_builtin_reason", lambda: reason)
    monkeypatch.setattr(blas, "_candidates", lambda: pytest.fail("looked for a library"))
    info = load_blas("openblas", threads=4)
    assert (info.kind, info.path, info.threads, info.reason) == ("builtin", None, None, reason)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"DRAFTWIRE_BLAS": "mkl"}, "DRAFTWIRE_BLAS='mkl'"),
        ({"DRAFTWIRE_THREADS": "many"}, "DRAFTWIRE_THREADS='many'"),
        ({"DRAFTWIRE_THREADS": "0"}, "threads is 0"),
    ],
)
def test_bad_settings_are_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_blas_from_env(environ)


@linux_cpu
def test_environment_chooses() -> None:
    code = "info = load_blas_from_env()\nprint(info.kind, info.threads)"
    assert run(code, DRAFTWIRE_BLAS="openblas", DRAFTWIRE_THREADS="1").stdout.split() == ["openblas", "1"]
    assert run(code, DRAFTWIRE_BLAS="reference").stdout.split() == ["reference", "None"]


def test_all_errors_have_one_base() -> None:
    assert all(issubclass(kind, BlasError) for kind in (blas.BlasNotFound, blas.BlasTooLate, blas.BlasConflict))
