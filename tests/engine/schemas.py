"""Random JSON schemas of every keyword that is enforced, for outputs that a small model can end."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import numpy as np

NAMES = ("a", "b", "key", "long name", "x_1", "e")
PATTERNS = ("^[a-f]{1,5}$", "^(yes|no)$", "^a+b?$", "[0-9]{2}", "^[A-C][0-9]-")
FORMATS = ("date", "time", "uuid", "ipv4")
MAX_DEPTH = 3


class Schemas:
    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def whole(self) -> dict[str, Any]:
        """Return a schema, sometimes with definitions that it refers to."""
        found = self._any(0)
        if self._chance(0.3):
            name = self._one(NAMES)
            found = {
                "$defs": {name: self._any(MAX_DEPTH - 1)},
                "type": "object",
                "properties": {"first": {"$ref": f"#/$defs/{quote(name)}"}, "second": found},
                "required": ["first", "second"],
                "additionalProperties": False,
            }
        return found

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "integer", "number", "enum", "const", "scalar", "combined"]
        kinds += [] if depth >= MAX_DEPTH else ["object", "object", "array", "tuple", "either"]
        kind = self._one(kinds)
        made: dict[str, Any] = getattr(self, f"_{kind}")(depth)
        if self._chance(0.2):
            made["description"] = "what it is"
        return made

    def _string(self, depth: int) -> dict[str, Any]:
        match self._draw.integers(3):
            case 0:
                least = int(self._draw.integers(4))
                return {"type": "string", "minLength": least, "maxLength": least + 4}
            case 1:
                return {"type": "string", "pattern": self._one(PATTERNS), "maxLength": 12}
        return {"type": "string", "format": self._one(FORMATS)}

    def _integer(self, depth: int) -> dict[str, Any]:
        least = int(self._draw.integers(-50, 50))
        found = {"type": "integer", "minimum": least, "maximum": least + 40}
        if self._chance(0.3):
            found["multipleOf"] = int(self._draw.integers(2, 7))
        if self._chance(0.3):
            found["exclusiveMaximum"] = found.pop("maximum")
        return found

    def _number(self, depth: int) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": int(self._draw.integers(1, 90))}

    def _enum(self, depth: int) -> dict[str, Any]:
        values: list[Any] = ["x", 'quo"te', 3, -1.5, None, True, [1], {"a": {}}]
        self._draw.shuffle(values)  # type: ignore[arg-type]
        return {"enum": values[: int(self._draw.integers(1, 5))]}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self._one(["only", 7, None, {"k": [1, 2]}])}

    def _scalar(self, depth: int) -> dict[str, Any]:
        return {"type": self._one([["boolean", "null"], "boolean", "null"])}

    def _combined(self, depth: int) -> dict[str, Any]:
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}

    def _either(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            return {"anyOf": [self._any(depth + 1), self._any(depth + 1)]}
        return {"oneOf": [self._string(depth), self._integer(depth), {"type": "null"}]}

    def _array(self, depth: int) -> dict[str, Any]:
        least = int(self._draw.integers(3))
        return {
            "type": "array",
            "items": self._any(depth + 1),
            "minItems": least,
            "maxItems": least + 2,
        }

    def _tuple(self, depth: int) -> dict[str, Any]:
        parts = [self._any(depth + 1) for _ in range(int(self._draw.integers(1, 3)))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _object(self, depth: int) -> dict[str, Any]:
        names = [str(name) for name in self._draw.permutation(NAMES)[: self._draw.integers(1, 4)]]
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": [name for name in names if self._chance(0.6)],
            "additionalProperties": False,
        }
        if self._chance(0.2):
            found["patternProperties"] = {"^p[0-9]$": {"type": "boolean"}}
            found |= {"required": names, "minProperties": 1, "maxProperties": len(names) + 1}
        return found

    def _one(self, values: Any) -> Any:
        return values[int(self._draw.integers(len(values)))]

    def _chance(self, part: float) -> bool:
        return bool(self._draw.random() < part)
