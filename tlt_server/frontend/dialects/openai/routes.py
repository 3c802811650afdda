"""The dialect's routes for models, completions and tokenization; `/v1/responses` is elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import InvalidRequest, NotFound, QueueFull, Unavailable
from tlt_server.frontend.dialects.borrowed import generating, named, running, unknown
from tlt_server.frontend.dialects.openai.answers import (
    QUESTION,
    Prompted,
    answer,
    conversation,
    prepared,
)
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import (
    ChatCompletion,
    Completion,
    Detokenized,
    Model,
    Models,
    Rendered,
    TokenizerInfo,
    Tokens,
    failure,
)
from tlt_server.frontend.dialects.openai.requests import (
    COMPLETION,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    template_arguments,
)
from tlt_server.frontend.dialects.openai.responses import routes as responses
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, Failure
from tlt_server.frontend.dialects.replies.server_info import model_path
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.validation import check_vocabulary
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import About, Routes
from tlt_server.frontend.http.fields import check_one
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.service import Service

ROUTES = Routes(needs="data", read=generating, error_shape=failure)
ModelName = Annotated[str, "a name of the model, as `GET /v1/models` lists it"]


@ROUTES.get("/v1/models")
async def models(service: Service, caller: Caller) -> Models:
    """List the names of the served model, with the limit on its prompt plus output.

    A key that may push weights or operate also sees the model's directory, which is a name too.
    """
    return Models([*_models(service, caller).values()])


@ROUTES.get("/v1/models/{name:path}", raises=(NotFound,))
async def model(service: Service, caller: Caller, name: ModelName) -> Model:
    """Describe the served model, by one of its names."""
    found = _models(service, caller).get(name)
    if found is None:
        raise unknown(service, name)
    return found


def _models(service: Service, caller: Caller) -> dict[str, Model]:
    info, root = service.engine.info, model_path(service, caller)
    longest = info.max_model_len if info is not None else service.config.max_model_len
    assert isinstance(longest, int)
    served = service.config.served_model_name
    created = service.started_s
    found = {name: Model(name, created, longest, root) for name in (served, root)}
    adapters = info.adapters if info is not None else {}
    return found | {
        name: Model(name, created, longest, version, served)
        for name, version in adapters.items()
        if name not in found
    }


@ROUTES.post(
    "/v1/completions",
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
    service: Service, request: Request, asked: CompletionRequest
) -> Annotated[Response, Completion]:
    """Complete one prompt or a batch of prompts, given as text or token ids.

    Choices are prompt-major: choice i of prompt p has the index p * n + i. With `stream` the reply
    is server-sent chunks and a last `[DONE]`. Unknown fields are ignored, and null means absent.
    """
    prompted = Prompted(asked.prompts(), COMPLETION, asked.structure)
    return await answer(service, request, asked, prompted, "cmpl", CompletionPhrase)


@ROUTES.post(
    "/v1/chat/completions",
    example={"messages": QUESTION, "max_completion_tokens": 64, "logprobs": True},
    streams=(("message", ChatCompletion), ("message", Failure), ("message", Literal["[DONE]"])),
    raises=(NotFound, *UNFINISHED),
)
async def chat(
    service: Service, request: Request, asked: ChatRequest
) -> Annotated[Response, ChatCompletion]:
    """Answer a conversation, put into the model's chat template with tools and
    chat_template_kwargs.

    With `stream` the reply is server-sent chunks and a last `[DONE]`. Unknown fields are ignored,
    and null means absent.
    """
    prompted = await prepared(service, request, asked, asked.words)
    phrase = partial(ChatPhrase, reader=prompted.reader)
    return await answer(service, request, asked, prompted, "chatcmpl", phrase)


@ROUTES.post(
    "/v1/chat/completions/render",
    example={"messages": QUESTION},
    raises=(NotFound, QueueFull, Unavailable),
)
async def render(
    service: Service, request: Request, asked: ChatRequest
) -> Annotated[Response, Rendered]:
    """Return the prompt that a chat completion would have, and generate nothing."""
    ready = await prepared(service, request, asked, asked.words)
    text, [token_ids] = ready.text, ready.prompts
    if asked.input_ids is not None:
        text = await tokenizing.decode(service.text, asked.input_ids, special=True)
    return _sliced(
        service,
        request,
        {
            "model": named(service, asked.model),
            "prompt": text,
            "token_ids": token_ids,
            "count": len(token_ids),
            "max_model_len": service.info.max_model_len,
        },
    )


TOKENIZING: About = {
    "read": running,
    "example": {"messages": QUESTION},
    "raises": (NotFound, Unavailable),
}
DETOKENIZING: About = {**TOKENIZING, "example": {"tokens": [17, 18, 19]}}


@ROUTES.post("/v1/tokenize", **TOKENIZING)
@ROUTES.post("/tokenize", **TOKENIZING)
async def tokenize(
    service: Service, request: Request, asked: TokenizeRequest
) -> Annotated[Response, Tokens]:
    """Return the token ids of a text, or of a conversation put into the chat template. This works
    in a pause and a sleep too.
    """
    check_one(asked)
    if asked.messages is not None:
        arguments = template_arguments(asked, asked.messages)
        _, tokens = await conversation(service, arguments, special=asked.add_special_tokens is True)
    else:
        assert asked.prompt is not None
        [tokens] = await service.validator.encode(
            ["prompt"], [asked.prompt], service.info, special=asked.add_special_tokens is not False
        )
    content = {"tokens": tokens, "count": len(tokens), "max_model_len": service.info.max_model_len}
    return _sliced(service, request, content)


@ROUTES.get("/tokenizer_info")
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


@ROUTES.post("/v1/detokenize", **DETOKENIZING)
@ROUTES.post("/detokenize", **DETOKENIZING)
async def detokenize(
    service: Service, request: Request, asked: DetokenizeRequest
) -> Annotated[Response, Detokenized]:
    """Return the text of token ids, special tokens included. This works in a pause and a sleep
    too.
    """
    if service.text.tokenizer is None:
        raise InvalidRequest(
            "tokens cannot be read: this model directory has no tokenizer.json; decode them where "
            "that file is"
        )
    check_vocabulary("tokens", asked.tokens, service.info)
    text = await tokenizing.decode(service.text, asked.tokens, special=True)
    return _sliced(service, request, {"prompt": text})


def _sliced(service: Service, request: Request, content: dict[str, Any]) -> Response:
    return sliced_response(content, service.generations.share.of(caller_of(request).name))


ROUTES += responses.ROUTES
