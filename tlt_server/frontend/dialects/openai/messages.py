"""Messages of a chat, and how a template sees them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tlt_client.fields import ShortName
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.lenient import SentArguments, SentMessage
from tlt_server.frontend.generation.requests import MAX_MESSAGES
from tlt_server.frontend.http.fields import Open, Tolerant
from tlt_server.frontend.http.parsing import any_json

MAX_PARTS = 2**12  # limit on one message


class Part(Tolerant, frozen=True, kw_only=True):
    type: Annotated[Literal["text"], "other types are refused"]
    text: Annotated[str, "a piece of the message"]


class ChatMessage(Open, frozen=True, kw_only=True):
    """A message of which the template sees every field; parts of the content are joined by
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
    """Return a tool call as templates read it: the arguments as an object, or as JSON."""
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
