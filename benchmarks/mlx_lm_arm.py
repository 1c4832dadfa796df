"""mlx-lm's own stream_generate in a process of its own: one JSON request a line in, one JSON result a line out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import TracebackType

from benchmarks.streams import Timed


class MlxLm:
    """The other arm of a comparison: same machine, model, BLAS and threads."""

    def __init__(self, model: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mlx_lm_arm", model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> MlxLm:
        self.generate([1, 2, 3], max_tokens=4)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def generate(self, prompt_ids: list[int], *, max_tokens: int) -> Timed:
        """A greedy completion, to its natural end or max_tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ids": prompt_ids, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Timed(ids=tuple(answer["ids"]), wall_s=answer["wall_s"], first_s=answer["first_s"])


def main() -> None:
    """Serves requests from standard input until it is closed."""
    from draftwire.blas import load_blas

    load_blas("auto", threads=int(sys.argv[2]))
    from draftwire.models import resolve

    path = resolve(sys.argv[1])
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = load(str(path))[:2]
    model.set_dtype(mx.float32)
    for line in sys.stdin:
        request = json.loads(line)
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        ids: list[int] = []
        for response in stream_generate(
            model, tokenizer, request["ids"], max_tokens=request["max_tokens"], sampler=make_sampler(temp=0.0)
        ):
            # The end token is no content, and mlx-lm's last response repeats the last token of a full budget.
            if response.token in tokenizer.eos_token_ids or len(ids) == request["max_tokens"]:
                break
            last_s = time.perf_counter() - began_s
            first_s = first_s or last_s
            ids.append(int(response.token))
        print(json.dumps({"ids": ids, "wall_s": last_s, "first_s": first_s}), flush=True)
    mx.clear_streams()


if __name__ == "__main__":
    main()
