"""A value that a body may not have, on its way from where it was found to the error about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.json import decode

from tlt_server.errors import InvalidRequest, TltError
from tlt_server.frontend.http.fields import shown

MAX_PATH = 200  # characters of a path that an error shows


class Wrong(Exception):
    """`say` makes the error from the path of the value; `path` has its steps, innermost first:
    names of fields, and places in lists.
    """

    def __init__(self, say: Callable[[str], TltError], *path: str | int) -> None:
        super().__init__()
        self._say, self.path = say, [*path]

    def error(self) -> TltError:
        steps = (
            f".{step[:MAX_PATH]}" if isinstance(step, str) else f"[{step}]" for step in self.path
        )
        return self._say("".join(reversed([*steps])).removeprefix(".")[:MAX_PATH])


def must(text: memoryview, requirement: str, *path: str | int) -> Wrong:
    value = shown_text(text)
    return Wrong(lambda where: InvalidRequest(f"{where} is {value}; it must {requirement}"), *path)


def no_text() -> Wrong:
    return Wrong(
        lambda where: InvalidRequest(
            f"the body is not JSON: {where or 'a field name'} is not UTF-8; send one UTF-8 encoded "
            "JSON object"
        )
    )


def part(step: str | int, make: Callable[[Any], Any], found: Any) -> Any:
    """Return what `make` makes of a part of a value; an error's path gets the step to the part."""
    try:
        return make(found)
    except Wrong as wrong:
        wrong.path.append(step)
        raise


def shown_text(text: memoryview) -> str:
    """Return a value in JSON as an error message shows it, without decoding a large one."""
    if len(text) <= 2**12:
        try:
            return shown(decode(text))
        except (ValueError, RecursionError):
            pass  # text that is not UTF-8, or a number of too many digits
    start = bytes(text[:400]).decode("utf-8", "replace")
    start = repr(start[1:]) if start.startswith('"') else start
    return start if len(start) <= 80 else start[:77] + "..."
