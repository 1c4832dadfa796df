"""1 to 16 streams at once over real gRPC, against mlx_lm.server with and without a draft model over its own HTTP."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress

from benchmarks.crowd import Crowd, Read, closed_loop, median_ratio, reader
from benchmarks.mlx_lm_server import MlxLmServer
from benchmarks.report import Report
from benchmarks.turns import chats, copies
from client.services import Services, ServicesConfig
from draftwire.blas import default_threads
from draftwire.client import Client
from draftwire.layers import cut_layers
from draftwire.models import resolve

MODEL: Final = "smollm2-135m"
LEVELS: Final = (1, 2, 4, 8, 16)
_BAR_LEVEL: Final = 8
_REPEATS: Final = 3
_TOKENS: Final = 128
_ROUNDS: Final = 2
"""Requests a stream makes, one after the other."""
_DRAFT_LAYERS: Final = 25
_CHAT_ARMS: Final = ("ours", "ours, no drafts", "mlx_lm.server")
_COPY_ARMS: Final = ("ours, copies", "mlx_lm.server, copies")
_DRAFT_ARM: Final = "mlx_lm.server, drafts"


@dataclass(frozen=True, slots=True)
class _Task:
    arm: str
    streams: int
    turns: tuple[str, ...]


def run(console: Console) -> Report:
    """Arms alternate; the levels beside 8 run once, 8 three times, and each figure is the median of the runs' ratios."""
    threads = default_threads()
    crowds: dict[tuple[str, int], list[Crowd]] = {}
    with _arms(threads) as arms, Progress(console=console) as progress:
        tasks = list(_tasks())
        bar = progress.add_task("concurrency", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.streams} streams: {task.arm}")
            crowd = closed_loop(arms[task.arm], task.turns, task.streams)
            crowds.setdefault((task.arm, task.streams), []).append(crowd)
            progress.advance(bar)
    return _report(crowds, threads)


def _tasks() -> Iterator[_Task]:
    """Each arm of a level gets the same turns, and no turn comes twice in an arm."""
    chat, copy = chats(), copies()
    for streams in LEVELS:
        repeats = _REPEATS if streams == _BAR_LEVEL else 1
        for repeat in range(repeats):
            turns = tuple(islice(chat, _ROUNDS * streams))
            order = _CHAT_ARMS if repeat % 2 == 0 else tuple(reversed(_CHAT_ARMS))
            yield from (_Task(arm, streams, turns) for arm in order)
            if streams in (1, _BAR_LEVEL) and repeat == 0:
                # It takes one request at a time: as many requests as streams say the same.
                yield _Task(_DRAFT_ARM, streams, turns[:streams])
            if streams == _BAR_LEVEL and repeat < 2:
                turns = tuple(islice(copy, _ROUNDS * streams))
                yield from (_Task(arm, streams, turns) for arm in _COPY_ARMS)


@contextmanager
def _arms(threads: int) -> Iterator[Mapping[str, Read]]:
    """All servers stay up; those that nobody asks are idle."""
    with ExitStack() as stack:
        draft = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "draft"
        cut_layers(Path(resolve(MODEL)), draft, _DRAFT_LAYERS)
        services = stack.enter_context(
            Services(
                ServicesConfig(
                    model=MODEL,
                    drafter="lookup",
                    threads=threads,
                    target_arguments=("--max-running", str(max(LEVELS))),
                ),
                sink=lambda name, line: None,
            )
        )
        client = stack.enter_context(Client(services.target_address))
        plain = stack.enter_context(MlxLmServer(MODEL, threads))
        drafted = stack.enter_context(MlxLmServer(MODEL, threads, draft_model=draft))
        ours = reader(client, max_tokens=_TOKENS, drafting="auto", tenant="drafted")
        theirs = _bounded(plain)
        yield {
            "ours": ours,
            "ours, copies": ours,
            "ours, no drafts": reader(client, max_tokens=_TOKENS, drafting="off", tenant="plain"),
            "mlx_lm.server": theirs,
            "mlx_lm.server, copies": theirs,
            _DRAFT_ARM: _bounded(drafted),
        }


def _bounded(server: MlxLmServer) -> Read:
    return lambda turn: server.read(turn, max_tokens=_TOKENS)


def _report(crowds: Mapping[tuple[str, int], list[Crowd]], threads: int) -> Report:
    at: Callable[[str], list[Crowd]] = lambda arm: crowds[arm, _BAR_LEVEL]  # noqa: E731
    figures: dict[str, float | int | str] = {
        "vs_mlx_lm_server_8": median_ratio(at("ours"), at("mlx_lm.server")),
        "vs_mlx_lm_server_draft_8": median_ratio(at("ours")[:1], at(_DRAFT_ARM)),
        "copy_vs_mlx_lm_server_8": median_ratio(at("ours, copies"), at("mlx_lm.server, copies")),
        "drafted_vs_plain_8": median_ratio(at("ours"), at("ours, no drafts")),
        "vs_mlx_lm_server_1": median_ratio(crowds["ours", 1], crowds["mlx_lm.server", 1]),
        **_agreement(crowds),
    }
    rows = [
        [
            arm,
            str(streams),
            f"{crowd.tokens_per_s:.1f}",
            *(f"{value * 1000:.0f}" for value in (crowd.first_s(0.5), crowd.first_s(0.99))),
            *(f"{value * 1000:.0f}" for value in (crowd.gap_s(0.5), crowd.gap_s(0.99))),
        ]
        for (arm, streams), repeats in sorted(crowds.items(), key=lambda item: (item[0][1], item[0][0]))
        for crowd in repeats
    ]
    return Report(
        name="concurrency",
        figures=figures,
        setting={
            "model": MODEL,
            "dtype": "float32",
            "threads": threads,
            "tokens": _TOKENS,
            "temperature": 0,
            "drafter": "lookup, auto",
            "draft model of mlx_lm.server": f"{_DRAFT_LAYERS} layers of {MODEL}",
            "loop": f"closed, {_ROUNDS} requests a stream",
        },
        columns=["arm", "streams", "tok/s", "first p50 ms", "first p99 ms", "gap p50 ms", "gap p99 ms"],
        rows=rows,
        bars={arm: [_middle(crowds[arm, streams]).tokens_per_s for streams in LEVELS] for arm in _CHAT_ARMS},
        groups=[f"{streams} streams" for streams in LEVELS],
        unit="completion tokens/s over wall time",
    )


def _middle(repeats: list[Crowd]) -> Crowd:
    return sorted(repeats, key=lambda crowd: crowd.tokens_per_s)[len(repeats) // 2]


def _agreement(crowds: Mapping[tuple[str, int], list[Crowd]]) -> dict[str, str]:
    """How many completions have the very text of another arm's."""

    def equal(first: str, second: str) -> str:
        pairs = [
            (a.text, b.text)
            for (arm, streams), repeats in crowds.items()
            if arm == first and (second, streams) in crowds
            for one, other in zip(repeats, crowds[second, streams], strict=False)
            for a, b in zip(one.readings, other.readings, strict=True)
        ]
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"

    return {
        "texts_equal_plain": equal("ours", "ours, no drafts"),
        "texts_equal_mlx_lm_server": equal("ours", "mlx_lm.server"),
        "texts_equal_copies": equal(*_COPY_ARMS),
    }
