"""The round loop: propose, verify, accept, commit, truncate. One tick is one batch."""

from __future__ import annotations

import asyncio

from draftwire.logs import get_logger
from target_service.accept import accept
from target_service.costs import Costs
from target_service.engine import Engine
from target_service.ledger import Committed
from target_service.scheduler import Scheduler
from target_service.sequence import Sequence
from target_service.window import Choice, Window

_log = get_logger("rounds")


async def run_rounds(scheduler: Scheduler, engine: Engine, costs: Costs) -> None:
    """Runs until the scheduler is closed. Whatever fails ends the requests that it concerns, nothing else."""
    traces: list[dict[str, str | int | float | None]] = []
    while ready := await scheduler.tick():
        live, windows = windows_of(scheduler, ready)
        if not live:
            continue
        forward = asyncio.ensure_future(engine.forward(windows))
        await asyncio.sleep(0)
        # Logging can wait until the forward runs; nobody waits for the event loop then.
        _write(traces)
        try:
            choices = await forward
        except Exception as error:
            scheduler.fail(live, error)
            continue
        # What a replay costs, the drafts before it have caused: it counts where there are drafts, never as plain decoding.
        alone = len(windows) == 1 and choices[0].error is None
        if alone and (windows[0].drafts or not choices[0].replayed):
            costs.observe(windows[0].rows, choices[0].forward_s, ahead=windows[0].ahead)
        booked = []
        for sequence, window, choice in zip(live, windows, choices, strict=True):
            try:
                committed = commit_round(engine, sequence, window, choice)
            except Exception as error:
                scheduler.fail([sequence], error)
            else:
                booked.append((sequence, window, choice, committed))
        # The questions to the drafters leave first: their answers are what the next round waits for.
        await asyncio.sleep(0)
        for sequence, window, choice, committed in booked:
            deliver(scheduler, sequence, committed)
            traces.append(sequence.trace(window, choice, committed))
        if any(committed.finish is not None for *_, committed in booked):
            _write(traces)


def _write(traces: list[dict[str, str | int | float | None]]) -> None:
    for trace in traces:
        _log.debug("round", **trace)
    traces.clear()


def windows_of(scheduler: Scheduler, ready: list[Sequence]) -> tuple[list[Sequence], list[Window]]:
    """The windows of the next forward, and whose they are."""
    live, windows = [], []
    settled = scheduler.settled
    for sequence in ready:
        try:
            windows.append(sequence.window(may_run_ahead=settled))
        except Exception as error:
            scheduler.fail([sequence], error)
        else:
            live.append(sequence)
    return live, windows


def commit_round(engine: Engine, sequence: Sequence, window: Window, choice: Choice) -> Committed:
    """What one sequence keeps of what its window's rows chose. Raises the choice's error where there is one."""
    if choice.error is not None:
        raise choice.error
    assert sequence.slot is not None
    before = sequence.ledger.step
    verdict = accept(window.drafts, choice.ids)
    committed = sequence.ledger.commit(verdict, choice.logprobs)
    # After commit: only commit knows where an end token, a stop or the budget cuts.
    engine.truncate(sequence.slot, sequence.ledger.cached_length)
    emitted = sequence.ledger.step - before + int(sequence.ledger.ended_by_token)
    sequence.book(window, choice, committed, emitted)
    if committed.finish is None:
        sequence.ask()
    return committed


def deliver(scheduler: Scheduler, sequence: Sequence, committed: Committed) -> None:
    """Hands the text to the stream, and frees a sequence that has ended."""
    sequence.emit(committed)
    if committed.finish is not None:
        scheduler.retire(sequence)
