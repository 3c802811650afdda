"""Values that a client sends outside the body, each declared by an argument of a handler.

`Annotated[KIND, "sentence"]` is one of the path if the path names it, with `HEADER` a header, and
else one of the query: a word, words, a flag, a count, a time in seconds, or a text. Unknown ones
are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta
from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import sentence_of, shown

HEADER = object()  # mark of an argument that is a header
REQUIRED = inspect.Parameter.empty
Place = Literal["path", "query", "header"]
# In any case, since trainers send `True` of Python as well as `true` of JSON.
FLAGS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)


class Parameter(NamedTuple):
    name: str
    place: Place
    kind: Any
    sentence: str
    bounds: Meta
    default: Any

    @classmethod
    def of(cls, name: str, hint: Any, default: Any, path: Collection[str]) -> Parameter | None:
        """Return the parameter that an argument stands for, or None. `path`: names in the path."""
        sentence = sentence_of(hint)
        if not sentence:
            return None
        kind, *marks = get_args(hint)
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        bounds = next((mark for mark in marks if isinstance(mark, Meta)), Meta())
        if HEADER in marks:
            return cls(name.replace("_", "-").title(), "header", kind, sentence, bounds, default)
        place: Place = "path" if name in path else "query"
        return cls(name, place, kind, sentence, bounds, default)

    @property
    def _is_list(self) -> bool:
        return get_origin(self.kind) is Sequence

    @property
    def _known(self) -> tuple[str, ...]:
        """The words that it may be, or have; empty without such a limit."""
        return get_args(get_args(self.kind)[0] if self._is_list else self.kind)

    @property
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "enum": [*self._known]}
        if self._is_list:
            return {"type": "array", "items": schema}
        if not self._known:
            schema = msgspec.json.schema(Annotated[self.kind, self.bounds])
        has_default = self.default not in (REQUIRED, None, "")
        return schema | {"default": self.default} if has_default else schema

    def read(self, request: Request) -> Any:
        if self.place == "path":
            return request.path_params[self.name]
        if self._is_list:  # in one parameter with commas, or in several
            texts = request.query_params.getlist(self.name)
            return [self._value(word, "has") for text in texts for word in text.split(",")]
        values = request.headers if self.place == "header" else request.query_params
        text = values.get(self.name)
        return self.default if text is None else self._value(text, "is")

    def _value(self, text: str, has: str) -> Any:
        value: Any = text
        least: Any = self.bounds.ge
        most: Any = self.bounds.le
        requirement = f"one of {', '.join(self._known or FLAGS)}"
        if self._known:
            value = text if text in self._known else None
        elif self.kind is bool:
            value = FLAGS.get(text.lower())
        elif self.kind is int:
            requirement = f"a whole number from {least} to {most}"
            digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
            value = int(text) if digits and least <= int(text) <= most else None
        elif self.kind is float:
            requirement = f"a number of seconds from 0 to {most:g}: wait again for more"
            value = _seconds(text, most)
        if value is None:
            raise InvalidRequest(f"{self.name} {has} {shown(text)}; it must be {requirement}")
        return value


def _seconds(text: str, most: float) -> float | None:
    try:
        return value if 0 <= (value := float(text)) <= most else None
    except ValueError:
        return None
