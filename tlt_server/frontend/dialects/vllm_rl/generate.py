"""Generation from token ids, as trainers that drive vLLM ask for it."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import NotFound
from tlt_server.frontend.dialects.models import adapter_of
from tlt_server.frontend.dialects.replies.errors import UNFINISHED
from tlt_server.frontend.dialects.replies.logprobs import Speller, scored, scored_prompt, whole
from tlt_server.frontend.dialects.replies.usage import UsageCount
from tlt_server.frontend.dialects.vllm_rl.replies import TokensChoice, TokensReply, fault
from tlt_server.frontend.dialects.vllm_rl.requests import TokensRequest
from tlt_server.frontend.generation.batch import PromptReading, Words
from tlt_server.frontend.generation.delivery import reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes, Unread, read_given
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.service import Service

ROUTES = Routes(read=read_given, error_shape=fault)
WORDS = Words("token_ids", "", "sampling_params.", clamps=True)
PREFIX = "generate-tokens-"  # vLLM puts it before the names of these requests


@ROUTES.post(
    "/inference/v1/generate",
    needs="data",
    example={
        "token_ids": [17, 18, 19],
        "sampling_params": {"max_tokens": 8, "logprobs": 1, "seed": 7},
    },
    raises=(NotFound, *UNFINISHED),
)
async def generate(
    service: Service, request: Request, body: Unread[TokensRequest]
) -> Annotated[Response, TokensReply]:
    """Generate from token ids. Unknown fields are ignored, and null means absent."""
    service.engine.check_available()
    await request.body()
    # Checked before a large prompt.
    service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    asked = await body.read()
    lora = adapter_of(service, asked.model)
    assert service.engine.info is not None
    caller = caller_of(request)
    reading = PromptReading(keep=asked.sampling_params.truncate_prompt_tokens)
    words = WORDS.structured_by(asked.sampling_params.structure[0])
    batch = await service.validator.batch(
        asked.native(lora), service.engine.info, caller, words, reading
    )
    token_ids = [*batch.items[0].requests[0].token_ids]
    names = (PREFIX + asked.request_id,) if asked.request_id else ()
    generation = await service.start(batch, caller.name, names=names)
    return await reply(request, _whole(service, asked, token_ids, generation), generation)


async def _whole(
    service: Service, asked: TokensRequest, token_ids: list[int], generation: Generation
) -> Response:
    count = UsageCount()
    async for event in generation.events():
        if isinstance(event, FailedItem):
            raise event.error
        if isinstance(event, FinishedItem):
            result = event
            count.add(event)
    speller, params = Speller(service.pieces, as_ids=True), asked.sampling_params
    prompt = result.choices[0].prompt_logprobs
    choices = []
    for choice in result.choices:
        await generation.turn(SLICE_BYTES)
        choices.append(
            TokensChoice(
                index=choice.index,
                token_ids=choice.token_ids,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=None if params.logprobs is None else speller.chat(scored(whole(choice))),
                weight_versions=choice.weight_versions,
            )
        )
    content = TokensReply(
        request_id=result.id,
        choices=choices,
        prompt_logprobs=speller.prompt(
            scored_prompt(token_ids, prompt, params.prompt_logprobs or 0)
        )
        if isinstance(prompt, list)
        else None,
        usage=count.usage(),
    )
    return sliced_response(content, generation.turn)
