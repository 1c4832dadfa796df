"""Drafters that compute one after another: a chunk or a whole draft is one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, Runner, Work

T = TypeVar("T")


class OneByOne:
    """A `Computing` in the order in which calls come."""

    def __init__(self, runner: Runner, clock: Callable[[], float], *, prefill_step_size: int = 256) -> None:
        """prefill_step_size: ids that a draft may catch up within its own job."""
        self._runner = runner
        self._clock = clock
        self._step = prefill_step_size

    @property
    def waiting(self) -> int:
        """Jobs that wait for the runner."""
        return self._runner.queue_depth

    async def catch_up(self, drafter: Drafter, work: Work) -> None:
        """A job a chunk."""
        while drafter.behind and not work.should_stop():
            await self._timed(work, lambda: drafter.feed(work.should_stop))

    async def draft(self, drafter: Drafter, ask: Ask, work: Work) -> Guess:
        """A job a chunk, as long as it is far behind, then one for the draft."""
        while drafter.behind > self._step and not work.should_stop():
            await self._timed(work, lambda: drafter.feed(work.should_stop))
        if work.should_stop():
            return Guess(end=DraftEnd.TIME_BUDGET)
        return await self._timed(work, lambda: drafter.draft(ask, work.should_stop))

    def spare(self, nbytes: int) -> None:
        """Nothing is used beyond."""

    async def run(self, job: Callable[[], T]) -> T:
        """Queues it with the others."""
        return await self._runner.run(job)

    async def _timed(self, work: Work, job: Callable[[], T]) -> T:
        def timed() -> T:
            began_s = self._clock()
            try:
                return job()
            finally:
                work.computed_s += self._clock() - began_s

        return await self._runner.run(timed)
