"""Messages of a chat, in the form that templates read, and the functions that a model may or must
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tlt_client.fields import ShortName
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.lenient import SentArguments, SentMessage
from tlt_server.frontend.generation.requests import MAX_MESSAGES
from tlt_server.frontend.http.fields import Open, RefusedField, Tolerant, shown
from tlt_server.frontend.http.parsing import any_json
from tlt_server.frontend.parsers.pieces import MAX_NAME, is_name

MAX_TOOLS = 1024

Tools = Annotated[
    list[dict[str, Any]],
    'functions, each `{"type": "function", "function": {"name", "description", "parameters"}}`; '
    "the chat template shows them to the model",
]
Parallel = Annotated[bool, "false: at most one call is read out of the answer"]
MAX_PARTS = 2**12  # limit on one message


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
    """Refuse anything but a list of functions."""
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
    """Return the function of a tool. The tool itself may be the function, as templates accept."""
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}


class Part(Tolerant, frozen=True, kw_only=True):
    type: Annotated[Literal["text"], "other types are refused"]
    text: Annotated[str, "a piece of the message"]


class ChatMessage(Open, frozen=True, kw_only=True):
    """A message, every field of which the template sees. Parts of the content are joined by
    newlines.
    """

    role: Annotated[ShortName, "whose turn it is, as the chat template knows it"]
    content: Annotated[
        str | None | Annotated[list[Part], Meta(max_length=MAX_PARTS)],
        "the text of the message; null or absent: it has none",
    ] = None

    def for_template(self) -> dict[str, Any]:
        content = (
            "\n".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content
        )
        fields = {name: value for name, value in self.more.items() if value is not None}
        # A template may show calls only where there is no text.
        if not content and fields.get("tool_calls"):
            content = None
        if isinstance(fields.get("tool_calls"), list):
            fields["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
        if "reasoning" in fields:  # as replies name it too
            fields.setdefault("reasoning_content", fields["reasoning"])
        return SentMessage({"role": self.role, "content": content, **fields})


def _with_arguments(call: Any) -> Any:
    """Return a tool call in the form of templates: arguments as an object, or as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(given, str | dict):
        return call
    text = given or "{}" if isinstance(given, str) else msgspec.json.encode(given).decode()
    try:
        arguments = any_json(text)
    except InvalidRequest:
        return call
    if isinstance(arguments, dict):
        arguments = SentArguments(arguments, text)
    return call | {"function": function | {"arguments": arguments}}


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
