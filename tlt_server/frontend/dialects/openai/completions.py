"""Routes that complete prompts and conversations."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import NotFound, QueueFull, Unavailable
from tlt_server.frontend.dialects.models import named
from tlt_server.frontend.dialects.openai.answers import QUESTION, answer, read
from tlt_server.frontend.dialects.openai.conversations import prepared
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import (
    ChatCompletion,
    Completion,
    Rendered,
    failure,
)
from tlt_server.frontend.dialects.openai.requests import COMPLETION, ChatRequest, CompletionRequest
from tlt_server.frontend.dialects.openai.speaker import Speaker
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, Failure
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes, Unread, read_given
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.service import Service
from tlt_server.wire.labels import label_of
from tlt_server.wire.packed import PackedIds

ROUTES = Routes(read=read_given, error_shape=failure)


@ROUTES.post(
    "/v1/completions",
    needs="data",
    example={
        "prompt": ["2+2=", "3*4="],
        "n": 2,
        "max_tokens": 16,
        "seed": 7,
        "return_token_ids": True,
    },
    streams=(("message", Completion), ("message", Failure), ("message", Literal["[DONE]"])),
    raises=(NotFound, *UNFINISHED),
)
async def completions(
    service: Service, request: Request, body: Unread[CompletionRequest]
) -> Annotated[Response, Completion]:
    """Complete one prompt or a batch of prompts, given as text or token ids.

    Choices are prompt-major: choice i of prompt p has the index p * n + i. With `stream` the reply
    is server-sent chunks and a last `[DONE]`. Unknown fields are ignored, and null means absent.
    """
    asked, info = await read(service, request, body)
    return await answer(
        service,
        request,
        asked,
        info,
        asked.prompts(),
        COMPLETION,
        asked.structure,
        "cmpl",
        CompletionPhrase,
    )


@ROUTES.post(
    "/v1/chat/completions",
    needs="data",
    example={"messages": QUESTION, "max_completion_tokens": 64, "logprobs": True},
    streams=(("message", ChatCompletion), ("message", Failure), ("message", Literal["[DONE]"])),
    raises=(NotFound, *UNFINISHED),
)
async def chat(
    service: Service, request: Request, body: Unread[ChatRequest]
) -> Annotated[Response, ChatCompletion]:
    """Answer a conversation, put into the model's chat template with tools and
    chat_template_kwargs.

    With `stream` the reply is server-sent chunks and a last `[DONE]`. Unknown fields are ignored,
    and null means absent.
    """
    asked, info = await read(service, request, body)
    words = asked.words
    ready = await prepared(service, request, asked, info, words)
    phrase = partial(
        ChatPhrase,
        speaker=lambda: Speaker(
            ready.answer(),
            reasons=asked.include_reasoning,
            silence="" if asked.return_meta_info else None,
        ),
        live_version=label_of(info.weight_version),
    )
    prompts: list[str | PackedIds] = [ready.token_ids]
    return await answer(
        service, request, asked, info, prompts, words, ready.held, "chatcmpl", phrase
    )


@ROUTES.post(
    "/v1/chat/completions/render",
    needs="data",
    example={"messages": QUESTION},
    raises=(NotFound, QueueFull, Unavailable),
)
async def render(
    service: Service, request: Request, body: Unread[ChatRequest]
) -> Annotated[Response, Rendered]:
    """Return the prompt that a chat completion would have, and generate nothing."""
    asked, info = await read(service, request, body)
    ready = await prepared(service, request, asked, info, asked.words)
    text = ready.text
    if asked.input_ids is not None:
        text = await tokenizing.decode(service.text, asked.input_ids, special=True)
    turn = service.generations.share.of(caller_of(request).name)
    return sliced_response(
        {
            "model": named(service, asked.model),
            "prompt": text,
            "token_ids": ready.token_ids,
            "count": len(ready.token_ids),
            "max_model_len": info.max_model_len,
        },
        turn,
    )
