"""What a round costs outside the two models' forward passes, over real loopback gRPC at the pace of real rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from benchmarks.prompts import COPY_HEAVY
from benchmarks.report import Report
from benchmarks.streams import generate
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client

MODEL = "smollm2-135m"
_TOKENS = 128
_DRAFTS = 3


class _Rounds:
    """Collects the target's round lines (debug log): one JSON object each."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, name: str, line: str) -> None:
        if name == "target":
            with suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if entry.get("event") == "round":
                    self.lines.append(entry)


def run(console: Console) -> Report:
    """Overhead of a round = from the end of one forward to the end of the next, less this forward and the drafter's own
    computing. Rounds that waited for an answer count: they are what drafting costs."""
    rounds = _Rounds()
    threads = default_threads()
    config = ServicesConfig(
        model=MODEL,
        drafter="lookup",
        threads=threads,
        log_format="json",
        target_arguments=("--log-level", "debug"),
    )
    with Services(config, sink=rounds) as services, Client(services.target_address) as client:
        for repeat in range(2):
            for name, text in COPY_HEAVY.items():
                console.print(f"overhead: {name}, run {repeat + 1}")
                ids = list(client.tokenize(messages=[{"role": "user", "content": text}]))
                generate(client, ids, max_tokens=_TOKENS, drafting="fixed", drafts=_DRAFTS)
    return _report(rounds.lines, threads)


def _report(lines: Sequence[dict[str, Any]], threads: int) -> Report:
    asked = [line for line in lines if line["rpc_ms"] is not None and line["round_ms"] is not None]
    overhead = sorted(line["round_ms"] - line["forward_ms"] - line["computed_ms"] for line in asked)
    rpc = sorted(line["rpc_ms"] - line["computed_ms"] for line in asked)
    rest = sorted(line["round_ms"] - line["forward_ms"] - line["rpc_ms"] for line in asked)
    figures: dict[str, float | int | str] = {
        "overhead_ms_p50": round(statistics.median(overhead), 3),
        "overhead_ms_p90": round(overhead[int(len(overhead) * 0.9)], 3),
        "overhead_rpc_ms_p50": round(statistics.median(rpc), 3),
        "overhead_rest_ms_p50": round(statistics.median(rest), 3),
        "forward_ms_p50": round(statistics.median(line["forward_ms"] for line in asked), 3),
        "rounds": len(asked),
    }
    return Report(
        name="overhead",
        figures=figures,
        setting={"model": MODEL, "source": "lookup", "threads": threads, "drafting": f"fixed, k = {_DRAFTS}"},
        columns=["figure", "value"],
        rows=[],
        bars={"ms, p50": [figures["overhead_rpc_ms_p50"], figures["overhead_rest_ms_p50"]]},  # type: ignore[list-item]
        groups=["Draft call", "everything else"],
        unit="ms a round outside the forward",
    )
