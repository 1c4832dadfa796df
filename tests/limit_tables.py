"""The tables of docs/limits.md, made from the settings that are limits. `python tests/limit_tables.py` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from draft_service.config import DraftSettings
from draftwire.refusals import METRIC
from draftwire.settings import ServiceSettings
from target_service.config import TargetSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
# gRPC ends these calls itself, before any code of ours.
_NOT_COUNTED = frozenset({"MESSAGE_TOO_LARGE"})


def limits(cls: type[ServiceSettings]) -> Iterator[tuple[str, FieldInfo, dict[str, Any]]]:
    """(name, field, what it refuses with) of the settings of `cls` that are limits; those of both services only for both."""
    shared = ServiceSettings.model_fields
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "reason" in extra and (cls is ServiceSettings or name not in shared):
            yield name, field, dict(extra)


def filled(page: str) -> str:
    """The page with its tables as they should be. Raises ValueError where a table has no place."""
    for place, cls in (("target", TargetSettings), ("draft", DraftSettings), ("both", ServiceSettings)):
        rows = [_row(*found) for found in limits(cls)]
        table = "\n".join(["| flag | default | limits | refused with | counted |", "|---|---|---|---|---|", *rows])
        pattern = re.compile(rf"(<!-- limits:{place} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"docs/limits.md needs exactly one place for the table {place!r}")
        page = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
    return page


def _row(name: str, field: FieldInfo, extra: dict[str, Any]) -> str:
    default = field.get_default()
    shown = "" if default is None else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
    metric = "no" if extra["reason"] in _NOT_COUNTED else f'`{METRIC}{{reason="{extra["reason"]}"}}`'
    flag = f"`--{name.replace('_', '-')}`"
    return f"| {flag} | {shown} | {field.description} | {extra['status']} `{extra['reason']}` | {metric} |"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
