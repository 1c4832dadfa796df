"""`mlx_lm.server` in a process of its own, driven over its own HTTP: same machine, model, BLAS, threads and number format."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.crowd import Reading
from client.services import free_port

_HOST = "127.0.0.1"
_READY_S = 180.0
_MOST_RESETS = 20


class MlxLmServer:
    """The other arm of a comparison. draft_model: a folder; its server then takes one request at a time."""

    def __init__(self, model: str, threads: int, *, draft_model: Path | None = None) -> None:
        self._port = free_port(_HOST)
        draft = [] if draft_model is None else [str(draft_model)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mlx_lm_server", model, str(threads), str(self._port), *draft],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> MlxLmServer:
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"mlx_lm.server has ended with {self._process.returncode}")
            try:
                # The first request loads the model.
                self.read("Hello", max_tokens=4)
            except OSError:
                time.sleep(0.2)
            else:
                return self
        self._process.kill()
        raise RuntimeError("mlx_lm.server does not answer")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def read(self, user_turn: str, *, max_tokens: int) -> Reading:
        """A greedy chat completion, streamed, to its natural end or max_tokens."""
        body = {
            "messages": [{"role": "user", "content": user_turn}],
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.perf_counter()
        text, arrivals_s, tokens, prompt_tokens = "", [], 0, 0
        connection, response = self._asked(json.dumps(body))
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"mlx_lm.server answers {response.status}: {response.read()[:200]!r}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                tokens, prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                arrivals_s.append(time.perf_counter() - began_s)
                text += event["choices"][0]["delta"]["content"]
        connection.close()
        return Reading(text=text, tokens=tokens, prompt_tokens=prompt_tokens, arrivals_s=tuple(arrivals_s))

    def _asked(self, body: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Its socket keeps few connections waiting and resets the others: who is reset asks again, as its clients would, and
        the time counts."""
        resets = 0
        while True:
            connection = http.client.HTTPConnection(_HOST, self._port, timeout=600)
            try:
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                return connection, connection.getresponse()
            except ConnectionResetError:
                connection.close()
                resets += 1
                if resets == _MOST_RESETS:
                    raise


def main() -> None:
    """Runs the server with our BLAS loader before mlx, and with float32 weights, as ours are on this machine."""
    from draftwire.blas import load_blas

    model, threads, port, *draft = sys.argv[1:]
    load_blas("auto", threads=int(threads))
    import mlx.core as mx
    import mlx_lm
    from mlx_lm import server

    from draftwire.models import resolve

    load = mlx_lm.load

    def load_float32(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        loaded[0].set_dtype(mx.float32)
        return loaded

    setattr(server, "load", load_float32)  # noqa: B010
    sys.argv = ["mlx_lm.server", "--model", str(resolve(model)), "--host", _HOST, "--port", port]
    sys.argv += ["--draft-model", draft[0]] if draft else []
    server.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
