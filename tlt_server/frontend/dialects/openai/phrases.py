"""Phrases: convert a choice's new tokens into a part of the reply. The last part also says how the
choice ended.

A whole reply has one part per choice, made by the same code from the finished choice, so the chunks
of a stream add up to it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tlt_server.frontend.dialects.borrowed import named
from tlt_server.frontend.dialects.openai.replies import (
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Speech,
    ToolCall,
    figures,
)
from tlt_server.frontend.dialects.openai.requests import Asked, ChatRequest, CompletionRequest
from tlt_server.frontend.dialects.replies.logprobs import (
    MetaInfo,
    PromptLogprobs,
    Scored,
    Speller,
    scored,
    scored_prompt,
)
from tlt_server.frontend.dialects.replies.logprobs import ended as with_end
from tlt_server.frontend.dialects.replies.whole import OpenAIUsage
from tlt_server.frontend.generation.choice import Delta, FinishedChoice
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.http.slices import SLICE_BYTES, Turn
from tlt_server.frontend.parsers.answer import SLICE_CHARS, AnswerReader
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText, ThoughtText
from tlt_server.frontend.service import Service
from tlt_server.wire.labels import label_of

Reply = TypeVar("Reply", Completion, ChatCompletion)
Used = OpenAIUsage | None | UnsetType


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


async def sliced(text: str, turn: Turn) -> AsyncIterator[str]:
    """Yield a text in slices, with turns of other requests in between."""
    for at in range(0, len(text), SLICE_CHARS):
        if at:
            await turn(SLICE_BYTES)
        yield text[at : at + SLICE_CHARS]


class Speaker:
    """Collects text, and returns what is new since the last call."""

    def __init__(
        self, answer: AnswerReader | None, *, reasons: bool, silence: str | None = None
    ) -> None:
        """`answer`: reads the text; None: all of it is content. `reasons`: reasoning is shown.
        `silence`: content of a whole message that has only calls or reasoning.
        """
        self.calls = 0  # said so far
        self._silence = silence
        self._answer, self._reasons = answer, reasons
        self._pieces: list[Piece] = []

    async def hear(self, text: str, turn: Turn) -> None:
        """Add text."""
        if self._answer is None:
            self._pieces.append(SpokenText(text))
            return
        async for some in sliced(text, turn):
            self._pieces += self._answer.push(some)

    def end(self) -> None:
        """Note the end of the answer."""
        if self._answer is not None:
            self._pieces += self._answer.end()

    def delta(self) -> Speech:
        """Return the new text, for a chunk of a stream."""
        calls = self._take_calls()
        speech = self._said()
        if calls:
            speech.tool_calls = calls
        elif self._answer is None and speech.content is UNSET:
            speech.content = ""
        return speech

    def message(self) -> Speech:
        """Return the whole message."""
        calls = self._take_calls()
        speech = self._said()
        for call in calls:
            call.index = UNSET
        if calls:
            speech.tool_calls = calls
        if speech.content is UNSET:
            speech.content = self._silence if calls or speech.reasoning else ""
        return speech

    def _take_calls(self) -> list[ToolCall]:
        found = [piece for piece in self._pieces if isinstance(piece, SpokenCall)]
        first, self.calls = self.calls, self.calls + len(found)
        return [
            ToolCall(CalledFunction(call.name, call.arguments), new_call_id(), index=index)
            for index, call in enumerate(found, first)
        ]

    def _said(self) -> Speech:
        """Return the text since the last call, and clear it."""
        speech = Speech()
        content = "".join(piece.text for piece in self._pieces if isinstance(piece, SpokenText))
        reasoning = "".join(piece.text for piece in self._pieces if isinstance(piece, ThoughtText))
        if content:
            speech.content = content
        if reasoning and self._reasons:
            speech.reasoning_content = speech.reasoning = reasoning
        self._pieces = []
        return speech


class Phrase:
    """Makes parts and replies of one request."""

    def __init__(self, service: Service, asked: Asked, batch: RequestBatch, id: str) -> None:
        stops = () if asked.stop_token_ids is UNSET else asked.stop_token_ids
        self._eos = frozenset(service.info.eos_token_ids) - {*stops}
        self._versions, self._text = asked.return_weight_versions, service.text
        as_ids = asked.return_tokens_as_token_ids or service.text.tokenizer is None
        self._speller = Speller(service.pieces, as_ids=as_ids)
        self._prompt_ids = [item.requests[0].token_ids for item in batch.items]
        self._single = len(batch.items) == asked.n == 1
        self._named: dict[str, Any] = {
            "id": id,
            "created": int(time.time()),
            "model": named(service, asked.model),
        }

    def _end(self, part: CompletionChoice | ChatChoice, choice: FinishedChoice) -> None:
        """Add the fields of a choice's last part."""
        part.finish_reason = choice.finish_reason
        part.stop_reason = None if choice.stop_reason in self._eos else choice.stop_reason
        part.weight_versions = choice.weight_versions if self._versions else UNSET
        part.metrics = figures(choice.sd)

    def _prompt(self, token_ids: list[int], delta: Delta, count: int) -> PromptLogprobs:
        """Return the prompt's log-probs; none for a choice that ended before its prompt was
        read.
        """
        found = delta.prompt_logprobs
        return self._speller.prompt(scored_prompt(token_ids, found, count)) if found else []

    def _reply(self, head: Reply, parts: Sequence[Any], usage: Used) -> Reply:
        metrics = parts[0].metrics if self._single and parts else UNSET
        return msgspec.structs.replace(head, choices=parts, usage=usage, metrics=metrics)


class CompletionPhrase(Phrase):
    """The choices of a completions request, prompt-major."""

    def __init__(
        self, service: Service, asked: CompletionRequest, batch: RequestBatch, id: str
    ) -> None:
        super().__init__(service, asked, batch, id)
        self._asked, self._prompts = asked, asked.prompts()
        # Choice -> where its next token begins, for choices that have started.
        self._offsets: dict[int, int] = {}
        self._head = Completion(choices=[], **self._named)

    def reply(self, parts: Sequence[CompletionChoice], usage: Used) -> Completion:
        return self._reply(self._head, parts, usage)

    async def part(
        self, prompt: int, delta: Delta, ended: FinishedChoice | None, cached: int, turn: Turn
    ) -> CompletionChoice:
        """Return what to send for one delta of a choice. `prompt`: the number of the choice's
        prompt. `ended`: given with the last delta.
        """
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
            self._end(part, ended)
        return part

    def _begin(self, part: CompletionChoice, prompt: int, delta: Delta) -> list[Scored]:
        """Add the content that only a choice's first part has.

        Return the prompt's tokens if they are echoed with log-probs.
        """
        asked, token_ids = self._asked, [*self._prompt_ids[prompt]]
        self._offsets[part.index] = 0
        if asked.return_token_ids:
            part.prompt_token_ids = token_ids
        if asked.prompt_logprobs is not None:
            part.prompt_logprobs = self._prompt(token_ids, delta, asked.prompt_logprobs)
        if not asked.echo:
            return []
        given = self._prompts[prompt]
        if not isinstance(given, str) or asked.truncate_prompt_tokens is not None:
            given = self._text.decode(token_ids)
        part.text = given + part.text
        count = asked.alternatives()
        if count is None:
            return []
        return [*scored_prompt(token_ids, delta.prompt_logprobs or [], count)]


class ChatPhrase(Phrase):
    """The choices of a chat completion."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        batch: RequestBatch,
        id: str,
        *,
        reader: Callable[[], AnswerReader | None],
    ) -> None:
        """`reader`: creates the reader of one answer."""
        super().__init__(service, asked, batch, id)
        # The version of a choice of which no token tells.
        self._live_version = label_of(service.info.weight_version)
        self._started_s, self._asked, self._reader = time.monotonic(), asked, reader
        self._speakers: dict[int, Speaker] = {}  # by choice, once it begins
        self._head = ChatCompletion(
            choices=[],
            object="chat.completion.chunk" if asked.stream else "chat.completion",
            **self._named,
        )
        if asked.return_token_ids:
            self._head.prompt_token_ids = [*self._prompt_ids[0]]

    def reply(self, parts: Sequence[ChatChoice], usage: Used) -> ChatCompletion:
        reply = self._reply(self._head, parts, usage)
        self._head.prompt_token_ids = self._head.prompt_logprobs = UNSET  # sent once
        return reply

    async def part(
        self, prompt: int, delta: Delta, ended: FinishedChoice | None, cached: int, turn: Turn
    ) -> ChatChoice:
        """Return the part for a delta of a choice; with `ended`, its last part."""
        asked, index = self._asked, delta.index
        first = index not in self._speakers
        if first:
            silence = "" if asked.return_meta_info else None
            self._speakers[index] = Speaker(
                self._reader(), reasons=asked.include_reasoning, silence=silence
            )
        speaker = self._speakers[index]
        await speaker.hear(delta.text or "", turn)
        if ended is not None:
            speaker.end()
        speech = speaker.delta() if asked.stream else speaker.message()
        part = (
            ChatChoice(index=index, delta=speech)
            if asked.stream
            else ChatChoice(index=index, message=speech)
        )
        if first:
            self._begin(part, speech, delta)
        if asked.alternatives() is not None and (first or delta.token_ids):
            part.logprobs = self._speller.chat(scored(delta))
        if asked.return_token_ids:
            part.token_ids = delta.token_ids
        if ended is not None:
            self._end(part, ended)
            if speaker.calls and ended.finish_reason == "stop":
                part.finish_reason = "tool_calls"
            if asked.return_meta_info:
                part.meta_info = self._meta(ended, cached)
        return part

    def _begin(self, part: ChatChoice, speech: Speech, delta: Delta) -> None:
        """Add the content that only a choice's first part has."""
        speech.role = "assistant"
        asked = self._asked
        if asked.return_prompt_token_ids:
            part.prompt_token_ids = [*self._prompt_ids[0]]
        if asked.prompt_logprobs is not None and len(self._speakers) == 1:
            self._head.prompt_logprobs = self._prompt(
                [*self._prompt_ids[0]], delta, asked.prompt_logprobs
            )

    def _meta(self, choice: FinishedChoice, cached: int) -> MetaInfo:
        """Return the figures of a choice in SGLang's form."""
        asked, id = self._asked, self._head.id
        meta = MetaInfo(
            id=id if asked.n == 1 else f"{id}_{choice.index}",
            finish_reason=None,
            prompt_tokens=len(self._prompt_ids[0]),
            completion_tokens=len(choice.token_ids),
            cached_tokens=cached,
            weight_version=self._live_version,
            e2e_latency=time.monotonic() - self._started_s,
            output_token_logprobs=UNSET
            if asked.alternatives() is None
            else [
                (logprob, token, self._speller.name(token))
                for logprob, token in zip(choice.logprobs, choice.token_ids, strict=True)
            ],
        )
        return with_end(meta, choice)
