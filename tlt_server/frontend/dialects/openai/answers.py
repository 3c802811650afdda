"""Runs a request up to its reply, whole or in chunks: a conversation gets its tokens, the structure
of its answer (reasoning before it is free), and a reader of the answer.

A reply is complete or an error: the first item that fails ends the request with its error, which in
a stream is a chunk `{"error": ...}` before `[DONE]`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.borrowed import adapter_of
from tlt_server.frontend.dialects.openai.messages import NamedTool, by_name
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import ChatChoice, CompletionChoice, failure
from tlt_server.frontend.dialects.openai.requests import (
    CHAT,
    Asked,
    ChatRequest,
    StreamOptions,
    template_arguments,
)
from tlt_server.frontend.dialects.replies.logprobs import whole
from tlt_server.frontend.dialects.replies.whole import OpenAIUsage, UsageCount, parts_of
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem
from tlt_server.frontend.generation.requests import RequestBatch, StructuredOutputs, Words
from tlt_server.frontend.generation.samplings import is_small
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.parsers.answer import PROMPT_END, AnswerReader
from tlt_server.frontend.parsers.pieces import Form
from tlt_server.frontend.parsers.thinking import CLOSE, OPEN
from tlt_server.frontend.service import Service
from tlt_server.grammars.schemas import read_json
from tlt_server.grammars.tags import format_of
from tlt_server.wire.packed import PackedIds, PackedText, ending

QUESTION = [{"role": "user", "content": "Compute 3*4+5."}]
NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
FREE = {"type": "any_text"}
SPACE = {"type": "regex", "pattern": "[ \\n]{0,4}"}
Tag = dict[str, Any]
# The field that asks for a structure, and the structure.
Held = tuple[str, StructuredOutputs | UnsetType]


def called(asked: ChatRequest) -> dict[str, dict[str, Any]] | None:
    """Return the functions of which the answer must call one, by name; None if no call is
    required.
    """
    choice, offered = asked.tool_choice, by_name(asked.shown_tools())
    if choice in ("none", "auto"):
        return None
    if not offered:
        raise InvalidRequest("tool_choice requires a call, but tools is empty: give some tools")
    if not isinstance(choice, NamedTool):
        return offered
    name = choice.function.name
    if name not in offered:
        raise InvalidRequest(
            f"tool_choice.function.name is {shown(name)}, which is not one of the tools: name one"
        )
    return {name: offered[name]}


def structure(
    asked: ChatRequest, form: Form | None, prompt_opens: bool | None, words: Words
) -> Held:
    """Return the name of the field that asks for a structure, and the structure of the whole
    answer.

    `form`: of tool calls; None if none are read. `prompt_opens`: whether the end of the prompt
    opens reasoning; None if reasoning is not separated. A required call overrides a format of
    answers.
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
        return "tool_choice", _thought_first(_calls(functions, form, single=single), prompt_opens)
    if given is UNSET:
        return field, given
    part = _part(given)
    if part is None or (prompt_opens is None and (form is None or given.json_schema is None)):
        return field, given
    if form is not None and given.json_schema is not None:
        offered = by_name(asked.shown_tools())
        calls = _calls(offered, form, single=not asked.parallel_tool_calls)
        part = {"type": "or", "elements": [calls, part]}
    return field, _thought_first(part, prompt_opens)


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
    """Return a structure as a part of a structural tag; None if the structure itself will be
    refused.
    """
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


def _thought_first(part: Tag, prompt_opens: bool | None) -> StructuredOutputs:
    if prompt_opens is not None:
        begin = "" if prompt_opens else OPEN
        thought = {"type": "tag", "begin": begin, "content": FREE, "end": CLOSE}
        after = {"type": "sequence", "elements": [thought, SPACE, part]}
        part = after if prompt_opens else {"type": "or", "elements": [after, part]}
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": part})


class Prompted(NamedTuple):
    """The prompts of a request, the structure of the answers, and the client's names of fields."""

    prompts: Sequence[str | PackedIds]
    words: Words
    held: Held
    # Of a conversation its text, the end alone where it is given as tokens, and the maker of what
    # reads one answer.
    text: str | PackedText = ""
    reader: Callable[[], AnswerReader | None] = lambda: None


async def prepared(
    service: Service, request: Request, asked: ChatRequest, words: Words = CHAT
) -> Prompted:
    """Put a chat request into the template. `words`: the client's field names. `InvalidRequest` if
    its tools are invalid or the template does not show them.
    """
    service.validator.check_choices(asked.n, caller_of(request))
    must_call = called(asked) is not None
    text: str | PackedText
    if asked.input_ids is not None:
        token_ids = asked.input_ids
        text = service.text.decode(token_ids[-PROMPT_END:], special=True)
    else:
        _check_shown(service, asked, must_call)
        text, token_ids = await conversation(
            service,
            template_arguments(asked, asked.messages),
            special=asked.add_special_tokens is True,
            whole=asked.truncate_prompt_tokens is None,
            where=words.item,
        )
    parsers, tools = service.parsers, by_name(asked.shown_tools())
    end, reasons = ending(text, PROMPT_END), asked.separate_reasoning
    kind = parsers.forced if must_call else parsers.tools
    held = structure(
        asked,
        kind.form if kind is not None and tools else None,
        parsers.thinking.opens(end) if parsers.thinking and reasons else None,
        words,
    )
    reader = partial(
        parsers.answer,
        end,
        tools or None,
        forced=must_call,
        parallel=asked.parallel_tool_calls,
        reasons=reasons,
    )
    return Prompted([token_ids], words, held, text, reader)


def _check_shown(service: Service, asked: ChatRequest, must_call: bool) -> None:
    """Refuse tools that the model would not see, unless the answer must be a call."""
    tools = asked.shown_tools()
    template = service.text.template_for(tools=bool(tools), name=asked.chat_template)
    if tools and not must_call and template is not None and not template.reads("tools"):
        raise InvalidRequest(
            "tools is given, and the chat template of this model does not show them to it: leave "
            'them out, or set tool_choice to "none" or "required"'
        )


async def conversation(
    service: Service,
    arguments: dict[str, Any],
    *,
    special: bool = False,
    whole: bool = True,
    where: str = "messages",
) -> tuple[str | PackedText, PackedIds]:
    """Return the text of a conversation, and its tokens."""
    template = arguments["template"]
    if template not in (None, *service.text.templates) and not service.config.allow_chat_template:
        raise InvalidRequest(
            "chat_template is given, and this server runs only the model's own templates: leave it "
            "out, or start the server with --allow-chat-template"
        )
    text = await tokenizing.render(service.text, **arguments)
    [token_ids] = await service.validator.encode(
        [where], [text], service.info, special=special, whole=whole
    )
    return text, token_ids


async def answer(
    service: Service,
    request: Request,
    asked: Asked,
    native: Prompted,
    kind: str,
    phrase_of: Callable[[Service, Any, RequestBatch, str], CompletionPhrase | ChatPhrase],
) -> Response:
    """Generate, and reply in the form of `phrase_of`."""
    name = asked.request_id or given_id(request.headers.raw) or uuid.uuid4().hex
    id = f"{kind}-{name}"
    batch, generation = await begun(service, request, asked, native, (name, id))
    phrase = phrase_of(service, asked, batch, id)
    if asked.stream:
        events = _chunks(phrase, batch, generation, asked.stream_options)
        return EventStream(events, generation, lambda error: [event_frame(failure(error))])
    return await reply(request, _whole(phrase, batch, generation), generation)


async def begun(
    service: Service, request: Request, asked: Asked, native: Prompted, names: Collection[str]
) -> tuple[RequestBatch, Generation]:
    """Admit the prompts and start to generate. `names`: any of these can abort all."""
    field, structure = native.held
    return await service.begin(
        asked.native(native.prompts, structure, adapter_of(service, asked.model)),
        caller_of(request),
        native.words.structured_by(field),
        asked.reading(),
        names,
    )


async def _whole(
    phrase: CompletionPhrase | ChatPhrase, batch: RequestBatch, generation: Generation
) -> Response:
    positions = batch.positions

    async def made(item: FinishedItem, choice: FinishedChoice) -> CompletionChoice | ChatChoice:
        cached, turn = item.cached_tokens, generation.turn
        return await phrase.part(positions[item.id], whole(choice), choice, cached, turn)

    parts, count = await parts_of(generation, batch, made)
    return sliced_response(phrase.reply(parts, count.openai()), generation.turn)  # type: ignore[arg-type]


async def _chunks(
    phrase: CompletionPhrase | ChatPhrase,
    batch: RequestBatch,
    generation: Generation,
    options: StreamOptions,
) -> AsyncIterator[bytes | LargeEvent]:
    positions, count, usage = batch.positions, UsageCount(), options.include_usage
    far = UsageCount(sum(len(item.requests[0].token_ids) for item in batch.items))
    async for event in generation.successes():
        if isinstance(event, FinishedItem):
            count.add(event)
            continue
        id, delta, ended = event
        far.completion_tokens += len(delta.token_ids)
        so_far: OpenAIUsage | None | UnsetType = None if usage else UNSET
        if usage and options.continuous_usage_stats:
            far.cached_tokens = sum(map(generation.cached_tokens, positions))
            so_far = far.openai()
        cached = generation.cached_tokens(id) if ended is not None else 0
        part = await phrase.part(positions[id], delta, ended, cached, generation.turn)
        chunk = phrase.reply([part], so_far)  # type: ignore[list-item]
        if delta.prompt_logprobs:
            yield LargeEvent(chunk, generation.turn)
        else:
            yield event_frame(chunk)
    if usage:
        yield event_frame(phrase.reply([], count.openai()))
