"""The functions that a model may call, and which of them it must, in the words of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from tlt_client.fields import ShortName
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import RefusedField, Tolerant, shown
from tlt_server.frontend.parsers.pieces import MAX_NAME, is_name

MAX_TOOLS = 1024

Tools = Annotated[
    list[dict[str, Any]],
    'functions, each `{"type": "function", "function": {"name", "description", "parameters"}}`; '
    "the chat template shows them to the model",
]
Parallel = Annotated[bool, "false: at most one call is read out of the answer"]


class NamedFunction(Tolerant, frozen=True, kw_only=True):
    name: Annotated[ShortName, "one of the tools"]


class NamedTool(Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = {
        "allowed_tools": RefusedField("send only the tools that are allowed")
    }

    type: Annotated[Literal["function"], "the kind of tool"] = "function"
    function: Annotated[NamedFunction, "the function to call"]


Choice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    "none: tools are not shown to the model; auto: it may call; required, or a function: it must",
]


def check_tools(tools: Sequence[dict[str, Any]]) -> None:
    """Refuse what is no list of functions."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} items; the limit is {MAX_TOOLS}: offer fewer functions"
        )
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise InvalidRequest(
                f"tools[{i}].type is {shown(tool['type'])}; the server calls no tools itself: "
                "describe it as a function"
            )
        name = _function(tool).get("name")
        if not is_name(name):
            raise InvalidRequest(
                f"tools[{i}].function.name is {shown(name)}; it must have 1 to {MAX_NAME} "
                "characters, without control characters"
            )


def by_name(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions of tools that `check_tools` has passed."""
    return {function["name"]: function for function in map(_function, tools)}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a tool, which may also be the tool itself, as templates take it."""
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}
