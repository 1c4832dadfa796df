"""Collects what is wrong with a request, field by field, so that one answer names everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftwire.errors import FieldViolation, InvalidRequest


class Checks:
    """Notes violations; `done` raises them together."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []
        self._reasons: list[str] = []

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

    def done(self) -> None:
        """Raises InvalidRequest if anything was noted. Its reason is that of the first violation."""
        if self._violations:
            names = ", ".join(violation.field for violation in self._violations[:4])
            more = f" and {len(self._violations) - 4} more" if len(self._violations) > 4 else ""
            raise InvalidRequest(f"bad request: {names}{more}", reason=self._reasons[0], violations=self._violations)
