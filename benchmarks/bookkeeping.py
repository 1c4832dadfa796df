"""What a step costs beside the model, with eight sequences; and what counting costs a round, a message and a scrape."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from benchmarks import ragged_step
from benchmarks.report import Report
from draftwire.blas import default_threads
from draftwire.metrics import rpc_collector
from draftwire.observe import Method
from draftwire.rpc_tally import RpcTally
from draftwire.serving import State
from target_service.metrics import TargetReading, families
from target_service.recorder import NullRecorder, Recorder
from target_service.stats import Times
from target_service.tally import Tally

_WIDTHS = (1, 4)
_ROUNDS = 20_000
_REPEATS = 9
_DRAFTED, _ACCEPTED = 4, 3


def rounds(recorder: Recorder, drafted: int) -> None:
    """What a sequence alone tells of each round, in which three of four drafts are accepted, or which has none."""
    accepted = min(drafted, _ACCEPTED)
    for _ in range(_ROUNDS):
        recorder.tick(1)
        recorder.round(drafted=drafted, accepted=accepted, cut=0, emitted=accepted + 1, reason="late")
        if drafted:
            recorder.draft_answered("127.0.0.1:50052", 0.0013)
        recorder.delivered(accepted + 1, 0.05)


def messages(tally: RpcTally) -> None:
    """A stream of so many messages, counted."""
    call = tally.began(Method("server_stream", "draftwire.v1.TargetService", "Generate"), {})
    for _ in range(_ROUNDS):
        call.sent()


def microseconds(work: Callable[[], object], count: int = _ROUNDS) -> float:
    """Median of the repeats, of one of `count`."""
    found = []
    for _ in range(_REPEATS):
        gc.collect()
        began_s = time.perf_counter()
        work()
        found.append((time.perf_counter() - began_s) / count * 1e6)
    return statistics.median(found)


def run(console: Console) -> Report:
    """Shares of a step, and microseconds of the counters; those of a round without anybody who counts are subtracted."""
    threads = default_threads()
    steps = ragged_step.measure(_WIDTHS, threads)
    idle = {drafted: microseconds(lambda drafted=drafted: rounds(NullRecorder(), drafted)) for drafted in (0, _DRAFTED)}  # type: ignore[misc]
    tally = Tally()
    plain = microseconds(lambda: rounds(tally, 0)) - idle[0]
    speculative = microseconds(lambda: rounds(tally, _DRAFTED)) - idle[_DRAFTED]
    message = microseconds(lambda: messages(RpcTally()))
    copied, rendered = asyncio.run(_scrape(tally))
    figures: dict[str, float | int | str] = {
        **{f"step_8x{width}_share": round(1 - model_s / step_s, 4) for width, (step_s, model_s) in steps.items()},
        **{f"step_8x{width}_ms": round(step_s * 1e3, 2) for width, (step_s, _) in steps.items()},
        "plain_round_us": round(plain, 2),
        "speculative_round_us": round(speculative, 2),
        "speculative_token_us": round(speculative / (_ACCEPTED + 1), 2),
        "message_us": round(message, 2),
        "scrape_on_the_event_loop_us": round(copied, 1),
        "scrape_elsewhere_us": round(rendered, 1),
    }
    console.print("the microseconds are those of the counters alone")
    return Report(
        name="bookkeeping",
        figures=figures,
        setting={
            "model": ragged_step.MODEL,
            "threads": threads,
            "rounds": _ROUNDS,
            "repeats": _REPEATS,
            "drafted": _DRAFTED,
            "accepted": _ACCEPTED,
        },
        columns=("what", "microseconds"),
        rows=[],
    )


async def _scrape(tally: Tally) -> tuple[float, float]:
    """(copying on the event loop, making the text elsewhere)."""
    from copy import deepcopy

    tally.finished("eos", 4, Times(arrived=0.0, first_token=0.1, finished=1.0))
    copied = microseconds(lambda: deepcopy(tally), 1)
    reading = TargetReading(
        tally=tally,
        running=1,
        queued=0,
        kv_bytes=1,
        kv_bytes_limit=2,
        drafters=(),
        info={"model": "m"},
    )
    rpcs = RpcTally()
    messages(rpcs)
    registry = CollectorRegistry()

    class Collected:
        def collect(self) -> object:
            return families(State.SERVING, reading)

    registry.register(Collected())  # type: ignore[arg-type]
    registry.register(rpc_collector(rpcs))
    elsewhere = await asyncio.to_thread(microseconds, lambda: generate_latest(registry), 1)
    return copied, elsewhere
