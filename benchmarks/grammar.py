"""Structured output with forced drafts: three forms of ten fields, drafted against the same requests without drafts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Report
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client
from draftwire.events import Completion

MODEL = "smollm2-135m"
FORMS = ("mixed", "enums", "strings")
_TOKENS = 400
_REPEATS = 3
_SCHEMAS = Path(__file__).parent / "schemas"
Mode = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class _Run:
    completion: Completion
    wall_s: float
    """From the request to its last event."""


def run(console: Console) -> Report:
    """Arms alternate form by form; each figure is the median over repeats of the ratio of whole requests."""
    threads = default_threads()
    forms = {name: json.loads((_SCHEMAS / f"{name}.json").read_text(encoding="utf-8")) for name in FORMS}
    runs: dict[tuple[str, Mode], list[_Run]] = {}
    config = ServicesConfig(model=MODEL, drafter="lookup", threads=threads)
    with (
        Services(config, sink=lambda name, line: None) as services,
        Client(services.target_address) as client,
        Progress(console=console) as progress,
    ):
        for form in forms.values():
            # The first constraint starts the compiler, and each is compiled once.
            _ask(client, form, "auto", 2)
        task = progress.add_task("grammar", total=_REPEATS * len(forms))
        for _ in range(_REPEATS):
            for name, form in forms.items():
                for mode in ("auto", "off"):
                    runs.setdefault((name, mode), []).append(_ask(client, form, mode, _TOKENS))
                progress.advance(task)
    return _report(runs, threads)


def _ask(client: Client, form: Mapping[str, Any], mode: Mode, tokens: int) -> _Run:
    began_s = time.perf_counter()
    completion = client.complete(
        messages=[{"role": "user", "content": form["prompt"]}],
        json_schema=form["schema"],
        any_whitespace=False,
        temperature=0.0,
        max_tokens=tokens,
        drafting=mode,
    )
    return _Run(completion, time.perf_counter() - began_s)


def _report(runs: Mapping[tuple[str, Mode], list[_Run]], threads: int) -> Report:
    figures: dict[str, float | int | str] = {}
    for name in FORMS:
        drafted, plain = runs[name, "auto"], runs[name, "off"]
        figures[f"speedup_{name}"] = _ratio(plain, drafted, whole=True)
        figures[f"speedup_decode_{name}"] = _ratio(plain, drafted, whole=False)
        figures[f"tokens_per_forward_{name}"] = round(_tokens_per_forward(drafted[0].completion), 2)
    every = [run for some in runs.values() for run in some]
    figures["mask_us_per_token"] = round(statistics.median(_constraint_us(run.completion) for run in every), 1)
    figures["complete"] = sum(run.completion.finished.grammar_complete is True for run in every)
    figures["runs"] = len(every)
    figures["ids_equal"] = str(
        all(
            len({run.completion.token_ids for mode in ("auto", "off") for run in runs[name, mode]}) == 1
            for name in FORMS
        )
    )
    rows = []
    for name in FORMS:
        stats = runs[name, "auto"][0].completion.speculation
        rows.append(
            [
                name,
                *(f"{_rate(runs[name, mode]):.1f}" for mode in ("auto", "off")),
                f"{stats.num_accepted_forced_draft_tokens}/{stats.num_forced_draft_tokens}",
                f"{_constraint_us(runs[name, 'auto'][0].completion):.0f}",
            ]
        )
    return Report(
        name="grammar",
        figures=figures,
        setting={
            "model": MODEL,
            "dtype": "float32",
            "threads": threads,
            "drafting": "auto, k <= 16, drafter lookup",
            "whitespace": "compact",
        },
        columns=["form", "drafted tok/s", "plain tok/s", "forced accepted", "constraint us/token"],
        rows=rows,
        bars={
            "drafted": [_rate(runs[name, "auto"]) for name in FORMS],
            "plain": [_rate(runs[name, "off"]) for name in FORMS],
        },
        groups=list(FORMS),
        unit="tokens/s after the prompt",
    )


def _ratio(slow: list[_Run], fast: list[_Run], *, whole: bool) -> float:
    """Median over repeats of seconds, one over the other. whole: with the prompt, as the client sees it."""

    def seconds(run: _Run) -> float:
        return run.wall_s if whole else run.completion.timings.decode_s

    return round(statistics.median(seconds(a) / seconds(b) for a, b in zip(slow, fast, strict=True)), 3)


def _rate(runs: list[_Run]) -> float:
    return statistics.median(run.completion.timings.decode_tokens_per_second for run in runs)


def _tokens_per_forward(completion: Completion) -> float:
    tokens = completion.usage.completion_tokens
    return tokens / max(1, tokens - completion.speculation.forwards_saved)


def _constraint_us(completion: Completion) -> float:
    return (completion.speculation.constraint_s or 0.0) / completion.usage.completion_tokens * 1e6
