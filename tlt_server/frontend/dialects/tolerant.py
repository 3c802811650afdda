"""Bodies of borrowed dialects: clients send fields that mean nothing here, so unknown ones are
ignored, and null is the same as absent.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Tolerant(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


def null_is_absent(schema: dict[str, Any]) -> None:
    """What `without_nulls` does, said in a body's JSON schema: a field that may be absent may be
    null.
    """
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get(
            "anyOf", ()
        ):
            said = {
                key: field.pop(key) for key in ("title", "description", "default") if key in field
            }
            schema["properties"][name] = said | {"anyOf": [field, {"type": "null"}]}


class NullIsAbsent(Tolerant):
    model_config = ConfigDict(json_schema_extra=null_is_absent)


def without_nulls(content: dict[str, Any]) -> dict[str, Any]:
    """Null is the same as absent, in sampling_params and init_info too."""
    return {
        name: without_nulls(value)
        if name in ("sampling_params", "init_info") and isinstance(value, dict)
        else value
        for name, value in content.items()
        if value is not None
    }
