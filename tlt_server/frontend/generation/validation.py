"""Applies the server's limits to a parsed request. The result is one `RequestBatch` of
`GenerateRequest`s, or one typed 4xx with value, limit and remedy.

`requests` has refused what is wrong for every server; `Validator` knows the model and the
configured limits. Every dialect ends in `Validator.batch`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from tlt_server.errors import ContextExceeded, Forbidden, InvalidRequest, NotFound, TooLarge
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.generation import repeated
from tlt_server.frontend.generation.items import pinned
from tlt_server.frontend.generation.requests import (
    NATIVE,
    PROMPTS,
    WHOLE,
    ItemFields,
    NativeRequest,
    PromptReading,
    RequestBatch,
    RequestItem,
    SamplingFields,
    SdFields,
    Words,
)
from tlt_server.frontend.generation.samplings import DEFAULTS, Grammars, Samplings
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.access import SESSION
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.link.admission import Demand
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.packed import PackedIds, PackedText
from tlt_server.wire.records import DraftLimits, GenerateRequest, Sampling

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

BREATH = 64  # items of a batch after which other requests get a turn


class Validator:
    """Applies the server's limits, cheapest first.

    `next_seed`: for requests without a seed. `choice_seed(seed, i)`: keys choice i.
    `check_room(demand)`: raises if there is no room.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        text: Text,
        next_seed: Callable[[], int],
        choice_seed: Callable[[int, int], int],
        check_room: Callable[[Demand], None],
    ) -> None:
        self._config, self._text, self._next_seed, self._choice_seed = (
            config,
            text,
            next_seed,
            choice_seed,
        )
        self._sampling, self._grammars = Samplings(config, text), Grammars()
        self._check_room = check_room
        # a random start, since rollouts come back with the ids that an earlier process gave them
        self._serial = itertools.count(secrets.randbits(48))

    async def batch(
        self,
        request: NativeRequest,
        info: EngineInfo,
        caller: Caller,
        words: Words = NATIVE,
        reading: PromptReading = WHOLE,
    ) -> RequestBatch:
        """Return the batch of a request. The request's items are freed."""
        _check_priority(request.priority, caller)
        begin_by_s, deadline_s = self._deadlines(request)
        for i, item in enumerate(request.requests):
            if i % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            self._check_shape(words, i, item, info)
        self._check_room(self._demand(request, info, caller.name, begin_by_s, deadline_s))
        prompts = await self._prompts(words, request, info, reading)
        samplings = await self._samplings(words, request, prompts, info)
        serial, session = next(self._serial), SESSION.get()
        items: list[RequestItem] = []
        choices = 0  # made since other requests last ran
        each = zip(request.requests, prompts, samplings, strict=True)
        for i, (item, prompt, sampling) in enumerate(each):
            choices += item.n
            if choices > BREATH:
                await asyncio.sleep(0)
                choices = 0
            seed = self._next_seed() if item.seed is None else item.seed
            drafts = _drafts(words.field.format(i=i), item.sd, info.drafters)
            pin = pinned(words.field.format(i=i), item, info)
            id = f"{serial:x}-{i}"
            items.append(
                RequestItem(
                    item.id or id,
                    [
                        GenerateRequest(
                            id=f"{id}.{choice}",
                            token_ids=prompt,
                            sampling=sampling,
                            seed=self._choice_seed(seed, choice),
                            group_id=item.group_id or session or id,
                            salt=item.salt,
                            lora=item.lora,
                            weight_version=pin,
                            owner=caller.name,
                            priority=request.priority,
                            sd=drafts,
                            train=item.train,
                            deadline_s=deadline_s,
                            begin_by_s=begin_by_s,
                        )
                        for choice in range(item.n)
                    ],
                )
            )
        _check_ids(items)
        while request.requests:
            del request.requests[-BREATH:]
            await asyncio.sleep(0)
        return RequestBatch(items, request.stream, deadline_s)

    async def _samplings(
        self, words: Words, request: NativeRequest, prompts: Sequence[PackedIds], info: EngineInfo
    ) -> list[Sampling]:
        """Return the sampling of each item, once its prompt has been checked."""
        bad_words = await self._bad_words(words, request)
        grammars = await self._grammars.of(words, request, info)
        shared: dict[int, Sampling] = {}  # by output room, for items without own fields
        samplings: list[Sampling] = []
        prompt_tokens = output_tokens = 0
        for i, (item, prompt) in enumerate(zip(request.requests, prompts, strict=True)):
            if i % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            room = self._check_prompt(words.item.format(i=i), prompt, info)
            own = item.sampling
            sampling = shared.get(room) if own is None else None
            if sampling is None:
                where = (
                    words if own is None else words._replace(sampling=f"requests[{i}].sampling.")
                )
                sampling = self._sampling.resolve(
                    where, request.sampling, own, room, info, bad_words, grammars
                )
            if own is None:
                shared[room] = sampling
            prompt_tokens += item.n * len(prompt)
            output_tokens += item.n * sampling.max_tokens
            self._check_work(prompt_tokens, output_tokens)
            samplings.append(sampling)
        return samplings

    async def _bad_words(
        self, words: Words, request: NativeRequest
    ) -> dict[str, list[tuple[int, ...]]]:
        """Return the tokens of each bad word, without and with a leading space."""
        given = (request.sampling, *(item.sampling for item in request.requests))
        found = dict.fromkeys(
            word for fields in given if fields is not None for word in fields.bad_words or ()
        )
        where = f"{words.sampling}bad_words"
        if not found:
            return {}
        if self._text.tokenizer is None:
            raise InvalidRequest(
                f"{where} needs text, and this model directory has no tokenizer.json; use "
                "logit_bias"
            )
        if blank := next((word for word in found if not word.strip()), None):
            raise InvalidRequest(f"{where} has {shown(blank)}, which is not a word: leave it out")
        texts = [space + word.lstrip() for word in found for space in ("", " ")]
        wheres = [where] * len(texts)
        encoded = await tokenizing.encode(self._text, wheres, texts, 0, special=False)
        ids = [*map(tuple, encoded)]
        return {word: ids[2 * i : 2 * i + 2] for i, word in enumerate(found)}

    def _deadlines(self, request: NativeRequest) -> tuple[float, float]:
        """Return the times by which a sequence must start and end."""
        config, now = self._config, time.monotonic()
        queue_timeout_s = (
            config.queue_timeout_s if request.queue_timeout_s is None else request.queue_timeout_s
        )
        timeout_s = config.default_timeout_s if request.timeout_s is None else request.timeout_s
        for name, value, limit, setting in (
            ("queue_timeout_s", queue_timeout_s, config.queue_timeout_s, "queue_timeout_s"),
            ("timeout_s", timeout_s, config.max_timeout_s, "max_timeout_s"),
        ):
            if value > limit:
                raise InvalidRequest(
                    f"{name} is {value:g}; the limit is {limit:g} s ({setting}): ask for less"
                )
        return now + queue_timeout_s, now + timeout_s

    def _demand(
        self,
        request: NativeRequest,
        info: EngineInfo,
        owner: str,
        begin_by_s: float,
        deadline_s: float,
    ) -> Demand:
        """Return the demand known before texts are tokenised."""
        return Demand(
            sequences=sum(item.n for item in request.requests),
            prompt_tokens=sum(
                item.n * len(item.token_ids) for item in request.requests if item.token_ids
            ),
            output_tokens=sum(
                item.n * _allowed(request, item.sampling, info) for item in request.requests
            ),
            begin_by_s=begin_by_s,
            deadline_s=deadline_s,
            owner=owner,
        )

    def _check_shape(self, words: Words, i: int, item: ItemFields, info: EngineInfo) -> None:
        where, field = words.item.format(i=i), words.field.format(i=i)
        given = [name for name in PROMPTS if getattr(item, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"{where} has {' and '.join(given) or 'no prompt'}; give exactly one of "
                f"{', '.join(PROMPTS)}"
            )
        self._check_choices(field, item.n)
        _check_adapter(field, item.lora, info)

    def _check_choices(self, field: str, n: int) -> None:
        if n > self._config.max_n:
            raise InvalidRequest(
                f"{field}n is {n}; the limit is {self._config.max_n} (max_n): ask for fewer choices"
            )

    def check_choices(self, n: int, caller: Caller) -> None:
        """Refuse one item's n as `batch` does, for a dialect that tokenises first."""
        self._check_choices("", n)
        self._check_room(Demand(sequences=n, owner=caller.name))

    async def encode(
        self,
        wheres: Sequence[str],
        texts: Sequence[str | PackedText],
        info: EngineInfo,
        *,
        special: bool = True,
        whole: bool = True,
    ) -> list[PackedIds]:
        """Return the token ids of each text. With `whole`, a text may not exceed the longest
        prompt.
        """
        limit = self._prompt_limit(info) if whole else 0
        return await tokenizing.encode(self._text, wheres, texts, limit, special=special)

    async def _prompts(
        self, words: Words, request: NativeRequest, info: EngineInfo, reading: PromptReading
    ) -> list[PackedIds]:
        """Return the token ids of each item; if requested, only the last ones."""
        keep = reading.keep
        if keep == 0:
            raise InvalidRequest(
                f"{words.sampling}truncate_prompt_tokens is 0, which leaves nothing of the prompt; "
                "it must be -1, or at least 1"
            )
        prompts = await self._encoded(words, request.requests, info, reading)
        if keep is None:
            return prompts
        if keep == -1:
            room = info.max_model_len - _allowed(request, None, info)
            keep = max(1, min(self._prompt_limit(info), room))
        return [PackedIds(prompt.packed[-4 * keep :]) for prompt in prompts]

    async def _encoded(
        self, words: Words, items: list[ItemFields], info: EngineInfo, reading: PromptReading
    ) -> list[PackedIds]:
        found = {i: item.token_ids for i, item in enumerate(items) if item.token_ids is not None}
        chats = {
            i: await tokenizing.render(self._text, item.messages)
            for i, item in enumerate(items)
            if item.messages
        }
        plain = {i: item.prompt for i, item in enumerate(items) if item.prompt is not None}
        for texts, special, whole in (
            (chats, False, True),
            (plain, reading.special, reading.keep is None),
        ):
            if texts:
                wheres = [words.item.format(i=i) for i in texts]
                given = [*texts.values()]
                ids = await self.encode(wheres, given, info, special=special, whole=whole)
                found |= zip(texts, ids, strict=True)
        return [found[i] for i in range(len(items))]

    def _check_prompt(self, where: str, token_ids: PackedIds, info: EngineInfo) -> int:
        """Return the number of output tokens that fit after this prompt."""
        if not token_ids:
            raise InvalidRequest(f"{where} has an empty prompt; give at least one token")
        check_vocabulary(where, token_ids, info)
        limit = self._prompt_limit(info)
        if len(token_ids) > limit:
            raise ContextExceeded.of(
                f"{where} has a prompt of {len(token_ids)} tokens",
                f"{limit} (max_prompt_tokens, and max_model_len {info.max_model_len} less one)",
                limit,
            )
        return info.max_model_len - len(token_ids)

    def _prompt_limit(self, info: EngineInfo) -> int:
        return min(self._config.max_prompt_tokens, info.max_model_len - 1)

    def _check_work(self, prompt_tokens: int, output_tokens: int) -> None:
        for name, value, limit in (
            ("max_batch_prompt_tokens", prompt_tokens, self._config.max_batch_prompt_tokens),
            ("max_batch_output_tokens", output_tokens, self._config.max_batch_output_tokens),
        ):
            if value > limit:
                raise TooLarge(
                    f"the request asks for {value} or more tokens, counting every choice; the "
                    f"limit is {limit} ({name}): split the batch, or lower n or max_tokens"
                )


def check_vocabulary(where: str, token_ids: PackedIds, info: EngineInfo) -> None:
    greatest = token_ids.greatest()
    if greatest >= info.vocab_size:
        raise InvalidRequest(
            f"{where} has the token id {greatest}; ids of this model end at "
            f"{info.vocab_size - 1}: tokenise with the served model's tokenizer"
        )


def _check_ids(items: Sequence[RequestItem]) -> None:
    twice = repeated(item.id for item in items)
    if twice is not None:
        raise InvalidRequest(
            f"the id {shown(twice)} is used twice in requests; ids of one batch must differ (or "
            "leave them out)"
        )


def _allowed(request: NativeRequest, own: SamplingFields | None, info: EngineInfo) -> int:
    """Return the limit on an item's output; 0 for everything that the prompt leaves."""
    given = request.sampling if own is None or own.max_tokens is UNSET else own
    tokens = DEFAULTS.max_tokens if given.max_tokens is UNSET else given.max_tokens
    return min(tokens or 0, info.max_model_len)


def _drafts(field: str, sd: bool | str | SdFields, loaded: Sequence[str]) -> bool | DraftLimits:
    if not isinstance(sd, SdFields):
        return sd not in (False, "off")
    if sd.drafter is not None and sd.drafter not in loaded:
        raise InvalidRequest(
            f"{field}sd.drafter is {shown(sd.drafter)}; loaded: {', '.join(loaded) or 'none'}. "
            "Name one of these, or leave it out"
        )
    return DraftLimits(drafter=sd.drafter or "", max_depth=sd.max_depth, max_rows=sd.max_rows)


def _check_priority(priority: int, caller: Caller) -> None:
    if priority < 0 and not caller.may("operate"):
        raise Forbidden(
            f"the priority is {abs(priority)} ahead of the default, and the key {caller.name} "
            "lacks the scope operate: leave priority out, or use 0 or more"
        )


def _check_adapter(field: str, name: str, info: EngineInfo) -> None:
    """Raise `NotFound` if the named adapter is not loaded. `field`: the path before the field's
    name.
    """
    if name and name not in info.adapters:
        raise NotFound(
            f"{field}lora is {shown(name)}; loaded: {shown(', '.join(info.adapters) or 'none')}. "
            "Load it first (POST /update_weights with role adapter, /v1/load_lora_adapter, "
            "/load_lora_adapter)"
        )
