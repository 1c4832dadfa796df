"""From the wire to the core: validates a GenerateRequest and completes it with defaults."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from draftwire.errors import NotFound, Unsupported
from draftwire.sampling import Sampler
from draftwire.tokenizer import ChatTemplateError, Tokenizer
from draftwire.v1 import target_pb2
from target_service.checks import Checks
from target_service.grammars import missing
from target_service.limits import RequestLimits
from target_service.params import Choosing, Constraint, Drafting, DraftingMode, Generation, Penalties, Stopping

MAX_TOP_LOGPROBS = 20
MAX_DRAFTS = 64
_MAX_NAME = 128
_MODES = {
    target_pb2.DRAFTING_MODE_AUTO: DraftingMode.AUTO,
    target_pb2.DRAFTING_MODE_OFF: DraftingMode.OFF,
    target_pb2.DRAFTING_MODE_FIXED: DraftingMode.FIXED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a request may leave out, and what bounds it."""

    model_id: str
    context_length: int
    width: int
    """Ids below it exist."""
    end_ids: frozenset[int]
    max_tokens: int
    temperature: float
    drafting: Literal["auto", "off", "fixed"]
    num_draft_tokens: int
    limits: RequestLimits = field(default_factory=RequestLimits)
    grammar_bytes: int = 0
    """Longest constraint, in bytes of UTF-8; 0 where the server has no constraints."""


def generation_of(
    request: target_pb2.GenerateRequest, tokenizer: Tokenizer, defaults: Defaults, owner: str = ""
) -> Generation:
    """The request in the terms of the core. owner: who asks.

    Raises InvalidRequest with every bad field, NotFound for another model, Unsupported for an option that this server lacks.
    """
    if request.model and request.model != defaults.model_id:
        raise NotFound(f"model {request.model!r} is not served here, {defaults.model_id!r} is", reason="MODEL_UNKNOWN")
    refuse_unsupported(request, constraints=bool(defaults.grammar_bytes))
    checks = Checks()
    checks.length("request_id", request.request_id, _MAX_NAME)
    checks.length("cache.cache_salt", request.cache.cache_salt, _MAX_NAME)
    prompt = prompt_ids(request, tokenizer, checks, defaults.width, defaults.limits)
    room = defaults.context_length - len(prompt)
    _check_prompt_length(len(prompt), checks, defaults)
    stopping = _stopping(request.stopping, checks, defaults, room)
    choosing = _choosing(request, checks, defaults, stopping)
    drafting = _drafting(request.drafting, checks, defaults)
    constraint = _constraint(request, checks, defaults.grammar_bytes)
    checks.done()
    skip = request.response.skip_special_tokens if request.response.HasField("skip_special_tokens") else True
    return Generation(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=tuple(prompt),
        choosing=choosing,
        stopping=stopping,
        drafting=drafting,
        constraint=constraint,
        skip_special_tokens=skip,
        cache_salt=request.cache.cache_salt,
        cache_disabled=request.cache.disabled,
        priority=request.priority,
        owner=owner,
    )


def _check_prompt_length(length: int, checks: Checks, defaults: Defaults) -> None:
    context, limit = defaults.context_length, defaults.limits.max_prompt_tokens
    problem = ""
    if length >= context:
        problem = f"the context holds {context}: at most {context - 1} leave room for an answer"
    elif limit is not None and length > limit:
        problem = f"at most {limit} are allowed"
    if problem:
        checks.bad("prompt", f"has {length} tokens, {problem}", "CONTEXT_LENGTH_EXCEEDED")


def refuse_unsupported(request: target_pb2.GenerateRequest, *, constraints: bool = True) -> None:
    """Raises Unsupported naming the first option that this server does not have. constraints: whether it has those."""
    constraint = request.WhichOneof("constraint")
    if not constraints and constraint is not None:
        raise missing(constraint)
    if not constraints and request.HasField("grammar"):
        raise missing("grammar")
    if request.response.n > 1:
        raise Unsupported("response.n: one completion a request; send several requests with different seeds")
    if request.response.echo:
        raise Unsupported("response.echo: the prompt is not repeated; prepend it yourself")
    if request.response.HasField("prompt_logprobs"):
        raise Unsupported("response.prompt_logprobs: logprobs of the prompt are not supported")


def prompt_ids(
    request: target_pb2.GenerateRequest | target_pb2.TokenizeRequest,
    tokenizer: Tokenizer,
    checks: Checks,
    width: int,
    limits: RequestLimits | None = None,
) -> list[int]:
    """Token ids of whichever prompt was given; violations go to `checks`."""
    noted = checks.noted
    if not _fits(request, checks, (limits or RequestLimits()).max_prompt_bytes):
        return []
    if request.HasField("text"):
        add_special = True
        if isinstance(request, target_pb2.TokenizeRequest) and request.HasField("add_special_tokens"):
            add_special = request.add_special_tokens
        ids = tokenizer.encode(request.text, add_special)
        field = "text"
    elif request.HasField("chat"):
        ids = chat_ids(request.chat, tokenizer, checks)
        field = "chat"
    elif isinstance(request, target_pb2.GenerateRequest) and request.HasField("token_ids"):
        ids = list(request.token_ids.ids)
        field = "token_ids.ids"
        checks.token_ids(field, ids, width)
    else:
        checks.bad("prompt", "is missing; give one of text, chat and token_ids", "FIELD_REQUIRED")
        return []
    if not ids and checks.noted == noted and isinstance(request, target_pb2.GenerateRequest):
        checks.bad(field, "has no tokens; a prompt needs at least one", "FIELD_REQUIRED")
    return ids


def _fits(request: target_pb2.GenerateRequest | target_pb2.TokenizeRequest, checks: Checks, most: int) -> bool:
    """Whether a text or a conversation is short enough to be tokenized: a long one would hold up those of others."""
    if request.HasField("text"):
        name, size = "text", len(request.text.encode())
    elif request.HasField("chat"):
        name, size = "chat", request.chat.ByteSize()
    else:
        return True
    if size > most:
        checks.bad(name, f"has {size} bytes, at most {most} are allowed", "OUT_OF_BOUNDS")
    return size <= most


def chat_ids(chat: target_pb2.ChatPrompt, tokenizer: Tokenizer, checks: Checks) -> list[int]:
    """Token ids of a conversation, rendered with the model's template."""
    if not tokenizer.has_chat_template:
        checks.bad("chat", "the model has no chat template; send text or token_ids", "NO_CHAT_TEMPLATE")
        return []
    if not chat.messages:
        checks.bad("chat.messages", "is empty; give at least one message", "FIELD_REQUIRED")
        return []
    if chat.tools and not tokenizer.template_uses("tools"):
        raise Unsupported("chat.tools: the model's chat template takes no tools")
    for index, message in enumerate(chat.messages):
        if not message.role:
            checks.bad(f"chat.messages[{index}].role", 'is empty; use "system", "user", "assistant" or "tool"')
            return []
    generate = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if generate and chat.continue_final_message:
        checks.bad("chat.add_generation_prompt", "cannot be combined with continue_final_message")
        return []
    arguments = checks.plain("chat.template_arguments", chat.template_arguments)
    try:
        return tokenizer.apply_chat_template(
            [_message(f"chat.messages[{i}]", message, checks) for i, message in enumerate(chat.messages)],
            add_generation_prompt=generate,
            continue_final_message=chat.continue_final_message,
            template_arguments=arguments or None,
            tools=[checks.plain(f"chat.tools[{i}]", tool) for i, tool in enumerate(chat.tools)] or None,
        )
    except ChatTemplateError as error:
        checks.bad("chat", f"the chat template refuses it: {error}", "CHAT_TEMPLATE")
        return []


def _message(field: str, message: target_pb2.ChatMessage, checks: Checks) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [
            checks.plain(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _stopping(wire: target_pb2.StoppingParams, checks: Checks, defaults: Defaults, room: int) -> Stopping:
    limits = defaults.limits
    wanted = wire.max_tokens if wire.HasField("max_tokens") else defaults.max_tokens
    if wanted < 1:
        checks.bad("stopping.max_tokens", "is 0, must be at least 1", "OUT_OF_BOUNDS")
    most = limits.max_output_tokens
    if most is not None and wire.max_tokens > most:
        checks.bad("stopping.max_tokens", f"is {wire.max_tokens}, at most {most} are allowed", "OUT_OF_BOUNDS")
    if wire.min_tokens > wanted:
        checks.bad("stopping.min_tokens", f"is {wire.min_tokens}, more than max_tokens ({wanted})", "OUT_OF_BOUNDS")
    if len(wire.stop) > limits.max_stops:
        problem = f"has {len(wire.stop)} texts, at most {limits.max_stops} are allowed"
        checks.bad("stopping.stop", problem, "OUT_OF_BOUNDS")
    for index, stop in enumerate(wire.stop[: limits.max_stops]):
        if not stop:
            checks.bad(f"stopping.stop[{index}]", "is empty; leave it out")
        checks.length(f"stopping.stop[{index}]", stop, limits.max_stop_chars)
    if len(wire.stop_token_ids) > limits.max_stop_token_ids:
        problem = f"has {len(wire.stop_token_ids)} ids, at most {limits.max_stop_token_ids} are allowed"
        checks.bad("stopping.stop_token_ids", problem, "OUT_OF_BOUNDS")
    checks.token_ids("stopping.stop_token_ids", wire.stop_token_ids, defaults.width)
    return Stopping(
        max_tokens=max(1, min(wanted, room)),
        capped_by_context=room < wanted,
        min_tokens=wire.min_tokens,
        end_ids=frozenset() if wire.ignore_eos else defaults.end_ids,
        stop_ids=frozenset(wire.stop_token_ids),
        stops=tuple(wire.stop),
        include_stop=wire.include_stop_in_output,
    )


def _choosing(request: target_pb2.GenerateRequest, checks: Checks, defaults: Defaults, stopping: Stopping) -> Choosing:
    wire = request.sampling
    top: int | None = None
    if request.response.HasField("top_logprobs"):
        top = int(checks.number("response.top_logprobs", request.response.top_logprobs, 0, MAX_TOP_LOGPROBS))
    most = defaults.limits.max_logit_bias
    if len(wire.logit_bias) > most:
        count = len(wire.logit_bias)
        checks.bad("sampling.logit_bias", f"has {count} entries, at most {most} are allowed", "OUT_OF_BOUNDS")
    for token, value in sorted(wire.logit_bias.items())[:most]:
        checks.number(f"sampling.logit_bias[{token}]", value, -100, 100)
        if token >= defaults.width:
            problem = f"the vocabulary ends at {defaults.width - 1}"
            checks.bad(f"sampling.logit_bias[{token}]", problem, "TOKEN_OUT_OF_VOCAB")
    return Choosing(
        sampler=_sampler(wire, checks, defaults),
        penalties=_penalties(wire, checks),
        logit_bias=dict(wire.logit_bias),
        banned=frozenset(id for id in stopping.end_ids | stopping.stop_ids if id < defaults.width),
        min_tokens=stopping.min_tokens,
        top_logprobs=top,
    )


def _constraint(request: target_pb2.GenerateRequest, checks: Checks, most_bytes: int) -> Constraint | None:
    kind = request.WhichOneof("constraint")
    if kind is None:
        if request.HasField("grammar"):
            checks.bad("grammar", "has no effect without a constraint; leave it out or give one")
        return None
    text, values = "", tuple[str, ...]()
    if kind == "choice":
        values = tuple(dict.fromkeys(request.choice.values))
        if not values or "" in values:
            checks.bad("choice.values", "needs at least one text, none of them empty", "FIELD_REQUIRED")
    elif kind == "json_object":
        if not request.json_object:
            checks.bad("json_object", "is false; leave it out or set it to true")
    else:
        text = str(getattr(request, kind))
        if not text.strip():
            checks.bad(kind, "is empty; leave it out", "FIELD_REQUIRED")
    size = len(text.encode()) + sum(len(value.encode()) for value in values)
    if size > most_bytes:
        checks.bad(kind, f"has {size} bytes, at most {most_bytes} are allowed", "OUT_OF_BOUNDS")
    return Constraint(kind, text, values, request.grammar.any_whitespace)


def _sampler(wire: target_pb2.SamplingParams, checks: Checks, defaults: Defaults) -> Sampler:
    temperature = wire.temperature if wire.HasField("temperature") else defaults.temperature
    return Sampler(
        temperature=checks.number("sampling.temperature", temperature, 0, 100),
        top_p=checks.number("sampling.top_p", wire.top_p if wire.HasField("top_p") else 1.0, 0, 1, above=True),
        top_k=wire.top_k,
        min_p=checks.number("sampling.min_p", wire.min_p, 0, 1),
        # A seed that was not given is still named in `started`, so that the run can be repeated.
        seed=wire.seed if wire.HasField("seed") else secrets.randbits(64),
    )


def _penalties(wire: target_pb2.SamplingParams, checks: Checks) -> Penalties:
    repetition = wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0
    return Penalties(
        repetition=checks.number("sampling.repetition_penalty", repetition, 0, 100, above=True),
        presence=checks.number("sampling.presence_penalty", wire.presence_penalty, -100, 100),
        frequency=checks.number("sampling.frequency_penalty", wire.frequency_penalty, -100, 100),
        window=wire.penalty_window if wire.HasField("penalty_window") else 20,
    )


def _drafting(wire: target_pb2.DraftingParams, checks: Checks, defaults: Defaults) -> Drafting:
    mode = DraftingMode(defaults.drafting)
    if wire.mode != target_pb2.DRAFTING_MODE_UNSPECIFIED:
        if wire.mode not in _MODES:
            checks.bad("drafting.mode", f"is {wire.mode}, must be AUTO, OFF or FIXED")
        mode = _MODES.get(wire.mode, mode)
    # More than the server allows is lowered, as documented: a huge number means "as many as you can".
    drafts = wire.num_draft_tokens if wire.HasField("num_draft_tokens") else defaults.num_draft_tokens
    drafts = min(drafts, MAX_DRAFTS)
    return Drafting(DraftingMode.OFF if drafts == 0 else mode, drafts)
