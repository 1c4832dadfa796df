"""From the wire to the core: every bad field is named together with the value that would be right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.errors import DraftwireError, InvalidRequest, NotFound, Unsupported
from draftwire.testing_models import TINY_END_IDS, TINY_VOCAB, save_tiny_model
from draftwire.tokenizer import Tokenizer
from draftwire.v1 import target_pb2 as pb
from target_service.checks import Checks
from target_service.params import Constraint, Drafting, DraftingMode, Generation, Penalties
from target_service.requests import MAX_DRAFTS, Defaults, generation_of, prompt_ids

WIDTH = 320
"""The head of the test's model: wider than its tokenizer, as real ones are."""
CONTEXT = 64
DEFAULTS = Defaults(
    model_id="tiny",
    context_length=CONTEXT,
    width=WIDTH,
    end_ids=frozenset(TINY_END_IDS),
    max_tokens=20,
    temperature=0.0,
    drafting="auto",
    num_draft_tokens=16,
)
HUGE = 2**32 - 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", 1))


def request(**fields: Any) -> pb.GenerateRequest:
    """A good request with some fields set: nested ones as dicts, which protobuf merges."""
    fields.setdefault("text", "hello")
    if fields["text"] is None:
        del fields["text"]
    return pb.GenerateRequest(**fields)


def made(tokenizer: Tokenizer, defaults: Defaults = DEFAULTS, **fields: Any) -> Generation:
    return generation_of(request(**fields), tokenizer, defaults)


def refused(tokenizer: Tokenizer, defaults: Defaults = DEFAULTS, **fields: Any) -> dict[str, str]:
    """The violations of a bad request, field -> description."""
    with pytest.raises(InvalidRequest) as caught:
        made(tokenizer, defaults, **fields)
    assert caught.value.violations
    found = {violation.field: violation.description for violation in caught.value.violations}
    assert all(description for description in found.values())
    assert next(iter(found)) in caught.value.message
    return found


def test_an_empty_request_takes_every_default(tokenizer: Tokenizer) -> None:
    generation = made(tokenizer)
    assert generation.prompt == tuple(b"hello")
    assert generation.stopping.max_tokens == 20
    assert generation.stopping.end_ids == frozenset(TINY_END_IDS)
    assert not generation.stopping.capped_by_context
    assert generation.choosing.sampler.temperature == 0.0
    assert (generation.choosing.sampler.top_p, generation.choosing.sampler.top_k) == (1.0, 0)
    assert generation.choosing.penalties == Penalties()
    assert generation.choosing.penalties.window == 20
    assert generation.choosing.top_logprobs is None
    assert generation.drafting == Drafting(DraftingMode.AUTO, 16)
    assert generation.skip_special_tokens
    assert generation.request_id


def test_given_values_are_kept(tokenizer: Tokenizer) -> None:
    generation = made(
        tokenizer,
        request_id="mine",
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            penalty_window=0,
            logit_bias={5: -100.0, 319: 1.5},
        ),
        stopping=pb.StoppingParams(max_tokens=9, min_tokens=3, stop=["a", "b"], stop_token_ids=[5, 319]),
        response=pb.ResponseOptions(top_logprobs=0, skip_special_tokens=False, n=1),
        drafting=pb.DraftingParams(mode=pb.DRAFTING_MODE_FIXED, num_draft_tokens=3),
        cache=pb.CacheParams(cache_salt="salt"),
        priority=-4,
    )
    sampler, choosing = generation.choosing.sampler, generation.choosing
    assert (sampler.temperature, sampler.top_p, sampler.top_k, sampler.min_p) == (0.5, 0.25, 7, 0.125)
    assert sampler.seed == 2**64 - 1
    assert choosing.penalties == Penalties(repetition=1.5, presence=-1.0, frequency=2.0, window=0)
    assert choosing.logit_bias == {5: -100.0, 319: 1.5}
    assert choosing.banned == frozenset({*TINY_END_IDS, 5, 319})
    assert choosing.min_tokens == generation.stopping.min_tokens == 3
    assert choosing.top_logprobs == 0
    assert (generation.stopping.stops, generation.stopping.stop_ids) == (("a", "b"), frozenset({5, 319}))
    assert generation.drafting == Drafting(DraftingMode.FIXED, 3)
    assert (generation.request_id, generation.cache_salt, generation.priority) == ("mine", "salt", -4)
    assert not generation.skip_special_tokens


def test_zero_is_a_value_and_not_an_absent_field(tokenizer: Tokenizer) -> None:
    hot = replace(DEFAULTS, temperature=0.75)
    assert made(tokenizer, hot).choosing.sampler.temperature == 0.75
    assert made(tokenizer, hot, sampling=pb.SamplingParams(temperature=0.0)).choosing.sampler.greedy
    assert made(tokenizer, sampling=pb.SamplingParams(seed=0)).choosing.sampler.seed == 0


def test_a_seed_that_nobody_gave_is_picked_anew(tokenizer: Tokenizer) -> None:
    seeds = {made(tokenizer).choosing.sampler.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


NUMBERS = {
    "temperature": ((0.0, 1e-3, 100.0), (-1.0, -1e-6, 100.5, math.nan, math.inf, -math.inf), "[0, 100]"),
    "top_p": ((1e-6, 0.5, 1.0), (0.0, -0.5, 1.5, math.nan, math.inf), "(0, 1]"),
    "min_p": ((0.0, 0.5, 1.0), (-0.5, 1.5, math.nan, -math.inf), "[0, 1]"),
    "repetition_penalty": ((0.5, 1.0, 100.0), (0.0, -1.0, 101.0, math.nan, math.inf), "(0, 100]"),
    "presence_penalty": ((-100.0, 0.0, 100.0), (-101.0, 101.0, math.nan, math.inf), "[-100, 100]"),
    "frequency_penalty": ((-100.0, 0.0, 100.0), (-101.0, 101.0, math.nan, -math.inf), "[-100, 100]"),
}


def sampling_with(name: str, value: float) -> pb.SamplingParams:
    wire = pb.SamplingParams()
    setattr(wire, name, value)
    return wire


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_outside_their_range_are_refused_with_the_range(tokenizer: Tokenizer, name: str) -> None:
    """Kind of fault: NaN passes comparisons, so a check that asks for `below` or `above` lets it through."""
    good, bad, bounds = NUMBERS[name]
    for value in good:
        made(tokenizer, sampling=sampling_with(name, value))
    for value in bad:
        found = refused(tokenizer, sampling=sampling_with(name, value))
        assert list(found) == [f"sampling.{name}"]
        assert bounds in found[f"sampling.{name}"]


@pytest.mark.parametrize("value", [-101.0, 101.0, math.nan, math.inf, -math.inf])
def test_a_bias_out_of_range_is_named_by_its_id(tokenizer: Tokenizer, value: float) -> None:
    found = refused(tokenizer, sampling=pb.SamplingParams(logit_bias={7: value, 8: 1.0}))
    assert list(found) == ["sampling.logit_bias[7]"]
    assert "[-100, 100]" in found["sampling.logit_bias[7]"]


@pytest.mark.parametrize("token", [WIDTH, HUGE])
def test_ids_outside_the_vocabulary_are_refused_wherever_they_stand(tokenizer: Tokenizer, token: int) -> None:
    """They would be written out of bounds, or read there, in silence."""
    end = f"the vocabulary ends at {WIDTH - 1}"
    assert end in refused(tokenizer, text=None, token_ids=pb.TokenIds(ids=[1, token]))["token_ids.ids[1]"]
    assert end in refused(tokenizer, stopping=pb.StoppingParams(stop_token_ids=[token]))["stopping.stop_token_ids[0]"]
    assert (
        end in refused(tokenizer, sampling=pb.SamplingParams(logit_bias={token: 1.0}))[f"sampling.logit_bias[{token}]"]
    )
    assert made(tokenizer, text=None, token_ids=pb.TokenIds(ids=[WIDTH - 1])).prompt == (WIDTH - 1,)


def test_end_ids_beyond_the_head_are_not_banned(tokenizer: Tokenizer) -> None:
    wide = replace(DEFAULTS, end_ids=frozenset({5, WIDTH + 3}))
    assert made(tokenizer, wide, stopping=pb.StoppingParams(min_tokens=2)).choosing.banned == frozenset({5})


@pytest.mark.parametrize("wanted", [1, 10, 59, 60, 512, 2**31, HUGE])
def test_max_tokens_is_lowered_to_what_the_context_holds(tokenizer: Tokenizer, wanted: int) -> None:
    """Kind of fault: odd limits (2^31) overflow or mean something of their own."""
    stopping = made(tokenizer, stopping=pb.StoppingParams(max_tokens=wanted)).stopping
    assert stopping.max_tokens == min(wanted, CONTEXT - 5)
    assert stopping.capped_by_context == (wanted > CONTEXT - 5)


def test_the_default_of_max_tokens_is_lowered_too(tokenizer: Tokenizer) -> None:
    stopping = made(tokenizer, replace(DEFAULTS, max_tokens=512)).stopping
    assert (stopping.max_tokens, stopping.capped_by_context) == (CONTEXT - 5, True)


def test_no_token_at_all_is_refused(tokenizer: Tokenizer) -> None:
    found = refused(tokenizer, stopping=pb.StoppingParams(max_tokens=0))
    assert "at least 1" in found["stopping.max_tokens"]


def test_min_tokens_above_max_tokens_names_both(tokenizer: Tokenizer) -> None:
    found = refused(tokenizer, stopping=pb.StoppingParams(max_tokens=4, min_tokens=5))["stopping.min_tokens"]
    assert "5" in found
    assert "4" in found
    assert made(tokenizer, stopping=pb.StoppingParams(max_tokens=4, min_tokens=4)).stopping.min_tokens == 4
    assert "20" in refused(tokenizer, stopping=pb.StoppingParams(min_tokens=HUGE))["stopping.min_tokens"]


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(tokenizer: Tokenizer, length: int) -> None:
    """Kind of fault: looking ahead past the end of the context. One free place is enough for an answer of one token."""
    for prompt in ({"text": "x" * length}, {"text": None, "token_ids": pb.TokenIds(ids=[7] * length)}):
        if length < CONTEXT:
            assert made(tokenizer, **prompt).stopping.max_tokens == min(20, CONTEXT - length)
        else:
            with pytest.raises(InvalidRequest) as caught:
                made(tokenizer, **prompt)
            assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
            assert str(length) in str(caught.value)
            assert str(CONTEXT) in str(caught.value)


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_prompt_needs_a_token_and_one_is_enough(tokenizer: Tokenizer, ids: list[int]) -> None:
    if ids:
        assert made(tokenizer, text=None, token_ids=pb.TokenIds(ids=ids)).prompt == (1,)
    else:
        assert "at least one" in refused(tokenizer, text=None, token_ids=pb.TokenIds())["token_ids.ids"]
        assert "at least one" in refused(tokenizer, text="")["text"]


def test_a_missing_prompt_says_what_there_is_to_give(tokenizer: Tokenizer) -> None:
    found = refused(tokenizer, text=None)["prompt"]
    assert all(name in found for name in ("text", "chat", "token_ids"))


def test_stop_strings_and_ids_have_limits(tokenizer: Tokenizer) -> None:
    def stops(*texts: str) -> dict[str, str]:
        return refused(tokenizer, stopping=pb.StoppingParams(stop=texts))

    assert list(stops("a", "", "b", "")) == ["stopping.stop[1]", "stopping.stop[3]"]
    assert "256" in stops("x" * 257)["stopping.stop[0]"]
    assert "16" in stops(*"abcdefghijklmnopq")["stopping.stop"]
    assert made(tokenizer, stopping=pb.StoppingParams(stop=["😀" * 256] * 16)).stopping.stops == ("😀" * 256,) * 16
    found = refused(tokenizer, stopping=pb.StoppingParams(stop_token_ids=range(65)))
    assert "64" in found["stopping.stop_token_ids"]


def test_names_have_limits(tokenizer: Tokenizer) -> None:
    assert "128" in refused(tokenizer, request_id="x" * 129)["request_id"]
    assert "128" in refused(tokenizer, cache=pb.CacheParams(cache_salt="x" * 129))["cache.cache_salt"]
    found = refused(tokenizer, sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)))
    assert "1024" in found["sampling.logit_bias"]


@pytest.mark.parametrize("top", [21, 2**31, HUGE])
def test_top_logprobs_have_a_limit(tokenizer: Tokenizer, top: int) -> None:
    assert "[0, 20]" in refused(tokenizer, response=pb.ResponseOptions(top_logprobs=top))["response.top_logprobs"]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_top_logprobs_up_to_the_limit_are_fine(tokenizer: Tokenizer, top: int) -> None:
    assert made(tokenizer, response=pb.ResponseOptions(top_logprobs=top)).choosing.top_logprobs == top


def test_everything_that_is_wrong_is_named_at_once(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(
            tokenizer,
            text=None,
            request_id="x" * 200,
            sampling=pb.SamplingParams(
                temperature=-1, top_p=0, min_p=2, repetition_penalty=math.nan, logit_bias={999: 1}
            ),
            stopping=pb.StoppingParams(max_tokens=0, stop=[""], stop_token_ids=[1000]),
            response=pb.ResponseOptions(top_logprobs=99),
        )
    assert {violation.field for violation in caught.value.violations} == {
        "prompt",
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.repetition_penalty",
        "sampling.logit_bias[999]",
        "stopping.max_tokens",
        "stopping.stop[0]",
        "stopping.stop_token_ids[0]",
        "response.top_logprobs",
    }
    assert "and 7 more" in caught.value.message


@pytest.mark.parametrize(
    ("wanted", "mode", "expected"),
    [
        (None, pb.DRAFTING_MODE_UNSPECIFIED, Drafting(DraftingMode.AUTO, 16)),
        (None, pb.DRAFTING_MODE_FIXED, Drafting(DraftingMode.FIXED, 16)),
        (None, pb.DRAFTING_MODE_OFF, Drafting(DraftingMode.OFF, 16)),
        (0, pb.DRAFTING_MODE_FIXED, Drafting(DraftingMode.OFF, 0)),
        (0, pb.DRAFTING_MODE_AUTO, Drafting(DraftingMode.OFF, 0)),
        (1, pb.DRAFTING_MODE_AUTO, Drafting(DraftingMode.AUTO, 1)),
        (10**6, pb.DRAFTING_MODE_FIXED, Drafting(DraftingMode.FIXED, MAX_DRAFTS)),
        (HUGE, pb.DRAFTING_MODE_AUTO, Drafting(DraftingMode.AUTO, MAX_DRAFTS)),
    ],
)
def test_odd_numbers_of_drafts_have_a_meaning(
    tokenizer: Tokenizer, wanted: int | None, mode: pb.DraftingMode.ValueType, expected: Drafting
) -> None:
    """Kind of fault: degenerate numbers of drafts. 0 is plain decoding, a huge one is as many as the server allows."""
    wire = pb.DraftingParams(mode=mode)
    if wanted is not None:
        wire.num_draft_tokens = wanted
    assert made(tokenizer, drafting=wire).drafting == expected


def test_a_drafting_mode_of_a_newer_client_is_refused(tokenizer: Tokenizer) -> None:
    wire = pb.GenerateRequest(text="x")
    wire.drafting.ParseFromString(b"\x08\x63")
    with pytest.raises(InvalidRequest) as caught:
        generation_of(wire, tokenizer, DEFAULTS)
    assert caught.value.violations[0].field == "drafting.mode"
    assert "AUTO, OFF or FIXED" in caught.value.violations[0].description


def test_drafting_takes_the_servers_default(tokenizer: Tokenizer) -> None:
    off = replace(DEFAULTS, drafting="off", num_draft_tokens=4)
    assert made(tokenizer, off).drafting == Drafting(DraftingMode.OFF, 4)
    on = made(tokenizer, off, drafting=pb.DraftingParams(mode=pb.DRAFTING_MODE_AUTO)).drafting
    assert on == Drafting(DraftingMode.AUTO, 4)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("json_schema", {"json_schema": "{}"}),
        ("json_object", {"json_object": True}),
        ("regex", {"regex": "a+"}),
        ("ebnf", {"ebnf": "root ::= 'a'"}),
        ("choice", {"choice": pb.Choices()}),
        ("structural_tag", {"structural_tag": "{}"}),
        ("grammar", {"grammar": pb.GrammarOptions(any_whitespace=True)}),
        ("response.n", {"response": pb.ResponseOptions(n=2)}),
        ("response.echo", {"response": pb.ResponseOptions(echo=True)}),
        ("response.prompt_logprobs", {"response": pb.ResponseOptions(prompt_logprobs=0)}),
    ],
)
def test_options_that_the_server_lacks_are_refused_by_name(
    tokenizer: Tokenizer, name: str, fields: dict[str, Any]
) -> None:
    """Kind of fault: an option is taken without complaint and has no effect."""
    with pytest.raises(Unsupported, match=rf"^{name}: "):
        made(tokenizer, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_schema": "{}"}, Constraint("json_schema", "{}")),
        ({"json_object": True}, Constraint("json_object")),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"choice": pb.Choices(values=["b", "a", "b"])}, Constraint("choice", values=("b", "a"))),
        (
            {"json_schema": "{}", "grammar": pb.GrammarOptions(any_whitespace=True)},
            Constraint("json_schema", "{}", any_whitespace=True),
        ),
        ({}, None),
    ],
)
def test_a_constraint_is_taken_where_the_server_has_them(
    tokenizer: Tokenizer, fields: dict[str, Any], expected: Constraint | None
) -> None:
    """Whether its content is right, the compiler says."""
    assert made(tokenizer, replace(DEFAULTS, grammar_bytes=100), **fields).constraint == expected


def test_constraints_are_bounded_in_bytes(tokenizer: Tokenizer) -> None:
    """Characters may have several, and a choice is counted whole."""
    bounded = replace(DEFAULTS, grammar_bytes=10)
    assert made(tokenizer, bounded, regex="é" * 5).constraint
    assert "regex" in refused(tokenizer, bounded, regex="é" * 6)
    assert "choice" in refused(tokenizer, bounded, choice=pb.Choices(values=["abcdef", "ghijk"]))


def test_another_model_is_not_found_and_this_one_may_be_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(NotFound, match="'tiny' is"):
        made(tokenizer, model="huge")
    assert made(tokenizer, model="tiny").prompt


def test_ignore_eos_leaves_nothing_to_end_or_ban(tokenizer: Tokenizer) -> None:
    generation = made(tokenizer, stopping=pb.StoppingParams(ignore_eos=True, stop_token_ids=[9]))
    assert generation.stopping.end_ids == frozenset()
    assert generation.choosing.banned == frozenset({9})


def chat(*messages: tuple[str, str], **fields: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages], **fields)


def rendered(tokenizer: Tokenizer, prompt: pb.ChatPrompt) -> str:
    roomy = replace(DEFAULTS, context_length=4096)
    return tokenizer.decode(made(tokenizer, roomy, text=None, chat=prompt).prompt, False)


def test_a_chat_opens_an_assistant_turn_unless_told_otherwise(tokenizer: Tokenizer) -> None:
    user = "<|im_start|>user\nhi<|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    assert rendered(tokenizer, chat(("user", "hi"))) == user + opening
    assert rendered(tokenizer, chat(("user", "hi"), add_generation_prompt=True)) == user + opening
    assert rendered(tokenizer, chat(("user", "hi"), add_generation_prompt=False)) == user
    continued = rendered(tokenizer, chat(("user", "hi"), ("assistant", "Sure"), continue_final_message=True))
    assert continued == user + opening + "Sure"


def test_a_chat_cannot_both_open_and_continue_a_turn(tokenizer: Tokenizer) -> None:
    prompt = chat(("user", "hi"), add_generation_prompt=True, continue_final_message=True)
    assert list(refused(tokenizer, text=None, chat=prompt)) == ["chat.add_generation_prompt"]


def test_a_chat_needs_messages_with_roles(tokenizer: Tokenizer) -> None:
    assert list(refused(tokenizer, text=None, chat=pb.ChatPrompt())) == ["chat.messages"]
    found = refused(tokenizer, text=None, chat=chat(("user", "a"), ("", "b")))
    assert '"user"' in found["chat.messages[1].role"]


def struct(content: dict[str, Any]) -> Struct:
    made = Struct()
    made.update(content)
    return made


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"maximum": 3, "half": 0.5, "none": None}}}


def test_tools_reach_the_template_in_one_fixed_order_with_whole_numbers_whole(tokenizer: Tokenizer) -> None:
    """Kind of fault: a Struct has no order of keys, so the same request would give another prompt in another process."""
    backwards = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}  # type: ignore[attr-defined]
    texts = {rendered(tokenizer, chat(("user", "hi"), tools=[struct(tool)])) for tool in (TOOL, backwards)}
    (text,) = texts
    expected = (
        '[{"type": "function", "function": {"name": "add", "parameters": {"half": 0.5, "maximum": 3, "none": null}}}]'
    )
    assert text.startswith(f"<|im_start|>tools\n{expected}<|im_end|>\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_named_inside_tools_and_arguments(tokenizer: Tokenizer, value: float) -> None:
    """Kind of fault: they raise where they are converted, and a bad request becomes an internal error."""
    bad = Struct(fields={"a": Value(list_value=ListValue(values=[Value(number_value=1), Value(number_value=value)]))})
    message = pb.ChatMessage(role="assistant", content="x", tool_calls=[bad])
    prompt = pb.ChatPrompt(messages=[message], tools=[Struct(), bad], template_arguments=bad)
    assert set(refused(tokenizer, text=None, chat=prompt)) == {
        "chat.template_arguments.a[1]",
        "chat.messages[0].tool_calls[0].a[1]",
        "chat.tools[1].a[1]",
    }


def test_arguments_of_the_tokenizer_itself_are_no_template_arguments(tokenizer: Tokenizer) -> None:
    prompt = chat(("user", "hi"), template_arguments=struct({"tokenize": False}))
    assert "tokenize" in refused(tokenizer, text=None, chat=prompt)["chat"]


class NoTools:
    """A tokenizer whose template knows no tools, or that has none at all."""

    def __init__(self, template: bool) -> None:
        self.has_chat_template = template

    def template_uses(self, name: str) -> bool:
        return False

    def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
        return [len(messages)]


def test_tools_are_refused_where_the_template_takes_none() -> None:
    tokenizer: Any = NoTools(template=True)
    with pytest.raises(Unsupported, match=r"^chat\.tools: "):
        made(tokenizer, text=None, chat=chat(("user", "hi"), tools=[struct(TOOL)]))
    assert made(tokenizer, text=None, chat=chat(("user", "hi"))).prompt == (1,)


def test_a_model_without_a_template_says_what_to_send_instead() -> None:
    tokenizer: Any = NoTools(template=False)
    with pytest.raises(InvalidRequest) as caught:
        made(tokenizer, text=None, chat=chat(("user", "hi")))
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    assert "text or token_ids" in str(caught.value)


def test_tokenizing_is_what_generating_does(tokenizer: Tokenizer) -> None:
    checks = Checks()
    wire = pb.TokenizeRequest(chat=chat(("user", "hi"), tools=[struct(TOOL)]))
    roomy = replace(DEFAULTS, context_length=4096)
    assert tuple(prompt_ids(wire, tokenizer, checks, WIDTH)) == made(tokenizer, roomy, text=None, chat=wire.chat).prompt
    assert prompt_ids(pb.TokenizeRequest(text=""), tokenizer, checks, WIDTH) == []
    checks.done()
    prompt_ids(pb.TokenizeRequest(), tokenizer, checks, WIDTH)
    with pytest.raises(InvalidRequest):
        checks.done()


def test_the_head_of_the_test_is_wider_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == TINY_VOCAB < WIDTH


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_that_parse_give_a_request_or_a_typed_error(whole: bytes, sampling: bytes, stopping: bytes) -> None:
    """Nothing that can be sent makes the service fail in any other way."""
    wire = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))
    for part, raw in ((wire, whole), (wire.sampling, sampling), (wire.stopping, stopping)):
        copy = type(part)()
        try:
            copy.ParseFromString(raw)
        except Exception:
            continue
        part.MergeFrom(copy)  # type: ignore[arg-type]
    tokenizer: Any = Plain()
    try:
        generation = generation_of(wire, tokenizer, DEFAULTS)
    except DraftwireError:
        return
    assert 1 <= generation.stopping.max_tokens <= CONTEXT - len(generation.prompt)
    assert generation.choosing.sampler.temperature >= 0
    assert all(token < WIDTH for token in (*generation.prompt, *generation.choosing.logit_bias))


class Plain(NoTools):
    """Bytes are ids."""

    def __init__(self) -> None:
        super().__init__(template=False)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def test_the_tiny_model_is_where_the_test_says(tmp_path: Path) -> None:
    """The union of the end ids of all files is what a request gets by default."""
    directory = save_tiny_model(tmp_path / "model", "llama", 2)
    assert Tokenizer(directory).end_ids(directory) == frozenset(TINY_END_IDS)
