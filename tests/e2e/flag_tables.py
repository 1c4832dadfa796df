"""The tables of flags in README.md, made from the settings classes. `python tests/e2e/flag_tables.py` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from draft_service.config import DraftSettings
from draftwire.settings import ServiceSettings
from target_service.config import TargetSettings

README = Path(__file__).resolve().parents[2] / "README.md"


def tables() -> dict[str, str]:
    """Markdown by the name of its place in the README."""
    shared = list(ServiceSettings.model_fields)
    return {
        "target": _table(TargetSettings, [name for name in TargetSettings.model_fields if name not in shared]),
        "draft": _table(DraftSettings, [name for name in DraftSettings.model_fields if name not in shared]),
        "both": _table(ServiceSettings, shared),
    }


def filled(readme: str) -> str:
    """The README with every table as it should be. Raises ValueError where a table has no place."""
    for name, table in tables().items():
        place = re.compile(rf"(<!-- flags:{name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(place.findall(readme)) != 1:
            raise ValueError(f"README.md needs exactly one place for the table {name!r}")
        readme = place.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", readme)
    return readme


def _table(cls: type[ServiceSettings], names: Sequence[str]) -> str:
    rows = [_row(name, cls.model_fields[name]) for name in names]
    return "\n".join(["| flag | environment | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    flag = "--" + name.replace("_", "-")
    cells = (f"`{flag}`", f"`DRAFTWIRE_{name.upper()}`", _default(field), _meaning(field))
    return f"| {' | '.join(cells)} |"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    return "" if value in (None, []) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _meaning(field: FieldInfo) -> str:
    choices = [value for value in _literals(field.annotation) if isinstance(value, str)]
    listed = f" One of {', '.join(f'`{value}`' for value in choices)}." if choices else ""
    return f"{field.description}{listed}"


def _literals(annotation: Any) -> list[Any]:
    """The values of a Literal, inside a union too."""
    found: list[Any] = []
    for part in get_args(annotation):
        found += _literals(part) if get_args(part) else [part]
    return found


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
