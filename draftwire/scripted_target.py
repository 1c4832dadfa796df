"""A target service that plays a script: for tests of programs that use the client library. Needs no model and no mlx."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwire.errors import DraftwireError, NotFound
from draftwire.v1 import target_pb2 as pb
from draftwire.v1 import target_pb2_grpc
from draftwire.wire import to_duration, to_status

Step: TypeAlias = pb.GenerateResponse | DraftwireError | threading.Event
"""A message to send, an error to end with, or an event to wait for (the end of the call ends the wait)."""


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Each Generate call plays the next script, the last one for ever. Remembers what was asked, and how calls ended."""

    def __init__(
        self,
        *scripts: Sequence[Step],
        replies: Mapping[str, Any] | None = None,
        pieces: Mapping[int, str] | None = None,
    ) -> None:
        """replies: by method name, a reply, an error, or a list of those of which each call takes the first.

        pieces: text of each id, for Detokenize.
        """
        self._scripts = list(scripts)
        self._replies = dict(replies or {})
        self._pieces = dict(pieces or {})
        self._lock = threading.Lock()
        self.requests: list[Any] = []
        """Every request in order, of all methods."""
        self.metadata: list[dict[str, str]] = []
        """The metadata of each request."""
        self.ended = threading.Event()
        """Set when a Generate call has ended, however it did."""
        self.cancelled = threading.Event()
        """Set when a Generate call ended before its script did."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        """Plays the next script."""
        self._remember(request, context)
        with self._lock:
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        over = threading.Event()
        waits = [step for step in script if isinstance(step, threading.Event)]
        played = threading.Event()

        def on_end() -> None:
            over.set()
            if not played.is_set():
                self.cancelled.set()
            self.ended.set()
            for wait in waits:
                wait.set()

        context.add_callback(on_end)
        for step in script:
            if isinstance(step, threading.Event):
                step.wait()
                if over.is_set():
                    return
            elif isinstance(step, DraftwireError):
                played.set()
                _abort(context, step)
            else:
                yield step
        played.set()

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """The scripted reply."""
        reply: pb.AbortResponse = self._reply("Abort", request, context)
        return reply

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """The scripted reply."""
        reply: pb.TokenizeResponse = self._reply("Tokenize", request, context)
        return reply

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """The scripted reply, else the pieces of the ids."""
        if "Detokenize" in self._replies:
            reply: pb.DetokenizeResponse = self._reply("Detokenize", request, context)
            return reply
        self._remember(request, context)
        return pb.DetokenizeResponse(text="".join(self._pieces.get(token_id, "") for token_id in request.token_ids))

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """The scripted reply."""
        reply: pb.GetModelInfoResponse = self._reply("GetModelInfo", request, context)
        return reply

    def ListDrafters(self, request: pb.ListDraftersRequest, context: Any) -> pb.ListDraftersResponse:
        """The scripted reply."""
        reply: pb.ListDraftersResponse = self._reply("ListDrafters", request, context)
        return reply

    def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        """The scripted reply."""
        reply: pb.ListRequestsResponse = self._reply("ListRequests", request, context)
        return reply

    def _remember(self, request: Any, context: Any) -> None:
        with self._lock:
            self.requests.append(request)
            self.metadata.append({key: value for key, value in context.invocation_metadata()})

    def _reply(self, method: str, request: Any, context: Any) -> Any:
        self._remember(request, context)
        reply = self._replies.get(method, NotFound(f"no reply is scripted for {method}"))
        if isinstance(reply, list):
            with self._lock:
                reply = reply.pop(0)
        if isinstance(reply, DraftwireError):
            _abort(context, reply)
        return reply


def started(request_id: str = "r1", *, prompt_tokens: int = 3, seed: int = 7) -> pb.GenerateResponse:
    """A first event."""
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=request_id,
            model_id="scripted",
            prompt_tokens=prompt_tokens,
            max_tokens=64,
            sampling=pb.SamplingParams(temperature=0.0, seed=seed),
            numerics="fast",
        )
    )


def chunk(first_step: int, *tokens: tuple[int, str], drafted: int = 0) -> pb.GenerateResponse:
    """One round's tokens, each an id and its text, of which the first `drafted` are accepted drafts."""
    texts = [text for _, text in tokens]
    return pb.GenerateResponse(
        chunk=pb.GenerateChunk(
            first_step=first_step,
            text="".join(texts),
            token_ids=[token_id for token_id, _ in tokens],
            from_draft=[index < drafted for index in range(len(tokens))],
            text_ends=accumulate(map(len, texts)),
        )
    )


def finished(
    completion_tokens: int,
    *,
    drafted: int = 0,
    accepted: int = 0,
    no_draft_reason: pb.NoDraftReason.ValueType = pb.NO_DRAFT_REASON_UNSPECIFIED,
) -> pb.GenerateResponse:
    """A last event: ended by max_tokens after one second of decoding."""
    return pb.GenerateResponse(
        finished=pb.GenerateFinished(
            finish_reason=pb.FINISH_REASON_MAX_TOKENS,
            usage=pb.Usage(prompt_tokens=3, completion_tokens=completion_tokens),
            timings=pb.GenerateTimings(
                time_to_first_token=to_duration(0.25),
                decode=to_duration(1.0),
                decode_tokens_per_second=completion_tokens,
            ),
            speculation=pb.SpeculationStats(
                num_spec_steps=1 if drafted else 0,
                num_draft_tokens=drafted,
                num_accepted_draft_tokens=accepted,
                draft_acceptance_rate=accepted / drafted if drafted else 0.0,
                no_draft_reason=no_draft_reason,
            ),
        )
    )


@contextmanager
def serve(target: target_pb2_grpc.TargetServiceServicer, *, ready: bool = True) -> Iterator[str]:
    """Runs a real gRPC server with health checks on a free port of 127.0.0.1; yields its address."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
        checks = health.HealthServicer()
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        checks.set("", serving if ready else not_serving)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def _abort(context: Any, error: DraftwireError) -> NoReturn:
    context.abort_with_status(to_status(error))
    raise AssertionError("abort_with_status returns by raising")
