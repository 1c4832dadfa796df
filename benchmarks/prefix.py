"""Time to the first token behind a shared prefix of 2,000 tokens: cold, on a hit, and from disk after a restart."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.prompts import COPY_HEAVY
from benchmarks.report import Report
from benchmarks.streams import Timed, generate
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client

MODEL = "smollm2-135m"
_PREFIX = 2000
_BLOCK = 32
"""Tokens that are stored together: from disk, whole blocks only."""
_TOKENS = 4
_REPEATS = 3
_QUESTIONS = {"cold": "Summarise this.", "hit": "Which words are used most?", "disk": "Which words are used most?"}


def run(console: Console) -> Report:
    """One process serves the cold request and the hits behind it, one after a restart those from disk; both again and again."""
    threads = default_threads()
    arms: dict[str, list[Timed]] = {"cold": [], "hit": [], "disk": []}
    with tempfile.TemporaryDirectory(prefix="draftwire-prefix-") as folder, Progress(console=console) as progress:
        task = progress.add_task("prefix", total=3 * _REPEATS)
        for number in range(_REPEATS):
            # A directory of its own each time: what an earlier repeat wrote would be no cold start.
            kept = Path(folder) / str(number)
            with _target(kept, threads) as client:
                prompt = _prefix(client)
                # The first request of a process pays for what the operating system and mlx do once.
                generate(client, [7] * 40, max_tokens=_TOKENS, drafting="off")
                arms["cold"].append(_ask(client, prompt, "cold", 0))
                progress.advance(task)
                arms["hit"].append(_ask(client, prompt, "hit", _PREFIX))
                progress.advance(task)
            with _target(kept, threads) as client:
                generate(client, [7] * 40, max_tokens=_TOKENS, drafting="off")
                arms["disk"].append(_ask(client, prompt, "disk", _PREFIX // _BLOCK * _BLOCK))
                progress.advance(task)
                if not number:
                    # The same question without the cache must have the same answer.
                    read = _ask(client, prompt, "hit", 0, cache=False)
    return _report(arms, threads, all(timed.ids == read.ids for timed in (*arms["hit"], *arms["disk"])))


@contextmanager
def _target(kept: Path, threads: int) -> Iterator[Client]:
    """A target process without a drafter. It ends by SIGTERM, as in service, and so writes what is queued."""
    arguments = ("--prompt-cache-dir", str(kept))
    config = ServicesConfig(model=MODEL, drafter="none", threads=threads, target_arguments=arguments)
    with Services(config, sink=lambda name, line: None) as services, Client(services.target_address) as client:
        yield client


def _prefix(client: Client) -> list[int]:
    """The shared beginning: real text, as often as it takes."""
    ids = list(client.tokenize("\n\n".join(COPY_HEAVY.values())))
    return (ids * (_PREFIX // len(ids) + 1))[:_PREFIX]


def _ask(client: Client, prefix: list[int], arm: str, cached: int, *, cache: bool = True) -> Timed:
    """A question behind the prefix. Raises AssertionError where it reused something else than it should."""
    ids = [*prefix, *client.tokenize(_QUESTIONS[arm])]
    timed = generate(client, ids, max_tokens=_TOKENS, drafting="off", ignore_eos=True, cache=cache)
    assert timed.finished is not None
    found = timed.finished.usage.cached_tokens
    # A question may begin like the one before it.
    if not cached <= found <= cached + 3 or len(timed.ids) != _TOKENS:
        raise AssertionError(f"{arm}: {found} tokens were reused, not {cached}; {len(timed.ids)} were made")
    return timed


def _report(arms: dict[str, list[Timed]], threads: int, equal: bool) -> Report:
    first_ms = {name: [timed.first_s * 1e3 for timed in runs] for name, runs in arms.items()}
    medians = {name: statistics.median(times) for name, times in first_ms.items()}
    figures: dict[str, float | int | str] = {
        "ttft_hit_ratio": _ratio(first_ms["hit"], first_ms["cold"]),
        "ttft_disk_ratio": _ratio(first_ms["disk"], first_ms["cold"]),
        **{f"ttft_{name}_ms": round(value, 1) for name, value in medians.items()},
        "ids_equal": str(equal),
    }
    return Report(
        name="prefix",
        figures=figures,
        setting={"model": MODEL, "dtype": "float32", "threads": threads, "prefix_tokens": _PREFIX, "repeats": _REPEATS},
        columns=["start", *(f"run {number + 1} ms" for number in range(_REPEATS))],
        rows=[[name, *(f"{value:.0f}" for value in times)] for name, times in first_ms.items()],
        bars={"time to first token": [medians[name] for name in arms]},
        groups=["cold", "hit in memory", "from disk after a restart"],
        unit="ms",
    )


def _ratio(ours: list[float], cold: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, cold, strict=True)), 4)
