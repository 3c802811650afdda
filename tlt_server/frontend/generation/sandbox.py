"""The environments of chat templates: one for the model's own, and a stricter one for templates of
requests.

In both, no operator, method, filter or format can create a value larger than the data allows. In
the strict one every value that is not data is wrapped on entry, so no template can print anything
of the process: no address, no class, no generator.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Cycler, Joiner, Namespace, missing
from markupsafe import Markup

from tlt_server.frontend.generation.lenient import as_text, asking

# Limits on what one operation makes: bits of a number, and characters or members.
MAX_BITS, MAX_MADE = 4096, 2**20
MAX_DIGITS = 308  # to which a number is rounded: a float has no more
MAX_INDENT = 64  # characters, which a line has for each of its depths
METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
FILTERS = {  # limits on numbers among their arguments
    **dict.fromkeys(
        ("batch", "center", "indent", "slice", "truncate", "urlize", "wordwrap"), MAX_MADE
    ),
    "round": MAX_DIGITS,
}
# Filters that write their value out, with everything in it.
WRITERS = frozenset({"e", "escape", "forceescape", "format", "join", "pprint", "string", "tojson"})
# A conversion of a `%` format: key, width and precision.
CONVERSION = re.compile(r"%(?:\(([^)]*)\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
NUMBER = re.compile(r"\d+")
DATA = (str, int, float, complex, bytes, list, tuple, Mapping, range, type(None))
CALLABLE, FORMATS = (BuiltinMethodType, MethodType), ("format", "format_map")
SEQUENCES = (str, bytes, list, tuple)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which no operation creates a large value."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _check_format(left)
            return super().call_binop(context, operator, left, right)
        bits = [side.bit_length() for side in (left, right) if isinstance(side, int)]
        sizes = [len(side) for side in (left, right) if isinstance(side, SEQUENCES)]
        if operator == "**":
            large = len(bits) == 2 and bits[0] * abs(right) > MAX_BITS
        elif sizes and bits:
            large = sizes[0] * (right if isinstance(right, int) else left) > MAX_MADE
        else:
            large = sum(bits) > MAX_BITS
        if large:
            raise SecurityError(
                f"{operator} would make a number of more than {MAX_BITS} bits, or more than "
                f"{MAX_MADE} characters or members; make a smaller one"
            )
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(called) is BuiltinMethodType and called.__name__ in METHODS:
            of: Any = called.__self__
            tabs = of.count("\t") if called.__name__ == "expandtabs" else 1
            _check_numbers(called.__name__, MAX_MADE // max(1, tabs), [*args, *kwargs.values()])
        if not self.is_safe_callable(called):
            raise SecurityError(
                "a template may call only the functions and methods that it is given"
            )
        return context.call(called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        if not isinstance(value, CALLABLE) or value.__name__ not in FORMATS:
            return None
        text, name = value.__self__, value.__name__
        if not isinstance(text, str):
            return None
        formatter: _Widths
        made: type[str]
        if isinstance(text, Markup):
            made, formatter = Markup, _EscapedWidths(self, escape=text.escape)
        else:
            made, formatter = str, _Widths(self)
        if name == "format_map":
            return _Method(name, lambda fields: made(formatter.vformat(text, (), fields)))
        return _Method(name, lambda *args, **fields: made(formatter.vformat(text, args, fields)))


class _Method:
    """A function or method that a template may call, and that reveals nothing about itself."""

    __slots__ = ("method", "name")

    def __init__(self, name: str, method: Callable[..., Any]) -> None:
        self.name, self.method = name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<method {self.name}>"


class _Widths(SandboxedFormatter):
    """Bounds the sum of the widths of all fields of one format."""

    made = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.made += sum(map(_number, NUMBER.findall(format_spec)))
        _check_numbers("format", MAX_MADE, [self.made])
        return super().format_field(value, format_spec)


class _EscapedWidths(_Widths, SandboxedEscapeFormatter):
    pass


def _number(digits: str) -> int:
    return int(digits[:12] or 0)  # more digits are beyond every limit


def _check_numbers(name: str, limit: int, numbers: Iterable[Any]) -> None:
    for number in numbers:
        if isinstance(number, int | float) and abs(number) > limit:
            raise SecurityError(f"{name} takes numbers up to {limit}; got {str(number)[:40]}")


def _check_format(text: str) -> None:
    """Refuse a `%` format that pads to a large size, or to a size in an argument."""
    made = 0
    for key, *sizes in CONVERSION.findall(text):
        if "*" in sizes or "(" in key:
            raise SecurityError(
                "a % format may not take its width from an argument (*), nor have ( in a name; "
                "write the width in digits"
            )
        made += sum(map(_number, sizes))
    _check_numbers("%", MAX_MADE, [made])


def _check_size(value: Any) -> None:
    """Refuse a value with many members when written out: parts of it may be shared."""
    waiting, members = [iter((value,))], 0
    while waiting:
        for part in waiting[-1]:
            if isinstance(part, list | tuple | Mapping):
                members += len(part)
                waiting.append(iter(part.values() if isinstance(part, Mapping) else part))
                break
        else:
            waiting.pop()
        if members > MAX_MADE:
            raise SecurityError(f"a value that is written out has more than {MAX_MADE} members")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON like transformers' function of this name, which escapes no HTML."""
    if indent is not None or separators is not None:
        parts = (indent, *(separators or ()))
        _check_numbers(
            "tojson", MAX_INDENT, [len(part) if isinstance(part, str) else part for part in parts]
        )
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=as_text,
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for trainers; when rendering a prompt it is
    transparent.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Cycler(Cycler):
    def __repr__(self) -> str:
        return "<cycler>"


class _Joiner(Joiner):
    def __repr__(self) -> str:
        return "<joiner>"


class _Namespace(Namespace):
    """A namespace without names that have a meaning in Python or Jinja."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no name {str(name)[:40]!r}: leave out the underscore")


class _Missing(jinja2.Undefined):
    """A value that a template does not find. Its message names no class of this process."""

    @property
    def _undefined_message(self) -> str:
        of = self._undefined_obj
        if self._undefined_hint or of is missing or isinstance(of, DATA):
            return super()._undefined_message
        return f"{self._undefined_name!r} is not an attribute of this"


class StrictSandbox(Sandbox):
    """A sandbox for templates of requests: a template gets only data and `_Method`s."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _tamed(super().getattr(_untamed(obj), attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _tamed(super().getitem(obj, argument))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _tamed(super().call(context, _untamed(called), *args, **kwargs))


def _untamed(value: Any) -> Any:
    return value.method if type(value) is _Method else value


def _tamed(value: Any) -> Any:
    """Return a value in a form that a strict template may hold."""
    if isinstance(value, (*DATA, *VIEWS, _Method, _Cycler, _Joiner)):
        return value
    if isinstance(value, jinja2.Undefined | Namespace | LoopContext | Macro):
        return value
    if isinstance(value, Iterator):
        return [*value]
    if callable(value):
        return _Method(getattr(value, "__name__", "call"), value)
    raise SecurityError(f"a template may not hold a {type(value).__name__}")


def _written(value: Any) -> Any:
    """Return a value in the form that a strict template prints."""
    _check_size(value)
    return value


def _bounded_filter(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers, except as the value that it filters."""
    first = 1 + hasattr(apply, "jinja_pass_arg")

    @functools.wraps(apply)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(name, FILTERS[name], [*args[first:], *kwargs.values()])
        return apply(*args, **kwargs)

    return bounded


def _strict_filter(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    first = hasattr(apply, "jinja_pass_arg")

    @functools.wraps(apply)
    def tamed(*args: Any, **kwargs: Any) -> Any:
        if name in WRITERS:
            _check_size(args[first:])
        return _tamed(apply(*args, **kwargs))

    return tamed


def _formatted(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return jinja2.filters.do_format(text, *args, **kwargs)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def environment(*, strict: bool = False) -> jinja2.Environment:
    """Return an environment; `strict` for templates of requests."""
    made = (StrictSandbox if strict else Sandbox)(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        finalize=_written if strict else None,
        undefined=_Missing if strict else jinja2.Undefined,
    )
    made.filters |= {"tojson": tojson, "format": _formatted}
    made.filters |= {name: _bounded_filter(name, made.filters[name]) for name in FILTERS}
    made.tests |= {name: asking(made.tests[name]) for name in ("none", "sameas")}
    made.globals |= {
        "cycler": _Cycler,
        "joiner": _Joiner,
        "namespace": _Namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    del made.globals["lipsum"]  # random text, as long as a template likes
    if strict:
        made.filters = {name: _strict_filter(name, each) for name, each in made.filters.items()}
        made.globals = {name: _tamed(each) for name, each in made.globals.items()}
    return made
