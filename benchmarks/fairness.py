"""A 4,000-token prompt beside seven streams: what it does to them, and they to it."""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise

from rich.console import Console

from benchmarks.report import Report
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client
from draftwire.events import Chunk

MODEL = "smollm2-135m"
_PROMPT = 4000
_OTHERS = 7
_BEFORE_S = 15.0
_REPEATS = 3


class _Stream(threading.Thread):
    """One client that reads until it is told to stop."""

    def __init__(self, address: str, ids: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._address, self._ids, self._max_tokens = address, ids, max_tokens
        self.came_s: list[float] = []
        self.stopped = False

    def run(self) -> None:
        """Notes when each chunk came."""
        with (
            Client(self._address) as client,
            client.generate(
                token_ids=self._ids,
                temperature=0.0,
                max_tokens=self._max_tokens,
                drafting="off",
                ignore_eos=True,
                cache=False,
            ) as stream,
        ):
            for event in stream:
                if isinstance(event, Chunk):
                    self.came_s.append(time.perf_counter())
                if self.stopped:
                    return

    def gaps_s(self, first_s: float, last_s: float) -> list[float]:
        """Between chunks in [first_s, last_s)."""
        return [after - before for before, after in pairwise(self.came_s) if before >= first_s and after < last_s]


def run(console: Console) -> Report:
    """The prompt alone, then the streams alone, then both; greedy, without drafts. Each figure is the median of the runs'."""
    threads = default_threads()
    config = ServicesConfig(model=MODEL, drafter="lookup", threads=threads)
    with Services(config, sink=lambda name, line: None) as services, Client(services.target_address) as client:
        words = list(
            client.tokenize(text="The keeper climbed the stairs and wrote the weather into a small green book. ")
        )
        prompt = (words * (_PROMPT // len(words) + 1))[:_PROMPT]
        runs = [_run(services.target_address, words, prompt, console) for _ in range(_REPEATS)]
    return _report(runs, threads)


def _run(address: str, words: list[int], prompt: list[int], console: Console) -> dict[str, float]:
    console.print("fairness: the prompt alone")
    alone_s = _first_token_s(address, prompt)
    console.print(f"fairness: {_OTHERS} streams alone")
    streams = [_Stream(address, words[number:] + words, 3000) for number in range(_OTHERS)]
    for stream in streams:
        stream.start()
    while any(len(stream.came_s) < 5 for stream in streams):
        time.sleep(0.1)
    began_s = time.perf_counter()
    time.sleep(_BEFORE_S)
    ended_s = time.perf_counter()
    console.print("fairness: both")
    beside_s = _first_token_s(address, prompt)
    last_s = time.perf_counter()
    for stream in streams:
        stream.stopped = True
    for stream in streams:
        stream.join()
    before = [gap for stream in streams for gap in stream.gaps_s(began_s, ended_s)]
    during = [gap for stream in streams for gap in stream.gaps_s(ended_s, last_s)]
    quiet_s, worst_s = statistics.median(before), _percentile(during, 0.99)
    figures = {
        "others_p99_over_p50": worst_s / quiet_s,
        "prefill_vs_alone": beside_s / alone_s,
        "others_p50_before_ms": quiet_s * 1e3,
        "others_p99_before_ms": _percentile(before, 0.99) * 1e3,
        "others_p50_during_ms": statistics.median(during) * 1e3,
        "others_p99_during_ms": worst_s * 1e3,
        "others_max_during_ms": max(during) * 1e3,
        "prefill_alone_s": alone_s,
        "prefill_beside_s": beside_s,
        "gaps": len(during),
    }
    console.print({name: round(figure, 3) for name, figure in figures.items()})
    return figures


def _first_token_s(address: str, prompt: list[int]) -> float:
    reader = _Stream(address, prompt, 1)
    began_s = time.perf_counter()
    reader.run()
    return reader.came_s[0] - began_s


def _report(runs: list[dict[str, float]], threads: int) -> Report:
    figures: dict[str, float | int | str] = {
        name: round(statistics.median(one[name] for one in runs), 3) for name in runs[0]
    }
    return Report(
        name="fairness",
        figures=figures,
        setting={
            "model": MODEL,
            "threads": threads,
            "prompt": _PROMPT,
            "streams": _OTHERS,
            "drafting": "off",
            "runs": _REPEATS,
        },
        columns=["figure", "value"],
        rows=[],
        bars={
            "before": [figures["others_p50_before_ms"], figures["others_p99_before_ms"]],  # type: ignore[list-item]
            "during": [figures["others_p50_during_ms"], figures["others_p99_during_ms"]],  # type: ignore[list-item]
        },
        groups=["p50", "p99"],
        unit="ms between a stream's tokens",
    )


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
