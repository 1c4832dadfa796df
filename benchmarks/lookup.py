"""Copy-heavy prompts with the lookup source: drafted against plain, and plain against mlx-lm."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.progress import Progress

from benchmarks.mlx_lm_arm import MlxLm
from benchmarks.prompts import COPY_HEAVY
from benchmarks.report import Report
from benchmarks.streams import Timed, generate
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client

MODEL = "smollm2-135m"
_TOKENS = 128
_REPEATS = 3


def run(console: Console) -> Report:
    """Arms alternate prompt by prompt; each figure is the median over repeats of the ratio over all prompts."""
    threads = default_threads()
    arms: dict[str, list[list[Timed]]] = {"drafted": [], "plain": [], "mlx_lm": []}
    with (
        Services(
            ServicesConfig(model=MODEL, drafter="lookup", threads=threads), sink=lambda name, line: None
        ) as services,
        Client(services.target_address) as client,
        MlxLm(MODEL, threads) as other,
        Progress(console=console) as progress,
    ):
        prompts = [list(client.tokenize(messages=[{"role": "user", "content": text}])) for text in COPY_HEAVY.values()]
        generate(client, prompts[0], max_tokens=8, drafting="auto")
        task = progress.add_task("lookup", total=_REPEATS * len(prompts))
        for _ in range(_REPEATS):
            for timed in arms.values():
                timed.append([])
            for ids in prompts:
                arms["drafted"][-1].append(generate(client, ids, max_tokens=_TOKENS, drafting="auto"))
                arms["plain"][-1].append(generate(client, ids, max_tokens=_TOKENS, drafting="off"))
                arms["mlx_lm"][-1].append(other.generate(ids, max_tokens=_TOKENS))
                progress.advance(task)
    return _report(arms, threads)


def _report(arms: dict[str, list[list[Timed]]], threads: int) -> Report:
    rates = {
        name: [
            statistics.median(runs[number].decode_tokens_per_s for runs in repeats) for number in range(len(COPY_HEAVY))
        ]
        for name, repeats in arms.items()
    }
    counts = [timed.finished.speculation for timed in arms["drafted"][0] if timed.finished is not None]
    drafted = sum(count.num_draft_tokens for count in counts)
    accepted = sum(count.num_accepted_draft_tokens for count in counts)
    equal = all(
        drafted.ids == plain.ids == other.ids
        for drafted, plain, other in zip(arms["drafted"][0], arms["plain"][0], arms["mlx_lm"][0], strict=True)
    )
    figures: dict[str, float | int | str] = {
        "speedup": _ratio(arms["drafted"], arms["plain"], whole=True),
        "speedup_decode": _ratio(arms["drafted"], arms["plain"], whole=False),
        "plain_vs_mlx_lm": _ratio(arms["plain"], arms["mlx_lm"], whole=False),
        "plain_vs_mlx_lm_whole": _ratio(arms["plain"], arms["mlx_lm"], whole=True),
        "acceptance_rate": round(accepted / drafted, 3) if drafted else 0.0,
        "ids_equal": str(equal),
    }
    rows = [[name, *(f"{rates[arm][number]:.1f}" for arm in arms)] for number, name in enumerate(COPY_HEAVY)]
    return Report(
        name="lookup",
        figures=figures,
        setting={
            "model": MODEL,
            "dtype": "float32",
            "threads": threads,
            "tokens": _TOKENS,
            "drafting": "auto, k <= 16",
        },
        columns=["prompt", "drafted tok/s", "plain tok/s", "mlx-lm tok/s"],
        rows=rows,
        bars={"drafted (lookup)": rates["drafted"], "plain": rates["plain"], "mlx-lm": rates["mlx_lm"]},
        groups=list(COPY_HEAVY),
        unit="tokens/s after the first",
    )


def _ratio(ours: list[list[Timed]], theirs: list[list[Timed]], *, whole: bool) -> float:
    """Median over repeats of tokens/s of all prompts, ours over theirs. whole: with prefill, from the request on."""

    def seconds(runs: list[Timed]) -> float:
        return sum(timed.wall_s if whole else timed.wall_s - timed.first_s for timed in runs)

    return round(statistics.median(seconds(b) / seconds(a) for a, b in zip(ours, theirs, strict=True)), 3)
