"""A conversation on its way to the engine: its tokens, the structure that its answer is held to,
and what reads the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.openai.forced import Held, called, structure
from tlt_server.frontend.dialects.openai.requests import CHAT, ChatRequest, template_arguments
from tlt_server.frontend.dialects.openai.tools import by_name
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.batch import Words
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.parsers.answer import AnswerReader
from tlt_server.frontend.parsers.choice import PROMPT_END
from tlt_server.frontend.service import Service
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.packed import PackedIds, PackedText, ending


class Prepared(NamedTuple):
    text: str | PackedText  # the end alone where the prompt is given as tokens
    token_ids: PackedIds
    held: Held
    answer: Callable[[], AnswerReader | None]  # makes what reads one answer


async def prepared(
    service: Service, request: Request, asked: ChatRequest, info: EngineInfo, words: Words = CHAT
) -> Prepared:
    """Put a chat request into the template. `words` are the client's names of its fields.

    `InvalidRequest`: its tools are none, or not seen.
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
            info,
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
    answer = partial(
        parsers.answer,
        end,
        tools or None,
        forced=must_call,
        parallel=asked.parallel_tool_calls,
        reasons=reasons,
    )
    return Prepared(text, token_ids, held, answer)


def _check_shown(service: Service, asked: ChatRequest, must_call: bool) -> None:
    """Refuse tools that the model would not see, unless the answer is held to calls."""
    tools = asked.shown_tools()
    template = service.text.template_for(tools=bool(tools), name=asked.chat_template)
    if tools and not must_call and template is not None and not template.reads("tools"):
        raise InvalidRequest(
            "tools is given, and the chat template of this model does not show them to it: leave "
            'them out, or set tool_choice to "none" or "required"'
        )


async def conversation(
    service: Service,
    info: EngineInfo,
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
        [where], [text], info, special=special, whole=whole
    )
    return text, token_ids
