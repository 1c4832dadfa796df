"""The round loop: propose, verify, accept, commit, truncate. One tick is one batch."""

from __future__ import annotations

from draftwire.logs import get_logger
from target_service.accept import accept
from target_service.costs import Costs
from target_service.engine import Engine
from target_service.scheduler import Scheduler
from target_service.sequence import Sequence
from target_service.window import Choice, Window

_log = get_logger("rounds")


async def run_rounds(scheduler: Scheduler, engine: Engine, costs: Costs) -> None:
    """Runs until the scheduler is closed. Whatever fails ends the requests that it concerns, nothing else."""
    while ready := await scheduler.tick():
        live, windows = windows_of(scheduler, ready)
        if not live:
            continue
        try:
            choices = await engine.forward(windows)
        except Exception as error:
            scheduler.fail(live, error)
            continue
        # What a replay costs, the drafts before it have caused: it counts where there are drafts, never as plain decoding.
        alone = len(windows) == 1 and choices[0].error is None
        if alone and (windows[0].drafts or not choices[0].replayed):
            costs.observe(windows[0].rows, choices[0].forward_s, ahead=windows[0].ahead)
        for sequence, window, choice in zip(live, windows, choices, strict=True):
            try:
                finish_round(scheduler, engine, sequence, window, choice)
            except Exception as error:
                scheduler.fail([sequence], error)


def windows_of(scheduler: Scheduler, ready: list[Sequence]) -> tuple[list[Sequence], list[Window]]:
    """The windows of the next forward, and whose they are."""
    live, windows = [], []
    for sequence in ready:
        try:
            windows.append(sequence.window())
        except Exception as error:
            scheduler.fail([sequence], error)
        else:
            live.append(sequence)
    return live, windows


def finish_round(scheduler: Scheduler, engine: Engine, sequence: Sequence, window: Window, choice: Choice) -> None:
    """What one sequence does with what its window's rows chose."""
    if sequence.slot is None:
        return
    if choice.error is not None:
        raise choice.error
    before = sequence.ledger.step
    verdict = accept(window.drafts, choice.ids)
    committed = sequence.ledger.commit(verdict, choice.logprobs)
    # After commit: only commit knows where an end token, a stop or the budget cuts.
    engine.truncate(sequence.slot, sequence.ledger.cached_length)
    emitted = sequence.ledger.step - before + int(sequence.ledger.ended_by_token)
    sequence.book(window, choice, committed, emitted)
    if committed.finish is None:
        sequence.ask()
    sequence.emit(committed)
    _log.debug("round", **sequence.trace(window, choice, committed))
    if committed.finish is not None:
        scheduler.retire(sequence)
