"""Collects what is wrong with a request, field by field, so that one answer names everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from draftwire.errors import FieldViolation, InvalidRequest

# Order of keys in a prompt: as chat templates and their training data write tools and calls, then by alphabet.
_FIRST_KEYS = ("id", "type", "function", "name", "description", "arguments", "parameters", "properties", "required")


class Checks:
    """Notes violations; `done` raises them together."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []
        self._reasons: list[str] = []

    @property
    def noted(self) -> int:
        """Violations so far."""
        return len(self._violations)

    def bad(self, field: str, description: str, reason: str = "FIELD_INVALID") -> None:
        """Notes a violation."""
        self._violations.append(FieldViolation(field, description))
        self._reasons.append(reason)

    def number(self, field: str, value: float, low: float, high: float, *, above: bool = False) -> float:
        """Notes a value outside [low, high], or outside (low, high] with `above`. NaN is outside. Returns the value."""
        inside = (value > low if above else value >= low) and value <= high
        if not inside or math.isnan(value):
            bracket = "(" if above else "["
            self.bad(field, f"is {value:g}, must lie in {bracket}{low:g}, {high:g}]", "OUT_OF_BOUNDS")
        return value

    def length(self, field: str, text: str, most: int) -> str:
        """Notes a text longer than `most` characters. Returns the text."""
        if len(text) > most:
            self.bad(field, f"has {len(text)} characters, at most {most} are allowed", "OUT_OF_BOUNDS")
        return text

    def token_ids(self, field: str, ids: Sequence[int], width: int) -> None:
        """Notes the first id outside [0, width)."""
        for index, token in enumerate(ids):
            if token >= width:
                self.bad(f"{field}[{index}]", f"is {token}, the vocabulary ends at {width - 1}", "TOKEN_OUT_OF_VOCAB")
                return

    def plain(self, field: str, struct: Struct) -> dict[str, Any]:
        """A Struct as plain values for a template. Notes NaN and infinities, which JSON does not have.

        A Struct keeps neither the order of keys nor whether 3 was 3.0: keys come in one fixed order, so that equal requests
        give equal prompts, and whole numbers as integers.
        """
        keys = sorted(struct.fields, key=lambda key: (_FIRST_KEYS.index(key) if key in _FIRST_KEYS else 99, key))
        return {key: self._plain_value(f"{field}.{key}", struct.fields[key]) for key in keys}

    def _plain_value(self, field: str, value: Value) -> Any:
        match value.WhichOneof("kind"):
            case "struct_value":
                return self.plain(field, value.struct_value)
            case "list_value":
                return [self._plain_value(f"{field}[{i}]", item) for i, item in enumerate(value.list_value.values)]
            case "string_value":
                return value.string_value
            case "bool_value":
                return value.bool_value
            case "number_value":
                number = value.number_value
                if not math.isfinite(number):
                    self.bad(field, f"is {number}, must be a finite number")
                    return None
                return int(number) if number.is_integer() and abs(number) < 2**53 else number
            case _:
                return None

    def done(self) -> None:
        """Raises InvalidRequest if anything was noted. Its reason is that of the first violation."""
        if self._violations:
            names = ", ".join(violation.field for violation in self._violations[:4])
            more = f" and {len(self._violations) - 4} more" if len(self._violations) > 4 else ""
            raise InvalidRequest(f"bad request: {names}{more}", reason=self._reasons[0], violations=self._violations)
