"""The OpenAI dialect: completions and chat completions with token ids in and out, models, tokenize
and detokenize.

Bodies are translated to the native request and share its limits; errors have the OpenAI envelope. A
reply is complete or an error: the first item that fails ends the request with its error, which in a
stream is a chunk `{"error": ...}` before `[DONE]`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import InvalidRequest, NotFound, TltError, Unavailable
from tlt_server.events import EngineInfo
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import (
    ChatCompletion,
    Completion,
    Detokenized,
    Model,
    Models,
    TokenizerInfo,
    Tokens,
    failure,
)
from tlt_server.frontend.dialects.openai.requests import (
    CHAT,
    COMPLETION,
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    template_arguments,
)
from tlt_server.frontend.dialects.openai.speaker import Speaker
from tlt_server.frontend.dialects.openai.tools import by_name
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, Failure
from tlt_server.frontend.dialects.replies.logprobs import Speller, whole
from tlt_server.frontend.dialects.replies.server_info import model_path
from tlt_server.frontend.dialects.replies.usage import OpenAIUsage, UsageCount, usage_of
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.batch import RequestBatch, Words
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import About, Parameter, Routes
from tlt_server.frontend.http.replies import json_response, sliced_response, unexpected
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.parsers.choice import PROMPT_END
from tlt_server.frontend.service import Service
from tlt_server.packed import PackedIds, ending

Phrase = CompletionPhrase | ChatPhrase


ROUTES = Routes(error_shape=failure)
QUESTION = [{"role": "user", "content": "Compute 3*4+5."}]
NAME = Parameter("name", "path", "a name of the model, as `GET /v1/models` lists it")
TOKENIZING: About = {
    "takes": TokenizeRequest,
    "example": {"messages": QUESTION},
    "gives": Tokens,
    "raises": (NotFound, Unavailable),
}
DETOKENIZING: About = {
    "takes": DetokenizeRequest,
    "example": {"tokens": [17, 18, 19]},
    "gives": Detokenized,
    "raises": (NotFound, Unavailable),
}


@ROUTES.get("/v1/models", needs="data", gives=Models)
async def models(service: Service, request: Request) -> Response:
    """List the names of the served model, with the limit on its prompt plus output.

    A key that may push weights or operate also sees the model's directory, which is a name too.
    """
    return json_response(Models([*_models(service, request).values()]))


@ROUTES.get(
    "/v1/models/{name:path}", needs="data", parameters=(NAME,), gives=Model, raises=(NotFound,)
)
async def model(service: Service, request: Request) -> Response:
    """Describe the served model, by one of its names."""
    found = _models(service, request).get(request.path_params["name"])
    if found is None:
        raise _unknown(service, request.path_params["name"])
    return json_response(found)


def _models(service: Service, request: Request) -> dict[str, Model]:
    info, root = service.engine.info, model_path(service, caller_of(request))
    longest = info.max_model_len if info is not None else service.config.max_model_len
    assert isinstance(longest, int)
    names = dict.fromkeys((service.config.served_model_name, root))
    return {name: Model(name, longest, root) for name in names}


def _unknown(service: Service, name: str) -> NotFound:
    served = service.config.served_model_name
    return NotFound(
        f"model is {name[:100]!r}; this server serves {served!r}: name that one, or none"
    )


@ROUTES.post(
    "/v1/completions",
    needs="data",
    takes=CompletionRequest,
    example={
        "prompt": ["2+2=", "3*4="],
        "n": 2,
        "max_tokens": 16,
        "seed": 7,
        "return_token_ids": True,
    },
    gives=Completion,
    streams=(("message", Completion), ("message", Failure), ("message", Literal["[DONE]"])),
    raises=(NotFound, *UNFINISHED),
)
async def completions(service: Service, request: Request) -> Response:
    """Complete one prompt or a batch of prompts, given as text or token ids.

    Choices are prompt-major: choice i of prompt p has the index p * n + i. With `stream` the reply
    is server-sent chunks and a last `[DONE]`. Unknown fields are ignored, and null means absent.
    """
    asked, info = await _read(service, request, CompletionRequest)
    return await _answer(
        service, request, asked, info, asked.prompts(), COMPLETION, "cmpl", CompletionPhrase
    )


@ROUTES.post(
    "/v1/chat/completions",
    needs="data",
    takes=ChatRequest,
    example={"messages": QUESTION, "max_completion_tokens": 64, "logprobs": True},
    gives=ChatCompletion,
    streams=(("message", ChatCompletion), ("message", Failure), ("message", Literal["[DONE]"])),
    raises=(NotFound, *UNFINISHED),
)
async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation, put into the model's chat template with tools and
    chat_template_kwargs.

    With `stream` the reply is server-sent chunks and a last `[DONE]`. Unknown fields are ignored,
    and null means absent.
    """
    asked, info = await _read(service, request, ChatRequest)
    if asked.shown_tools() and service.text.has_template and not service.text.reads("tools"):
        raise InvalidRequest(
            "tools is given, and the chat template of this model does not show them to it: leave "
            'them out, or set tool_choice to "none"'
        )
    service.validator.check_choices(asked.n, caller_of(request))
    token_ids, end = await _conversation(
        service,
        info,
        template_arguments(asked, asked.messages),
        special=asked.add_special_tokens is True,
        whole=asked.truncate_prompt_tokens is None,
    )
    phrase = partial(ChatPhrase, speaker=lambda: _speaker(service, asked, end))
    return await _answer(service, request, asked, info, [token_ids], CHAT, "chatcmpl", phrase)


def _speaker(service: Service, asked: ChatRequest, prompt_end: str) -> Speaker:
    tools = asked.shown_tools()
    answer = service.parsers.answer(
        prompt_end,
        by_name(tools) if tools else None,
        parallel=asked.parallel_tool_calls,
        reasons=asked.separate_reasoning,
    )
    return Speaker(answer, reasons=asked.include_reasoning)


@ROUTES.post("/v1/tokenize", needs="data", **TOKENIZING)
@ROUTES.post("/tokenize", needs="data", **TOKENIZING)
async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation put into the chat template. This works
    in a pause and a sleep too.
    """
    asked, info = await _read(service, request, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest(
            f"prompt is {'absent' if asked.prompt is None else 'given'} and so is messages; give "
            "exactly one of them"
        )
    if asked.messages is not None:
        arguments = template_arguments(asked, asked.messages)
        tokens, _ = await _conversation(
            service, info, arguments, special=asked.add_special_tokens is True
        )
    else:
        assert asked.prompt is not None
        [tokens] = await service.validator.encode(
            ["prompt"], [asked.prompt], info, special=asked.add_special_tokens is not False
        )
    return sliced_response(
        {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_model_len},
        service.generations.share.of(caller_of(request).name),
    )


@ROUTES.get("/tokenizer_info", needs="data", gives=TokenizerInfo)
async def tokenizer_info(service: Service, request: Request) -> Response:
    """Name the special tokens and the chat template."""
    text, tokens = service.text, service.text.tokens
    info = TokenizerInfo(
        chat_template=text.template,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        pad_token=tokens.get("pad_token"),
        unk_token=tokens.get("unk_token"),
    )
    return json_response(info)


@ROUTES.post("/v1/detokenize", needs="data", **DETOKENIZING)
@ROUTES.post("/detokenize", needs="data", **DETOKENIZING)
async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, special tokens included. This works in a pause and a sleep
    too.
    """
    asked, info = await _read(service, request, DetokenizeRequest)
    if service.text.tokenizer is None:
        raise InvalidRequest(
            "tokens cannot be read: this model directory has no tokenizer.json; decode them where "
            "that file is"
        )
    if asked.tokens.greatest() >= info.vocab_size:
        raise InvalidRequest(
            f"tokens has the token id {asked.tokens.greatest()}; ids of this model end at "
            f"{info.vocab_size - 1}: tokenise with the served model's tokenizer"
        )
    text = await tokenizing.decode(service.text, asked.tokens, special=True)
    turn = service.generations.share.of(caller_of(request).name)
    return sliced_response({"prompt": text}, turn)


async def _answer(
    service: Service,
    request: Request,
    asked: Any,
    info: EngineInfo,
    prompts: list[str | PackedIds],
    words: Words,
    kind: str,
    phrase_of: Callable[..., Phrase],
) -> Response:
    words = words.structured_by(asked.structure[0])
    batch = await service.validator.batch(
        asked.native(prompts), info, caller_of(request), words, asked.reading()
    )
    name = asked.request_id or given_id(request.headers.raw) or uuid.uuid4().hex
    id = f"{kind}-{name}"
    generation = await service.start(batch, caller_of(request).name, names=(name, id))
    speller = Speller(
        service.pieces, as_ids=asked.return_tokens_as_token_ids or service.text.tokenizer is None
    )
    phrase = phrase_of(
        asked,
        batch,
        service.text,
        speller,
        frozenset(info.eos_token_ids) - set(asked.stop_token_ids or ()),
        id,
        int(time.time()),
        service.config.served_model_name,
    )
    if asked.stream:
        return EventStream(_chunks(phrase, batch, generation, asked.stream_options), generation)
    return await reply(request, _whole(phrase, batch, generation), generation)


async def _read(service: Service, request: Request, model: type[Any]) -> tuple[Any, EngineInfo]:
    generates = issubclass(model, Asked)
    check = service.engine.check_available if generates else service.engine.check_running
    check()
    body = await request.body()
    check()  # again, since reading the body may take long
    if generates:
        # Checked before a large body is parsed.
        service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    asked = await service.bodies.read(model, body)
    if asked.model not in ("", service.config.served_model_name, str(service.config.model)):
        raise _unknown(service, asked.model)
    assert service.engine.info is not None
    return asked, service.engine.info


async def _conversation(
    service: Service,
    info: EngineInfo,
    arguments: dict[str, Any],
    *,
    special: bool = False,
    whole: bool = True,
) -> tuple[PackedIds, str]:
    """Return the tokens of a conversation, and the end of its text."""
    text = await tokenizing.render(service.text, **arguments)
    [token_ids] = await service.validator.encode(
        ["messages"], [text], info, special=special, whole=whole
    )
    return token_ids, ending(text, PROMPT_END)


async def _whole(phrase: Phrase, batch: RequestBatch, generation: Generation) -> Response:
    positions, count, parts = _positions(batch), UsageCount(), []
    async for event in generation.events():
        if isinstance(event, FailedItem):
            raise event.error
        if isinstance(event, FinishedItem):
            count.add(event)
            for choice in event.choices:
                await generation.turn(SLICE_BYTES)
                delta = whole(choice)
                await phrase.hear(delta, True, generation.turn)
                parts.append(phrase.part(positions[event.id], delta, choice))
    parts.sort(key=lambda part: part.index)
    return sliced_response(phrase.reply(parts, count.usage()), generation.turn)  # type: ignore[arg-type]


async def _chunks(
    phrase: Phrase, batch: RequestBatch, generation: Generation, options: StreamOptions
) -> AsyncIterator[bytes | LargeEvent]:
    positions, count, usage = _positions(batch), UsageCount(), options.include_usage
    prompt_tokens = sum(len(item.requests[0].token_ids) for item in batch.items)
    made = 0
    try:
        async for event in generation.events():
            match event:
                case TokenEvent(id, delta, ended):
                    made += len(delta.token_ids)
                    so_far: OpenAIUsage | None | UnsetType = None if usage else UNSET
                    if usage and options.continuous_usage_stats:
                        cached = sum(map(generation.cached_tokens, positions))
                        so_far = usage_of(prompt_tokens, made, cached)
                    await phrase.hear(delta, ended is not None, generation.turn)
                    chunk = phrase.reply([phrase.part(positions[id], delta, ended)], so_far)  # type: ignore[list-item]
                    if not delta.prompt_logprobs:
                        yield event_frame(chunk)
                        continue
                    yield LargeEvent(chunk, generation.turn)
                case FinishedItem():
                    count.add(event)
                case FailedItem(_, error):
                    raise error
        if usage:
            yield event_frame(phrase.reply([], count.usage()))
    except TltError as error:
        yield event_frame(failure(error))
    except Exception as error:  # a bug of ours; the status is sent, so the stream shows it
        yield event_frame(failure(unexpected(error)))
    yield b"data: [DONE]\n\n"


def _positions(batch: RequestBatch) -> dict[str, int]:
    return {item.id: i for i, item in enumerate(batch.items)}
