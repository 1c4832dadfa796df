"""Grammars of a target: compiled in a process of its own within a time limit, kept by content, matched here."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from draftwire.errors import InvalidRequest, Overloaded, Unsupported
from draftwire.logs import get_logger
from draftwire.wire import invalid
from target_service.grammar_worker import pack_vocabulary
from target_service.matcher import Matcher, Vocabulary
from target_service.params import Constraint, Stopping

T = TypeVar("T")
_log = get_logger("grammars")

_START_S: Final = 60.0
_MOST_MEMORY: Final = 1 << 30
_MOST_GRAMMAR: Final = 64 << 20
_JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
Job = dict[str, Any]


def installed() -> bool:
    """Whether the extra [grammar] is there."""
    try:
        return find_spec("xgrammar") is not None
    except (ImportError, ValueError):
        return False


def missing(name: str) -> Unsupported:
    """The error for a constraint without the extra."""
    return Unsupported(
        f"{name}: constrained output needs the extra [grammar] at the server: pip install 'draftwire[grammar]'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What compiling may take."""

    timeout_s: float
    """Longest compile."""
    cache_bytes: int
    """Compiled grammars that are kept, together."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What takes a while to make."""

    text: Vocabulary
    json: Vocabulary
    info: Any
    """xgrammar's view of the vocabulary."""


class Grammars:
    """Makes matchers. Belongs to the event loop. xgrammar, and torch behind it, are loaded at the first constraint."""

    def __init__(
        self,
        limits: GrammarLimits,
        *,
        pieces: Callable[[], Sequence[bytes]],
        width: int,
        end_ids: frozenset[int],
        encoder: Callable[[], Callable[[str], list[int]]],
    ) -> None:
        """pieces: makes the bytes of each id, empty for special ones; encoder: makes `Vocabulary.encode`."""
        self._limits = limits
        self._pieces = pieces
        self._width = width
        self._end_ids = frozenset(token for token in end_ids if token < width)
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._parts: _Parts | None = None
        self._kept: OrderedDict[Constraint, tuple[Any, int]] = OrderedDict()
        self._running: dict[Constraint, asyncio.Task[Any]] = {}
        self._process = CompilerProcess()
        self._turn = asyncio.Lock()

    @property
    def cached_bytes(self) -> int:
        """Size of the grammars that are kept."""
        return sum(size for _, size in self._kept.values())

    async def matcher(self, constraint: Constraint, stopping: Stopping) -> Matcher:
        """The state of a new sequence.

        Raises InvalidRequest for a constraint that cannot be kept, Overloaded where the compiler is busy, Unsupported without
        xgrammar.
        """
        compiled = await self._compiled(constraint)
        assert self._parts is not None
        vocabulary = self._parts.json if constraint.kind in _JSON_KINDS else self._parts.text

        def make(ends: list[int]) -> Any:
            return import_module("xgrammar").GrammarMatcher(compiled, override_stop_tokens=ends)

        return Matcher(vocabulary, make, stop_ids=stopping.stop_ids, ignore_eos=not stopping.end_ids)

    async def close(self) -> None:
        """Ends the compiler and whatever waits for it."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._process.kill()
        await asyncio.to_thread(self._thread.shutdown)
        self._kept.clear()

    async def _compiled(self, constraint: Constraint) -> Any:
        kept = self._kept.get(constraint)
        if kept is not None:
            self._kept.move_to_end(constraint)
            return kept[0]
        task = self._running.get(constraint)
        if task is None:
            task = asyncio.create_task(self._compile(constraint))
            self._running[constraint] = task
            task.add_done_callback(lambda done: self._finished(constraint, done))
        # Others may wait for the same one: it goes on when this caller leaves.
        return await asyncio.shield(task)

    def _finished(self, constraint: Constraint, task: asyncio.Task[Any]) -> None:
        del self._running[constraint]
        if not task.cancelled():
            # Read here too, or a caller that has left makes it look like a forgotten error.
            task.exception()

    async def _compile(self, constraint: Constraint) -> Any:
        parts = await self._loaded(constraint.kind)
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(2 * self._limits.timeout_s + _START_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("the grammar compiler is busy", reason="COMPILER_BUSY", retry_after_s=1.0) from None
        try:
            text = await self._asked(constraint, parts.text)
        finally:
            self._turn.release()
        compiled = await self._on_thread(
            lambda: import_module("xgrammar").CompiledGrammar.deserialize_json(text, parts.info)
        )
        size = len(text) + int(compiled.memory_size_bytes)
        _log.info("compiled", kind=constraint.kind, size=size, seconds=round(time.perf_counter() - began_s, 3))
        self._keep(constraint, compiled, size)
        return compiled

    async def _asked(self, constraint: Constraint, vocabulary: Vocabulary) -> str:
        job = {
            "kind": constraint.kind,
            "text": constraint.text,
            "values": constraint.values,
            "any_whitespace": constraint.any_whitespace,
            "timeout_s": self._limits.timeout_s,
            "most_bytes": _MOST_MEMORY,
        }
        if not self._process.running:
            packed = pack_vocabulary(list(vocabulary.pieces), self._width, sorted(self._end_ids))
            await self._process.start(packed, constraint.kind)
        return await self._process.ask(job, self._limits.timeout_s)

    def _keep(self, constraint: Constraint, compiled: Any, size: int) -> None:
        if size > self._limits.cache_bytes:
            return
        self._kept[constraint] = (compiled, size)
        while self.cached_bytes > self._limits.cache_bytes:
            self._kept.popitem(last=False)

    async def _loaded(self, kind: str) -> _Parts:
        if self._parts is None:
            try:
                self._parts = await self._on_thread(self._load)
            except ImportError as error:
                _log.error("no_xgrammar", reason=str(error))
                raise missing(kind) from error
        return self._parts

    def _load(self) -> _Parts:
        from target_service.grammar_compile import tokenizer_info

        if self._parts is not None:
            return self._parts
        pieces = tuple(self._pieces())[: self._width]
        info = tokenizer_info(pieces, self._width, sorted(self._end_ids))
        text = Vocabulary(self._width, pieces, self._end_ids, self._encoder())
        return _Parts(text, replace(text, control=False), info)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _TooLarge(Exception):
    """An answer of so many bytes, unread."""


class CompilerProcess:
    """The compiler, started when it is needed. One job at a time; ended when a job outlives its time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether it can take a job."""
        return self._process is not None and self._process.returncode is None

    async def start(self, vocabulary: bytes, kind: str) -> None:
        """Starts it. Raises Unsupported, naming the constraint's kind, where it does not come up."""
        await self.kill()
        home = str(Path(__file__).parents[1])
        paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "target_service.grammar_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_S):
                answer = await self._exchange(vocabulary)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            await self.kill()
            _log.error("compiler_did_not_start", reason=str(error))
            raise missing(kind) from error
        if answer[:1] != b"+":
            await self.kill()
            _log.error("compiler_did_not_start", reason=answer[1:].decode(errors="replace"))
            raise missing(kind)

    async def ask(self, job: Job, timeout_s: float) -> str:
        """The compiled grammar. Raises InvalidRequest with the compiler's reason, or that it takes too long."""
        kind = job["kind"]
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(json.dumps(job).encode())
        except TimeoutError:
            await self.kill()
            raise _refused(kind, f"takes longer than {timeout_s:g} s to compile; simplify it") from None
        except _TooLarge as size:
            await self.kill()
            raise _refused(
                kind, f"compiles to {size} bytes, at most {_MOST_GRAMMAR} are allowed; simplify it"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            await self.kill()
            raise _refused(kind, "is too much for the compiler, which broke down; simplify it") from None
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next job.
            await self.kill()
            raise
        if answer[:1] != b"+":
            raise _refused(kind, answer[1:].decode(errors="replace"))
        return answer[1:].decode()

    async def kill(self) -> None:
        """Ends it at once. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.shield(process.wait())

    async def _exchange(self, frame: bytes) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(struct.pack(">I", len(frame)) + frame)
        await process.stdin.drain()
        (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
        if length > _MOST_GRAMMAR:
            raise _TooLarge(length)
        return await process.stdout.readexactly(length)


def _refused(kind: str, problem: str) -> InvalidRequest:
    return invalid(kind, problem, reason="GRAMMAR_INVALID")
