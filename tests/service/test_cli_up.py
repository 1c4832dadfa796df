"""`draftwire up` and `draftwire demo` on the real services."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from client.services import free_port
from draftwire.client import Client
from draftwire.testing_models import save_tiny_model


def test_up_serves_until_sigterm_and_exits_0(tmp_path: Path) -> None:
    """Both services come up, a request with drafts runs, SIGTERM stops both. test_readme.py does it with the default model."""
    model = save_tiny_model(tmp_path / "tiny", "llama", 7, context_length=512)
    argv = [sys.executable, "-m", "client", "up", "--model", str(model), "--port", str(free_port("127.0.0.1"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            found = re.search(r"Serving at (\S+:\d+)\.", process.stdout.readline())
            assert found is not None, process.stderr.read()
            with Client(found[1], timeout_s=60.0) as client:
                answer = client.complete("one two three one two three one two", max_tokens=12, ignore_eos=True)
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert answer.usage.completion_tokens == 12
    assert errors.index("target: stopped") < errors.index("drafter: stopped")
    assert "Traceback" not in errors


@pytest.mark.model
def test_demo_shows_equal_answers_and_the_speed_of_both() -> None:
    """From nothing to a comparison, exit code 0."""
    argv = [sys.executable, "-m", "client", "demo", "--max-tokens", "24"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Both answers are equal" in done.stdout
    assert "times as fast with drafts" in done.stdout
    assert re.search(r"\[[^\]]+\]", done.stdout.split("in [brackets].")[1])
