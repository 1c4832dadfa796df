"""Random JSON schemas of everything that a constraint can keep, with strings and arrays bounded."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("id", "name", "size", "état", "parts", "kind", "note", "x-y", "größe", "when")


def schema(dice: random.Random, fields: int) -> dict[str, Any]:
    """An object with so many fields at most, one level deeper at most."""
    made = _object(dice, fields, deep=True)
    if dice.random() < 0.3:
        made["$defs"] = {"shared": _leaf(dice)}
        made["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        made["required"].append("shared")
    return made


def _object(dice: random.Random, fields: int, *, deep: bool) -> dict[str, Any]:
    names = dice.sample(_WORDS, dice.randint(1, fields))
    properties = {name: _any(dice, deep=deep) for name in names}
    required = [name for name in names if dice.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(dice: random.Random, *, deep: bool) -> dict[str, Any]:
    if deep and dice.random() < 0.15:
        return _object(dice, 2, deep=False)
    if dice.random() < 0.15:
        least = dice.randint(0, 1)
        return {"type": "array", "items": _leaf(dice), "minItems": least, "maxItems": least + dice.randint(1, 2)}
    if dice.random() < 0.1:
        return {"anyOf": [_leaf(dice), {"type": "null"}]}
    return _leaf(dice)


def _leaf(dice: random.Random) -> dict[str, Any]:
    low = dice.randint(-50, 50)
    least = dice.randint(0, 2)
    return dice.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 5_000)},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
            {"type": "string", "minLength": least, "maxLength": least + dice.randint(1, 8)},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            {"type": "string", "format": "date"},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": dice.sample(["red", "green", "dark green", "ocre", 'a "b"', "tab\there", 7, None, True], 3)},
            {"const": dice.choice(["fixed text", 12, False])},
        ]
    )
