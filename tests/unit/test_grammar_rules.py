"""Schemas with something that the compiler ignores in silence are refused, with the place; nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from target_service.grammar_compile import Compiler, cleaned, tokenizer_info
from target_service.grammar_rules import Refused, checked_schema, choice_grammar

INTEGER = {"type": "integer"}
IGNORING = {"type": "json_schema", "json_schema": {"not": {}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "https://example.org/other.json"}, "leads outside"),
        ({"type": "object", "properties": {"a": {"$ref": "other.json#/x"}}}, "#/properties/a: $ref"),
        ({"not": INTEGER}, "'not'"),
        ({"if": INTEGER, "then": {"const": 1}}, "'if'"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INTEGER}, "'contains'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["a", "z"]}, "'z'"),
        ({"anyOf": [INTEGER, {"type": "string"}], "minimum": 5}, "'minimum' beside 'anyOf'"),
        ({"anyOf": [INTEGER], "oneOf": [INTEGER]}, "'anyOf' and 'oneOf'"),
        ({"$defs": {"a": INTEGER}, "$ref": "#/$defs/a", "minimum": 5}, "'minimum' beside '$ref'"),
        ({"enum": ["a", "bbb"], "maxLength": 2}, "'maxLength' beside 'enum'"),
        ({"enum": ["a"], "type": "integer"}, "'type' beside 'enum'"),
        ({"enum": [True], "type": "integer"}, "'type' beside 'enum'"),
        ({"const": "a", "type": "integer"}, "'type' beside 'const'"),
        ({"minimum": 5}, "needs a 'type'"),
        ({"type": "string", "format": "iri"}, "'iri'"),
        ({"items": {"anyOf": [INTEGER, {"not": {}}]}}, "#/items/anyOf/1"),
        ({"type": "object", "properties": {"a": 3}}, "#/properties/a"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_place(schema: Any, words: str) -> None:
    with pytest.raises(Refused) as caught:
        checked_schema(json.dumps(schema))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {
            "type": "object",
            "properties": {"a": {**INTEGER, "minimum": 1, "title": "A", "default": 1}},
            "required": ["a"],
        },
        {"$defs": {"a": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/a", "description": "one"}, "maxItems": 2},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "Maybe"},
        {"enum": ["a", "b"], "type": "string", "x-note": 1},
        {"const": 3, "type": ["integer", "null"]},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "password"},
        {"type": "array", "uniqueItems": False},
    ],
)
def test_what_can_be_enforced_passes(schema: Any) -> None:
    """Notes, unknown keywords and pydantic's habits are no reason to refuse."""
    checked_schema(json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "{" * 20_000, '{"items":' * 5_000 + "{}" + "}" * 5_000])
def test_what_is_no_schema_is_refused(text: str) -> None:
    """Without a crash, however deep."""
    with pytest.raises(Refused):
        checked_schema(text)


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("[19:21:34] /project/cpp/json.cc:5082: enum must not be empty\n", "enum must not be empty"),
        ("[19:21:34] /a/b.cc:1: Warning: '$' is ignored.", "'$' is ignored."),
        ("[01:02:03] /p/c.cc:9: Check failed: (std::x(y)) is false: Invalid tag: z", "Invalid tag: z"),
    ],
)
def test_compiler_messages_lose_clock_and_source(message: str, left: str) -> None:
    assert cleaned(message) == left


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(tokenizer_info([*(bytes([byte]) for byte in range(256)), b""], 257, [256]))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"type": "number", "multipleOf": 0.5}', "multipleOf"),
        ("json_schema", '{"type": "string", "pattern": "^a", "maxLength": 2}', "maxLength"),
        ("json_schema", '{"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}', "allOf"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json_schema", '{"$ref": "#/$defs/missing"}', "$defs"),
        ("json_schema", "false", "cannot accept any value"),
        ("regex", "a(?=b)", "Lookahead"),
        ("regex", "a^b", "'^'"),
        ("regex", "(", "parenthesis"),
        ("regex", "a*", ""),
        ("ebnf", "root ::= 'a'", "Unexpected character"),
        ("ebnf", 'start ::= "a"', "root"),
        ("ebnf", "root ::= root", "no text at all"),
        ("ebnf", 'root ::= ""', "empty text"),
        ("structural_tag", "{", "JSON"),
        ("structural_tag", '{"x": 1}', "format"),
        ("structural_tag", json.dumps({"type": "structural_tag", "format": IGNORING}), "'not'"),
        ("regex", "((a{1,60}){1,60}){1,60}", "ambiguous"),
    ],
)
def test_the_compiler_says_what_is_wrong(compiler: Compiler, kind: str, text: str, words: str) -> None:
    """What it cannot compile, what it warns of, what has no text and what is slow to follow."""
    if not words:
        assert compiler.compile(kind, text, (), False)
        return
    with pytest.raises(Refused) as caught:
        compiler.compile(kind, text, (), False)
    assert words in str(caught.value)
    assert "/project" not in str(caught.value)
    assert ".cc" not in str(caught.value)


def test_a_choice_is_of_exactly_these_texts(compiler: Compiler) -> None:
    """Quotes, backslashes, line ends and characters of any plane stand for themselves."""
    import xgrammar

    values = ['say "hi"\\n', "a\nb", "é", "🦊", "root ::= x", "]|["]
    info = tokenizer_info([*(bytes([byte]) for byte in range(256)), b""], 257, [256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(choice_grammar(values))
    for text in values:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(text)
        assert matcher.is_completed()
    assert not xgrammar.GrammarMatcher(compiled).accept_string("b")
