"""The error tree: one class a status code, the same on both sides."""

from __future__ import annotations

import grpc
import pytest

from draftwire import errors
from draftwire.errors import (
    ERROR_CLASSES,
    DraftwireError,
    FieldViolation,
    InvalidRequest,
    UnfinishedOutput,
    error_class,
)


def test_every_subclass_is_listed_once_and_has_a_code_of_its_own() -> None:
    assert {*ERROR_CLASSES, UnfinishedOutput} == set(DraftwireError.__subclasses__())
    assert len({cls.code for cls in ERROR_CLASSES}) == len(ERROR_CLASSES)
    assert grpc.StatusCode.OK not in {cls.code for cls in ERROR_CLASSES}


@pytest.mark.parametrize("cls", ERROR_CLASSES)
def test_a_code_leads_back_to_its_class_and_reasons_are_constants(cls: type[DraftwireError]) -> None:
    assert error_class(cls.code) is cls
    assert cls.default_reason == cls.default_reason.upper() != ""
    assert cls("text").reason == cls.default_reason
    assert cls("text", reason="SPECIAL").reason == "SPECIAL"


def test_codes_that_draftwire_never_sends_are_the_base_class() -> None:
    unused = set(grpc.StatusCode) - {cls.code for cls in ERROR_CLASSES}
    assert {error_class(code) for code in unused} == {DraftwireError}


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    """The table at the top of the module names every class with its code."""
    words = [line.split() for line in (errors.__doc__ or "").splitlines()]
    listed = {line[1]: line[2] for line in words if len(line) > 2 and line[0] in {"├──", "└──"}}
    assert listed == {cls.__name__: cls.code.name for cls in ERROR_CLASSES}


def test_an_error_reads_as_its_message_and_each_bad_field() -> None:
    error = InvalidRequest("bad request", violations=[FieldViolation("a.b", "is 0"), FieldViolation("c", "is 1")])
    assert str(error) == "bad request\n  a.b: is 0\n  c: is 1"
    assert error.args == ("bad request",)


def test_an_error_does_not_keep_the_callers_containers() -> None:
    metadata, violations = {"a": "b"}, [FieldViolation("a", "b")]
    error = DraftwireError("text", metadata=metadata, violations=violations)
    metadata.clear()
    violations.clear()
    assert error.metadata == {"a": "b"}
    assert len(error.violations) == 1
