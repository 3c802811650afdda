"""Bodies of the dialect `sglang`. Unknown fields are ignored, since clients send many that have no
meaning here, and null means absent.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.requests import (
    MAX_INT32,
    MAX_NAME,
    Count,
    ItemFields,
    Length,
    NativeRequest,
    SamplingFields,
    Seed,
    SharedSampling,
    ShortName,
    TokenIds,
)
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.fields import (
    Model,
    NullIsAbsent,
    Tolerant,
    checked,
    null_is_absent,
    one_of,
    shown,
    without_nulls,
)
from tlt_server.frontend.weights.broadcasts import (
    Address,
    Dimensions,
    GroupName,
    Packing,
    Port,
    Rank,
    TensorName,
    WorldSize,
)
from tlt_server.frontend.weights.session import Selector, Version

GROUP = "weight_update_group"  # where a trainer names none
ONE, SEVERAL = "list[one]", "list[several]"  # tags of a form that no error message shows


class SglangSampling(SharedSampling):
    """Sampling in SGLang's words; `min_tokens` is called `min_new_tokens`."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=null_is_absent)

    n: Count = Field(1, description="choices per prompt")
    sampling_seed: Seed | None = Field(
        None, description="keys the choices' noise: the same seed gives the same tokens"
    )
    max_new_tokens: Length = Field(128, description="the longest output; 0: only read the prompt")
    min_new_tokens: Length = Field(
        0, description="no stop token, and no end at a stop string, before this many output tokens"
    )
    top_k: int = Field(0, ge=-1, le=MAX_INT32, description="0 or -1: all tokens")
    no_stop_trim: bool = Field(
        False, description="the text keeps the stop string or stop token that ended it"
    )
    skip_special_tokens: bool = Field(True, description="the text leaves special tokens out")
    spaces_between_special_tokens: bool = Field(True, description="accepted and without effect")


def _kind(value: Any) -> str:
    return (
        SEVERAL
        if isinstance(value, list) and (not value or isinstance(value[0], list | str))
        else ONE
    )


def _listed(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


def _one_or_several(one: Any, tag: Any) -> Any:
    return Annotated[
        Annotated[one, Tag(ONE)] | Annotated[list[one], Field(min_length=1), Tag(SEVERAL)],
        Discriminator(tag),
    ]


def _text_or_ids(schema: dict[str, Any]) -> None:
    null_is_absent(schema)
    schema |= one_of(("text", "input_ids"))


class GenerateFields(Tolerant):
    """One prompt or several, as text or as token ids."""

    model_config = ConfigDict(json_schema_extra=_text_or_ids)

    text: _one_or_several(str, _kind) | None = Field(None, description="a text, or several")  # type: ignore[valid-type]
    input_ids: _one_or_several(TokenIds, _kind) | None = Field(  # type: ignore[valid-type]
        None, description="token ids, or several lists"
    )
    sampling_params: SglangSampling = Field(SglangSampling(), description="how to sample")
    rid: _one_or_several(ShortName, _listed) | None = Field(  # type: ignore[valid-type]
        None, description="names the request, or each prompt, for POST /abort_request"
    )
    return_logprob: bool = Field(False, description="report log-probs")
    logprob_start_len: int = Field(
        -1,
        ge=-1,
        le=MAX_INT32,
        description="report the prompt's from this token on, too; -1: none of them",
    )
    top_logprobs_num: int = Field(
        0, ge=0, le=MAX_INT32, description="alternatives per token, with return_logprob"
    )
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] = Field(
        0, description="sequences of higher values start first; above 0 needs the scope operate"
    )
    stream: bool = Field(
        False, description="server-sent chunks, each with all that there is so far"
    )
    incremental_streaming_output: bool = Field(
        False, description="a stream's chunks hold what no chunk before had"
    )
    image_data: list[Any] | str | None = Field(
        None, description="must be empty: this server reads text"
    )

    def prompts(self) -> list[dict[str, Any]]:
        name, value = (
            ("text", self.text) if self.text is not None else ("input_ids", self.input_ids)
        )
        several: Any = value if _kind(value) == SEVERAL else [value]
        return [{"prompt" if name == "text" else "token_ids": prompt} for prompt in several]

    @property
    def several(self) -> bool:
        """Tell whether the reply is a list."""
        return (
            _kind(self.text if self.text is not None else self.input_ids) == SEVERAL
            or self.sampling_params.n > 1
        )

    def names(self, count: int) -> list[str | None]:
        """Return the id of each prompt."""
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise InvalidRequest(
                    f"rid has {len(self.rid)} names and there are {count} prompts; give each "
                    "prompt one, or leave rid out"
                )
            if len({*self.rid}) < count:
                twice = next(name for i, name in enumerate(self.rid) if name in self.rid[:i])
                raise InvalidRequest(f"rid has {shown(twice)} twice; give each prompt its own name")
            return [*self.rid]
        if self.rid is None or count == 1:
            return [self.rid] * count
        names = [f"{self.rid}_{i}" for i in range(count)]
        if len(names[-1]) > MAX_NAME:
            raise InvalidRequest(
                f"rid has {len(self.rid)} characters, and {count} prompts are named by it with "
                f"_0 to _{count - 1} at its end; a name has at most {MAX_NAME}: give a shorter one"
            )
        return [*names]

    def native(self) -> NativeRequest:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest(
                f"text is {'absent' if self.text is None else 'given'} and so is input_ids; give "
                "exactly one of them"
            )
        if self.image_data:
            raise InvalidRequest(
                f"image_data is {shown(self.image_data)}; this server reads text only: leave it out"
            )
        params = self.sampling_params
        sampling = {
            name: getattr(params, name)
            for name in SharedSampling.model_fields.keys() & params.model_fields_set
        }
        sampling |= {
            "top_k": max(0, params.top_k),
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            "logprobs": self.top_logprobs_num if self.return_logprob else 0,
        }
        if self.return_logprob and self.logprob_start_len >= 0:
            sampling["prompt_logprobs"] = self.top_logprobs_num
        prompts = self.prompts()
        items = [
            checked(ItemFields, prompt | {"id": name, "n": params.n, "seed": params.sampling_seed})
            for prompt, name in zip(prompts, self.names(len(prompts)), strict=True)
        ]
        return NativeRequest(
            requests=items,
            sampling=checked(SamplingFields, sampling),
            stream=self.stream,
            priority=-self.priority,
        )


class PauseFields(NullIsAbsent):
    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort", description="what becomes of running sequences"
    )


class SglangAbort(NullIsAbsent):
    rid: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="the name that the request was given; empty: none"
    )
    abort_all: bool = Field(False, description="end everything that is open")


class BeginFields(NullIsAbsent):
    selector: Selector = Field("target", description="the model whose weights are pushed")


class DiskFields(NullIsAbsent):
    model_path: Annotated[
        str,
        Field(
            min_length=1, description="directory of safetensors, absolute or below the weight root"
        ),
    ]
    load_format: Literal["auto", "safetensors"] = Field("auto", description="both mean safetensors")
    weight_version: Version | None = Field(
        None, description="absent: the directory's name and digest"
    )
    abort_all_requests: bool = Field(
        False,
        description="end running sequences with what they have; else they continue under the "
        "new weights",
    )
    flush_cache: bool = Field(
        True,
        description="accepted and without effect: KV of another version never serves a new request",
    )


class SglangGroup(NullIsAbsent):
    master_address: Address
    master_port: Port
    rank_offset: Rank = 1
    world_size: WorldSize
    group_name: GroupName = GROUP
    backend: Literal["gloo", "nccl"] = Field("nccl", description="gloo on CPUs, nccl on GPUs")


class LeaveFields(NullIsAbsent):
    group_name: GroupName = GROUP


class DistributedFields(NullIsAbsent):
    names: list[TensorName] = Field(
        description="names of tensors, in the order in which they are broadcast; those of the "
        "drafter may begin with `draft.`"
    )
    dtypes: list[str] = Field(description='as torch names them, such as "bfloat16"')
    shapes: list[Dimensions] = Field(description="shapes of the tensors")
    group_name: GroupName = GROUP
    load_format: Literal["flattened_bucket"] | None = Field(
        None, description="all come as one bucket of raw bytes; absent: one each"
    )
    weight_version: Version | None = Field(
        None, description="absent: the channel and the content's digest"
    )
    selector: Selector | None = Field(
        None, description="whose weights these are; absent: those of POST /begin_weight_update"
    )
    abort_all_requests: bool = Field(
        False,
        description="end running sequences with what they have; else they continue under the "
        "new weights",
    )
    flush_cache: bool = Field(
        True,
        description="accepted and without effect: KV of another version never serves a new request",
    )

    @property
    def packing(self) -> Packing:
        return Packing(packed=True, bucket_bytes=2**40) if self.load_format else Packing()


class MemoryFields(NullIsAbsent):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] = Field(
        [],
        description="empty: all; cuda_graph is without effect, as graphs come and go with the rest",
    )


class ReadFields(NullIsAbsent):
    name: str = Field(
        min_length=1,
        max_length=1024,
        description="name of the tensor, as POST /weight_checker lists it",
    )
    truncate_size: int = Field(100, ge=1, le=4096, description="the number of its first rows")


NUMBER = re.compile("-?[0-9]{1,18}")  # a whole number in a query


async def read(model: type[Model], request: Request) -> Model:
    return checked(model, await read_content(model, request))


async def read_content(model: type[Model], request: Request) -> dict[str, Any]:
    """Return the body, or without one the query, as an object, which may be empty."""
    body = await request.body()
    return without_nulls(
        await read_object(body, next(iter(model.model_fields), "nothing"))
        if body
        else _query(model, request)
    )


def _query(model: type[Model], request: Request) -> dict[str, Any]:
    """Return the query, with numbers where the model takes whole numbers."""
    numbers = {name for name, field in model.model_fields.items() if field.annotation is int}
    return {
        name: int(value) if name in numbers and NUMBER.fullmatch(value) else value
        for name, value in request.query_params.items()
    }
