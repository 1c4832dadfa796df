"""Answers as objects: a pydantic model asks for its JSON schema, and reads the answer. pydantic is needed only here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from draftwire.errors import InternalError, UnfinishedOutput
from draftwire.events import Completion
from draftwire.wire import invalid

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")

_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")


def with_schema(model: type[BaseModel], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request for such an object. Raises InvalidRequest where they have a constraint already."""
    schema_of = getattr(model, "model_json_schema", None)
    if schema_of is None:
        raise invalid("response_model", f"expected a pydantic model (a subclass of BaseModel), got {model!r}")
    for name in _CONSTRAINTS:
        if options.get(name) is not None:
            raise invalid(name, "cannot be combined with response_model, which is a constraint itself")
    if options.get("stop"):
        raise invalid("stopping.stop", "cannot be combined with response_model: it would cut the object short")
    return {**options, "json_schema": json.dumps(schema_of())}


def parsed(model: type[M], completion: Completion) -> M:
    """The object. Raises UnfinishedOutput where the answer was cut short, InternalError where it does not fit all the same."""
    from pydantic import ValidationError

    if not completion.finished.grammar_complete:
        reason = completion.finish_reason.value.replace("_", " ")
        raise UnfinishedOutput(
            f"the answer ended ({reason}) after {completion.usage.completion_tokens} tokens, before the object was "
            "complete; give it more max_tokens",
            metadata={"request_id": completion.request_id},
            text=completion.text,
        )
    try:
        return model.model_validate_json(completion.text)
    except ValidationError as error:
        # What a schema cannot say, such as a validator written in Python.
        raise InternalError(
            f"the answer has the schema of {model.__name__}, but its validators refuse it: {error}",
            reason="VALIDATORS_REFUSE",
        ) from error
