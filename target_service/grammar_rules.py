"""What a constraint may say, checked before the compiler sees it: it ignores in silence what it does not know. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_COMBINATORS: Final = ("anyOf", "oneOf", "allOf")
_SUBSCHEMAS: Final = (
    *("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else", "contains", "additionalItems"),
)
_NEVER: Final = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "additionalItems"),
)
_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
_ASSERTIONS: Final = tuple(keyword for keywords in _OF_TYPE.values() for keyword in keywords)
# With one of these the compiler takes the type for granted; with the others alone it takes any value.
_TYPE_IMPLIED_BY: Final = ("properties", "items", "prefixItems", "additionalProperties", "patternProperties")
# Formats of the standard that are not enforced. Names outside the standard are notes, as JSON Schema has it.
_LOOSE_FORMATS: Final = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


class Refused(ValueError):
    """A constraint that cannot be kept; the text says where and why."""


def checked_schema(text: str) -> None:
    """Raises Refused for a JSON schema with something that the compiler would ignore, naming the place."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise Refused(f"is not JSON: {error}") from None
    except RecursionError:
        raise Refused("is nested too deeply") from None
    try:
        _check(schema, "#")
    except RecursionError:
        raise Refused("is nested too deeply") from None


def checked_tag(text: str) -> None:
    """Raises Refused for a structural tag whose schemas have something that the compiler would ignore."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"is not JSON: {error}") from None
    _check_tag(tag)


def _check_tag(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "json_schema" and "json_schema" in node:
            checked_schema(json.dumps(node["json_schema"]))
        for value in node.values():
            _check_tag(value)
    elif isinstance(node, list):
        for value in node:
            _check_tag(value)


def choice_grammar(values: Sequence[str]) -> str:
    """The EBNF grammar of one of these texts."""
    return "root ::= " + " | ".join(_literal(value) for value in values)


def _literal(text: str) -> str:
    # By code point: what a literal may hold unescaped is no concern of ours then.
    plain = (char if char.isascii() and char.isalnum() else f"\\U{ord(char):08X}" for char in text)
    return f'"{"".join(plain)}"'


def _check(schema: Any, place: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise Refused(f"{place}: a schema is an object, true or false")
    for keyword in _NEVER:
        if keyword in schema and schema[keyword] is not False:
            raise Refused(f"{place}: {keyword!r} cannot be enforced; leave it out")
    _check_reference(schema, place)
    _check_siblings(schema, place)
    _check_object(schema, place)
    if schema.get("format") in _LOOSE_FORMATS:
        raise Refused(f"{place}: the format {schema['format']!r} cannot be enforced; use a pattern, or leave it out")
    for name, inner in _inner(schema):
        _check(inner, f"{place}/{name}")


def _check_reference(schema: Mapping[str, Any], place: str) -> None:
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise Refused(f"{place}: $ref {reference!r} leads outside; put it under $defs and refer to '#/$defs/NAME'")


def _check_siblings(schema: Mapping[str, Any], place: str) -> None:
    """One of $ref, const, enum and the combinators rules alone: what stands beside it is ignored."""
    ruling = [name for name in ("$ref", "const", "enum", *_COMBINATORS) if name in schema]
    beside = [name for name in _ASSERTIONS if name in schema]
    if len(ruling) > 1:
        raise Refused(f"{place}: {ruling[0]!r} and {ruling[1]!r} in one schema cannot both be enforced")
    if ruling and beside:
        raise Refused(f"{place}: {beside[0]!r} beside {ruling[0]!r} cannot be enforced; move it inside")
    if ruling and "type" in schema:
        values = schema["enum"] if ruling == ["enum"] else [schema["const"]] if ruling == ["const"] else None
        if values is None or not isinstance(values, list) or not all(_is(value, schema["type"]) for value in values):
            raise Refused(f"{place}: 'type' beside {ruling[0]!r} cannot be enforced; leave it out")
    if not ruling and "type" not in schema and beside and not any(name in schema for name in _TYPE_IMPLIED_BY):
        raise Refused(f"{place}: {beside[0]!r} needs a 'type' beside it")


def _check_object(schema: Mapping[str, Any], place: str) -> None:
    known = schema.get("properties", {})
    for name in schema.get("required", ()) if isinstance(known, dict) else ():
        if name not in known:
            raise Refused(f"{place}: 'required' names {name!r}, which 'properties' does not have")


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _SUBSCHEMAS:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        held = schema.get(keyword)
        if isinstance(held, dict):
            yield from ((f"{keyword}/{name}", inner) for name, inner in held.items())
    for keyword in (*_COMBINATORS, "prefixItems"):
        held = schema.get(keyword)
        if isinstance(held, list):
            yield from ((f"{keyword}/{number}", inner) for number, inner in enumerate(held))


def _is(value: Any, kind: Any) -> bool:
    """Whether a value has a type, or one of several."""
    kinds = kind if isinstance(kind, list) else [kind]
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[one]) for one in kinds if one in _TYPES)
