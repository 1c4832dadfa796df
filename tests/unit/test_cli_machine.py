"""Commands about this machine: models and doctor."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from client import window_cost
from client.app import build_app
from client.doctor import cost_table, measured
from client.exact_cost import exact_table
from client.models import ensure
from draftwire import models
from draftwire.models import ModelPullError
from draftwire.scripted_target import ScriptedTarget, serve
from draftwire.v1 import target_pb2 as pb

FOUND = {
    "blas": {"kind": "reference", "path": None, "version": None, "threads": None, "reason": "asked for"},
    "device": "Device(cpu, 0)",
    "model_id": "m",
    "dtype": "float32",
    "rolls_back": True,
    "rows_ms": {"1": 50.0, "2": 60.0, "4": 200.0},
    "exact": {
        "reason": "",
        "faults": {"8": "layers.0 (64 to 64) adds up in another order", "4": ""},
        "ms": {"4": 75.0},
    },
}


def run(cache_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        build_app(), list(arguments), env={"DRAFTWIRE_CACHE_DIR": str(cache_dir), "COLUMNS": "200"}
    )


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path | None]]:
    """Replaces `models.pull` by one that reports progress and fetches nothing."""
    seen: list[tuple[str, Path | None]] = []

    def pull(name: str, *, cache_dir: Path | None, progress: models.Progress) -> Path:
        seen.append((name, cache_dir))
        if name not in models.BUNDLED:
            raise models.UnknownModel(f"no bundled model is called {name!r}")
        for stage, done, total in (("wait", 0, None), ("download", 0, 10), ("download", 10, 10), ("convert", 5, 10)):
            progress(stage, done, total)
        return Path("folder") / name

    monkeypatch.setattr(models, "pull", pull)
    return seen


def test_models_list_says_what_is_here(tmp_path: Path) -> None:
    """Name, licence and whether it was pulled."""
    result = run(tmp_path, "models", "list")
    assert result.exit_code == 0
    for word in ("smollm2-135m", "not pulled", "Apache-2.0"):
        assert word in result.stdout


def test_models_pull_prints_the_folder(tmp_path: Path, pulls: list[tuple[str, Path | None]]) -> None:
    """Only the folder is on stdout, so that a script can use it; an unknown name is a failure with a reason."""
    result = run(tmp_path, "models", "pull", "smollm2-135m")
    assert (result.exit_code, result.stdout.strip()) == (0, str(Path("folder/smollm2-135m")))
    assert pulls == [("smollm2-135m", tmp_path)]
    unknown = run(tmp_path, "models", "pull", "nobody")
    assert unknown.exit_code == 4
    assert "no bundled model is called 'nobody'" in unknown.stderr


def test_only_bundled_models_are_fetched(tmp_path: Path, pulls: list[tuple[str, Path | None]]) -> None:
    """Paths and Hugging Face ids are for the service to judge."""
    ensure("owner/name", tmp_path)
    ensure(str(tmp_path), tmp_path)
    assert pulls == []
    ensure("smollm2-135m", tmp_path)
    assert pulls == [("smollm2-135m", tmp_path)]


def test_a_failed_pull_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause and the remedy come from the library."""

    def fail(*arguments: object, **options: object) -> Path:
        raise ModelPullError("the index cannot be reached; check the network")

    monkeypatch.setattr(models, "pull", fail)
    result = run(tmp_path, "models", "pull")
    assert result.exit_code == 4
    assert "error: the index cannot be reached; check the network" in result.stderr


def test_doctor_names_a_missing_model_and_a_missing_service(tmp_path: Path) -> None:
    """The model is a fault with its remedy; a service that does not run is none."""
    result = run(tmp_path, "doctor", "--address", "127.0.0.1:1")
    assert result.exit_code == 4
    assert "draftwire models pull smollm2-135m" in result.stderr
    assert "none is running" in result.stdout
    assert "grpcio" in result.stdout


def test_doctor_shows_costs_and_warns_of_the_slow_blas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as ratios to one row, and the command that installs a fast BLAS."""
    monkeypatch.setattr("client.doctor.measured", lambda *_, **__: FOUND)
    result = run(tmp_path, "doctor", "--model", str(tmp_path), "--address", "127.0.0.1:1")
    assert result.exit_code == 4
    assert "1.20x" in result.stdout
    assert re.search(r"8 .* no: layers.0 \(64 to 64\) adds up in another order", result.stdout)
    assert re.search(r"4 .* yes .* 75.0 .* 1.50x .* 0.38x", result.stdout)
    assert "pip install 'draftwire[cpu]'" in result.stderr
    wanted = run(tmp_path, "doctor", "--model", str(tmp_path), "--address", "127.0.0.1:1", "--blas", "reference")
    assert wanted.exit_code == 0


def test_doctor_looks_at_a_running_service(tmp_path: Path) -> None:
    """Health, model and drafters of whatever answers at --address."""
    replies = {"GetModelInfo": pb.GetModelInfoResponse(model_id="served"), "ListDrafters": pb.ListDraftersResponse()}
    with serve(ScriptedTarget(replies=replies)) as address:
        result = run(tmp_path, "doctor", "--no-measure", "--model", str(tmp_path), "--address", address)
    assert result.exit_code == 0
    for word in ("serving", "served", "no drafter is configured"):
        assert word in result.stdout


def test_a_window_that_costs_more_than_its_rows_never_pays() -> None:
    """4 rows for the price of 4 cannot be won back by any acceptance."""
    pays = list(cost_table(FOUND).columns[3].cells)
    assert pays == ["", "0.2 accepted", "never"]


def test_a_model_without_tiles_says_why() -> None:
    assert "not with this model: it is too round" in str(exact_table({"exact": {"reason": "it is too round"}}))


def test_sizes_are_measured_in_turn_and_the_warm_up_is_left_out() -> None:
    """Alternating sizes share a slow moment; the first forwards are not counted."""
    seen: list[int] = []
    times = window_cost.measure(seen.append, (1, 4), 3)
    assert seen == [1, 4] * 5
    assert set(times) == {1, 4}
    assert all(value >= 0 for value in times.values())


def test_what_cannot_be_measured_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The child answers in JSON, also when it fails."""
    found: Any = measured(str(tmp_path))
    assert "config.json" in found["error"]
    assert window_cost.main([str(tmp_path), "--blas", "nonsense"]) == 1
    assert "nonsense" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.model
def test_windows_of_the_default_model_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real measurement in a child process, of one forward a size and not of nine: every size has a positive cost."""
    run = subprocess.run
    monkeypatch.setattr("client.doctor.subprocess.run", lambda argv, **kw: run([*argv, "--repeats", "1"], **kw))
    found = measured("smollm2-135m")
    assert "error" not in found, found
    assert sorted(map(int, found["rows_ms"])) == [1, 2, 4, 8, 16]
    assert min(found["rows_ms"].values()) > 0
    passed = {rows for rows, fault in found["exact"]["faults"].items() if not fault}
    assert passed == set(found["exact"]["ms"]) <= {"4", "8"}
    assert found["rolls_back"]
