"""Keyword arguments become request messages; what a message cannot hold is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from draftwire.errors import InvalidRequest
from draftwire.request import detokenize_request, generate_request, tokenize_request
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import MAX_MESSAGE_BYTES


def as_dict(request: Any) -> dict[str, Any]:
    return MessageToDict(request, preserving_proto_field_name=True)


def test_absent_options_leave_the_message_empty() -> None:
    """None and absent are the same: the server's default applies, so no field is present."""
    request = generate_request("hi", {"temperature": None, "stop": None, "drafting": None})
    assert as_dict(request) == {"text": "hi"}


def test_every_option_reaches_its_field() -> None:
    """One request with everything that goes together; zero is a value, not an absence."""
    request = generate_request(
        "hi",
        {
            **{"temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.25, "seed": 2**64 - 1},
            **{"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5, "penalty_window": 0},
            **{"logit_bias": {7: -100.0}, "max_tokens": 9, "min_tokens": 1, "stop": "end", "stop_token_ids": [2]},
            **{"ignore_eos": True, "include_stop_in_output": True, "top_logprobs": 0, "skip_special_tokens": False},
            **{"drafting": "fixed", "num_draft_tokens": 3, "json_schema": {"type": "object"}, "any_whitespace": False},
            **{"request_id": "r", "model": "m", "priority": -1, "cache": False, "cache_salt": "s"},
        },
    )
    assert as_dict(request) == {
        "request_id": "r",
        "model": "m",
        "text": "hi",
        "sampling": {
            **{"temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.25, "seed": str(2**64 - 1)},
            **{"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5, "penalty_window": 0},
            "logit_bias": {"7": -100.0},
        },
        "stopping": {
            **{"max_tokens": 9, "min_tokens": 1, "stop": ["end"], "stop_token_ids": [2]},
            **{"ignore_eos": True, "include_stop_in_output": True},
        },
        "json_schema": '{"type": "object"}',
        "grammar": {"any_whitespace": False},
        "response": {"top_logprobs": 0, "skip_special_tokens": False},
        "drafting": {"mode": "DRAFTING_MODE_FIXED", "num_draft_tokens": 3},
        "cache": {"disabled": True, "cache_salt": "s"},
        "priority": -1,
    }


def test_a_chat_keeps_order_tools_and_template_arguments() -> None:
    """Messages, also those of tools, become a ChatPrompt; a None content is left out."""
    call = {"id": "c1", "function": {"name": "add"}}
    request = generate_request(
        None,
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
            ],
            "template_arguments": {"thinking": True},
            "tools": [{"type": "function"}],
            "add_generation_prompt": False,
        },
    )
    chat = as_dict(request)["chat"]
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool"]
    assert chat["messages"][1] == {"role": "assistant", "tool_calls": [call]}
    assert (chat["template_arguments"], chat["tools"]) == ({"thinking": True}, [{"type": "function"}])
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"choice": ["a", "b"]}, "choice"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"json_object": True}, "json_object"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_a_constraint_is_one_of_a_kind(options: dict[str, Any], kind: str) -> None:
    """Each constraint sets the oneof."""
    assert generate_request("hi", options).WhichOneof("constraint") == kind


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "ids"])
def test_an_empty_prompt_is_still_a_prompt(prompt: Any) -> None:
    """The server, not the client, refuses an empty prompt: its kind must be visible."""
    text = prompt if isinstance(prompt, str) else None
    options = {} if text is not None else {"token_ids": prompt}
    assert generate_request(text, options).WhichOneof("prompt") in ("text", "token_ids")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ("hi", {"token_ids": [1]}, "prompt"),
        (None, {"token_ids": [-1]}, "prompt.token_ids.ids"),
        (None, {"token_ids": "12"}, "prompt.token_ids.ids"),
        (None, {"token_ids": 5}, "prompt.token_ids.ids"),
        (7, {}, "prompt.text"),
        ("\ud800", {}, "prompt.text"),
        (None, {"messages": "hi"}, "prompt.chat.messages"),
        (None, {"messages": ["hi"]}, "prompt.chat.messages[0]"),
        (None, {"messages": [{"role": "user", "text": "hi"}]}, "prompt.chat.messages[0].text"),
        (None, {"messages": [{"role": "user", "content": 1}]}, "prompt.chat.messages[0].content"),
        (None, {"messages": [], "template_arguments": {"a": object()}}, "prompt.chat.template_arguments"),
        (None, {"messages": [], "tools": [3]}, "prompt.chat.tools[0]"),
        ("hi", {"temperature": "hot"}, "sampling.temperature"),
        ("hi", {"top_k": -1}, "sampling.top_k"),
        ("hi", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),
        ("hi", {"max_tokens": 1.5}, "stopping.max_tokens"),
        ("hi", {"stop": [1]}, "stopping.stop"),
        ("hi", {"drafting": "always"}, "drafting.mode"),
        ("hi", {"num_draft_tokens": -1}, "drafting.num_draft_tokens"),
        ("hi", {"regex": "a", "ebnf": "b"}, "constraint"),
        ("hi", {"choice": "ab"}, "constraint.choice.values"),
        ("hi", {"json_schema": {"a": object()}}, "constraint.json_schema"),
        ("x" * (MAX_MESSAGE_BYTES + 1), {}, ""),
    ],
)
def test_what_cannot_be_sent_names_its_field(prompt: Any, options: dict[str, Any], field: str) -> None:
    """The client refuses what the message cannot hold, with the path that the server would use."""
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_misspelt_option_is_a_type_error_with_a_hint() -> None:
    """Options are never dropped in silence."""
    with pytest.raises(TypeError, match=r"'temprature'; did you mean 'temperature'"):
        generate_request("hi", {"temprature": 1.0})
    with pytest.raises(TypeError, match="'max_tokens'"):
        tokenize_request("hi", {"max_tokens": 1})


def test_tokenize_takes_exactly_one_input() -> None:
    """Text or messages, with the same chat options as generate."""
    assert as_dict(tokenize_request("hi", {"add_special_tokens": False})) == {
        "text": "hi",
        "add_special_tokens": False,
    }
    request = tokenize_request(None, {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True})
    assert request.WhichOneof("input") == "chat"
    with pytest.raises(InvalidRequest, match="exactly one"):
        tokenize_request(None, {})


def test_detokenize_leaves_absent_what_was_not_said() -> None:
    """skip_special_tokens is present only when given."""
    assert not detokenize_request([1], None).HasField("skip_special_tokens")
    assert detokenize_request([1], False) == pb.DetokenizeRequest(token_ids=[1], skip_special_tokens=False)
    with pytest.raises(InvalidRequest, match="token_ids"):
        detokenize_request([2**32], None)
