"""Helpers for tests of the draft service: a real server in this process or in one of its own, and short calls."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from draft_service import service
from draft_service.rounds import Rounds
from draft_service.sessions import SessionLimits, SessionTable
from draft_service.sources.base import Runner, Source
from draft_service.sources.lookup import InlineRunner, LookupSource
from draft_service.tally import Recorder
from draftwire.guard import Guard
from draftwire.observe import Observer
from draftwire.serving import Lifecycle, State, listen
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.wire import prefix_hash

NAME = "session-0123456789"
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A draft service in this process."""

    address: str
    stub: Any
    lifecycle: Lifecycle
    rounds: Rounds


@asynccontextmanager
async def draft_service(
    source: Source | None = None,
    runner: Runner | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    max_draft_tokens: int = 16,
    guard: Guard | None = None,
    max_calls: int = 256,
    log_prompts: bool = False,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
    note: Callable[[str, int | float | str], None] | None = None,
    prompt_cache_bytes: int = 0,
    **limits: Any,
) -> AsyncIterator[Running]:
    """Serves a source on a loopback port, as the program does; lookup unless told otherwise."""
    values = {"sessions": 8, "kv_bytes": 2**30, "lease_s": 60.0, "max_lease_s": 600.0, **limits}
    session_limits = SessionLimits(**values)
    lifecycle = Lifecycle(service.SERVICE_NAME, service.NEW_WORK)
    servicer = service.DraftServicer(
        lifecycle.instance_id,
        session_limits,
        max_draft_tokens=max_draft_tokens,
        max_calls=max_calls,
        log_prompts=log_prompts,
        recorder=recorder,
    )
    servicer.note = note or servicer.note
    server, port = await listen(
        lifecycle,
        "127.0.0.1",
        0,
        lambda server: service.register(servicer, server),
        guard,
        observers=observers,
    )
    rounds = Rounds(
        SessionTable(session_limits, clock),
        source or LookupSource(),
        runner or InlineRunner(),
        clock,
        max_draft_tokens=max_draft_tokens,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    servicer.ready(rounds)
    await lifecycle.enter(State.SERVING)
    async with connected(f"127.0.0.1:{port}") as stub:
        try:
            yield Running(address=f"127.0.0.1:{port}", stub=stub, lifecycle=lifecycle, rounds=rounds)
        finally:
            await server.stop(None)
            await rounds.close()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """A stub of the draft service at an address."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)


def advance(ids: Sequence[int], base_length: int = 0) -> draft_pb2.Advance:
    """ids: the whole text; the advance carries what lies behind base_length."""
    return draft_pb2.Advance(base_length=base_length, token_ids=ids[base_length:], prefix_hash=prefix_hash(ids))


def opening(**fields: Any) -> draft_pb2.SessionOpen:
    """A good opening, with fields changed."""
    return draft_pb2.SessionOpen(
        **{"session_id": NAME, "protocol_version": 1, "prompt_length": 1, "max_length": 1000, **fields}
    )


def prefill_messages(
    ids: Sequence[int], *, base_length: int = 0, chunk: int = 1000, **fields: Any
) -> list[draft_pb2.PrefillRequest]:
    """open, then the ids [base_length, ...) in chunks."""
    messages = [draft_pb2.PrefillRequest(open=opening(**fields))]
    for start in range(base_length, len(ids), chunk):
        messages.append(draft_pb2.PrefillRequest(chunk=advance(ids[: start + chunk], start)))
    return messages


def draft_request(ids: Sequence[int], base_length: int, number: int = 1, **fields: Any) -> draft_pb2.DraftRequest:
    """ids: the whole text, of which the request carries what lies behind base_length."""
    return draft_pb2.DraftRequest(
        **{"session_id": NAME, "round": number, "advance": advance(ids, base_length), "max_draft_tokens": 4, **fields}
    )


class Program:
    """`python -m draft_service` as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.lines: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Reads the log until an event with these fields. Raises AssertionError when the log ends before."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            if not line.startswith(b"{"):
                self.lines.append({"event": line.decode()})
                continue
            entry: dict[str, Any] = json.loads(line)
            self.lines.append(entry)
            if entry["event"] == "listening":
                self.port = int(entry["address"].rpartition(":")[2])
            if entry["event"] == event and all(entry.get(key) == value for key, value in fields.items()):
                return entry
        raise AssertionError(f"the log ended without {event!r}: {self.lines}")

    async def end(self) -> int:
        """Its exit status, after the rest of its log was read."""
        assert self.process.stderr is not None
        rest = await self.process.stderr.read()
        self.lines += [{"event": line} for line in rest.decode().splitlines()]
        return await self.process.wait()


@asynccontextmanager
async def program(*flags: str) -> AsyncIterator[Program]:
    """Starts the program on a free port; kills it if it is still there at the end."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTWIRE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draft_service", "--port", "0", "--log-format", "json", "--blas", "reference", *flags,
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env=settings,
    )  # fmt: skip
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
