"""Whole and streamed completions of the OpenAI API, as far as benches read them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def completion(content: bytes) -> Completion:
    return msgspec.json.decode(content, type=Completion)


def events(content: bytes) -> Iterator[Completion]:
    """Yield the events of a stream, or of a part of it, without its end."""
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            yield completion(line.removeprefix(b"data: "))
