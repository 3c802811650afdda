"""Phrases, which turn what a choice gained into a part of the reply. The last part also tells how
the choice ended.

A whole reply has one part per choice, made by the same code from the finished choice, so the chunks
of a stream add up to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_server.frontend.dialects.openai.replies import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    figures,
)
from tlt_server.frontend.dialects.openai.requests import ChatRequest, CompletionRequest
from tlt_server.frontend.dialects.openai.speaker import Speaker
from tlt_server.frontend.dialects.replies.logprobs import (
    PromptLogprobs,
    Scored,
    Speller,
    scored,
    scored_prompt,
)
from tlt_server.frontend.dialects.replies.meta_info import MetaInfo
from tlt_server.frontend.dialects.replies.meta_info import ended as with_end
from tlt_server.frontend.dialects.replies.usage import OpenAIUsage
from tlt_server.frontend.generation.batch import RequestBatch
from tlt_server.frontend.generation.choice import Delta, FinishedChoice
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.loop_share import Turn


class _Ending(Struct, frozen=True):
    """The fields that only the last part of a choice has."""

    versions: bool  # whether weight versions were asked for
    eos: frozenset[int]

    def put(self, part: CompletionChoice | ChatChoice, choice: FinishedChoice) -> None:
        part.finish_reason = choice.finish_reason
        part.stop_reason = None if choice.stop_reason in self.eos else choice.stop_reason
        part.weight_versions = choice.weight_versions if self.versions else UNSET
        part.metrics = figures(choice.sd)


def _prompt(speller: Speller, token_ids: list[int], delta: Delta, count: int) -> PromptLogprobs:
    """Return the prompt's log-probs; none for a choice that ended before its prompt was read."""
    found = delta.prompt_logprobs
    return speller.prompt(scored_prompt(token_ids, found, count)) if found else []


class CompletionPhrase:
    """The choices of a completions request, prompt-major."""

    def __init__(
        self,
        asked: CompletionRequest,
        batch: RequestBatch,
        text: Text,
        speller: Speller,
        eos: frozenset[int],
        id: str,
        created: int,
        model: str,
    ) -> None:
        self._asked, self._text, self._speller = asked, text, speller
        self._prompts = asked.prompts()
        self._prompt_ids = [item.requests[0].token_ids for item in batch.items]
        self._ending = _Ending(asked.return_weight_versions, eos)
        # Choice -> where its next token begins, for choices that have started.
        self._offsets: dict[int, int] = {}
        self._head = Completion(id=id, created=created, model=model, choices=[])

    def reply(
        self, parts: list[CompletionChoice], usage: OpenAIUsage | None | UnsetType
    ) -> Completion:
        metrics = (
            parts[0].metrics if len(self._prompt_ids) == self._asked.n == 1 and parts else UNSET
        )
        return msgspec.structs.replace(self._head, choices=parts, usage=usage, metrics=metrics)

    async def hear(self, delta: Delta, ended: bool, turn: Turn) -> None:
        """Take a delta in before `part`."""

    def part(
        self, prompt: int, delta: Delta, ended: FinishedChoice | None, cached_tokens: int
    ) -> CompletionChoice:
        """Return the part for a delta of a choice of that prompt; with `ended`, the last part."""
        asked, index = self._asked, prompt * self._asked.n + delta.index
        part = CompletionChoice(index=index, text=delta.text or "")
        tokens = scored(delta) if asked.alternatives() is not None else []
        first = index not in self._offsets
        if first:
            tokens = self._begin(part, prompt, delta) + tokens
        if asked.alternatives() is not None and (first or tokens):
            part.logprobs, self._offsets[index] = self._speller.completion(
                tokens, self._offsets[index]
            )
        if asked.return_token_ids:
            part.token_ids = delta.token_ids
        if ended is not None:
            self._ending.put(part, ended)
        return part

    def _begin(self, part: CompletionChoice, prompt: int, delta: Delta) -> list[Scored]:
        """Add what the first part of a choice begins with.

        Return the prompt's tokens if they are echoed with log-probs.
        """
        asked, token_ids = self._asked, [*self._prompt_ids[prompt]]
        self._offsets[part.index] = 0
        if asked.return_token_ids:
            part.prompt_token_ids = token_ids
        if asked.prompt_logprobs is not None:
            part.prompt_logprobs = _prompt(self._speller, token_ids, delta, asked.prompt_logprobs)
        if not asked.echo:
            return []
        given = self._prompts[prompt]
        if not isinstance(given, str) or asked.truncate_prompt_tokens is not None:
            given = self._text.decode(token_ids)
        part.text = given + part.text
        count = asked.alternatives()
        return (
            [*scored_prompt(token_ids, delta.prompt_logprobs or [], count)]
            if count is not None
            else []
        )


class ChatPhrase:
    """The choices of a chat completion."""

    def __init__(
        self,
        asked: ChatRequest,
        batch: RequestBatch,
        text: Text,
        speller: Speller,
        eos: frozenset[int],
        id: str,
        created: int,
        model: str,
        *,
        speaker: Callable[[], Speaker],
        live_version: str,
    ) -> None:
        """`live_version` computed a choice of which no token tells."""
        self._live_version, self._started_s = live_version, time.monotonic()
        self._asked, self._speller, self._new_speaker = asked, speller, speaker
        self._prompt_ids = batch.items[0].requests[0].token_ids
        self._ending = _Ending(asked.return_weight_versions, eos)
        self._speakers: dict[int, Speaker] = {}  # by choice, once it begins
        self._first: set[int] = set()  # choices that have had no part yet
        self._head = ChatCompletion(
            id=id,
            created=created,
            model=model,
            choices=[],
            object="chat.completion.chunk" if asked.stream else "chat.completion",
        )
        if asked.return_token_ids:
            self._head.prompt_token_ids = [*self._prompt_ids]

    def reply(
        self, parts: list[ChatChoice], usage: OpenAIUsage | None | UnsetType
    ) -> ChatCompletion:
        metrics = parts[0].metrics if self._asked.n == 1 and parts else UNSET
        reply = msgspec.structs.replace(self._head, choices=parts, usage=usage, metrics=metrics)
        self._head.prompt_token_ids = self._head.prompt_logprobs = UNSET  # sent once
        return reply

    async def hear(self, delta: Delta, ended: bool, turn: Turn) -> None:
        """Take the text of a delta in before `part`."""
        if delta.index not in self._speakers:
            self._speakers[delta.index] = self._new_speaker()
            self._first.add(delta.index)
        speaker = self._speakers[delta.index]
        await speaker.hear(delta.text or "", turn)
        if ended:
            speaker.end()

    def part(
        self, prompt: int, delta: Delta, ended: FinishedChoice | None, cached_tokens: int
    ) -> ChatChoice:
        """Return the part for a delta of a choice; with `ended`, its last part."""
        asked, index, speaker = self._asked, delta.index, self._speakers[delta.index]
        first = index in self._first
        if asked.stream:
            part = ChatChoice(index=index, delta=speaker.delta())
        else:
            part = ChatChoice(index=index, message=speaker.message())
        speech = part.delta or part.message
        assert speech is not UNSET
        if first:
            self._first.remove(index)
            speech.role = "assistant"
            if asked.return_prompt_token_ids:
                part.prompt_token_ids = [*self._prompt_ids]
            if asked.prompt_logprobs is not None and len(self._speakers) == 1:
                self._head.prompt_logprobs = _prompt(
                    self._speller, [*self._prompt_ids], delta, asked.prompt_logprobs
                )
        if asked.alternatives() is not None and (first or delta.token_ids):
            part.logprobs = self._speller.chat(scored(delta))
        if asked.return_token_ids:
            part.token_ids = delta.token_ids
        if ended is not None:
            self._ending.put(part, ended)
            if speaker.calls and ended.finish_reason == "stop":
                part.finish_reason = "tool_calls"
            if asked.return_meta_info:
                part.meta_info = self._meta(ended, cached_tokens)
        return part

    def _meta(self, choice: FinishedChoice, cached_tokens: int) -> MetaInfo:
        """Return the figures of a choice in SGLang's form."""
        tokens = zip(choice.logprobs, choice.token_ids, strict=True)
        id = self._head.id
        meta = MetaInfo(
            id=id if self._asked.n == 1 else f"{id}_{choice.index}",
            finish_reason=None,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=cached_tokens,
            weight_version=self._live_version,
            e2e_latency=time.monotonic() - self._started_s,
        )
        if self._asked.alternatives() is not None:
            meta = msgspec.structs.replace(
                meta,
                output_token_logprobs=[
                    (logprob, token, self._speller.name(token)) for logprob, token in tokens
                ],
            )
        return with_end(meta, choice)
