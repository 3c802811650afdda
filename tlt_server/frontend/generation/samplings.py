"""Sampling fields of a request, resolved to the sampling of a sequence: an item's fields override
the batch's, which override the defaults, within the server's limits. The reading process compiles a
structure's grammar once, before the request is admitted.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.generation.requests import (
    FORMS,
    MAX_BAD_TOKENS,
    NativeRequest,
    SamplingFields,
    StructuredOutputs,
    Words,
)
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.reading.asking import ask
from tlt_server.frontend.reading.frames import sliced
from tlt_server.frontend.reading.jobs import Patience, Slice
from tlt_server.frontend.reading.reader import LANES
from tlt_server.grammars import KEPT
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import Grammar, Sampling

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

MAX_BYTES = 2**17  # limit on a schema or grammar
# Of a core: a slow one takes 2 s for the largest grammar that compiles, and the process as much for
# each other lane.
COMPILE_S = 10.0
MOST = 64  # structures of one request, so that a batch takes a compiler from no one else for long
DEFAULTS = Sampling()
MIN_TEMPERATURE = 1e-3  # below it logits / T leaves float32's useful range


class Written(NamedTuple):
    """A requested structure. Equal ones share one grammar."""

    form: str  # a field of `StructuredOutputs`
    text: str  # choices and objects as JSON


def written(where: str, structure: StructuredOutputs) -> Written:
    """Return the requested structure. `where`: its field."""
    given = [name for name in FORMS if getattr(structure, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{where} has {' and '.join(given) or 'nothing in it'}; give exactly one of "
            f"{', '.join(FORMS)}"
        )
    [form] = given
    value = getattr(structure, form)
    if not is_small(value):
        raise _too_large(where)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text.encode()) > MAX_BYTES:
        raise _too_large(where)
    return Written(form, text)


def is_small(value: Any) -> bool:
    """Return True if the JSON of a value may be within the limit, without encoding a value far
    beyond it. Only texts, names and members are counted.
    """
    least, waiting = 0, [value]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, str | list | dict):
            continue
        least += len(found)
        if least > MAX_BYTES:
            return False
        if isinstance(found, dict):
            waiting += found.values()
        if not isinstance(found, str):
            waiting += found
    return True


def _too_large(where: str) -> TooLarge:
    return TooLarge(f"{where} has more than {MAX_BYTES} bytes: simplify it")


def check_with(words: Words, sampling: Sampling, eos: bool) -> None:
    """Refuse sampling fields that exclude a structure. `eos`: whether the model has an end
    token.
    """
    if sampling.structured_outputs is None:
        return
    structure = words.called("structured_outputs")
    for name, why in (
        ("ignore_eos", "the end token ends a structure"),
        ("min_tokens", "a structure ends where it is complete"),
        ("allowed_token_ids", "the structure says what is allowed"),
        ("bad_words", "the structure may need them"),
    ):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{words.called(name)} is given with {structure}, and {why}: leave one of them out"
            )
    if not eos:
        raise InvalidRequest(f"{structure} needs an end token, and this model has none")


class Grammars:
    """The grammars of recently requested structures, or the reasons why they have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[Written, Grammar | str] = OrderedDict()  # text: why it is none

    async def of(
        self, words: Words, request: NativeRequest, info: EngineInfo
    ) -> dict[int, Grammar]:
        """Return the grammar of each structure of a request, by the structure's identity.
        `InvalidRequest` if a structure has none.
        """
        where, given = words.called("structured_outputs"), dict[Written, list[int]]()
        for fields in (request.sampling, *(item.sampling for item in request.requests)):
            if fields is not None and fields.structured_outputs is not UNSET:
                structure = fields.structured_outputs
                given.setdefault(written(where, structure), []).append(id(structure))
                if len(given) > MOST:
                    raise TooLarge(
                        f"{where} differs between more than {MOST} items of one request; "
                        "spread them over several requests"
                    )
        found = {asked: await self._grammar(where, asked, info) for asked in given}
        return {id: found[asked] for asked, ids in given.items() for id in ids}

    async def _grammar(self, where: str, asked: Written, info: EngineInfo) -> Grammar:
        known = self._known.get(asked)
        if known is None:
            known = await _compiled(asked, info)
            while len(self._known) >= KEPT:
                self._known.popitem(last=False)
            self._known[asked] = known
        self._known.move_to_end(asked)
        if isinstance(known, str):
            raise InvalidRequest(f"{where}: {known}")
        return known


def _too_slow() -> Exception:
    return InvalidRequest(
        f"the grammar takes more than {COMPILE_S:g} s of a core to compile; simplify it, above all "
        "its repetitions and numbers"
    )


async def _compiled(asked: Written, info: EngineInfo) -> Grammar | str:
    """Return the grammar of a structure, or the reason why it has none."""
    data = asked.text.encode()
    header = ("grammar", asked.form, info.vocab_size, [*info.eos_token_ids])
    work = [Slice(header, lambda: sliced([data]))]
    try:
        # As a large job, since a small text may take a while too.
        [found] = await ask(
            work, total=LANES[0] + 1, largest=len(data), patience=Patience(COMPILE_S, _too_slow)
        )
    except InvalidRequest as error:
        return error.message
    assert isinstance(found, Grammar)
    return found


class Samplings:
    def __init__(self, config: ResolvedConfig, text: Text) -> None:
        self._config, self._text, self._specials = config, text, text.specials

    def resolve(
        self,
        words: Words,
        defaults: SamplingFields,
        own: SamplingFields | None,
        room: int,
        info: EngineInfo,
        bad_words: Mapping[str, list[tuple[int, ...]]],
        grammars: Mapping[int, Grammar],
    ) -> Sampling:
        """`bad_words`: the tokens of each bad word, without and with a leading space. `grammars`:
        by the structure's `id`.
        """

        def given(name: str) -> Any:
            value = UNSET if own is None else getattr(own, name)
            return getattr(defaults, name) if value is UNSET else value

        def get(name: str) -> Any:
            value = given(name)
            return getattr(DEFAULTS, name) if value is UNSET else value

        where = words.sampling
        strict = given("max_tokens") is not UNSET and not words.clamps
        limit = min(self._config.max_output_tokens, room)
        wanted = limit if get("max_tokens") is None else get("max_tokens")
        max_tokens = wanted if strict else min(wanted, limit)
        if max_tokens > limit:
            raise InvalidRequest(
                f"{words.called('max_tokens')} is {max_tokens}; the limit here is {limit} "
                "(max_output_tokens, and what the prompt leaves of max_model_len "
                f"{info.max_model_len}): ask for fewer or shorten the prompt"
            )
        if get("min_tokens") > max_tokens:
            raise InvalidRequest(
                f"{words.called('min_tokens')} is {get('min_tokens')}; the limit is the longest "
                f"output, {max_tokens}: lower it"
            )
        _check_temperature(where, get("temperature"))
        asked = get("prompt_logprobs")
        prompt_logprobs = info.vocab_size if asked == -1 else asked
        self._check_logprobs(words, get("logprobs"), asked, prompt_logprobs)
        stops = self._stop(where, get("stop"))
        ends = [self._specials[stop] for stop in stops if stop in self._specials]
        ids = _known(f"{where}stop_token_ids", [*get("stop_token_ids"), *ends], info)
        fields = {name: get(name) for name in SamplingFields.__struct_fields__}
        fields |= {
            "max_tokens": max_tokens,
            "prompt_logprobs": prompt_logprobs,
            "stop": stops,
            "stop_token_ids": ids,
            "logit_bias": self._logit_bias(where, get("logit_bias"), info),
            "allowed_token_ids": self._allowed(where, given("allowed_token_ids"), info),
            "bad_words": self._bad_words(where, get("bad_words"), bad_words),
            "structured_outputs": grammars.get(id(given("structured_outputs"))),
        }
        sampling = Sampling(**fields)
        check_with(words, sampling, bool(info.eos_token_ids))
        _check_some_left(where, sampling, info)
        return sampling

    def _check_logprobs(
        self, words: Words, alternatives: int, asked: int | None, prompt: int | None
    ) -> None:
        """`prompt`: the value of `asked` for prompts, with -1 resolved."""
        limit = self._config.max_logprobs
        for name, said, count in (
            ("logprobs", alternatives, alternatives),
            ("prompt_logprobs", asked, prompt or 0),
        ):
            if count > limit:
                all = f", which is all {count} of the vocabulary" if said == -1 else ""
                raise InvalidRequest(
                    f"{words.called(name)} is {said}{all}; the limit is {limit} (max_logprobs): "
                    "ask for fewer"
                )

    def _stop(self, where: str, stop: str | list[str]) -> tuple[str, ...]:
        stops = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop))
        if "" in stops:
            raise InvalidRequest(
                f"{where}stop has an empty string, which matches everywhere; leave it out"
            )
        if any(len(text) > self._config.max_stop_chars for text in stops):
            raise InvalidRequest(
                f"{where}stop has a string of {max(map(len, stops))} characters; the limit is "
                f"{self._config.max_stop_chars} (max_stop_chars): shorten it"
            )
        if stops and self._text.tokenizer is None:
            raise InvalidRequest(
                f"{where}stop needs text, and this model directory has no tokenizer.json; use "
                "stop_token_ids"
            )
        for stop in stops:
            special = next((token for token in self._specials if token in stop), None)
            if special is not None and stop not in self._specials:
                raise InvalidRequest(
                    f"{where}stop has {shown(stop)}, and the text of an output leaves out the "
                    f"special token {shown(special)}: give its id {self._specials[special]} in "
                    "stop_token_ids"
                )
        return stops

    def _allowed(self, where: str, ids: list[int] | UnsetType, info: EngineInfo) -> tuple[int, ...]:
        if ids is UNSET:
            return ()
        if not ids:
            raise InvalidRequest(
                f"{where}allowed_token_ids is empty, so nothing could follow; name ids, or leave "
                "it out"
            )
        return tuple(sorted(set(_known(f"{where}allowed_token_ids", ids, info))))

    def _bad_words(
        self, where: str, asked: list[str], words: Mapping[str, list[tuple[int, ...]]]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word to ban. A word that ends with another needs no ban."""
        found = {ids for word in asked for ids in words[word]}
        if () in found:
            word = next(word for word in asked if () in words[word])
            raise InvalidRequest(
                f"{where}bad_words has {shown(word)}, not a token of this model: leave it out"
            )
        if (tokens := sum(map(len, found))) > MAX_BAD_TOKENS:
            raise InvalidRequest(
                f"{where}bad_words are {tokens} tokens of this model, with and without a space "
                f"before; the limit is {MAX_BAD_TOKENS}: leave some out"
            )
        return tuple(
            sorted(ids for ids in found if not any(ids[i:] in found for i in range(1, len(ids))))
        )

    def _logit_bias(self, where: str, bias: dict[str, float], info: EngineInfo) -> dict[int, float]:
        for key in bias:
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key) or int(key) >= info.vocab_size:
                raise InvalidRequest(
                    f"{where}logit_bias has the key {shown(key)}; keys are token ids from 0 to "
                    f"{info.vocab_size - 1}"
                )
        return {int(key): value for key, value in bias.items()}


def _known(where: str, ids: list[int], info: EngineInfo) -> tuple[int, ...]:
    """Return token ids, after a check that the model has all of them."""
    if ids and max(ids) >= info.vocab_size:
        raise InvalidRequest(
            f"{where} has {max(ids)}; ids of this model end at {info.vocab_size - 1}"
        )
    return tuple(ids)


def _check_temperature(where: str, temperature: float) -> None:
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"{where}temperature is {temperature:g}; it must be 0 or at least "
            f"{MIN_TEMPERATURE:g}: use 0 for greedy decoding"
        )


def _check_some_left(where: str, sampling: Sampling, info: EngineInfo) -> None:
    """Refuse allowed tokens if other fields may exclude all of them."""
    if not sampling.allowed_token_ids:
        return
    left = {*sampling.allowed_token_ids} - {ids[-1] for ids in sampling.bad_words}
    if sampling.min_tokens:
        left -= {*sampling.stop_token_ids}
        left -= set() if sampling.ignore_eos else {*info.eos_token_ids}
    if not left:
        raise InvalidRequest(
            f"{where}allowed_token_ids has no token that bad_words and min_tokens leave: allow more"
        )
