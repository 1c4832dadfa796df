"""The round loop: propose, verify, accept, commit, truncate. One tick is one batch, in one forward or two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping

from draftwire.logs import get_logger
from target_service.accept import Verdict, accept
from target_service.crowd import Crowd
from target_service.engine import Engine
from target_service.ledger import Committed
from target_service.matcher import dead_end
from target_service.prefill import Pace
from target_service.recorder import NullRecorder, Recorder
from target_service.scheduler import Scheduler, slot_of
from target_service.sequence import Sequence
from target_service.window import Choice, Window

_log = get_logger("rounds")
Group = list[tuple[Sequence, Window]]
Booked = tuple[Sequence, Window, Choice, Committed]


class DeadEnd(Exception):
    """A round after which a constraint leaves nothing to choose. What it committed is still delivered."""

    def __init__(self, committed: Committed, step: int) -> None:
        super().__init__()
        self.committed = committed
        self.error = dead_end(step)


async def run_rounds(scheduler: Scheduler, engine: Engine, crowd: Crowd, recorder: Recorder | None = None) -> None:
    """Runs until the scheduler is closed. Whatever fails ends the requests that it concerns, nothing else."""
    recorder = recorder or NullRecorder()
    pace = Pace()
    traces: list[dict[str, str | int | float | None]] = []
    begun = False
    while ready := await scheduler.tick():
        began_s = time.monotonic()
        groups = groups_of(scheduler, crowd, ready)
        if groups:
            recorder.tick(sum(map(len, groups)))
        # Queued together: the engine does not idle while the first one's tokens are committed.
        round_s = sum(expected_s(crowd, pace, group) for group in groups)
        rows = rows_of(groups[0]) if groups else 0
        reads = scheduler.beside([sequence for group in groups for sequence, _ in group], round_s, rows)
        forwards = [
            asyncio.ensure_future(start(engine, group, {} if number else reads)) for number, group in enumerate(groups)
        ]
        await asyncio.sleep(0)
        # Logging can wait until the forward runs; nobody waits for the event loop then.
        _write(traces)
        emitted, ended, whole, computed_s = 0, False, True, 0.0
        for group, forward in zip(groups, forwards, strict=True):
            beside, reads = reads, {}
            try:
                choices = await forward
            except Exception as error:
                whole = False
                await scheduler.recover([*(sequence for sequence, _ in group), *beside], error)
                continue
            if beside:
                whole = False
                scheduler.was_read(beside, choices[0].forward_s - expected_s(crowd, pace, group))
            elif not scheduler.read_between and begun == all(window.ahead for _, window in group):
                # Where forwards begin or cease to be begun ahead, the clock shows two of them, or next to none.
                observe(crowd, pace, group, choices)
            computed_s += choices[0].forward_s
            steps = sum(sequence.ledger.step for sequence, _ in group)
            booked = commit_group(scheduler, engine, group, choices)
            emitted += sum(sequence.ledger.step for sequence, _ in group) - steps
            going_on = [sequence for sequence, *_, committed in booked if committed.finish is None]
            ask_all(scheduler, crowd, going_on, sum(map(len, groups)))
            # The questions to the drafters leave first: their answers are what the next round waits for.
            await asyncio.sleep(0)
            for sequence, window, choice, committed in booked:
                deliver(scheduler, sequence, committed)
                traces.append(sequence.trace(window, choice, committed))
                ended = ended or committed.finish is not None
        windows = [window for group in groups for _, window in group]
        if whole and windows:
            took_s = time.monotonic() - began_s
            if not begun:
                crowd.costs.observe_gap(took_s - computed_s)
            drafting = scheduler.waited_s > 0.0005 or any(window.drafts for window in windows)
            crowd.book(emitted, len(windows), scheduler.waited_s + took_s, drafting=drafting)
        begun = all(window.ahead for window in windows)
        if ended:
            _write(traces)


def _write(traces: list[dict[str, str | int | float | None]]) -> None:
    for trace in traces:
        _log.debug("round", **trace)
    traces.clear()


def groups_of(scheduler: Scheduler, crowd: Crowd, ready: list[Sequence]) -> list[Group]:
    """The windows of the next forwards, and whose they are."""
    bids = [sequence.bid() for sequence in ready]
    share = crowd.share(bids)
    # A forward that is begun ahead for some of them only would leave the others out of the next tick.
    settled = scheduler.settled and len(share.groups) == 1
    groups: list[Group] = []
    for members in share.groups:
        group = []
        for number in members:
            sequence = ready[number]
            try:
                group.append((sequence, sequence.window(share.drafts[number], may_run_ahead=settled)))
            except Exception as error:
                scheduler.fail([sequence], error)
        if group:
            groups.append(group)
    return groups


def start(engine: Engine, group: Group, reads: Mapping[Sequence, int]) -> Awaitable[list[Choice]]:
    """One forward of these windows, and of what is read of prompts beside them. What fails, fails where it is awaited."""
    try:
        chunks = {slot_of(one): one.next_ids(rows) for one, rows in reads.items()}
        return engine.forward([window for _, window in group], chunks)
    except Exception as error:
        return _raising(error)


async def _raising(error: Exception) -> list[Choice]:
    raise error


def rows_of(group: Group) -> int:
    """Rows of a forward of these windows."""
    return len(group) * max(window.rows for _, window in group)


def expected_s(crowd: Crowd, pace: Pace, group: Group) -> float:
    """Seconds of a forward of these windows alone."""
    width = max(window.rows for _, window in group)
    return pace.usual_s(_who(group)) or crowd.costs.batch_s(len(group), width)


def observe(crowd: Crowd, pace: Pace, group: Group, choices: list[Choice]) -> None:
    """Follows what the forward cost, where that says something of its shape."""
    windows = [window for _, window in group]
    if any(choice.error is not None for choice in choices) or (len(group) > 1 and not crowd.costs.shared):
        return
    drafted = any(window.drafts for window in windows)
    # What a replay costs, the drafts before it have caused: it counts where there are drafts, never as plain decoding.
    if drafted or not any(choice.replayed for choice in choices):
        rows = max(window.rows for window in windows)
        crowd.costs.observe(rows, choices[0].forward_s, sequences=len(group))
        pace.observe(_who(group), choices[0].forward_s)


def _who(group: Group) -> tuple[int, ...]:
    return (max(window.rows for _, window in group), *(window.slot for _, window in group))


def commit_group(scheduler: Scheduler, engine: Engine, group: Group, choices: list[Choice]) -> list[Booked]:
    """Commits every sequence's round, and ends those whose own round failed. The others, in order."""
    booked = []
    for (sequence, window), choice in zip(group, choices, strict=True):
        try:
            booked.append((sequence, window, choice, commit_round(engine, sequence, window, choice)))
        except DeadEnd as end:
            sequence.emit(end.committed)
            scheduler.fail([sequence], end.error)
        except Exception as error:
            scheduler.fail([sequence], error)
    return booked


def commit_round(engine: Engine, sequence: Sequence, window: Window, choice: Choice) -> Committed:
    """What one sequence keeps of what its window's rows chose. Raises the choice's error where there is one, or DeadEnd."""
    if choice.error is not None:
        raise choice.error
    assert sequence.slot is not None
    before = sequence.ledger.step
    verdict = accept(window.drafts, choice.ids)
    dead = choice.dead_row is not None and choice.dead_row <= verdict.accepted
    if dead:
        verdict = Verdict(verdict.ids[: choice.dead_row], verdict.proposed)
    committed = sequence.ledger.commit(verdict, choice.logprobs)
    if dead and committed.finish is None:
        raise DeadEnd(committed, sequence.ledger.step)
    # After commit: only commit knows where an end token, a stop or the budget cuts.
    engine.truncate(sequence.slot, sequence.ledger.cached_length)
    emitted = sequence.ledger.step - before + int(sequence.ledger.ended_by_token)
    sequence.book(window, choice, committed, emitted)
    return committed


def ask_all(scheduler: Scheduler, crowd: Crowd, going_on: list[Sequence], running: int) -> None:
    """Asks the drafters for the next round, of `running` sequences, as has been decided for all together."""
    wishes = [(sequence, limit) for sequence in going_on if (limit := sequence.wish()) is not None]
    plans = crowd.plan([(sequence.controller, limit) for sequence, limit in wishes], running)
    for (sequence, _), plan in zip(wishes, plans, strict=True):
        try:
            sequence.ask(plan)
        except Exception as error:
            scheduler.fail([sequence], error)


def deliver(scheduler: Scheduler, sequence: Sequence, committed: Committed) -> None:
    """Hands the text to the stream, and frees a sequence that has ended."""
    sequence.emit(committed)
    if committed.finish is not None:
        scheduler.retire(sequence)
