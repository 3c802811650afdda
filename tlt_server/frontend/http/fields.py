"""Objects of JSON as checked models, and errors that name the field, its value and what it must be.

The native routes take `Strict` models, in which an unknown field is an error. The borrowed dialects
take `Tolerant` ones, since their clients send fields that have no meaning here: unknown fields are
ignored, and null is the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tlt_server.config import nearest, requirement
from tlt_server.errors import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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


def checked(model: type[Model], content: Any, within: str = "") -> Model:
    """The model's object, or `InvalidRequest` that begins with the field it is about. `within`:
    where the content stands.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(_explain(error.errors(include_url=False), model, within)) from None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(error: ErrorDetails) -> list[int | str]:
    """Without the branches of a union."""
    return [part for part in error["loc"] if not re.fullmatch(r"list\[.*|str|int|bool", str(part))]


def _explain(errors: Sequence[ErrorDetails], root: type[BaseModel], within: str) -> str:
    """Where, what it is, what it must be: pydantic's first finding in our words."""
    error, path = errors[0], _path(errors[0])
    where = (
        within + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    ).lstrip(".")[:200]
    if error["type"] == "extra_forbidden":
        fields = list(_model_at(root, path[:-1]).model_fields)
        return f"unknown field {where}{nearest(str(path[-1]), fields)} (known: {', '.join(fields)})"
    if error["type"] == "missing":
        return f"{where} is missing; it is required"
    return f"{where} is {shown(error['input'])}; it must {requirement([other for other in errors if _path(other) == path])}"


def _model_at(root: type[BaseModel], path: list[int | str]) -> type[BaseModel]:
    """The model whose object stands at `path`."""
    for part in path:
        field = root.model_fields.get(str(part))
        root = (_model_in(field.annotation) if field else None) or root
    return root


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
