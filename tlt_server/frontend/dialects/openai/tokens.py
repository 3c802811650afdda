"""Routes between texts and token ids."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import InvalidRequest, NotFound, Unavailable
from tlt_server.frontend.dialects.openai.answers import QUESTION, read
from tlt_server.frontend.dialects.openai.conversations import conversation
from tlt_server.frontend.dialects.openai.replies import Detokenized, TokenizerInfo, Tokens, failure
from tlt_server.frontend.dialects.openai.requests import (
    DetokenizeRequest,
    TokenizeRequest,
    template_arguments,
)
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import About, Routes, Unread, read_given
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.service import Service

ROUTES = Routes(read=read_given, error_shape=failure)
TOKENIZING: About = {"example": {"messages": QUESTION}, "raises": (NotFound, Unavailable)}
DETOKENIZING: About = {"example": {"tokens": [17, 18, 19]}, "raises": (NotFound, Unavailable)}


@ROUTES.post("/v1/tokenize", needs="data", **TOKENIZING)
@ROUTES.post("/tokenize", needs="data", **TOKENIZING)
async def tokenize(
    service: Service, request: Request, body: Unread[TokenizeRequest]
) -> Annotated[Response, Tokens]:
    """Return the token ids of a text, or of a conversation put into the chat template. This works
    in a pause and a sleep too.
    """
    asked, info = await read(service, request, body, generates=False)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest(
            f"prompt is {'absent' if asked.prompt is None else 'given'} and so is messages; give "
            "exactly one of them"
        )
    if asked.messages is not None:
        arguments = template_arguments(asked, asked.messages)
        _, tokens = await conversation(
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


@ROUTES.get("/tokenizer_info", needs="data")
async def tokenizer_info(service: Service) -> TokenizerInfo:
    """Name the special tokens and the chat template."""
    tokens, template = service.text.tokens, service.text.template_for(tools=False)
    return TokenizerInfo(
        chat_template=template.source if template is not None else None,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        pad_token=tokens.get("pad_token"),
        unk_token=tokens.get("unk_token"),
    )


@ROUTES.post("/v1/detokenize", needs="data", **DETOKENIZING)
@ROUTES.post("/detokenize", needs="data", **DETOKENIZING)
async def detokenize(
    service: Service, request: Request, body: Unread[DetokenizeRequest]
) -> Annotated[Response, Detokenized]:
    """Return the text of token ids, special tokens included. This works in a pause and a sleep
    too.
    """
    asked, info = await read(service, request, body, generates=False)
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
