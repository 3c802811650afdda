"""Generation from token ids, for trainers that drive vLLM. Unknown fields are ignored, and null
counts as absent; `known_fields` lists the fields that are refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_client.fields import Alternatives, Count, Length, Priority, ShortName, Train
from tlt_client.wire import FinishReason, VersionSpan
from tlt_server.errors import InvalidRequest, NotFound
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.borrowed import (
    AskedModel,
    CacheSalt,
    VllmStructured,
    adapter_of,
    generating,
)
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, fault
from tlt_server.frontend.dialects.replies.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    Speller,
    scored,
    scored_prompt,
    whole,
)
from tlt_server.frontend.dialects.replies.whole import OpenAIUsage, parts_of
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.delivery import reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem
from tlt_server.frontend.generation.requests import (
    AnySeed,
    NativeRequest,
    PromptIds,
    PromptReading,
    RequestBatch,
    SamplingFields,
    Truncation,
    Words,
    items_of,
)
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import RefusedField, Tolerant
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.service import Service

ROUTES = Routes(read=generating, error_shape=fault)
WORDS = Words("token_ids", "", "sampling_params.", clamps=True)
PREFIX = "generate-tokens-"  # vLLM puts it before the names of these requests


class VllmSampling(VllmStructured, Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.VLLM_SAMPLING)

    n: Annotated[Count, "choices"] = 1
    seed: Annotated[
        AnySeed | None, "keys the choices' noise: the same seed gives the same tokens"
    ] = None
    max_tokens: Annotated[Length, "the longest output; 0: only read the prompt"] = 16
    logprobs: Annotated[
        Length | None, "alternatives per token; absent: no log-probs are reported"
    ] = None
    prompt_logprobs: Annotated[
        Alternatives | None, "alternatives per prompt token; -1: the whole vocabulary"
    ] = None
    truncate_prompt_tokens: Truncation = None


class TokensRequest(Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.VLLM)

    token_ids: Annotated[PromptIds, "the prompt"]
    request_id: Annotated[
        ShortName | None, "comes back, and names the request for POST /abort_requests"
    ] = None
    sampling_params: Annotated[VllmSampling, "how to sample"] = VllmSampling()
    model: AskedModel = ""
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    train: Train = True
    stream: Annotated[bool, "true is refused: POST /v1/completions streams"] = False

    def native(self, lora: str) -> NativeRequest:
        if self.stream:
            raise InvalidRequest(
                "stream is true; this route gives one whole reply: leave it out, or stream from "
                "POST /v1/completions"
            )
        params = self.sampling_params
        return NativeRequest(
            requests=items_of(
                [self.token_ids],
                params.seed,
                [lora],
                [self.request_id],
                n=params.n,
                salt=self.cache_salt,
                train=self.train,
            ),
            sampling=SamplingFields(
                **params.shared(),
                logprobs=params.logprobs or 0,
                max_tokens=params.max_tokens,
                prompt_logprobs=params.prompt_logprobs,
                structured_outputs=params.structure[1],
            ),
            priority=self.priority,
        )


class TokensChoice(Struct, frozen=True):
    index: Annotated[int, "which of the n choices, from 0"]
    token_ids: Annotated[list[int], "the output, its stop token included"]
    finish_reason: Annotated[FinishReason, "what ended it"]
    stop_reason: Annotated[
        int | str | None, "the stop token's id or the stop string; null for another end"
    ]
    logprobs: Annotated[
        ChatLogprobs | None,
        "log-probs of the tokens, if asked for; tokens are named `token_id:<id>`",
    ]
    weight_versions: Annotated[list[VersionSpan], "which weights computed which tokens"]


class TokensReply(Struct, frozen=True):
    request_id: Annotated[str, "as the request gave it, or as it was numbered"]
    choices: Annotated[list[TokensChoice], "the n choices"]
    prompt_logprobs: Annotated[
        PromptLogprobs | None, "per prompt token, null for the first; where asked for"
    ]
    usage: Annotated[OpenAIUsage, "tokens of the request"]


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
    service: Service, request: Request, asked: TokensRequest
) -> Annotated[Response, TokensReply]:
    """Generate from token ids. Unknown fields are ignored, and null means absent."""
    batch, generation = await service.begin(
        asked.native(adapter_of(service, asked.model)),
        caller_of(request),
        WORDS.structured_by(asked.sampling_params.structure[0]),
        PromptReading(keep=asked.sampling_params.truncate_prompt_tokens),
        (PREFIX + asked.request_id,) if asked.request_id else (),
    )
    return await reply(request, _whole(service, asked, batch, generation), generation)


async def _whole(
    service: Service, asked: TokensRequest, batch: RequestBatch, generation: Generation
) -> Response:
    [item] = batch.items
    speller, params = Speller(service.pieces, as_ids=True), asked.sampling_params
    token_ids, finished = [*item.requests[0].token_ids], list[FinishedChoice]()

    async def made(_: FinishedItem, choice: FinishedChoice) -> TokensChoice:
        finished.append(choice)
        return TokensChoice(
            index=choice.index,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=None if params.logprobs is None else speller.chat(scored(whole(choice))),
            weight_versions=choice.weight_versions,
        )

    choices, count = await parts_of(generation, batch, made)
    prompt = finished[0].prompt_logprobs
    content = TokensReply(
        request_id=item.id,
        choices=choices,
        prompt_logprobs=speller.prompt(
            scored_prompt(token_ids, prompt, params.prompt_logprobs or 0)
        )
        if isinstance(prompt, list)
        else None,
        usage=count.openai(),
    )
    return sliced_response(content, generation.turn)
