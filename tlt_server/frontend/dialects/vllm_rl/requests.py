"""Bodies of the dialect `vllm_rl`. Unknown fields are ignored, since clients send many that have no
meaning here, and null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.requests import (
    MAX_INT32,
    Count,
    ItemFields,
    Length,
    NativeRequest,
    Priority,
    Salt,
    SamplingFields,
    Seed,
    SharedSampling,
    ShortName,
    TokenIds,
)
from tlt_server.frontend.http.bodies import optional_object
from tlt_server.frontend.http.fields import (
    Model,
    NullIsAbsent,
    checked,
    null_is_absent,
    without_nulls,
)
from tlt_server.frontend.weights.session import Version


class VllmSampling(SharedSampling):
    model_config = ConfigDict(extra="ignore", json_schema_extra=null_is_absent)

    n: Count = Field(1, description="choices")
    seed: Seed | None = Field(
        None, description="keys the choices' noise: the same seed gives the same tokens"
    )
    max_tokens: Length = Field(16, description="the longest output; 0: only read the prompt")
    top_k: int = Field(0, ge=-1, le=MAX_INT32, description="0 or -1: all tokens")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_INT32,
        description="alternatives per token; absent: no log-probs are reported",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT32,
        description="alternatives per prompt token; -1: the whole vocabulary",
    )


class TokensRequest(NullIsAbsent):
    token_ids: TokenIds = Field(description="the prompt")
    request_id: ShortName | None = Field(
        None, description="comes back, and names the request for POST /abort_requests"
    )
    sampling_params: VllmSampling = Field(VllmSampling(), description="how to sample")
    model: str = Field("", description="served_model_name, or absent")
    cache_salt: Salt = Field(
        "", description="requests share cached prefixes only with those of the same salt"
    )
    priority: Priority = 0
    stream: bool = Field(False, description="true is refused: POST /v1/completions streams")

    def native(self) -> NativeRequest:
        if self.stream:
            raise InvalidRequest(
                "stream is true; this route gives one whole reply: leave it out, or stream from "
                "POST /v1/completions"
            )
        params = self.sampling_params
        sampling = {
            name: getattr(params, name)
            for name in SharedSampling.model_fields.keys() & params.model_fields_set
        }
        sampling |= {
            "top_k": max(0, params.top_k),
            "logprobs": params.logprobs or 0,
            "max_tokens": params.max_tokens,
            "prompt_logprobs": params.prompt_logprobs,
        }
        item = {
            "id": self.request_id,
            "token_ids": self.token_ids,
            "n": params.n,
            "seed": params.seed,
            "salt": self.cache_salt,
        }
        return NativeRequest(
            requests=[checked(ItemFields, item)],
            sampling=checked(SamplingFields, sampling),
            priority=self.priority,
        )


class VllmAbort(NullIsAbsent):
    request_ids: Annotated[list[ShortName], Field(min_length=1)] = Field(
        description="names that requests were given; without a body all that is open is aborted"
    )


class StartFields(NullIsAbsent):
    is_checkpoint_format: bool = Field(
        True, description="tensors are named as in a checkpoint; false is refused"
    )


class FinishFields(NullIsAbsent):
    weight_version: Version | None = Field(
        None, description="the name of what was pushed; absent: the one it was pushed with"
    )


class RpcFields(NullIsAbsent):  # type: ignore[no-redef]  # mypy's plugin has a `kwargs` of its own
    method: str = Field(
        max_length=256,
        description="skyrl_start_weight_update, update_weights_nccl or skyrl_finish_weight_update",
    )
    arguments: dict[str, Any] = Field(
        {}, validation_alias="kwargs", description="what the route of that purpose takes"
    )


class VersionFields(NullIsAbsent):
    new_version: Version = Field(description="the name")


async def read(model: type[Model], request: Request) -> Model:
    """Check a body; without one, an empty object."""
    field = next(iter(model.model_fields), "nothing")
    return checked(model, without_nulls(await optional_object(await request.body(), field)))
