"""Keyword arguments of the client as messages of the target contract. Pure; the server judges the values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal, TypedDict, TypeVar

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2

from draftwire.v1 import target_pb2 as pb
from draftwire.wire import MAX_MESSAGE_BYTES, invalid

M = TypeVar("M", bound=Message)


class ChatOptions(TypedDict, total=False):
    """How a chat becomes a prompt."""

    messages: Sequence[Mapping[str, Any]] | None
    """Each with role, content and, where they apply, name, tool_calls, tool_call_id."""
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    template_arguments: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None


class TokenizeOptions(ChatOptions, total=False):
    """Keyword arguments of `tokenize`."""

    add_special_tokens: bool | None


class GenerateOptions(ChatOptions, total=False):
    """Keyword arguments of `generate` and `complete`; an absent one takes the server's default."""

    token_ids: Sequence[int] | None
    """The prompt as ids, instead of text or messages."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_window: int | None
    logit_bias: Mapping[int, float] | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None
    top_logprobs: int | None
    skip_special_tokens: bool | None
    drafting: Literal["auto", "off", "fixed"] | None
    num_draft_tokens: int | None
    json_schema: str | Mapping[str, Any] | None
    """As JSON text or as an object."""
    json_object: bool | None
    regex: str | None
    ebnf: str | None
    choice: Sequence[str] | None
    structural_tag: str | Mapping[str, Any] | None
    """As JSON text or as an object."""
    any_whitespace: bool | None
    request_id: str | None
    model: str | None
    priority: int | None
    cache: bool | None
    """False neither reads nor fills prefix caches."""
    cache_salt: str | None


_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_window"),
)
_STOPPING: Final = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output")
_RESPONSE: Final = ("top_logprobs", "skip_special_tokens")
_TOP: Final = ("request_id", "model", "priority")
_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
_MODES: Final[Mapping[str, pb.DraftingMode.ValueType]] = {
    "auto": pb.DRAFTING_MODE_AUTO,
    "off": pb.DRAFTING_MODE_OFF,
    "fixed": pb.DRAFTING_MODE_FIXED,
}


def generate_request(prompt: str | None, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request for a prompt (text, or `messages` or `token_ids` among the options) and GenerateOptions.

    Raises TypeError for an unknown option, InvalidRequest naming the field for what the message cannot hold.
    """
    given = _given(options, GenerateOptions)
    request = pb.GenerateRequest()
    _set_prompt(request, prompt, given)
    _set_all(request, given, _TOP, "")
    _set_all(request.sampling, given, _SAMPLING, "sampling.")
    for token_id, bias in dict(given.get("logit_bias", {})).items():
        _put(request.sampling.logit_bias, token_id, bias, f"sampling.logit_bias[{token_id}]")
    _set_all(request.stopping, given, _STOPPING, "stopping.")
    stop = given.get("stop", ())
    _extend(request.stopping, "stop", [stop] if isinstance(stop, str) else stop, "stopping.stop")
    _extend(request.stopping, "stop_token_ids", given.get("stop_token_ids", ()), "stopping.stop_token_ids")
    _set_all(request.response, given, _RESPONSE, "response.")
    _set_constraint(request, given)
    _set_drafting(request, given)
    if "cache" in given:
        _set(request.cache, "disabled", not given["cache"], "cache.disabled")
    _set_all(request.cache, given, ("cache_salt",), "cache.")
    return _fitting(request)


def tokenize_request(text: str | None, options: Mapping[str, Any]) -> pb.TokenizeRequest:
    """The request for a text, or for `messages` among the TokenizeOptions. Raises as `generate_request` does."""
    given = _given(options, TokenizeOptions)
    request = pb.TokenizeRequest()
    _exactly_one("input", {"text": text, "messages": given.get("messages")})
    if text is not None:
        _set(request, "text", text, "input.text")
    else:
        _set_chat(request.chat, given, "input.chat")
    _set_all(request, given, ("add_special_tokens",), "")
    return _fitting(request)


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """The request for ids. Raises InvalidRequest for what is no id."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _extend(request, "token_ids", token_ids, "token_ids")
    return _fitting(request)


def abort_request(request_ids: Sequence[str]) -> pb.AbortRequest:
    """The request that ends others. Raises InvalidRequest for what is no name."""
    request = pb.AbortRequest()
    _extend(request, "request_ids", request_ids, "request_ids")
    return _fitting(request)


def health_request(service: str) -> health_pb2.HealthCheckRequest:
    """The question whether a service is SERVING; "" means the whole server."""
    return health_pb2.HealthCheckRequest(service=service)


def _given(options: Mapping[str, Any], known: Any) -> dict[str, Any]:
    names = known.__annotations__
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    return {name: value for name, value in options.items() if value is not None}


def _exactly_one(field: str, values: Mapping[str, object]) -> None:
    named = [name for name, value in values.items() if value is not None]
    if len(named) != 1:
        raise invalid(field, f"expected exactly one of {', '.join(values)}; got {', '.join(named) or 'none'}")


def _set_prompt(request: pb.GenerateRequest, prompt: str | None, given: Mapping[str, Any]) -> None:
    kinds = {"text": prompt, "messages": given.get("messages"), "token_ids": given.get("token_ids")}
    _exactly_one("prompt", kinds)
    if prompt is not None:
        _set(request, "text", prompt, "prompt.text")
    elif "token_ids" in given:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", given["token_ids"], "prompt.token_ids.ids")
    else:
        _set_chat(request.chat, given, "prompt.chat")


def _set_chat(chat: pb.ChatPrompt, given: Mapping[str, Any], path: str) -> None:
    chat.SetInParent()
    for index, message in enumerate(_list(given["messages"], f"{path}.messages")):
        _set_message(chat.messages.add(), message, f"{path}.messages[{index}]")
    _set_all(chat, given, ("add_generation_prompt", "continue_final_message"), f"{path}.")
    if "template_arguments" in given:
        _fill(chat.template_arguments, given["template_arguments"], f"{path}.template_arguments")
    for index, tool in enumerate(_list(given.get("tools", ()), f"{path}.tools")):
        _fill(chat.tools.add(), tool, f"{path}.tools[{index}]")


def _set_message(target: pb.ChatMessage, message: Mapping[str, Any], path: str) -> None:
    if not isinstance(message, Mapping):
        raise invalid(path, f"expected a mapping with role and content, got {type(message).__name__}")
    for key, value in message.items():
        if key == "tool_calls":
            for index, call in enumerate(_list(value or (), f"{path}.tool_calls")):
                _fill(target.tool_calls.add(), call, f"{path}.tool_calls[{index}]")
        elif key not in ("role", "content", "name", "tool_call_id"):
            raise invalid(f"{path}.{key}", "unknown; a message has role, content, name, tool_calls, tool_call_id")
        elif value is not None:  # None is what other APIs give as the content of a message with tool calls
            _set(target, key, value, f"{path}.{key}")


def _set_constraint(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    named = [name for name in _CONSTRAINTS if name in given]
    if len(named) > 1:
        raise invalid("constraint", f"expected at most one of {', '.join(_CONSTRAINTS)}; got {', '.join(named)}")
    for name in named:
        value = given[name]
        if name == "choice":
            request.choice.SetInParent()
            _extend(request.choice, "values", value, "constraint.choice.values")
        else:
            _set(request, name, _json(value, name) if isinstance(value, Mapping) else value, f"constraint.{name}")
    _set_all(request.grammar, given, ("any_whitespace",), "grammar.")


def _set_drafting(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    if "drafting" in given:
        if given["drafting"] not in _MODES:
            raise invalid("drafting.mode", f"expected one of {', '.join(_MODES)}; got {given['drafting']!r}")
        request.drafting.mode = _MODES[given["drafting"]]
    _set_all(request.drafting, given, ("num_draft_tokens",), "drafting.")


def _set_all(message: Message, given: Mapping[str, Any], names: Sequence[str], path: str) -> None:
    for name in names:
        if name in given:
            _set(message, name, given[name], f"{path}{name}")


def _set(message: Message, name: str, value: Any, path: str) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise invalid(path, f"cannot hold {value!r}: {error}") from None


def _put(mapping: Any, key: Any, value: Any, path: str) -> None:
    try:
        mapping[key] = value
    except (TypeError, ValueError) as error:
        raise invalid(path, f"cannot hold {value!r}: {error}") from None


def _extend(message: Message, name: str, values: Any, path: str) -> None:
    items = _list(values, path)
    if not items:
        return  # extending by nothing would make an empty message appear
    try:
        getattr(message, name).extend(items)
    except (TypeError, ValueError) as error:
        raise invalid(path, f"cannot hold these values: {error}") from None


def _list(values: Any, path: str) -> Sequence[Any]:
    # A string is a sequence too, of characters that nobody meant.
    if isinstance(values, str | bytes | Mapping):
        raise invalid(path, f"expected a sequence, got {type(values).__name__}")
    try:
        return list(values)
    except TypeError:
        raise invalid(path, f"expected a sequence, got {type(values).__name__}") from None


def _fill(struct: Struct, value: Any, path: str) -> None:
    struct.SetInParent()
    try:
        struct.update(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid(path, f"expected a JSON object: {error}") from None


def _json(value: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise invalid(f"constraint.{name}", f"expected a JSON object: {error}") from None


def _fitting(request: M) -> M:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise invalid("", f"the request has {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be sent; shorten it")
    return request
