"""The gRPC face of a target: handlers validate, queue and drain; nothing is computed here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import structlog

from draftwire.access import owner_of
from draftwire.errors import AlreadyExists, Cancelled, DraftwireError, Overloaded, Unavailable
from draftwire.logs import beginning, get_logger
from draftwire.serving import Lifecycle
from draftwire.tokenizer import Tokenizer
from draftwire.v1 import target_pb2, target_pb2_grpc
from draftwire.wire import invalid
from target_service import activity, replies
from target_service.checks import Checks
from target_service.config import TargetSettings
from target_service.core import Target
from target_service.ledger import Released
from target_service.limits import ClientLimits
from target_service.params import Choosing, Generation
from target_service.requests import MAX_TOP_LOGPROBS, generation_of, prompt_ids
from target_service.sequence import Admitted, Done, Outcome, Sequence
from target_service.spans import NoSpan, Tracer

T = TypeVar("T")
_log = get_logger("target")
_MAX_NAMES = 1024
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceOptions:
    """What the face of a target is told, beside the target itself."""

    clients: ClientLimits = field(default_factory=ClientLimits)
    max_tokenizing: int = 64
    """Texts that may be tokenized or wait for it."""
    log_prompts: bool = False

    @classmethod
    def of(cls, settings: TargetSettings) -> FaceOptions:
        """Those of the settings."""
        clients = ClientLimits(
            max_requests=settings.requests_per_client, rate=settings.client_rate, burst=settings.client_burst
        )
        return cls(clients=clients, max_tokenizing=settings.max_tokenizing, log_prompts=settings.log_prompts)


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Serves once `target` is set; until then the interceptor answers UNAVAILABLE."""

    def __init__(self, lifecycle: Lifecycle, options: FaceOptions | None = None) -> None:
        self.target: Target | None = None
        self._options = options or FaceOptions()
        self._encoding = 0
        self.tracer: Tracer = NoSpan()
        """Draws where the time of requests goes."""
        self._lifecycle = lifecycle
        self._live: dict[str, tuple[str, Sequence]] = {}
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Long texts must not hold the event loop, and encoding is for one thread at a time: also when the caller of a text
        # that is being encoded has left, which a lock around the await would not see.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[target_pb2.GenerateResponse]:
        """Streams one completion."""
        target, owner = self._ready(), owner_of(context)
        self._options.clients.spend(owner)
        with self._counted(), self._options.clients.place(owner):
            # Before the prompt is tokenized as well as after it, when others may have come: a full server does no work.
            target.scheduler.check_room(owner)
            parts = target.parts
            generation = await self._encode(lambda: generation_of(request, parts.tokenizer, parts.defaults, owner))
            name = generation.request_id
            if name in self._live:
                raise AlreadyExists(f"request_id {name!r} is in use; choose another or leave it empty")
            structlog.contextvars.bind_contextvars(request_id=name)
            matcher = await target.matcher(generation)
            if name in self._live:
                raise AlreadyExists(f"request_id {name!r} is in use; choose another or leave it empty")
            sequence = target.submit(generation, matcher, self.tracer.request())
            self._live[name] = (owner, sequence)
            if self._options.log_prompts:
                _log.info("prompt", **beginning(_prompt_text(request), generation.prompt))
            try:
                async for event in self._events(target, sequence):
                    yield event
            finally:
                del self._live[name]
                sequence.left()
                sequence.span.ended(sequence)
                target.scheduler.cancel(sequence)

    async def Abort(self, request: target_pb2.AbortRequest, context: Context) -> target_pb2.AbortResponse:
        """Ends requests of the same owner; others and unknown ones are passed over."""
        if len(request.request_ids) > _MAX_NAMES:
            raise invalid("request_ids", f"has {len(request.request_ids)} names, at most {_MAX_NAMES} are allowed")
        target, owner = self._ready(), owner_of(context)
        ended = []
        for name in dict.fromkeys(request.request_ids):
            found = self._live.get(name)
            if found is not None and found[0] == owner:
                target.scheduler.cancel(found[1], Cancelled("aborted by an Abort call", reason="ABORTED_BY_CALL"))
                ended.append(name)
        return target_pb2.AbortResponse(aborted_request_ids=ended)

    async def Tokenize(self, request: target_pb2.TokenizeRequest, context: Context) -> target_pb2.TokenizeResponse:
        """Exactly what Generate would tokenize."""
        parts = self._ready().parts
        self._options.clients.spend(owner_of(context))
        checks, defaults = Checks(), parts.defaults
        ids = await self._encode(lambda: prompt_ids(request, parts.tokenizer, checks, defaults.width, defaults.limits))
        checks.done()
        return target_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: target_pb2.DetokenizeRequest, context: Context
    ) -> target_pb2.DetokenizeResponse:
        """The text of ids, as a stream of them would give it."""
        parts = self._ready().parts
        self._options.clients.spend(owner_of(context))
        return await self._encode(lambda: _detokenized(request, parts.tokenizer, parts.defaults.width))

    async def GetModelInfo(
        self, request: target_pb2.GetModelInfoRequest, context: Context
    ) -> target_pb2.GetModelInfoResponse:
        """What is served."""
        target = self._ready()
        parts, defaults, rollback = target.parts, target.parts.defaults, target.engine.rollback
        tokenizer = parts.tokenizer
        abilities = ["logprobs", "speculation", "seed"]
        abilities += ["chat"] if tokenizer.has_chat_template else []
        abilities += ["grammar"] if target.grammars is not None else []
        abilities += ["tools"] if tokenizer.template_uses("tools") else []
        return target_pb2.GetModelInfoResponse(
            instance_id=self._lifecycle.instance_id,
            software_version=version("draftwire"),
            model_id=defaults.model_id,
            model_revision=parts.loaded.revision or "",
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer_size=tokenizer.size,
            context_length=defaults.context_length,
            end_token_ids=sorted(defaults.end_ids),
            dtype=parts.loaded.dtype,
            device=parts.device,
            numerics=parts.numerics,
            default_sampling=_default_sampling(defaults.temperature),
            capabilities=abilities,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            rollback=rollback.kind,
            no_drafting_reason=rollback.reason,
            default_max_tokens=defaults.max_tokens,
            max_running=parts.limits.max_running,
            max_queued=parts.limits.max_queued,
            running=target.scheduler.running,
            queued=target.scheduler.queued,
            batching=target.engine.batching,
            kv_bytes=target.scheduler.kv_bytes,
            kv_bytes_limit=parts.limits.kv_bytes,
            exact_rows=target.engine.tile.rows if target.engine.tile else 0,
            near_tie_gap=target.engine.near_tie_gap,
            prompt_cache_bytes=target.prefixes.counts.memory_bytes if target.prefixes else 0,
            prompt_cache_bytes_limit=target.prefixes.counts.memory_limit_bytes if target.prefixes else 0,
        )

    async def ListDrafters(
        self, request: target_pb2.ListDraftersRequest, context: Context
    ) -> target_pb2.ListDraftersResponse:
        """The drafters as this target sees them."""
        return replies.drafters(self._ready().pool.links)

    async def ListRequests(
        self, request: target_pb2.ListRequestsRequest, context: Context
    ) -> target_pb2.ListRequestsResponse:
        """What runs and waits, and the totals."""
        target = self._ready()
        return activity.requests([sequence for _, sequence in self._live.values()], target.tally)

    async def idle(self) -> None:
        """Waits until every stream has been read to its end, not only made."""
        await self._idle.wait()

    def cut(self) -> None:
        """Ends all streams."""
        if self.target is not None:
            for _, sequence in self._live.values():
                stopped = Unavailable("the service stops", reason="DRAINING", retry_after_s=5.0)
                self.target.scheduler.cancel(sequence, stopped)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._streams += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    async def _encode(self, work: Callable[[], T]) -> T:
        if self._encoding >= self._options.max_tokenizing:
            raise Overloaded(f"{self._encoding} texts wait for the tokenizer", retry_after_s=1.0)
        self._encoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        finally:
            self._encoding -= 1

    def _ready(self) -> Target:
        if self.target is None:
            raise Unavailable("the model is loading", reason="NOT_READY", retry_after_s=2.0)
        return self.target

    async def _events(self, target: Target, sequence: Sequence) -> AsyncIterator[target_pb2.GenerateResponse]:
        while True:
            crowded = sequence.crowded
            outcome = await sequence.outbox.get()
            if crowded:
                target.scheduler.wake()
            event = self._event(target, sequence, outcome)
            yield event
            if isinstance(outcome, Done):
                _log_done(sequence.generation, sequence, outcome)
                return

    def _event(self, target: Target, sequence: Sequence, outcome: Outcome) -> target_pb2.GenerateResponse:
        """Raises the outcome where it is an error."""
        if isinstance(outcome, Released):
            return replies.chunk(outcome)
        if isinstance(outcome, Admitted):
            loaded = target.parts.loaded
            return replies.started(sequence, target.parts.defaults.model_id, loaded.revision, target.parts.numerics)
        if isinstance(outcome, DraftwireError):
            raise outcome
        return replies.finished(sequence, outcome.finish, target.engine.rollback.kind)


def _prompt_text(request: target_pb2.GenerateRequest) -> str:
    """The prompt as it was sent, for people; empty where it was ids."""
    if request.HasField("chat"):
        return "\n".join(f"{message.role}: {message.content}" for message in request.chat.messages)
    return request.text


def _detokenized(
    request: target_pb2.DetokenizeRequest, tokenizer: Tokenizer, width: int
) -> target_pb2.DetokenizeResponse:
    checks = Checks()
    checks.token_ids("token_ids", request.token_ids, width)
    checks.done()
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    hidden = tokenizer.special_ids if skip else frozenset()
    text = b"".join(tokenizer.piece_bytes(token) for token in request.token_ids if token not in hidden)
    return target_pb2.DetokenizeResponse(text=text.decode("utf-8", errors="replace"))


def _default_sampling(temperature: float) -> target_pb2.SamplingParams:
    sampling = replies.sampling(Choosing())
    sampling.temperature = temperature
    sampling.ClearField("seed")
    return sampling


def _log_done(generation: Generation, sequence: Sequence, done: Done) -> None:
    counts = sequence.counts
    _log.info(
        "finished",
        request_id=generation.request_id,
        reason=done.finish.reason.value,
        prompt_tokens=len(generation.prompt),
        completion_tokens=sequence.ledger.completion_tokens,
        drafted=counts.drafted,
        accepted=counts.accepted,
        forwards=counts.forwards,
        decode_s=round(sequence.times.decode_s, 3),
        without_draft=dict(counts.without_draft),
        constraint_ms=round(sequence.matcher.seconds * 1e3, 3) if sequence.matcher is not None else None,
    )
