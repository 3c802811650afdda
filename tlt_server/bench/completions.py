"""Fields that benches read of whole and streamed completions of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class CompletionPart(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def completion(content: bytes) -> CompletionPart:
    return msgspec.json.decode(content, type=CompletionPart)


def events(content: bytes) -> Iterator[CompletionPart]:
    """Yield the events of a stream, or of a part of it, without its end."""
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            yield completion(line.removeprefix(b"data: "))
