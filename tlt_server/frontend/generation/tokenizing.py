"""Texts to token ids and back without holding the loop: short texts at once, long ones by the
reading process, in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tlt_server.errors import ContextExceeded
from tlt_server.frontend.generation.templates import check_length, for_template
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading import asking
from tlt_server.frontend.reading.frames import cut, sliced
from tlt_server.frontend.reading.jobs import Slice
from tlt_server.wire.packed import PackedIds, PackedText

# Limits on what is done at once. On a slow core each takes 2 ms.
INLINE_CHARS = 2048
INLINE_IDS = 4096
INLINE_CONVERSATION_BYTES = 4096
SLICE_CHARS = 2**16
SLICE_TEXTS = 512


async def encode(
    text: Text,
    wheres: Sequence[str],
    texts: Sequence[str | PackedText],
    max_tokens: int,
    *,
    special: bool,
) -> list[PackedIds]:
    """Return the token ids of each text. `wheres`: the texts' names in errors.

    `ContextExceeded` if a text has more characters than `max_tokens` tokens can hold; also for a
    tokenizer that drops characters.
    """
    longest = text.longest_token
    for where, one in zip(wheres, texts, strict=True):
        if 0 < max_tokens * longest < len(one):
            raise ContextExceeded.of(
                f"{where} has a text of {len(one)} characters",
                f"{max_tokens * longest} (max_prompt_tokens {max_tokens}, and no token of this "
                f"model has more than {longest} characters)",
                max_tokens,
            )
        check_length(where, one)
    plain = [one for one in texts if isinstance(one, str)]
    total = sum(map(len, texts))
    if text.tokenizer is None or (
        total <= INLINE_CHARS and len(plain) == len(texts) <= INLINE_CHARS // 16
    ):
        return [*map(PackedIds.of, text.encode(plain, special=special))]
    largest = min(total, max(SLICE_CHARS, *map(len, texts)))
    values = await asking.ask(_slices(texts, special), total=total, largest=largest)
    return [*chain.from_iterable(values)]


def _slices(texts: Sequence[str | PackedText], special: bool) -> Iterator[Slice]:
    some: list[str | PackedText] = []
    chars = 0
    for one in texts:
        if some and (chars + len(one) > SLICE_CHARS or len(some) == SLICE_TEXTS):
            yield _slice(some, special)
            some, chars = [], 0
        some.append(one)
        chars += len(one)
    yield _slice(some, special)


def _slice(texts: list[str | PackedText], special: bool) -> Slice:
    parts = [one.parts if isinstance(one, PackedText) else (one.encode(),) for one in texts]
    lengths = [sum(map(len, some)) for some in parts]
    return Slice(("encode", lengths, special), lambda: sliced(chain.from_iterable(parts)))


async def decode(text: Text, ids: Sequence[int] | PackedIds, *, special: bool) -> str | PackedText:
    """Return the text of token ids."""
    if len(ids) <= INLINE_IDS:
        return text.decode([*ids], special=special)
    data = (ids if isinstance(ids, PackedIds) else PackedIds.of(ids)).packed
    slices = [Slice(("decode", special), lambda: sliced([data]))]
    [value] = await asking.ask(slices, total=len(data), largest=len(data))
    found: str | PackedText = value
    return found


async def render(
    text: Text,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    open_end: bool = False,
    template: str | None = None,
) -> str | PackedText:
    """Return the conversation in the chat template; with `open_end`, cut after the text of the
    final message. Messages are objects, or structs that convert themselves. `template`: the name of
    one of the model's templates, or a request's own template, which runs in a separate process.
    """
    brought = template is not None and template not in text.templates
    own = [template, text.tokens, open_end] if brought else []
    frames, size = list[bytes](), 0
    for frame in cut([[*messages], tools, options, *own]):
        frames.append(frame)
        size += len(frame)
        await asyncio.sleep(0)
    found: str | PackedText
    if brought:
        found = await asking.render(Slice((size,), lambda: frames), size)
        return found
    if not text.templates or size <= INLINE_CONVERSATION_BYTES:
        said = for_template(messages)
        return text.render(said, tools, options, open_end=open_end, name=template)
    work = [Slice(("render", open_end, template), lambda: frames)]
    [found] = await asking.ask(work, total=size, largest=size)
    return found
