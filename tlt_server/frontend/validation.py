"""The native request, checked: JSON in, one `Batch` of `GenerateRequest`s out, or one typed 4xx with value, limit and remedy.

The models below hold what is wrong whatever the server; `Validator` knows the model and the configured limits. Every dialect ends
in `Validator.batch`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from tlt_server.config import Config, nearest
from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.text import Text
from tlt_server.records import MAX_SEED, EngineInfo, GenerateRequest, Sampling

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
ShortName = Annotated[str, Field(min_length=1, max_length=256)]
LEAST_TEMPERATURE = 1e-3  # below it logits / T leaves float32's useful range


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SamplingFields(_Strict):
    """Partial: an item's fields win over the batch's, those over the defaults of `records.Sampling`."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0, le=2**31)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: int = Field(256, ge=1, le=2**31)
    min_tokens: int = Field(0, ge=0, le=2**31)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    logprobs: int = Field(0, ge=0, le=2**31)
    raw_logprobs: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=2**31)


class Message(_Strict):
    role: ShortName
    content: str
    name: str | None = None


class ItemFields(_Strict):
    id: ShortName | None = None
    prompt: str | None = None
    token_ids: TokenIds | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    group_id: ShortName | None = None
    salt: str = Field("", max_length=256)
    n: int = Field(1, ge=1, le=2**31)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    sd: bool = True
    sampling: SamplingFields | None = None


class NativeRequest(_Strict):
    requests: list[ItemFields] = Field(min_length=1)
    sampling: SamplingFields = Field(default_factory=SamplingFields)
    stream: bool = False
    timeout_s: float | None = Field(None, gt=0)


class Item(NamedTuple):
    """One prompt and its n choices; choice i is `requests[i]`."""

    id: str
    requests: list[GenerateRequest]


class Batch(NamedTuple):
    items: list[Item]
    stream: bool
    deadline_s: float


def parse(body: bytes) -> NativeRequest:
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}; send one UTF-8 encoded JSON object") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body is {_shown(content)}; it must be a JSON object with the field requests")
    if "requests" not in content and content.keys() & {"text", "input_ids"}:
        raise InvalidRequest("the body has text or input_ids but no requests; this server speaks the native form "
                             '{"requests": [{"prompt" | "token_ids" | "messages": ...}]}')
    try:
        return NativeRequest.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(_explain(error.errors(include_url=False)[0])) from None


class Validator:
    """Applies the server's limits. `next_seed` serves requests without one; `choice_seed(seed, i)` keys choice i."""

    def __init__(self, config: Config, text: Text, next_seed: Callable[[], int], choice_seed: Callable[[int, int], int]) -> None:
        self._config, self._text, self._next_seed, self._choice_seed = config, text, next_seed, choice_seed
        self._serial = itertools.count()

    async def batch(self, request: NativeRequest, info: EngineInfo) -> Batch:
        limit = self._config.max_batch_items
        if len(request.requests) > limit:
            raise TooLarge(f"requests has {len(request.requests)} items; the limit is {limit} (max_batch_items): split the batch")
        timeout_s = self._config.default_timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s > self._config.max_timeout_s:
            raise InvalidRequest(f"timeout_s is {timeout_s:g}; the limit is {self._config.max_timeout_s:g} s (max_timeout_s): ask for less")
        deadline_s = time.monotonic() + timeout_s
        for i, item in enumerate(request.requests):
            self._check_shape(f"requests[{i}]", item)
        prompts = await self._prompts(request.requests)
        serial, defaults = next(self._serial), request.sampling
        samplings: dict[int, Sampling] = {}  # items without fields of their own share one per room left
        items: list[Item] = []
        prompt_tokens = output_tokens = 0
        for i, (item, token_ids) in enumerate(zip(request.requests, prompts, strict=True)):
            where = f"requests[{i}]"
            room = self._check_prompt(where, token_ids, info)
            if item.sampling is None:
                sampling = samplings.get(room)
                if sampling is None:
                    sampling = samplings[room] = self._sampling("sampling", defaults, None, room, info)
            else:
                sampling = self._sampling(f"{where}.sampling", defaults, item.sampling, room, info)
            prompt_tokens += item.n * len(token_ids)
            output_tokens += item.n * sampling.max_tokens
            self._check_work(prompt_tokens, output_tokens)
            seed = self._next_seed() if item.seed is None else item.seed
            id = f"{serial:x}-{i}"
            items.append(Item(item.id or id, [
                GenerateRequest(id=f"{id}.{choice}", token_ids=token_ids, sampling=sampling, seed=self._choice_seed(seed, choice),
                                group_id=item.group_id or id, salt=item.salt, sd=item.sd, deadline_s=deadline_s)
                for choice in range(item.n)
            ]))
        _check_distinct([item.id for item in items])
        return Batch(items, request.stream, deadline_s)

    def _check_shape(self, where: str, item: ItemFields) -> None:
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(item, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"{where} has {' and '.join(given) or 'no prompt'}; give exactly one of prompt, token_ids, messages")
        if item.n > self._config.max_n:
            raise InvalidRequest(f"{where}.n is {item.n}; the limit is {self._config.max_n} (max_n): ask for fewer choices")

    async def _prompts(self, items: list[ItemFields]) -> list[list[int]]:
        """Token ids per item; tokenising leaves the event loop free."""
        chats = [self._text.render([m.model_dump(exclude_none=True) for m in item.messages]) for item in items if item.messages]
        plain = [item.prompt for item in items if item.prompt is not None]
        encoded_chats = iter(await asyncio.to_thread(self._text.encode, chats, special=False) if chats else [])
        encoded_plain = iter(await asyncio.to_thread(self._text.encode, plain) if plain else [])
        return [
            item.token_ids if item.token_ids is not None else next(encoded_chats if item.messages else encoded_plain) for item in items
        ]

    def _check_prompt(self, where: str, token_ids: list[int], info: EngineInfo) -> int:
        """Output tokens that fit after this prompt."""
        if not token_ids:
            raise InvalidRequest(f"{where} has an empty prompt; give at least one token")
        if max(token_ids) >= info.vocab_size:
            raise InvalidRequest(f"{where} has the token id {max(token_ids)}; ids of this model end at {info.vocab_size - 1}: "
                                 "tokenise with the served model's tokenizer")
        limit = min(_number(self._config.max_prompt_tokens, info.max_model_len - 1), info.max_model_len - 1)
        if len(token_ids) > limit:
            raise InvalidRequest(f"{where} has a prompt of {len(token_ids)} tokens; the limit is {limit} (max_prompt_tokens, and "
                                 f"max_model_len {info.max_model_len} less one): shorten it")
        return info.max_model_len - len(token_ids)

    def _sampling(self, where: str, defaults: SamplingFields, own: SamplingFields | None, room: int, info: EngineInfo) -> Sampling:
        def get(name: str) -> Any:
            return getattr(own if own is not None and name in own.model_fields_set else defaults, name)

        explicit = "max_tokens" in defaults.model_fields_set or (own is not None and "max_tokens" in own.model_fields_set)
        limit = min(_number(self._config.max_output_tokens, room), room)
        max_tokens = get("max_tokens") if explicit else min(get("max_tokens"), limit)
        if max_tokens > limit:
            raise InvalidRequest(f"{where}.max_tokens is {max_tokens}; the limit here is {limit} (max_output_tokens, and what the prompt "
                                 f"leaves of max_model_len {info.max_model_len}): ask for fewer or shorten the prompt")
        if get("min_tokens") > max_tokens:
            raise InvalidRequest(f"{where}.min_tokens is {get('min_tokens')}; the limit is max_tokens, {max_tokens}: lower it")
        if 0 < get("temperature") < LEAST_TEMPERATURE:
            raise InvalidRequest(f"{where}.temperature is {get('temperature'):g}; it must be 0 or at least {LEAST_TEMPERATURE:g}: "
                                 "use 0 for greedy decoding")
        for name in ("logprobs", "prompt_logprobs"):
            if (get(name) or 0) > self._config.max_logprobs:
                raise InvalidRequest(f"{where}.{name} is {get(name)}; the limit is {self._config.max_logprobs} (max_logprobs): "
                                     "ask for fewer")
        fields = {name: get(name) for name in SamplingFields.model_fields}
        fields |= {
            "max_tokens": max_tokens,
            "stop": self._stop(where, get("stop")),
            "stop_token_ids": self._stop_token_ids(where, get("stop_token_ids"), info),
            "logit_bias": self._logit_bias(where, get("logit_bias"), info),
        }
        return Sampling(**fields)

    def _stop(self, where: str, stop: str | list[str]) -> tuple[str, ...]:
        stops = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop))
        if len(stops) > self._config.max_stop_strings:
            raise InvalidRequest(f"{where}.stop has {len(stops)} strings; the limit is {self._config.max_stop_strings} (max_stop_strings)")
        if "" in stops:
            raise InvalidRequest(f"{where}.stop has an empty string, which matches everywhere; leave it out")
        if any(len(text) > self._config.max_stop_chars for text in stops):
            raise InvalidRequest(f"{where}.stop has a string of {max(map(len, stops))} characters; the limit is "
                                 f"{self._config.max_stop_chars} (max_stop_chars): shorten it")
        if stops and self._text.tokenizer is None:
            raise InvalidRequest(f"{where}.stop needs text, and this model directory has no tokenizer.json; use stop_token_ids")
        return stops

    def _stop_token_ids(self, where: str, ids: list[int], info: EngineInfo) -> tuple[int, ...]:
        if len(ids) > self._config.max_stop_token_ids:
            raise InvalidRequest(f"{where}.stop_token_ids has {len(ids)} ids; the limit is {self._config.max_stop_token_ids} "
                                 "(max_stop_token_ids)")
        if ids and max(ids) >= info.vocab_size:
            raise InvalidRequest(f"{where}.stop_token_ids has {max(ids)}; ids of this model end at {info.vocab_size - 1}")
        return tuple(ids)

    def _logit_bias(self, where: str, bias: dict[str, float], info: EngineInfo) -> dict[int, float]:
        if len(bias) > self._config.max_logit_bias:
            raise InvalidRequest(f"{where}.logit_bias has {len(bias)} entries; the limit is {self._config.max_logit_bias} (max_logit_bias)")
        for key in bias:
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key) or int(key) >= info.vocab_size:
                raise InvalidRequest(f"{where}.logit_bias has the key {_shown(key)}; keys are token ids from 0 to {info.vocab_size - 1}")
        return {int(key): value for key, value in bias.items()}

    def _check_work(self, prompt_tokens: int, output_tokens: int) -> None:
        for name, value, limit in (("max_batch_prompt_tokens", prompt_tokens, self._config.max_batch_prompt_tokens),
                                   ("max_batch_output_tokens", output_tokens, self._config.max_batch_output_tokens)):
            if value > limit:
                raise TooLarge(f"the request asks for {value} or more tokens, counting every choice; the limit is {limit} ({name}): "
                               "split the batch, or lower n or max_tokens")


def _number(value: int | Literal["auto"], auto: int) -> int:
    return auto if value == "auto" else value


def _check_distinct(ids: list[str]) -> None:
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            raise InvalidRequest(f"the id {_shown(id)} is used twice in requests; ids of one batch must differ (or leave them out)")
        seen.add(id)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _explain(error: ErrorDetails) -> str:
    """Where, what it is, what it must be: pydantic's first finding in our words."""
    path = [part for part in error["loc"] if not re.match(r"list\[|str$", str(part))]  # a union's branches are no part of the path
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")[:200]
    if error["type"] == "extra_forbidden":
        fields = list(_model_at(path[:-1]).model_fields)
        return f"unknown field {where}{nearest(str(path[-1]), fields)} (known: {', '.join(fields)})"
    if error["type"] == "missing":
        return f"{where} is missing; it is required"
    return f"{where} is {_shown(error['input'])}; {error['msg'].replace('Input should', 'it must')}"


def _model_at(path: list[int | str]) -> type[_Strict]:
    if not path:
        return NativeRequest
    return SamplingFields if path[-1] == "sampling" else Message if "messages" in path else ItemFields
