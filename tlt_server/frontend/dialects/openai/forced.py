"""The structure of an answer that must call functions, or that may call them and is otherwise held
to a schema, as a structural tag. Reasoning comes before it, free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.openai.requests import ChatRequest
from tlt_server.frontend.dialects.openai.tools import NamedTool, by_name
from tlt_server.frontend.generation.batch import Words
from tlt_server.frontend.generation.requests import StructuredOutputs
from tlt_server.frontend.generation.structures import is_small
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.parsers.pieces import Form
from tlt_server.frontend.parsers.thinking import CLOSE, OPEN
from tlt_server.grammars.schemas import read_json
from tlt_server.grammars.tags import format_of

NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
FREE = {"type": "any_text"}
SPACE = {"type": "regex", "pattern": "[ \\n]{0,4}"}
Tag = dict[str, Any]
# The field that asks for a structure, and the structure.
Held = tuple[str, StructuredOutputs | UnsetType]


def called(asked: ChatRequest) -> dict[str, dict[str, Any]] | None:
    """Return the functions of which the answer must call one, by name; None if it need not."""
    choice, offered = asked.tool_choice, by_name(asked.shown_tools())
    if choice in ("none", "auto"):
        return None
    if not offered:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools: give some")
    if not isinstance(choice, NamedTool):
        return offered
    name = choice.function.name
    if name not in offered:
        raise InvalidRequest(
            f"tool_choice.function.name is {shown(name)}, which is none of the tools: name one"
        )
    return {name: offered[name]}


def structure(
    asked: ChatRequest, form: Form | None, prompt_opens: bool | None, words: Words
) -> Held:
    """Return the client's field that asks for a structure, and the structure of the whole answer.

    `form` is that of calls, None where none are read; `prompt_opens` tells whether the end of the
    prompt opens reasoning, None where reasoning is not told apart. A call that must be made wins
    over a format of answers.
    """
    name, given = asked.structure
    field = words.called(name)
    functions = called(asked)
    if functions is not None:
        if given is not UNSET and name != "response_format":
            raise InvalidRequest(
                f"{field} asks for a structure and tool_choice for a call; give one of them"
            )
        assert form is not None
        single = isinstance(asked.tool_choice, NamedTool) or not asked.parallel_tool_calls
        return "tool_choice", _whole(_calls(functions, form, single=single), prompt_opens)
    if given is UNSET:
        return field, given
    part = _part(given)
    if part is None or (prompt_opens is None and (form is None or given.json_schema is None)):
        return field, given
    if form is not None and given.json_schema is not None:
        offered = by_name(asked.shown_tools())
        calls = _calls(offered, form, single=not asked.parallel_tool_calls)
        part = {"type": "or", "elements": [calls, part]}
    return field, _whole(part, prompt_opens)


def _calls(functions: Mapping[str, dict[str, Any]], form: Form, *, single: bool) -> Tag:
    tags = [
        {
            "begin": form.begin.format(name=json.dumps(name, ensure_ascii=False)),
            "content": {
                "type": "json_schema",
                "json_schema": function.get("parameters") or NO_ARGUMENTS,
            },
            "end": form.end,
        }
        for name, function in functions.items()
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def _part(given: StructuredOutputs) -> Tag | None:
    """Return a structure as a part of a structural tag, or None if it is refused as it is."""
    if given.regex is not None:
        return {"type": "regex", "pattern": given.regex}
    if given.grammar is not None:
        return {"type": "grammar", "grammar": given.grammar}
    if given.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in given.choice]
        return {"type": "or", "elements": texts}
    is_schema = given.json_schema is not None
    content = given.json_schema if is_schema else given.structural_tag
    if not is_small(content):
        return None
    try:
        content = read_json(content) if isinstance(content, str) else content
    except InvalidRequest:
        return None
    if is_schema:
        return {"type": "json_schema", "json_schema": content}
    return format_of(content) if isinstance(content, dict) else None


def _whole(part: Tag, prompt_opens: bool | None) -> StructuredOutputs:
    if prompt_opens is not None:
        begin = "" if prompt_opens else OPEN
        thought = {"type": "tag", "begin": begin, "content": FREE, "end": CLOSE}
        after = {"type": "sequence", "elements": [thought, SPACE, part]}
        part = after if prompt_opens else {"type": "or", "elements": [after, part]}
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": part})
