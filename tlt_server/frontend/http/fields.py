"""Fields of a JSON object, checked by a pydantic model, and errors that name the field that is
wrong.

A native route takes a `Strict` model, which refuses unknown fields. A borrowed dialect takes
`Tolerant` ones, because its clients send fields that have no meaning here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tlt_server.errors import InvalidRequest
from tlt_server.wording import nearest, requirement

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A body that may have only the fields that its model names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Tolerant(BaseModel):
    """A body whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class NoFields(Strict):
    """An empty object; the body may be left out."""


class AnyFields(Tolerant):
    """An object of which nothing is read; the body may be left out."""


def null_is_absent(schema: dict[str, Any]) -> None:
    """Change a body's JSON schema as `without_nulls` changes the body: a field that may be absent
    may be null.
    """
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get(
            "anyOf", ()
        ):
            described = {
                key: field.pop(key) for key in ("title", "description", "default") if key in field
            }
            schema["properties"][name] = described | {"anyOf": [field, {"type": "null"}]}


class NullIsAbsent(Tolerant):
    """A tolerant body in which null means the same as an absent field."""

    model_config = ConfigDict(json_schema_extra=null_is_absent)


def without_nulls(content: dict[str, Any]) -> dict[str, Any]:
    """Drop the fields that are null, in `sampling_params` and `init_info` too."""
    return {
        name: without_nulls(value)
        if name in ("sampling_params", "init_info") and isinstance(value, dict)
        else value
        for name, value in content.items()
        if value is not None
    }


def one_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of an object that has exactly one of these fields; a null field counts
    as absent.
    """
    return {
        "oneOf": [
            {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names
        ]
    }


def checked(model: type[Model], content: Any, within: str = "") -> Model:
    """Return the model's object, or raise `InvalidRequest`, whose message begins with the field
    that is wrong. `within` is the path of `content` in the body.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(_explain(error.errors(include_url=False), model, within)) from None


def shown(value: Any) -> str:
    """Return the value as an error message shows it: its repr, at most 80 characters long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(error: ErrorDetails) -> list[int | str]:
    """Return where the error is, without the branches of a union."""
    return [part for part in error["loc"] if not re.fullmatch(r"list\[.*|str|int|bool", str(part))]


def _explain(errors: Sequence[ErrorDetails], root: type[BaseModel], within: str) -> str:
    """Say pydantic's first finding in our words: where it is, what it is, what it must be."""
    error, path = errors[0], _path(errors[0])
    where = (
        within + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    ).lstrip(".")[:200]
    if error["type"] == "extra_forbidden":
        fields = list(_model_at(root, path[:-1]).model_fields)
        return f"unknown field {where}{nearest(str(path[-1]), fields)} (known: {', '.join(fields)})"
    if error["type"] == "missing":
        return f"{where} is missing; it is required"
    must = requirement([other for other in errors if _path(other) == path])
    return f"{where} is {shown(error['input'])}; it must {must}"


def _model_at(root: type[BaseModel], path: list[int | str]) -> type[BaseModel]:
    """Return the model whose object stands at `path`."""
    for part in path:
        field = root.model_fields.get(str(part))
        root = (_model_in(field.annotation) if field else None) or root
    return root


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
