"""Bodies of the dialect `sglang`. Unknown fields are ignored, since clients send many without
meaning here, and null counts as absent. `known_fields` lists the fields that are refused instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request

from tlt_client.arguments import SEEN, SEEN_MUST
from tlt_client.fields import MAX_INT32, MAX_NAME, Count, Length, SessionId, ShortName, Train
from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.borrowed import SglangStructured
from tlt_server.frontend.generation.generation import repeated
from tlt_server.frontend.generation.requests import (
    NAMES,
    AnySeed,
    NativeRequest,
    PromptIds,
    SamplingFields,
    Words,
    items_of,
)
from tlt_server.frontend.http.counting import Limit
from tlt_server.frontend.http.fields import RefusedField, Tolerant, check_one, shown
from tlt_server.frontend.service import Service
from tlt_server.wire.packed import PackedIds

PROMPTS = Limit("max_batch_items", "prompts", "split the batch", TooLarge)
RENAMED = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
Body = TypeVar("Body")
# A text with a pattern in a union with a list makes msgspec 0.22 free memory twice, so the pattern
# of this one is checked below.
OneName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
NameOrNone = Annotated[ShortName | None, "null: none"]


class SglangSampling(SglangStructured, Tolerant, frozen=True, kw_only=True):
    """Sampling in SGLang's words; `min_new_tokens` wins over `min_tokens`."""

    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(
        known_fields.SGLANG_SAMPLING
    )

    n: Annotated[Count, "choices per prompt"] = 1
    sampling_seed: Annotated[
        AnySeed | None, "keys the choices' noise: the same seed gives the same tokens"
    ] = None
    max_new_tokens: Annotated[Length, "the longest output; 0: only read the prompt"] = 128
    min_new_tokens: Annotated[
        Length, "no stop token, and no end at a stop string, before this many output tokens"
    ] = 0
    no_stop_trim: Annotated[bool, "the text keeps the stop string or stop token that ended it"] = (
        False
    )
    skip_special_tokens: Annotated[bool, "the text leaves special tokens out"] = True


class GenerateFields(Tolerant, frozen=True, kw_only=True):
    """One prompt or several, as text or as token ids."""

    exactly_one: ClassVar[tuple[str, ...]] = ("text", "input_ids")
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.SGLANG)

    text: Annotated[
        str | Annotated[list[str], Meta(min_length=1, extra={"limit": PROMPTS})] | None,
        "a text, or several",
    ] = None
    input_ids: Annotated[
        PromptIds | Annotated[list[PromptIds], Meta(min_length=1, extra={"limit": PROMPTS})] | None,
        "token ids, or several lists",
    ] = None
    sampling_params: Annotated[SglangSampling, "how to sample"] = SglangSampling()
    rid: Annotated[
        OneName | Annotated[list[ShortName], Meta(min_length=1, extra={"limit": NAMES})] | None,
        "names the request, or each prompt, for POST /abort_request",
    ] = None
    lora_path: Annotated[
        OneName | Annotated[list[NameOrNone], Meta(min_length=1, extra={"limit": NAMES})] | None,
        "the LoRA adapter that computes it, or of each prompt, by name",
    ] = None
    return_logprob: Annotated[bool, "report log-probs"] = False
    return_text_in_logprobs: Annotated[bool, "log-probs come with the text of their tokens"] = False
    logprob_start_len: Annotated[
        int,
        "report the prompt's from this token on, too; -1: none of them",
        Meta(ge=-1, le=MAX_INT32),
    ] = -1
    top_logprobs_num: Annotated[
        int, "alternatives per token, with return_logprob", Meta(ge=0, le=MAX_INT32)
    ] = 0
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)],
        "sequences of higher values start first; above 0 needs the scope operate",
    ] = 0
    train: Train = True
    session_id: SessionId = None
    stream: Annotated[bool, "server-sent chunks, each with all that there is so far"] = False
    incremental_streaming_output: Annotated[
        bool, "a stream's chunks hold what no chunk before had"
    ] = False

    @property
    def several(self) -> bool:
        """Return True if the reply is a list."""
        prompts = self.input_ids if self.text is None else self.text
        return isinstance(prompts, list) or self.sampling_params.n > 1

    @property
    def words(self) -> Words:
        """Return the names of the fields in this body, for messages."""
        field = "text" if self.input_ids is None else "input_ids"
        each = "[{i}]" if isinstance(self.text or self.input_ids, list) else ""
        structure, _ = self.sampling_params.structure
        words = Words(field + each, "sampling_params.", "sampling_params.", RENAMED)
        return words.structured_by(structure)

    def names(self, count: int) -> list[str | None]:
        """Return the id of each prompt."""
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise InvalidRequest(
                    f"rid has {len(self.rid)} names and there are {count} prompts; give each "
                    "prompt one, or leave rid out"
                )
            if (twice := repeated(self.rid)) is not None:
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

    def adapters(self, count: int) -> list[str]:
        """Return the adapter of each prompt."""
        if not isinstance(self.lora_path, list):
            return [self.lora_path or ""] * count
        if len(self.lora_path) != count:
            raise InvalidRequest(
                f"lora_path has {len(self.lora_path)} names and there are {count} prompts; give "
                "each prompt one, or one for all"
            )
        return [name or "" for name in self.lora_path]

    def native(self) -> NativeRequest:
        check_one(self)
        for field, name in (("rid", self.rid), ("lora_path", self.lora_path)):
            if isinstance(name, str) and not re.fullmatch(SEEN, name):
                raise InvalidRequest(f"{field} is {shown(name)}; it must {SEEN_MUST}")
        params = self.sampling_params
        given: Any = self.input_ids if self.text is None else self.text
        prompts: list[str | PackedIds] = given if isinstance(given, list) else [given]
        names, adapters = self.names(len(prompts)), self.adapters(len(prompts))
        return NativeRequest(
            requests=items_of(
                prompts,
                params.sampling_seed,
                adapters,
                names,
                n=params.n,
                train=self.train,
                group_id=self.session_id,
            ),
            sampling=self._sampling(),
            stream=self.stream,
            priority=-self.priority,
        )

    def _sampling(self) -> SamplingFields:
        params = self.sampling_params
        scores_prompt = self.return_logprob and self.logprob_start_len >= 0
        return SamplingFields(
            **params.shared()
            | {
                "max_tokens": params.max_new_tokens,
                "logprobs": self.top_logprobs_num if self.return_logprob else 0,
                "prompt_logprobs": self.top_logprobs_num if scores_prompt else None,
                "structured_outputs": params.structure[1],
            }
            | ({"min_tokens": params.min_new_tokens} if params.min_new_tokens else {})
        )


NUMBER = re.compile("-?[0-9]{1,18}")  # a whole number in a query


async def read(service: Service, kind: type[Body], request: Request) -> Body:
    """Read the body or, without a body, the query."""
    body = await request.body()
    return await service.bodies.read(kind, body or msgspec.json.encode(_query(kind, request)))


def _query(kind: type[Any], request: Request) -> dict[str, Any]:
    """Return the query, with numbers for fields of whole numbers."""
    numbers = {
        field.encode_name
        for field in msgspec.structs.fields(kind)
        if get_args(field.type)[:1] == (int,)
    }
    return {
        name: int(value) if name in numbers and NUMBER.fullmatch(value) else value
        for name, value in request.query_params.items()
    }
