"""docs/errors.md is true: each row happens over real connections, and no reason of the code is missing there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from service.error_rows import TRIGGERS

from draftwire.errors import DraftwireError, InvalidRequest
from draftwire.testing_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = [
    (service, reason, status)
    for reason, status, services in re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| ([a-z, ]+) \|", PAGE, re.MULTILINE)
    for service in services.split(", ")
]
_REASON = re.compile(r"(?=.{4})[A-Z]+(_[A-Z]+)*")
_NOTES = frozenset({"bad", "unless", "refuses", "invalid", "number", "ids"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 7, context_length=4096)


@pytest.mark.parametrize(("service", "reason", "status"), ROWS)
async def test_the_row_happens(service: str, reason: str, status: str, model: Path, tmp_path: Path) -> None:
    """Status and reason are those of the page; nothing of the service's inside is in what the caller sees."""
    with pytest.raises(DraftwireError) as caught:
        await TRIGGERS[service, reason](model, tmp_path)
    error = caught.value
    assert (error.code.name, error.reason) == (status, reason), error
    seen = f"{error}{error.metadata}"
    assert "secret" not in seen
    assert "/" not in seen.replace("chat template", "").replace("GetModelInfo/", "")
    if status == "INTERNAL":
        assert error.metadata["error_id"] in error.message
    if status == "INVALID_ARGUMENT" and reason != "MALFORMED_MESSAGE":
        assert isinstance(error, InvalidRequest)
        assert all(violation.field and violation.description for violation in error.violations)
        assert error.violations
    if status == "UNAVAILABLE" or reason in (
        "QUEUE_FULL",
        "CLIENT_LIMIT",
        "RATE_LIMIT",
        "SESSION_LIMIT",
        "OWNER_LIMIT",
    ):
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0


def test_the_page_has_the_rows_that_can_happen() -> None:
    """No row without its test, no test whose row is gone."""
    assert len(ROWS) > 50
    assert {(service, reason) for service, reason, _ in ROWS} == set(TRIGGERS)


def test_every_reason_in_the_code_is_on_the_page() -> None:
    found = {reason: where for where, reason in reasons()}
    assert {"QUEUE_FULL", "SESSION_LIMIT", "FIELD_REQUIRED", "POSITION_GAP", "ROLE_REQUIRED", "OUT_OF_BOUNDS"} <= set(
        found
    )
    missing = {reason: where for reason, where in found.items() if f"`{reason}`" not in PAGE}
    assert not missing, "docs/errors.md needs a row for each, and tests/service/error_rows.py a function"


def test_no_reason_on_the_page_is_gone_from_the_code() -> None:
    known = {reason for _, reason in reasons()} | {"STUCK", "DRAINING"}  # these two are names of states
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert documented <= known


def reasons() -> Iterator[tuple[str, str]]:
    """(file, reason) for whatever is given as a reason: by name, as a default, or noted with a violation."""
    for package in ("draftwire", "target_service", "draft_service", "client"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "v1" in path.parts or path.name.startswith(("testing", "scripted")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for constant in _constants(node):
                    if _REASON.fullmatch(constant):
                        yield str(path.relative_to(ROOT)), constant


def _constants(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.keyword(arg=str(name), value=value) if "reason" in name:
            yield from _strings(value)
        case ast.Assign(targets=targets, value=value) if any("reason" in ast.unparse(target) for target in targets):
            yield from _strings(value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) if "reason" in ast.unparse(target):
            yield from _strings(value)
        case ast.arguments(args=args, defaults=defaults):
            for argument, default in zip(args[len(args) - len(defaults) :], defaults, strict=True):
                if "reason" in argument.arg:
                    yield from _strings(default)
        case ast.Call(func=func, args=args) if _called(func) in _NOTES:
            for argument in args[:1] if _called(func) == "refuses" else args:
                yield from _strings(argument)


def _strings(value: ast.AST) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _called(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
