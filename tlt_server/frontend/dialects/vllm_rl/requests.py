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
from tlt_server.frontend.weights.broadcasts import UpdateFields
from tlt_server.frontend.weights.session import Directory, Version


class VllmSampling(VllmStructured, Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.VLLM_SAMPLING)

    n: Annotated[Count, "choices"] = 1
    seed: Annotated[
        AnySeed | None, "keys the choices' noise: the same seed gives the same tokens"
    ] = None
    max_tokens: Annotated[Length, "the longest output; 0: only read the prompt"] = 16
    top_k: TopK = 0
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
    model: Annotated[str, "served_model_name, a LoRA adapter that is loaded, or absent"] = ""
    cache_salt: Annotated[
        Salt, "requests share cached prefixes only with those of the same salt"
    ] = ""
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
        "names that requests were given; without a body all that is open is aborted",
    ]


class VllmLoad(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[
        Directory, "directory of the adapter, absolute or below the weight root", Meta(min_length=1)
    ]
    load_inplace: Annotated[bool, "replace the adapter of this name; else that is refused"] = False


class VllmUnload(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName


class StartFields(Tolerant, frozen=True, kw_only=True):
    is_checkpoint_format: Annotated[
        bool, "tensors are named as in a checkpoint; false is refused"
    ] = True


class FinishFields(Tolerant, frozen=True, kw_only=True):
    weight_version: Annotated[
        Version | None, "the name of what was pushed; absent: the one it was pushed with"
    ] = None


class RpcCall(Tolerant, frozen=True, kw_only=True):
    method: Annotated[str, Meta(max_length=256)]


class RpcStart(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["skyrl_start_weight_update"], "what POST /start_weight_update does"]
    arguments: Annotated[StartFields, "what that route takes"] = msgspec.field(
        name="kwargs", default_factory=StartFields
    )


class RpcUpdate(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["update_weights_nccl"], "what POST /update_weights does"]
    arguments: Annotated[UpdateFields, "what that route takes"] = msgspec.field(name="kwargs")


class RpcFinish(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["skyrl_finish_weight_update"], "what POST /finish_weight_update does"]
    arguments: Annotated[FinishFields, "what that route takes"] = msgspec.field(
        name="kwargs", default_factory=FinishFields
    )


class VersionFields(Tolerant, frozen=True, kw_only=True):
    new_version: Annotated[Version, "the name"]
