"""One thread that owns everything mlx: it loads, computes and drops there, and clears its streams as its last act."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeClosed(RuntimeError):
    """Work was given to a compute thread that has been closed."""


class ComputeThread:
    """Runs callables one after another on a thread of its own.

    mlx arrays and modules belong to the thread that made them, and a thread that ends without `mx.clear_streams()` aborts
    the process at exit. Safe to call from any thread; `run` belongs to an event loop.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed = False
        self._waiting = 0
        self._busy_since_s: float | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=False)
        self._thread.start()

    @property
    def queue_depth(self) -> int:
        """Jobs that wait, the running one aside."""
        return self._waiting

    @property
    def busy_for_s(self) -> float:
        """Seconds since the running job began; 0 when idle. A watchdog reads this."""
        since = self._busy_since_s
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job. A cancelled future's job is skipped if it has not begun. Raises ComputeClosed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ComputeClosed("the compute thread is closed")
            self._waiting += 1
            self._jobs.put((job, future))
        return future

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job and returns its result, or raises what it raised. Cancelling skips a job that has not begun."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """Finishes the queued jobs and joins the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while (item := self._jobs.get()) is not None:
                self._run_one(*item)
                # The last job's arrays must not live on through this frame.
                del item
        finally:
            self._clear_streams()

    def _run_one(self, job: Callable[[], Any], future: Future[Any]) -> None:
        with self._lock:
            self._waiting -= 1
        if not future.set_running_or_notify_cancel():
            return
        self._busy_since_s = time.monotonic()
        try:
            result = job()
        except BaseException as error:
            self._busy_since_s = None
            # The traceback goes to another thread, where the arrays in its frames must not be dropped.
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)
        else:
            self._busy_since_s = None
            future.set_result(result)

    @staticmethod
    def _clear_streams() -> None:
        import sys

        mx = sys.modules.get("mlx.core")
        if mx is not None:
            mx.clear_streams()
