"""Constraints over a real gRPC server: what is taken and refused, the compiler's process, and answers as objects."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc
import pytest
from pydantic import BaseModel, Field, field_validator
from service.target_fixture import Running, drafted, happens, reconciled, target_service, visible

from draftwire import testing
from draftwire.client import Client
from draftwire.errors import FailedPrecondition, InternalError, InvalidRequest, UnfinishedOutput, Unsupported
from draftwire.events import Chunk, FinishReason
from draftwire.testing import FakeDraftService
from draftwire.testing_models import save_tiny_model
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import from_rpc_error
from target_service.grammars import Grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["alpha", "beta"]}},
    "required": ["name", "kind"],
}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "b{1,9}"}, "end": "</a>"}}  # fmt: skip  # noqa: E501


class Person(BaseModel):
    """What the tiny model is asked for."""

    name: Annotated[str, Field(max_length=6)]
    kind: Literal["alpha", "beta"]
    size: Annotated[int, Field(ge=1, le=99)] | None = None


class Picky(BaseModel):
    """Has a rule that no schema tells."""

    kind: Literal["alpha"]

    @field_validator("kind")
    @classmethod
    def _never(cls, value: str) -> str:
        raise ValueError("not today")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=512)


@pytest.fixture
async def target(model: Path) -> AsyncIterator[Running]:
    async with target_service(model) as running:
        yield running
        await running.at_rest()


def grammars(target: Running) -> Grammars:
    found = target.target.grammars
    assert found is not None
    return found


def compiler(target: Running) -> int | None:
    process = grammars(target)._process._process
    return process.pid if process is not None else None


async def test_every_kind_of_constraint_is_kept(target: Running) -> None:
    """The text is of the grammar, the end says so, forced text was drafted without any drafter, and off means none."""
    assert "grammar" in (await target.client.model_info()).capabilities
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": SCHEMA}, r'\{"name": ".{0,5}", "kind": "(alpha|beta)"\}'),
        ({"regex": "[ab]{2,6}-tail"}, "[ab]{2,6}-tail"),
        ({"ebnf": 'root ::= "<" [0-9] [0-9]? ">"'}, "<[0-9]{1,2}>"),
        ({"choice": ["north-east", "north-west"]}, "north-(east|west)"),
        ({"structural_tag": TAG}, "<a>b{1,9}</a>"),
    ]
    for options, pattern in kinds:
        drafted = await target.client.complete("Go", max_tokens=80, seed=4, temperature=1.0, **options)
        plain = await target.client.complete("Go", max_tokens=80, seed=4, temperature=1.0, drafting="off", **options)
        assert re.fullmatch(pattern, plain.text, re.DOTALL), plain.text
        assert plain.finish_reason is FinishReason.GRAMMAR_END
        assert plain.finished.grammar_complete is True
        assert visible(drafted) == visible(plain)
        reconciled(drafted)
        stats = drafted.speculation
        assert 0 < stats.num_accepted_forced_draft_tokens <= stats.num_forced_draft_tokens == stats.num_draft_tokens
        assert stats.constraint_s is not None
        assert 0 < stats.constraint_s < 5
        assert plain.speculation.num_forced_draft_tokens == 0
    free = await target.client.complete("Go", max_tokens=4)
    assert (free.finished.grammar_complete, free.speculation.constraint_s) == (None, None)


async def test_an_unfinished_object_says_so(target: Running) -> None:
    """The budget in the middle, and any object: with the whitespace that was asked for."""
    cut = await target.client.complete("Go", max_tokens=7, json_schema=SCHEMA)
    assert (cut.finish_reason, cut.finished.grammar_complete) == (FinishReason.MAX_TOKENS, False)
    loose = await target.client.complete("Go", max_tokens=30, json_object=True, any_whitespace=True, temperature=1.0)
    assert loose.text.startswith("{")
    stopped = await target.client.complete("Go", max_tokens=40, json_schema=SCHEMA, stop="name")
    assert (stopped.text, stopped.finished.grammar_complete) == ('{"', False)


async def test_what_cannot_be_kept_is_refused_before_any_work(target: Running) -> None:
    """By field, with the compiler's words and without its clock and sources."""
    brake = target.brake(prefill=True)
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"json_schema": {"$ref": "https://example.org/x.json"}}, "json_schema", "leads outside"),
        ({"json_schema": {"type": "number", "multipleOf": 0.1}}, "json_schema", "multipleOf"),
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"regex": "a(?=b)"}, "regex", "Lookahead"),
        ({"ebnf": "root ::= nothing"}, "ebnf", "nothing"),
        ({"structural_tag": {"x": 1}}, "structural_tag", "format"),
        ({"regex": " "}, "regex", "empty"),
        ({"choice": []}, "choice.values", "at least one"),
        ({"choice": ["a", ""]}, "choice.values", "none of them empty"),
        ({"json_object": False}, "json_object", "false"),
        ({"regex": "a" * 70_000}, "regex", "at most 65536"),
        ({"any_whitespace": True}, "grammar", "without a constraint"),
    ]
    for options, field, words in refused:
        with pytest.raises(InvalidRequest) as caught:
            await target.client.complete("Go", **options)
        (violation,) = caught.value.violations
        assert violation.field == field
        assert words in violation.description
        assert not re.search(r"\d\d:\d\d:\d\d|/project|\.cc", str(caught.value))
        assert (brake.forwards, brake.prefills) == (0, 0), options


async def test_a_compiler_that_hangs_is_ended_and_holds_nobody(model: Path) -> None:
    """Past its time the constraint is refused; others go on meanwhile, and the next one gets a new compiler."""
    async with target_service(model, grammar_timeout_s=1.0) as target:
        await target.client.complete("Go", regex="ab", max_tokens=8)
        first = compiler(target)
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        stuck = asyncio.ensure_future(target.client.complete("Go", regex="abc", max_tokens=8))
        await happens(lambda: grammars(target)._running)
        assert (await target.client.complete("Go", max_tokens=8)).usage.completion_tokens == 8
        assert (await target.client.complete("Go", regex="ab", max_tokens=8)).text == "ab"
        with pytest.raises(InvalidRequest, match="takes longer than 1 s") as caught:
            await stuck
        assert caught.value.reason == "GRAMMAR_INVALID"
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert (await target.client.complete("Go", regex="abcd", max_tokens=8)).text == "abcd"
        second = compiler(target)
        assert second is not None
        os.kill(second, signal.SIGKILL)
        await happens(lambda: not grammars(target)._process.running)
        assert (await target.client.complete("Go", regex="abcde", max_tokens=8)).text == "abcde"
        last = compiler(target)
        assert last is not None
        await target.at_rest()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


async def test_equal_constraints_are_compiled_once_and_kept_within_bounds(model: Path) -> None:
    """Also when they come together, and when the first that asked has left."""
    async with target_service(model, grammar_cache_bytes=30_000) as target:
        owner = grammars(target)
        compiled: list[str] = []
        ask = owner._process.ask

        async def counted(job: dict[str, Any], timeout_s: float) -> str:
            compiled.append(job["text"])
            return await ask(job, timeout_s)

        owner._process.ask = counted  # type: ignore[method-assign]
        leaver = asyncio.ensure_future(target.client.complete("Go", regex="[ab]{3}", max_tokens=8))
        await happens(lambda: owner._running)
        others = [asyncio.ensure_future(target.client.complete("Go", regex="[ab]{3}", max_tokens=8)) for _ in range(3)]
        leaver.cancel()
        assert len({(await other).text for other in others}) == 1
        assert compiled == ["[ab]{3}"]
        for number in range(12):
            await target.client.complete("Go", regex=f"a{number}[0-9]+z", max_tokens=2)
            assert owner.cached_bytes <= 30_000
        assert 0 < len(owner._kept) < 12
        await target.at_rest()


async def _read(call: Any, texts: list[str]) -> None:
    async for event in call:
        texts.append(event.chunk.text)


async def test_a_dead_end_is_an_error_after_what_could_be_said(target: Running) -> None:
    """A stop id with text is banned before min_tokens, and here the grammar wants it: the same with drafts and without."""
    for drafting in ("off", "fixed"):
        request = pb.GenerateRequest(
            text="Go",
            regex="xy[ab]c",
            stopping=pb.StoppingParams(stop_token_ids=[ord("c")], min_tokens=10, max_tokens=20),
            drafting=pb.DraftingParams(mode=pb.DRAFTING_MODE_OFF if drafting == "off" else pb.DRAFTING_MODE_FIXED),
        )
        call, texts = target.stub.Generate(request), list[str]()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read(call, texts)
        error = from_rpc_error(caught.value)
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "CONSTRAINT_DEAD_END"
        assert "step 3" in error.message
        assert re.fullmatch("xy[ab]", "".join(texts))


async def test_without_the_extra_the_target_serves_and_names_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    async with target_service(model) as target:
        assert (await target.client.complete("Go", max_tokens=4)).usage.completion_tokens == 4
        assert "grammar" not in (await target.client.model_info()).capabilities
        for options in ({"regex": "a"}, {"any_whitespace": True}):
            with pytest.raises(Unsupported, match=r"\[grammar\]"):
                await target.client.complete("Go", **options)  # type: ignore[arg-type]


async def test_an_extra_that_does_not_load_is_named_as_well(target: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, but broken: only the first constraint can tell."""
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(Unsupported, match=r"\[grammar\]"):
        await target.client.complete("Go", regex="a")


async def test_answers_come_as_objects(target: Running) -> None:
    """Both clients; with a clear error where the text was cut short, or where Python's own rules refuse it."""
    client = target.client
    found = await client.generate("Go", response_model=Person, max_tokens=120, temperature=1.0, seed=3)
    assert isinstance(found, Person)

    def blocking() -> Person:
        with Client(target.address) as sync:
            return sync.generate("Go", response_model=Person, max_tokens=120, temperature=1.0, seed=3)

    assert await asyncio.to_thread(blocking) == found
    with pytest.raises(UnfinishedOutput, match="max_tokens") as caught:
        await client.generate("Go", response_model=Person, max_tokens=5)
    assert caught.value.text.startswith('{"')
    with pytest.raises(InternalError, match="not today"):
        await client.generate("Go", response_model=Picky, max_tokens=40)
    with pytest.raises(InvalidRequest, match="regex"):
        await client.generate("Go", response_model=Person, regex="a")
    with pytest.raises(InvalidRequest, match="stop"):
        await client.generate("Go", response_model=Person, stop="}")
    with pytest.raises(InvalidRequest, match="pydantic"):
        await client.generate("Go", response_model=dict)  # type: ignore[type-var]


async def test_logprobs_of_forced_tokens_are_certain(target: Running) -> None:
    """They are those of what the constraint leaves, and the lists never have what it rules out."""
    drafted = await target.client.complete("Go", choice=["ab", "ac"], top_logprobs=4, max_tokens=8)
    first, second = drafted.tokens
    assert (first.text, first.logprob) == ("a", 0.0)
    assert [top.id for top in first.top_logprobs] == [ord("a")]
    assert {top.id for top in second.top_logprobs} == {ord("b"), ord("c")}
    events = [event async for event in target.client.generate("Go", choice=["ab", "ac"], max_tokens=8)]
    assert json.dumps([event.text for event in events if isinstance(event, Chunk)])


async def test_a_drafter_and_the_grammar_draft_together(model: Path) -> None:
    """Its drafts stand beside forced ones, are counted apart, and its session never leaves the committed ids."""
    async with target_service(model) as alone:
        plain = await alone.client.complete("Go", max_tokens=80, json_schema=SCHEMA, drafting="off")
    answers = [testing.perfect(plain.token_ids), testing.fixed(*b"```json\n"), testing.outside_vocabulary(257)]
    for script in [*answers, testing.hang()]:
        async with drafted(model, FakeDraftService(script), draft_timeout_s=0.2) as (target, fake):
            found = await target.client.complete(
                "Go", max_tokens=80, json_schema=SCHEMA, drafting="fixed", num_draft_tokens=6
            )
            assert visible(found) == visible(plain)
            reconciled(found)
            stats = found.speculation
            assert stats.num_forced_draft_tokens > 0
            if script is answers[0]:
                assert stats.num_forced_draft_tokens < stats.num_draft_tokens
            if script is answers[2]:
                assert stats.num_forced_draft_tokens == stats.num_draft_tokens
            await target.at_rest()
            assert fake.refused == []


async def test_a_constraint_over_the_limit_is_refused_before_it_is_compiled(model: Path) -> None:
    async with target_service(model, grammar_max_bytes=20) as target:
        assert (await target.client.complete("x", regex="a{3}", max_tokens=8)).text == "aaa"
        with pytest.raises(InvalidRequest) as caught:
            await target.client.complete("x", regex="a" * 21)
        assert "20" in caught.value.violations[0].description
