"""Drafting for many sessions at once: a step is one forward for every session that drafts at the moment.

Calls join at the next step and leave when they have what they want, whatever the others do. What has to be read first, a
prompt or ids that came without a draft, is read in chunks between steps, one session after another.
Steps run on the compute thread, each as a job of its own, so that other jobs get their turn; methods with a leading
underscore run there.
"""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import mlx.core as mx

from draft_service.forwards import ForwardCounts
from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, Runner, Work
from draft_service.sources.benches import Bench, Benches, PooledKv
from draft_service.sources.model import ONE_FORWARD, ModelDrafter, chance_of
from draft_service.sources.pace import Pace
from draftwire.sampling import Draw, draw, host_ids, settle

T = TypeVar("T")
# Rows of one forward, all sessions together: beyond it, one that has several ids to feed takes more steps instead.
_MOST_ROWS: Final = 16

# Who has drafted within this time is about to ask again, once its target has verified, and must not find a long chunk running.
_RECENT_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Job:
    """One call's computing."""

    drafter: ModelDrafter
    work: Work
    ask: Ask | None
    """None only catches up."""
    done: Future[Guess] = field(default_factory=Future)
    path: list[int] = field(default_factory=list)
    """Ids that its KV follows: committed, assumed, drafted."""
    limit: int = 0
    end: DraftEnd = DraftEnd.MAX_DRAFT_TOKENS
    ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def kv(self) -> PooledKv:
        """The session's."""
        return cast("PooledKv", self.drafter.opened())

    @property
    def left(self) -> int:
        """Ids of its path that are not fed."""
        return len(self.path) - len(self.kv.fed)

    def take(self, token_id: int, chance: float | None) -> bool:
        """Notes a drafted id; whether it was the last."""
        self.ids.append(token_id)
        self.path.append(token_id)
        if chance is not None:
            self.chances.append((self.chances[-1] if self.chances else 1.0) * chance)
        if token_id in self.drafter.spec.end_ids:
            self.end = DraftEnd.END_TOKEN
            return True
        return len(self.ids) >= self.limit

    def finish(self, end: DraftEnd) -> None:
        """Answers with what it has."""
        self.done.set_result(Guess(ids=tuple(self.ids), confidences=tuple(min(1.0, c) for c in self.chances), end=end))


class Together:
    """A `Computing` in which all sessions share forwards."""

    def __init__(
        self,
        benches: Benches,
        runner: Runner,
        clock: Callable[[], float],
        forwards: ForwardCounts,
        *,
        vocabulary: int,
        prefill_step_size: int,
    ) -> None:
        self._benches: Benches | None = benches
        self._runner = runner
        self._clock = clock
        self._forwards = forwards
        self._vocabulary = vocabulary
        self._pace = Pace(prefill_step_size)
        self._arrived: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._stepping = False
        self._reading: deque[_Job] = deque()
        self._drafting: list[_Job] = []
        self._stepped_s = -math.inf
        """When the last step of drafts ended."""

    @property
    def waiting(self) -> int:
        """Calls that the next step takes in."""
        return len(self._arrived)

    async def catch_up(self, drafter: Drafter, work: Work) -> None:
        """Reads between other sessions' steps, until nothing is behind or the work stops."""
        if drafter.behind:
            await self._submit(_Job(cast("ModelDrafter", drafter), work, None))

    async def draft(self, drafter: Drafter, ask: Ask, work: Work) -> Guess:
        """Takes part in steps until it has what it wants, or the work stops."""
        return await self._submit(_Job(cast("ModelDrafter", drafter), work, ask))

    def spare(self, nbytes: int) -> None:
        """Lets pools be larger than the sum of their sessions' charges."""
        if self._benches is not None:
            self._benches.spare_bytes = nbytes

    async def run(self, job: Callable[[], T]) -> T:
        """Runs it between two steps."""
        return await self._runner.run(job)

    def close(self) -> None:
        """Drops the pools, on the compute thread."""
        self._benches = None

    async def _submit(self, job: _Job) -> Guess:
        self._arrived.append(job)
        with self._lock:
            begins = not self._stepping
            self._stepping = True
        if begins:
            self._runner.submit(self._step)
        return await asyncio.wrap_future(job.done)

    def _step(self) -> None:
        """One forward for those who draft, one chunk for one who reads."""
        try:
            while self._arrived:
                job = self._arrived.popleft()
                # From here on nobody can cancel it; one that was cancelled before is gone.
                if job.done.set_running_or_notify_cancel():
                    self._guarded([job], lambda job=job: self._begin(job))  # type: ignore[misc]
            self._draft_step()
            self._read_chunk()
        finally:
            self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            self._stepping = bool(self._arrived or self._reading or self._drafting)
        if not self._stepping:
            return
        try:
            self._runner.submit(self._step)
        except RuntimeError as error:
            # The thread is closing: nobody will compute for those who are left.
            for job in (*self._reading, *self._drafting):
                job.done.set_exception(error)
            self._reading.clear()
            self._drafting.clear()

    def _begin(self, job: _Job) -> None:
        job.drafter.opened()
        if job.ask is None:
            job.path = job.drafter.goal()
            if job.drafter.behind:
                job.drafter.path(())
                self._reading.append(job)
            else:
                job.finish(job.end)
            return
        job.limit, job.end = job.drafter.limit_of(job.ask)
        if job.limit <= 0:
            job.finish(job.end)
            return
        job.path = job.drafter.path(job.ask.assumed)
        (self._reading if job.left > ONE_FORWARD else self._drafting).append(job)

    def _draft_step(self) -> None:
        for job in [job for job in self._drafting if job.work.should_stop()]:
            self._drafting.remove(job)
            job.finish(DraftEnd.TIME_BUDGET)
        if self._benches is None:
            return
        if not self._drafting:
            # Those who wait for their targets keep to the bounds as well.
            self._benches.arrange((), 1)
            return
        began_s = self._clock()
        width = max(1, min(max(job.left for job in self._drafting), _MOST_ROWS // len(self._drafting)))
        by_kv = {job.kv: job for job in self._drafting}
        benches: list[Bench] = []
        self._guarded(self._drafting, lambda: benches.extend(self._arranged(list(by_kv), width)))
        for bench in benches:
            jobs = [by_kv[kv] for kv in bench.seated if kv in by_kv]
            if not self._guarded(jobs, lambda bench=bench, jobs=jobs: self._forward(bench, jobs, width)):  # type: ignore[misc]
                bench.lose()
        self._drafting = [job for job in self._drafting if not job.done.done()]
        self._stepped_s = self._clock()
        self._pace.stepped(self._stepped_s - began_s)

    def _arranged(self, kvs: Sequence[PooledKv], width: int) -> list[Bench]:
        assert self._benches is not None
        return self._benches.arrange(kvs, width)

    def _forward(self, bench: Bench, jobs: Sequence[_Job], width: int) -> None:
        began_s = self._clock()
        work = [(job.kv, job.path[len(job.kv.fed) : len(job.kv.fed) + width]) for job in jobs]
        logits = bench.forward(work, width)
        drawing = [(job, len(new) - 1) for job, (_, new) in zip(jobs, work, strict=True) if job.left == 0]
        answers: list[tuple[_Job, int, float | None]] = []
        if drawing:
            slots = mx.array([cast("Any", job.kv.row).index for job, _ in drawing])
            places = mx.array([place for _, place in drawing])
            answers = _drawn(logits[slots, places][:, : self._vocabulary], [job for job, _ in drawing])
        else:
            bench.evaluate()
        # Before anybody has the answer, so that a scrape after it shows this forward.
        self._forwards.drafted(len(work), sum(len(new) for _, new in work), logits.shape[0] * width)
        spent_s = self._clock() - began_s
        for job in jobs:
            job.work.computed_s += spent_s
        for job, token_id, chance in answers:
            if job.take(token_id, chance):
                job.finish(job.end)

    def _read_chunk(self) -> None:
        if not self._reading:
            return
        job = self._reading.popleft()
        if job.work.should_stop():
            job.finish(DraftEnd.TIME_BUDGET)
            return
        if self._guarded([job], lambda: self._read(job)):
            if job.ask is None:
                if job.left <= 0:
                    job.finish(job.end)
                else:
                    self._reading.append(job)
            else:
                (self._reading if job.left > ONE_FORWARD else self._drafting).append(job)

    def _read(self, job: _Job) -> None:
        began_s = self._clock()
        start = len(job.kv.fed)
        # A draft needs the logits of its path's last id, which are computed in a step.
        end = len(job.path) - (job.ask is not None)
        drafting = bool(self._drafting) or began_s - self._stepped_s < _RECENT_S
        chunk = job.path[start : min(end, start + self._pace.chunk(drafting=drafting))]
        job.kv.extend(chunk)
        spent_s = self._clock() - began_s
        job.work.computed_s += spent_s
        self._pace.read(len(chunk), spent_s)

    def _guarded(self, jobs: Sequence[_Job], act: Callable[[], object]) -> bool:
        """Runs it; where it fails, so do the jobs. Whether it went well."""
        try:
            act()
        except Exception as error:
            # Its frames hold arrays, which must not be dropped on another thread.
            traceback.clear_frames(error.__traceback__)
            for job in list(jobs):
                if not job.done.done():
                    job.done.set_exception(error)
            self._drafting = [job for job in self._drafting if not job.done.done()]
            return False
        return True


def _drawn(rows: mx.array, jobs: Sequence[_Job]) -> list[tuple[_Job, int, float | None]]:
    """What each job draws from its row, and its probability where that is wanted. rows: logits (jobs, vocabulary)."""
    best: mx.array | None = None
    drawn: dict[int, Draw | mx.array] = {}
    for place, job in enumerate(jobs):
        spec = job.drafter.spec
        if spec.sampler.greedy:
            best = mx.argmax(rows, axis=-1) if best is None else best
        else:
            drawn[place] = draw(rows[place : place + 1], spec.sampler, [len(job.path) - spec.prompt_length])
    pending = [best] if best is not None else []
    pending += [one.ids if isinstance(one, Draw) else one for one in drawn.values()]
    mx.eval(pending)
    best_ids = host_ids(best) if best is not None else []
    answers = []
    for place, job in enumerate(jobs):
        one = drawn.get(place)
        if one is None:
            token_id = best_ids[place]
        else:
            token_id = settle(one, job.drafter.spec.sampler)[0] if isinstance(one, Draw) else host_ids(one)[0]
        wanted = job.ask is not None and job.ask.want_confidences
        answers.append((job, token_id, chance_of(rows[place : place + 1], token_id) if wanted else None))
    return answers
