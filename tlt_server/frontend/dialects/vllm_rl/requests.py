"""Bodies of the dialect `vllm_rl`. Unknown fields are ignored, since clients send many that have no
meaning here, and null means absent. `known_fields` says which are refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from tlt_client.fields import Alternatives, Count, Length, Priority, Salt, ShortName, Train
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.structures import VllmStructured
from tlt_server.frontend.generation.requests import (
    NAMES,
    AnySeed,
    ItemFields,
    NativeRequest,
    PromptIds,
    SamplingFields,
    TopK,
    Truncation,
    seed_of,
)
from tlt_server.frontend.http.fields import RefusedField, Tolerant
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.session import Directory, Version
from tlt_server.frontend.weights.transfer import UpdateFields


class VllmSampling(VllmStructured, Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.VLLM_SAMPLING)

    n: Annotated[Count, Meta(description="choices")] = 1
    seed: Annotated[
        AnySeed | None,
        Meta(description="keys the choices' noise: the same seed gives the same tokens"),
    ] = None
    max_tokens: Annotated[
        Length, Meta(description="the longest output; 0: only read the prompt")
    ] = 16
    top_k: TopK = 0
    logprobs: Annotated[
        Length | None, Meta(description="alternatives per token; absent: no log-probs are reported")
    ] = None
    prompt_logprobs: Annotated[
        Alternatives | None,
        Meta(description="alternatives per prompt token; -1: the whole vocabulary"),
    ] = None
    truncate_prompt_tokens: Truncation = None


class TokensRequest(Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.VLLM)

    token_ids: Annotated[PromptIds, Meta(description="the prompt")]
    request_id: Annotated[
        ShortName | None,
        Meta(description="comes back, and names the request for POST /abort_requests"),
    ] = None
    sampling_params: Annotated[VllmSampling, Meta(description="how to sample")] = VllmSampling()
    model: Annotated[
        str, Meta(description="served_model_name, a LoRA adapter that is loaded, or absent")
    ] = ""
    cache_salt: Annotated[
        Salt, Meta(description="requests share cached prefixes only with those of the same salt")
    ] = ""
    priority: Priority = 0
    train: Train = True
    stream: Annotated[bool, Meta(description="true is refused: POST /v1/completions streams")] = (
        False
    )

    def native(self, lora: str) -> NativeRequest:
        if self.stream:
            raise InvalidRequest(
                "stream is true; this route gives one whole reply: leave it out, or stream from "
                "POST /v1/completions"
            )
        params = self.sampling_params
        return NativeRequest(
            requests=[
                ItemFields(
                    id=self.request_id,
                    token_ids=self.token_ids,
                    n=params.n,
                    seed=seed_of(params.seed),
                    salt=self.cache_salt,
                    lora=lora,
                    train=self.train,
                )
            ],
            sampling=SamplingFields(
                **params.shared(),
                top_k=max(0, params.top_k),
                logprobs=params.logprobs or 0,
                max_tokens=params.max_tokens,
                prompt_logprobs=params.prompt_logprobs,
                structured_outputs=params.structure[1],
            ),
            priority=self.priority,
        )


class VllmAbort(Tolerant, frozen=True, kw_only=True):
    request_ids: Annotated[
        Annotated[list[ShortName], Meta(min_length=1, extra={"limit": NAMES})],
        Meta(
            description="names that requests were given; without a body all that is open is aborted"
        ),
    ]


class VllmLoad(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[
        Directory,
        Meta(
            min_length=1, description="directory of the adapter, absolute or below the weight root"
        ),
    ]
    load_inplace: Annotated[
        bool, Meta(description="replace the adapter of this name; else that is refused")
    ] = False


class VllmUnload(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName


class StartFields(Tolerant, frozen=True, kw_only=True):
    is_checkpoint_format: Annotated[
        bool, Meta(description="tensors are named as in a checkpoint; false is refused")
    ] = True


class FinishFields(Tolerant, frozen=True, kw_only=True):
    weight_version: Annotated[
        Version | None,
        Meta(description="the name of what was pushed; absent: the one it was pushed with"),
    ] = None


class RpcCall(Tolerant, frozen=True, kw_only=True):
    method: Annotated[str, Meta(max_length=256)]


class RpcStart(Tolerant, frozen=True, kw_only=True):
    method: Annotated[
        Literal["skyrl_start_weight_update"],
        Meta(description="what POST /start_weight_update does"),
    ]
    arguments: Annotated[StartFields, Meta(description="what that route takes")] = msgspec.field(
        name="kwargs", default_factory=StartFields
    )


class RpcUpdate(Tolerant, frozen=True, kw_only=True):
    method: Annotated[
        Literal["update_weights_nccl"], Meta(description="what POST /update_weights does")
    ]
    arguments: Annotated[UpdateFields, Meta(description="what that route takes")] = msgspec.field(
        name="kwargs"
    )


class RpcFinish(Tolerant, frozen=True, kw_only=True):
    method: Annotated[
        Literal["skyrl_finish_weight_update"],
        Meta(description="what POST /finish_weight_update does"),
    ]
    arguments: Annotated[FinishFields, Meta(description="what that route takes")] = msgspec.field(
        name="kwargs", default_factory=FinishFields
    )


class VersionFields(Tolerant, frozen=True, kw_only=True):
    new_version: Annotated[Version, Meta(description="the name")]
