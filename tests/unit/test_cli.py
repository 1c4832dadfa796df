"""Commands that talk to a target service, against a real gRPC server that plays scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from client.app import build_app
from draftwire.errors import FieldViolation, InvalidRequest, NotFound, Overloaded, Unavailable
from draftwire.scripted_target import ScriptedTarget, chunk, finished, serve, started
from draftwire.tokens import Role, find, parse_grants
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import to_duration

GOOD = (
    started(),
    chunk(0, (5, "Hello")),
    chunk(1, (6, " big"), (7, " world"), drafted=1),
    finished(3, drafted=2, accepted=1),
)
PLAIN = (started(), chunk(0, (5, "Hi")), finished(1, no_draft_reason=pb.NO_DRAFT_REASON_NO_DRAFTER))


def run(target: ScriptedTarget, *arguments: str, stdin: str | None = None) -> Result:
    with serve(target) as address:
        return CliRunner().invoke(build_app(), list(arguments), input=stdin, env={"DRAFTWIRE_ADDRESS": address})


@pytest.fixture
def good() -> ScriptedTarget:
    return ScriptedTarget(GOOD)


def test_generate_writes_text_to_stdout_and_statistics_to_stderr(good: ScriptedTarget) -> None:
    """A pipe gets the answer, and a line end after it; the numbers go elsewhere."""
    result = run(good, "generate", "Hi")
    assert (result.exit_code, result.stdout) == (0, "Hello big world\n")
    assert "3 tokens, 3.0 tok/s" in result.stderr
    assert "drafted 2, accepted 1 (50%)" in result.stderr


def test_statistics_say_why_there_were_no_drafts() -> None:
    """No zero without its reason; --no-stats leaves the line out."""
    assert "no drafts: no drafter" in run(ScriptedTarget(PLAIN), "generate", "Hi").stderr
    assert run(ScriptedTarget(PLAIN), "generate", "Hi", "--no-stats").stderr == ""


def test_a_prompt_is_a_users_turn_unless_told_otherwise(good: ScriptedTarget) -> None:
    """--system comes before it; --no-chat sends the text as it is."""
    run(good, "generate", "Hi", "--system", "Be brief.")
    run(good, "generate", "Hi", "--no-chat")
    chat, plain = good.requests
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert plain.text == "Hi"
    assert run(good, "generate", "Hi", "--no-chat", "--system", "x").exit_code == 2


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_prompt_may_come_from_standard_input(good: ScriptedTarget, arguments: tuple[str, ...]) -> None:
    """Absent or "-": everything up to the end of the input, unchanged."""
    assert run(good, "generate", "--no-chat", *arguments, stdin=" two\nlines\n").exit_code == 0
    assert good.requests[0].text == " two\nlines\n"


def test_flags_reach_the_request(good: ScriptedTarget, tmp_path: Path) -> None:
    """Names follow mlx-lm; absent flags leave the server's defaults alone."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}', encoding="utf-8")
    flags = "--temp 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 7 --max-tokens 4 --min-tokens 1 --stop a --stop b"
    flags += " --stop-token-id 2 --logit-bias 5=-100 --logit-bias 6=1.5 --repetition-penalty 1.1 --penalty-window 9"
    flags += " --presence-penalty 0.5 --frequency-penalty 0.25 --ignore-eos --drafting fixed --num-draft-tokens 3"
    flags += f" --no-cache --cache-salt s --priority 2 --top-logprobs 1 --json-schema {schema}"
    assert run(good, "generate", "Hi", *flags.split()).exit_code == 0
    (request,) = good.requests
    assert request.sampling.temperature == 0.5
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.penalty_window) == (3, 7, 9)
    assert dict(request.sampling.logit_bias) == {5: -100.0, 6: 1.5}
    assert list(request.stopping.stop) == ["a", "b"]
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (4, True)
    assert (request.drafting.mode, request.drafting.num_draft_tokens) == (pb.DRAFTING_MODE_FIXED, 3)
    assert (request.cache.disabled, request.cache.cache_salt, request.priority) == (True, "s", 2)
    assert request.json_schema == '{"type": "object"}'
    run(good, "generate", "Hi")
    assert not any(
        good.requests[1].HasField(name) for name in ("sampling", "stopping", "drafting", "cache", "response")
    )


@pytest.mark.parametrize(
    ("flags", "kind", "value"),
    [
        (["--json-object"], "json_object", True),
        (["--regex", "a+"], "regex", "a+"),
        (["--grammar", "FILE"], "ebnf", 'root ::= "a"'),
        (["--ebnf", "FILE"], "ebnf", 'root ::= "a"'),
        (["--structural-tag", "FILE"], "structural_tag", 'root ::= "a"'),
        (["--json-schema", "FILE", "--any-whitespace"], "json_schema", 'root ::= "a"'),
        (["--choice", "a", "--choice", "b"], "choice", pb.Choices(values=["a", "b"])),
    ],
)
def test_a_constraint_reaches_the_request(
    good: ScriptedTarget, tmp_path: Path, flags: list[str], kind: str, value: Any
) -> None:
    """Those in files are read here."""
    file = tmp_path / "constraint"
    file.write_text('root ::= "a"', encoding="utf-8")
    assert run(good, "generate", "Hi", *(str(file) if flag == "FILE" else flag for flag in flags)).exit_code == 0
    (request,) = good.requests
    assert request.WhichOneof("constraint") == kind
    assert getattr(request, kind) == value
    assert request.grammar.any_whitespace == ("--any-whitespace" in flags)


def test_json_prints_one_event_a_line(good: ScriptedTarget) -> None:
    """Programs read kinds, ids, each token's text and statistics; the text is that of the chunks."""
    result = run(good, "generate", "Hi", "--json", "--no-stats")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "chunk", "chunk", "finished"]
    assert events[2]["text"] == " big world"
    assert [(token["id"], token["text"], token["from_draft"]) for token in events[2]["tokens"]] == [
        (6, " big", True),
        (7, " world", False),
    ]
    assert events[3]["finish_reason"] == "max_tokens"
    assert events[3]["speculation"]["num_draft_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            InvalidRequest("bad", violations=[FieldViolation("sampling.top_p", "is 7")]),
            2,
            "error: sampling.top_p: is 7\n",
        ),
        (Unavailable("draining", reason="DRAINING", retry_after_s=5.0), 3, "try again in 5 s"),
        (Overloaded("the queue is full", retry_after_s=1.0), 3, "the queue is full (try again in 1 s)"),
        (NotFound("no such model"), 4, "no such model"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error: Any, code: int, words: str) -> None:
    """The line names the field and what to do; nothing is on stdout."""
    result = run(ScriptedTarget((error,)), "generate", "Hi")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_service_that_is_not_there_is_named_with_its_remedy(good: ScriptedTarget) -> None:
    """Exit code 3 and the command that starts one."""
    with serve(good) as address:
        pass
    result = CliRunner().invoke(build_app(), ["generate", "Hi", "--address", address])
    assert result.exit_code == 3
    assert "draftwire up" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--logit-bias", "5"),
        ("--json-schema", "no/such/file"),
        ("--drafting", "always"),
        ("--regex", "a", "--json-object"),
        ("--top-k", "-1"),
        ("--address", "nowhere"),
        ("--tls-ca", "no/such/file"),
        ("--no-such-flag",),
    ],
)
def test_wrong_usage_is_exit_code_2_and_sends_nothing(good: ScriptedTarget, arguments: tuple[str, ...]) -> None:
    """What the command line or the library can see, the server never does."""
    result = run(good, "generate", "Hi", *arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert good.requests == []


def test_chat_remembers_until_reset(good: ScriptedTarget) -> None:
    """Each turn carries the conversation; /reset keeps only what --system said; the end of input ends it."""
    result = run(good, "chat", "--system", "S", stdin="one\n\ntwo\n/reset\nthree\n/quit\nfour\n")
    assert result.exit_code == 0
    said = [[message.content for message in request.chat.messages] for request in good.requests]
    assert said == [["S", "one"], ["S", "one", "Hello big world", "two"], ["S", "three"]]
    assert result.stdout == "Hello big world\n" * 3


def test_chat_drops_a_turn_that_was_refused_and_goes_on() -> None:
    """One bad turn does not end the conversation or stay in it; a lost service does end it."""
    target = ScriptedTarget((InvalidRequest("too long"),), GOOD, (Unavailable("draining", reason="DRAINING"),))
    result = run(target, "chat", stdin="one\ntwo\nthree\nfour\n")
    assert result.exit_code == 3
    assert [message.content for message in target.requests[1].chat.messages] == ["two"]
    assert "too long" in result.stderr
    assert "four" not in [message.content for request in target.requests for message in request.chat.messages]


def test_info_and_drafters_are_tables_or_json() -> None:
    """People see words, programs see the records."""
    info = pb.GetModelInfoResponse(model_id="m", context_length=64, capabilities=["chat"], rollback="trim")
    drafter = pb.Drafter(address="a:1", state=pb.DRAFTER_STATE_REFUSED, refused_reason="other tokenizer")
    drafter.rpc_p50.CopyFrom(to_duration(0.0125))
    replies = {"GetModelInfo": info, "ListDrafters": pb.ListDraftersResponse(drafters=[drafter])}
    target = ScriptedTarget(replies=replies)
    assert "64 tokens" in run(target, "info").stdout
    assert json.loads(run(target, "info", "--json").stdout)["capabilities"] == ["chat"]
    shown = run(target, "drafters").stdout
    assert "refused" in shown
    assert "12.5 ms" in shown
    assert json.loads(run(target, "drafters", "--json").stdout)[0]["state"] == "refused"


def test_tokenize_prints_ids_or_pieces() -> None:
    """One line of ids, or one piece a line."""
    replies = {"Tokenize": pb.TokenizeResponse(token_ids=[1, 2])}
    target = ScriptedTarget(replies=replies, pieces={1: "a", 2: "\n"})
    assert run(target, "tokenize", "x").stdout == "1 2\n"
    assert run(target, "tokenize", "x", "--pieces").stdout == "1\t'a'\n2\t'\\n'\n"
    run(target, "tokenize", "--chat", stdin="hello")
    assert target.requests[-1].chat.messages[0].content == "hello"


def test_help_lists_commands_and_exit_codes() -> None:
    """The help is the reference of the exit codes; --version is one line."""
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    assert "130" in result.stdout
    for command in ("up", "generate", "chat", "info", "drafters", "tokenize", "doctor", "demo", "models"):
        assert command in result.stdout
    assert CliRunner().invoke(build_app(), ["--version"]).stdout.startswith("draftwire ")


def test_token_new_prints_a_token_and_the_line_that_grants_it() -> None:
    """The line has the hash of the first line's token, its name and its roles; what is for people goes to stderr."""
    arguments = ["token", "new", "--name", "alice", "--role", "generate", "--role", "admin"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0
    token, line = result.stdout.splitlines()
    (grant,) = parse_grants(line)
    assert find([grant], token) is grant
    assert (grant.name, grant.roles) == ("alice", {Role.GENERATE, Role.ADMIN})
    for bad in (["--name", "a b", "--role", "admin"], ["--name", "a", "--role", "root"], ["--name", "a"], []):
        assert CliRunner().invoke(build_app(), ["token", "new", *bad]).exit_code == 2


def test_the_token_of_a_file_is_sent(good: ScriptedTarget, tmp_path: Path) -> None:
    """Without the line end that editors leave; a file that is not there is a usage error."""
    (tmp_path / "token").write_text("secret-token\n", encoding="utf-8")
    assert run(good, "generate", "--token-file", str(tmp_path / "token"), "Hi").exit_code == 0
    assert good.metadata[0]["authorization"] == "Bearer secret-token"
    assert run(good, "generate", "--token-file", str(tmp_path / "none"), "Hi").exit_code == 2
    assert run(good, "generate", "--token", "x", "--token-file", str(tmp_path / "token"), "Hi").exit_code == 2
