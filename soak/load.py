"""Users of every kind: those who read and compare, and those who leave, dawdle, hurry, lie and shout."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from draftwire.aio_client import AsyncClient
from draftwire.errors import DraftwireError
from draftwire.events import Chunk, Completion
from draftwire.v1 import draft_pb2, target_pb2
from draftwire.wire import MAX_MESSAGE_BYTES
from soak.cases import Case, visible
from soak.tally import Tally

HANG_S = 45.0
"""No request of the suite may take so long."""
NEVER = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
"""Statuses that no input of a client may cause."""
_TARGET = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
_DRAFT = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
_LOCAL = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
_BAD: Sequence[dict[str, Any]] = (
    {"prompt": "x", "top_p": 2.0},
    {"prompt": "x", "temperature": -1.0},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "stop": [""]},
    {"token_ids": [2**32 - 1]},
    {"prompt": "word " * 20_000},
    {"prompt": "x", "logit_bias": {1: 1e9}},
    {"prompt": "x", "top_logprobs": 10_000},
)


class Users:
    """Makes requests until it is told to stop. One instance for each run, any number of loops."""

    def __init__(self, address: str, drafters: Sequence[str], cases: Sequence[Case], tally: Tally, seed: int) -> None:
        self.tally = tally
        self._address = address
        self._drafters = drafters
        self._cases = cases
        self._seed = seed
        self._stopped = asyncio.Event()
        self._behaviours: Sequence[tuple[Callable[[AsyncClient, random.Random], Awaitable[str]], int]] = (
            (self.completes, 8),
            (self.cancels, 4),
            (self.is_cancelled, 2),
            (self.hurries, 4),
            (self.dawdles, 2),
            (self.aborts, 2),
            (self.asks_badly, 4),
            (self.sends_rubbish, 3),
            (self.shouts, 1),
            (self.looks_around, 3),
            (self.knocks, 1),
            (self.bothers_a_drafter, 3),
        )

    def stop(self) -> None:
        """Lets each loop end with its request."""
        self._stopped.set()

    async def mixed(self, number: int) -> None:
        """One user after another, each with a channel of its own for a while."""
        rng = random.Random(f"{self._seed}-{number}")
        behaviours, weights = zip(*self._behaviours, strict=True)
        while not self._stopped.is_set():
            async with AsyncClient(self._address) as client:
                for _ in range(rng.randrange(1, 12)):
                    if self._stopped.is_set():
                        return
                    behave = rng.choices(behaviours, weights)[0]
                    await self._bounded(behave.__name__, behave(client, rng))
                    await asyncio.sleep(rng.random() * 0.05)

    async def steady(self, number: int) -> None:
        """A user who reads as quickly as it comes: whose gaps are looked at."""
        rng = random.Random(f"{self._seed}-steady-{number}")
        async with AsyncClient(self._address) as client:
            while not self._stopped.is_set():
                await self._bounded("reads_steadily", self._read_steadily(client, rng))

    async def _bounded(self, behaviour: str, request: Awaitable[str]) -> None:
        """Counts the outcome; a fault for what hangs and for what no input may cause."""
        try:
            status = await asyncio.wait_for(request, HANG_S)
        except TimeoutError:
            self.tally.fault("hang", behaviour)
            return
        except DraftwireError as error:
            status = error.code.name
            if status in NEVER:
                self.tally.fault(status, f"{behaviour}: {error}")
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            if status in NEVER:
                self.tally.fault(status, f"{behaviour}: {error.details()}")
        except Exception as error:
            self.tally.fault("client", f"{behaviour}: {error!r}")
            return
        self.tally.outcome(behaviour, status)

    # Those who compare.

    async def completes(self, client: AsyncClient, rng: random.Random) -> str:
        """Whatever drafts there are, the answer is the known one."""
        case = rng.choice(self._cases)
        self._compare(case, await client.complete(**case.request, **_drafting(rng)))
        return "OK"

    async def _read_steadily(self, client: AsyncClient, rng: random.Random) -> str:
        case = rng.choice(self._cases)
        async with client.generate(**case.request, **_drafting(rng)) as stream:
            last_s: float | None = None
            async for event in stream:
                if isinstance(event, Chunk):
                    now_s = time.monotonic()
                    if last_s is not None:
                        self.tally.gaps_s.append(now_s - last_s)
                    last_s = now_s
            self._compare(case, stream.completion())
        return "OK"

    async def dawdles(self, client: AsyncClient, rng: random.Random) -> str:
        """Reads slowly, and the text is right all the same."""
        case = rng.choice(self._cases)
        async with client.generate(**case.request, **_drafting(rng)) as stream:
            async for _ in stream:
                await asyncio.sleep(rng.random() * 0.2)
            self._compare(case, stream.completion())
        return "OK"

    def _compare(self, case: Case, completion: Completion) -> None:
        if visible(completion) != case.visible:
            self.tally.fault("wrong text", f"{case.request}: {completion.text!r} instead of {case.text!r}")
        stats = completion.speculation
        self.tally.tokens += len(completion.tokens)
        self.tally.drafted += stats.num_draft_tokens
        self.tally.accepted += stats.num_accepted_draft_tokens
        self.tally.failovers += stats.failovers
        self.tally.reseeds += stats.reseeds

    def _prefix(self, case: Case, text: str) -> None:
        if not case.text.startswith(text):
            self.tally.fault("wrong text", f"{case.request}: begins with {text!r} instead of {case.text!r}")

    # Those who leave.

    async def cancels(self, client: AsyncClient, rng: random.Random) -> str:
        """Leaves after some events; what came until then was right."""
        case = rng.choice(self._cases)
        text = ""
        async with client.generate(**case.request, **_drafting(rng)) as stream:
            left = rng.randrange(6)
            async for event in stream:
                text += event.text if isinstance(event, Chunk) else ""
                left -= 1
                if left < 0:
                    break
        self._prefix(case, text)
        return "left"

    async def is_cancelled(self, client: AsyncClient, rng: random.Random) -> str:
        """Its task is cancelled anywhere in the call."""
        case = rng.choice(self._cases)
        task = asyncio.ensure_future(client.complete(**case.request, **_drafting(rng)))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            self._compare(case, await task)
            return "OK"
        return "left"

    async def hurries(self, client: AsyncClient, rng: random.Random) -> str:
        """Has a deadline that is mostly too short."""
        case = rng.choice(self._cases)
        self._compare(
            case, await client.complete(**case.request, **_drafting(rng), timeout_s=rng.choice([0.002, 0.05, 0.3, 2.0]))
        )
        return "OK"

    async def aborts(self, client: AsyncClient, rng: random.Random) -> str:
        """Ends its request by name."""
        case = rng.choice(self._cases)
        name = f"abort-{rng.getrandbits(64):x}"
        task = asyncio.ensure_future(client.complete(**case.request, request_id=name, **_drafting(rng)))
        try:
            await asyncio.sleep(rng.random() * 0.2)
            await client.abort(name, "never-heard-of", timeout_s=HANG_S)
            self._compare(case, await task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return "OK"

    # Those who lie and shout.

    async def asks_badly(self, client: AsyncClient, rng: random.Random) -> str:
        """A request that cannot be: INVALID_ARGUMENT, or refused before it is looked at."""
        bad = rng.choice(_BAD)
        try:
            await client.complete(**bad, timeout_s=HANG_S)
        except DraftwireError as error:
            if error.code.name not in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
                self.tally.fault("bad request", f"{list(bad)}: {error}")
            return error.code.name
        self.tally.fault("bad request", f"{list(bad)} was accepted")
        return "OK"

    async def sends_rubbish(self, client: AsyncClient, rng: random.Random) -> str:
        """Bytes that are no message, or nearly one, to any method."""
        method = rng.choice(_TARGET.methods)
        case = rng.choice([b"", rng.randbytes(rng.choice([1, 40, 4000])), _nearly(rng)])
        return await _raw(self._address, method, [case])

    async def shouts(self, client: AsyncClient, rng: random.Random) -> str:
        """A message over the limit."""
        status = await _raw(
            self._address, rng.choice(_TARGET.methods), [bytes(MAX_MESSAGE_BYTES + rng.choice([1, 2**20]))]
        )
        if status != "RESOURCE_EXHAUSTED":
            self.tally.fault("oversized", status)
        return status

    async def looks_around(self, client: AsyncClient, rng: random.Random) -> str:
        """The calls that answer at once."""
        match rng.randrange(4):
            case 0:
                await client.model_info(timeout_s=HANG_S)
            case 1:
                await client.drafters(timeout_s=HANG_S)
            case 2:
                text = " river stone" * rng.choice([1, 50])
                ids = await client.tokenize(text, timeout_s=HANG_S)
                if await client.detokenize(ids, timeout_s=HANG_S) != text:
                    self.tally.fault("wrong text", f"detokenize of {text!r}")
            case _:
                await client.health(timeout_s=HANG_S)
        return "OK"

    async def knocks(self, client: AsyncClient, rng: random.Random) -> str:
        """Opens a connection that is no gRPC, or nothing at all, and hangs up or does not."""
        host, _, port = self._address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            rng.choice([b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(300), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
        )
        await asyncio.sleep(rng.random() * 0.5)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return "left"

    async def bothers_a_drafter(self, client: AsyncClient, rng: random.Random) -> str:
        """Rubbish and half-done Prefills to a draft service, which may be dead or frozen at the moment."""
        method = rng.choice(_DRAFT.methods)
        opening = draft_pb2.PrefillRequest()
        opening.open.session_id, opening.open.protocol_version = "nobody-has-this-one", 1
        opening.open.prompt_length, opening.open.max_length = 5, 9
        parts = rng.choice(
            [[], [rng.randbytes(30)], [opening.SerializeToString()], [opening.SerializeToString(), b"\xff"]]
        )
        status = await _raw(
            rng.choice(self._drafters),
            method,
            parts if method.client_streaming else (parts or [b""])[-1:],
            timeout_s=1.0,
        )
        return f"drafter {status}" if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else status


async def _raw(address: str, method: Any, parts: Sequence[bytes], timeout_s: float = HANG_S / 2) -> str:
    """The status of a call whose bytes nobody has checked. Raises AioRpcError for what must not be."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with grpc.aio.insecure_channel(address, options=_LOCAL) as channel:
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
        }
        kind = kinds[method.client_streaming, method.server_streaming]
        call = kind(path)(iter(parts) if method.client_streaming else parts[0], timeout=timeout_s)
        try:
            if method.server_streaming:
                for _ in range(3):
                    if await call.read() is grpc.aio.EOF:
                        break
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            if error.code().name in NEVER:
                raise
            return str(error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "UNAVAILABLE"  # so grpc.aio says that the connection broke while it was sending
    return "OK"


def _nearly(rng: random.Random) -> bytes:
    """A good request with a few bytes changed."""
    request = target_pb2.GenerateRequest(text="once upon a time")
    request.stopping.max_tokens = 6
    request.stopping.stop.append("zz")
    request.sampling.temperature, request.sampling.seed = 0.5, 1
    data = bytearray(request.SerializeToString())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _drafting(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {},
            {"drafting": "off"},
            {"drafting": "auto"},
            {"drafting": "fixed", "num_draft_tokens": rng.choice([1, 4, 7])},
        ]
    )
