"""Checks of a caller's arguments before anything is sent: an `InvalidArgument` names the value, the
requirement and the remedy.

Called by a client's constructor and by `calls`. The server checks a version's name by the same
rule.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any, SupportsIndex

import msgspec

from tlt_client.errors import InvalidArgument

KEY = re.compile(r"[\x21-\x7e]+")
# Characters that no name has: controls, and formats, which turn or hide what is read around them.
UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f"
)
SEEN = rf"^[^{UNSEEN}]*$"
SEEN_MUST = "have no control or format character"
# A URL whose last segment is dots alone names another place. Spans name an adapter's rows
# VERSION+ADAPTER@VERSION, so only there an '@' follows a '+'.
VERSION = rf"^(?!.*\+.*@)[^/{UNSEEN}]*[^./{UNSEEN}][^/{UNSEEN}]*$"
MAX_VERSION = 256  # characters
VERSION_MUST = (
    f"have 1 to {MAX_VERSION} characters, none of them '/' or a control or format character, no "
    "'@' after a '+', and not dots alone, such as run-7"
)
_PART = rf"[^/+@{UNSEEN}]*[^./+@{UNSEEN}][^/+@{UNSEEN}]*"
ADAPTER = rf"^{_PART}(?:/{_PART})*$"
MAX_ADAPTER = 128  # characters
ADAPTER_MUST = (
    "have no '+', '@', control or format character, and no part between slashes that is empty or "
    "dots alone, such as math"
)


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header with the key. No message quotes the key."""
    if not api_key:
        return {}
    if not isinstance(api_key, str):
        raise InvalidArgument(f"api_key is of type {type(api_key).__name__}; give it as text")
    if not KEY.fullmatch(api_key):
        at = next(place for place, character in enumerate(api_key) if not KEY.fullmatch(character))
        what = (
            "white space"
            if api_key[at].isspace()
            else "a control character"
            if api_key[at] < " "
            else "no visible ASCII character"
        )
        raise InvalidArgument(
            f"api_key has {len(api_key)} characters, of which number {at + 1} is {what}; a key has "
            "visible ASCII characters only: strip white space where you read it (.strip() after "
            "reading a file)"
        )
    return {"authorization": f"Bearer {api_key}"}


def is_version(name: str) -> bool:
    return len(name) <= MAX_VERSION and re.fullmatch(VERSION, name) is not None


def is_adapter(name: str) -> bool:
    return len(name) <= MAX_ADAPTER and re.fullmatch(ADAPTER, name) is not None


def version_of(name: str) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(
            f"version is {str(name)[:80]} of type {type(name).__name__}; it must be text, such as "
            f"{f'run-{name}'[:80]!r}"
        )
    if not is_version(name):
        raise InvalidArgument(f"version is {name[:80]!r}; it must {VERSION_MUST}")
    return name


def check_finite(name: str, value: Any) -> None:
    """Raise `InvalidArgument` for a number that is not finite: JSON has no form for it, and it
    would arrive as null.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{name} is {value}; it must be a finite number")
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_finite(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple) and not {*map(type, value)} <= {
        int,
        str,
    }:  # prompts are long
        for i, inner in enumerate(value):
            check_finite(f"{name}[{i}]", inner)


def plain(value: Any) -> Any:
    """Return numbers and arrays of numpy and torch in a form that JSON has."""
    if hasattr(value, "tolist"):
        numbers = value.tolist()
        if type(numbers) is type(value):
            raise InvalidArgument(
                f"the request holds {str(value)[:80]} of type {type(value).__name__}; give "
                "Python's own numbers"
            )
        check_finite(f"a {type(value).__name__} in the request", numbers)
        return numbers
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    raise InvalidArgument(
        f"the request holds a {type(value).__name__}, for which JSON has no form; give numbers, "
        "text, lists, mappings"
    )
