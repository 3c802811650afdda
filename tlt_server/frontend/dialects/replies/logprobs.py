"""Log-probs of outputs in the two shapes of the OpenAI API, log-probs of a prompt, and the figures
of a choice in SGLang's form, `meta_info`.

Values are those of the native dialect: an output's are under the distribution that was sampled
from, a prompt's under the unprocessed one. Offsets count characters of the choice's text before a
stop string is cut off, so they do not depend on how a stream is cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_client.wire import VersionSpan
from tlt_server.frontend.generation.choice import Delta, FinishedChoice
from tlt_server.frontend.generation.text import Pieces
from tlt_server.frontend.http.slices import KnownWeight
from tlt_server.wire.labels import label_of
from tlt_server.wire.records import TokenLogprobs


class Logprobs(Struct, KnownWeight, frozen=True):
    """The shape of completions. The token itself is always among its `top_logprobs`."""

    tokens: Annotated[
        list[str], "the tokens as text, or as `token_id:<id>` where the request asks for that"
    ]
    token_logprobs: Annotated[list[float | None], "one per token; null for the first of a prompt"]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        "per token the log-probs of the most likely alternatives and of itself, by text; null for "
        "the first of a prompt",
    ]
    text_offset: Annotated[list[int], "where each token begins, in characters"]

    def weight(self) -> float:
        if hasattr(self.top_logprobs, "__next__"):  # made late
            return math.inf
        alternatives = len(self.top_logprobs[-1] or ()) if self.top_logprobs else 0
        return len(self.tokens) * (4 + 2 * alternatives)


class Alternative(Struct, frozen=True):
    token: Annotated[str, "its text, or `token_id:<id>`"]
    logprob: Annotated[float, "under the distribution that was sampled from"]
    bytes: Annotated[list[int], "bytes of the token in UTF-8, perhaps a part of a character"]


class ChatToken(Struct, frozen=True):
    token: Annotated[str, "its text, or `token_id:<id>`"]
    logprob: Annotated[float, "under the distribution that was sampled from"]
    bytes: Annotated[list[int], "bytes of the token in UTF-8, perhaps a part of a character"]
    top_logprobs: Annotated[
        list[Alternative], "the most likely tokens at this position, best first"
    ]


class ChatLogprobs(Struct, KnownWeight, frozen=True):
    content: Annotated[list[ChatToken], "one per token of the answer"]

    def weight(self) -> float:
        if hasattr(self.content, "__next__"):  # made late
            return math.inf
        alternatives = len(self.content[-1].top_logprobs) if self.content else 0
        return len(self.content) * (4 + 4 * alternatives)


class PromptToken(Struct, frozen=True):
    """The log-prob of a prompt's token, or of an alternative to it."""

    logprob: Annotated[float, "under the unprocessed distribution"]
    rank: Annotated[
        int | None, "from 1; null for a token that is not among the alternatives asked for"
    ]
    decoded_token: Annotated[str, "its text"]


PromptLogprobs = list[dict[str, PromptToken] | None]
NONE = TokenLogprobs((), ())
MANY = 2048  # tokens and alternatives; a stream's chunk has fewer, unless it tells of the prompt
Part = TypeVar("Part")


class Scored(NamedTuple):
    """One token with its log-prob, which is None for the first of a prompt."""

    token_id: int
    logprob: float | None
    best: TokenLogprobs


def scored_prompt(
    token_ids: list[int], logprobs: list[TokenLogprobs | None], count: int
) -> Iterator[Scored]:
    """Pair the tokens of a prompt with their log-probs, and keep `count` alternatives, -1 for all.

    For the first token the engine gives None; for others the token itself, then the best. Its list
    is empty, and so is the result, for a sequence that ended before its prompt was read.
    """
    end = None if count < 0 else 1 + count
    for token_id, found in zip(token_ids, logprobs, strict=bool(logprobs)):
        if found is None:
            yield Scored(token_id, None, NONE)
        else:
            best = TokenLogprobs(found.token_ids[1:end], found.logprobs[1:end])
            yield Scored(token_id, found.logprobs[0], best)


def whole(choice: FinishedChoice) -> Delta:
    """Return a finished choice as a single delta."""
    return Delta(
        index=choice.index,
        token_ids=choice.token_ids,
        text=choice.text,
        logprobs=choice.logprobs,
        top_logprobs=choice.top_logprobs,
        prompt_logprobs=choice.prompt_logprobs,
    )


def scored(delta: Delta) -> list[Scored]:
    best = [NONE] * len(delta.token_ids) if delta.top_logprobs is UNSET else delta.top_logprobs
    return [Scored(*each) for each in zip(delta.token_ids, delta.logprobs, best, strict=True)]


def made(parts: Iterable[Part], values: int) -> list[Part]:
    """Return the parts of a reply for this many tokens and alternatives: as a list or, if there are
    many, as an iterator, whose parts `json_slices` creates as it encodes them.
    """
    return [*parts] if values <= MANY else cast(list[Part], parts)


def told(tokens: Sequence[Scored]) -> int:
    """Return the number of tokens and alternatives."""
    return len(tokens) * (1 + len(tokens[-1].best.token_ids)) if tokens else 0


class Speller:
    """Spells tokens as strings: their text, or `token_id:<id>`."""

    def __init__(self, pieces: Pieces, *, as_ids: bool) -> None:
        self._pieces, self._as_ids = pieces, as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._pieces[token_id].text

    def completion(self, tokens: Sequence[Scored], offset: int) -> tuple[Logprobs, int]:
        """Return the log-probs in the shape of completions, and the offset after the last token.

        `offset`: of the first token.
        """
        pieces = [self._pieces[token.token_id] for token in tokens]
        *offsets, end = accumulate((piece.characters for piece in pieces), initial=offset)
        shape = Logprobs(
            [self.name(token.token_id) for token in tokens]
            if self._as_ids
            else [piece.text for piece in pieces],
            [token.logprob for token in tokens],
            made(map(self._named, tokens), told(tokens)),
            offsets,
        )
        return shape, end

    def _named(self, token: Scored) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for other, value in zip(token.best.token_ids, token.best.logprobs, strict=True):
            # Two tokens may have the same text; the better one stays.
            top.setdefault(self.name(other), value)
        top.setdefault(self.name(token.token_id), token.logprob)
        return top

    def chat(self, tokens: Sequence[Scored]) -> ChatLogprobs:
        return ChatLogprobs(made(map(self._chat_token, tokens), told(tokens)))

    def _chat_token(self, token: Scored) -> ChatToken:
        best = token.best
        return ChatToken(
            self.name(token.token_id),
            token.logprob or 0.0,
            [*self._pieces[token.token_id].bytes],
            [
                Alternative(self.name(other), value, [*self._pieces[other].bytes])
                for other, value in zip(best.token_ids, best.logprobs, strict=True)
            ]
            if best.token_ids
            else [],
        )

    def prompt(self, tokens: Iterable[Scored]) -> PromptLogprobs:
        """Return an iterator, since a prompt may be long."""
        return cast(
            PromptLogprobs,
            (
                None
                if token.logprob is None
                else self._ranked(token.token_id, token.logprob, token.best)
                for token in tokens
            ),
        )

    def _ranked(self, token_id: int, logprob: float, best: TokenLogprobs) -> dict[str, PromptToken]:
        rank = best.token_ids.index(token_id) + 1 if token_id in best.token_ids else None
        found = {str(token_id): PromptToken(logprob, rank, self._pieces[token_id].text)}
        for other_rank, (other, value) in enumerate(
            zip(best.token_ids, best.logprobs, strict=True), 1
        ):
            found.setdefault(str(other), PromptToken(value, other_rank, self._pieces[other].text))
        return found


Triple = tuple[float | None, int, str | None]  # log-prob, token id, and its text if asked for


class Finish(Struct, frozen=True):
    """The end of a choice."""

    type: Annotated[Literal["stop", "length", "abort"], "the kind of end"]
    matched: Annotated[
        int | str | UnsetType, "the stop token's id or the stop string; of a stop"
    ] = UNSET
    length: Annotated[int | UnsetType, "output tokens; of an end by length"] = UNSET
    message: Annotated[str | UnsetType, "why; of an abort"] = UNSET


class MetaInfo(Struct, frozen=True, kw_only=True):
    id: Annotated[str, "the request's rid, numbered where there are several choices"]
    finish_reason: Annotated[Finish | None, "what ended it; null in a chunk that does not"]
    prompt_tokens: Annotated[int, "tokens of its prompt"]
    completion_tokens: Annotated[int, "tokens of its output so far"]
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"]
    weight_version: Annotated[str, "version that computed the last token, or else the live version"]
    weight_versions: Annotated[
        list[VersionSpan] | UnsetType, "which weights computed which tokens; at the end"
    ] = UNSET
    e2e_latency: Annotated[float, "seconds since the request was accepted"]
    output_token_logprobs: Annotated[
        list[Triple] | UnsetType,
        "per output token its log-prob, its id, and its text or null; with return_logprob",
    ] = UNSET
    output_top_logprobs: Annotated[
        list[list[Triple]] | UnsetType,
        "per output token the best alternatives; with top_logprobs_num",
    ] = UNSET
    input_token_logprobs: Annotated[
        list[Triple] | UnsetType,
        "per prompt token from logprob_start_len on; the log-prob of the very first one is null; "
        "with -1 only the last token, with null; with return_logprob",
    ] = UNSET
    input_top_logprobs: Annotated[
        list[list[Triple] | None] | UnsetType,
        "per prompt token the best alternatives; where asked for",
    ] = UNSET
    spec_verify_ct: Annotated[int | UnsetType, "steps that verified a draft; at the end"] = UNSET
    spec_accept_length: Annotated[
        float | UnsetType,
        "tokens per such step, the bonus token included; 1 without one; at the end",
    ] = UNSET
    spec_accept_rate: Annotated[
        float | UnsetType, "the fraction of verified drafts that was accepted; at the end"
    ] = UNSET
    spec_accept_token_num: Annotated[int | UnsetType, "drafts accepted; at the end"] = UNSET
    spec_draft_token_num: Annotated[int | UnsetType, "drafts verified; at the end"] = UNSET


def ended(meta: MetaInfo, choice: FinishedChoice, **more: Any) -> MetaInfo:
    """Return the figures of a choice including those known only at its end."""
    sd, versions = choice.sd, choice.weight_versions
    return msgspec.structs.replace(
        meta,
        finish_reason=_finish(choice),
        weight_versions=versions,
        weight_version=label_of(versions[-1].version) if versions else meta.weight_version,
        spec_verify_ct=sd.draft_steps,
        spec_accept_length=sd.mean_accept_length or 1.0,
        spec_accept_rate=sd.accepted / sd.drafted if sd.drafted else 0.0,
        spec_accept_token_num=sd.accepted,
        spec_draft_token_num=sd.drafted,
        **more,
    )


def _finish(choice: FinishedChoice) -> Finish:
    match choice.finish_reason:
        case "stop":
            return Finish(
                "stop", matched=UNSET if choice.stop_reason is None else choice.stop_reason
            )
        case "length":
            return Finish("length", length=len(choice.token_ids))
        case "abort":
            return Finish(
                "abort",
                message="the request was aborted; this is what it had: send prompt and output "
                "again to continue",
            )
