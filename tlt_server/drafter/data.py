"""Training text from files: segments of a server's samples (.segment), rollouts of `tlt bench
record` (.safetensors), or JSONL with one conversation or one prompt with its response per line.

Every line is bounded before it is parsed. An error names file, line and both values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tlt_server.drafter.records import rollout_of
from tlt_server.errors import InvalidRequest, StartupError
from tlt_server.frontend.generation.text import Text
from tlt_server.samples.identity import identity_of
from tlt_server.samples.segments import SUFFIX, Refusals, SegmentHeader, read_segment
from tlt_server.trainer.target.recompute import Document

MAX_LINE_BYTES = 1 << 24  # 16 MiB: a million tokens of ids
MAX_TOKENS = 1 << 28  # in all files: 1 GiB of ids


class TextTurn(Struct):
    role: str
    content: str


class DataLine(Struct):
    """One line: token ids, or messages."""

    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    messages: list[TextTurn] | None = None


PlacedDocuments = Iterator[tuple[str, Document]]  # where a document stands, and the document
_lines = msgspec.json.Decoder(DataLine)


class TargetLimits(Struct, frozen=True):
    """Bounds set by the target."""

    vocab_size: int
    max_position: int


def read_documents(files: Sequence[Path], limits: TargetLimits, target: Path) -> list[Document]:
    """Read all documents. `StartupError` for an unusable line, or if there are none. Damaged parts
    of segments are left out and reported on stderr.
    """
    found: list[Document] = []
    total = 0
    for file in files:
        for place, document in READERS.get(file.suffix, _lines_of)(file, limits, target):
            found.append(document)
            total += len(document.token_T)
            if total > MAX_TOKENS:
                raise StartupError(
                    f"{place}: {total} tokens so far, the limit is {MAX_TOKENS}; train on fewer "
                    "files at a time"
                )
    if not found:
        raise StartupError(f"{', '.join(map(str, files))}: no data for this target")
    return found


def _segments_of(file: Path, limits: TargetLimits, target: Path) -> PlacedDocuments:
    header, refusals = SegmentHeader.of(identity_of(target), limits.vocab_size), Refusals()
    for number, sample, _ in read_segment(file, header, refusals, limits.max_position):
        yield f"{file}, sequence {number}", _marked(sample.token_T, sample.recorded_from)
    for message in refusals.take():
        print(message, file=sys.stderr)


def _rollout_of(file: Path, limits: TargetLimits, target: Path) -> PlacedDocuments:
    responses = rollout_of(file, target).responses
    for n, prompt_len in enumerate(responses.prompt_len_N.tolist()):
        token_T, place = responses.tokens(n), f"{file}, response {n}"
        _check_length(len(token_T), limits, place)
        yield place, _marked(token_T, prompt_len)


def _marked(token_T: NDArray[np.int32], start: int) -> Document:
    return Document(token_T, np.arange(len(token_T)) >= start)


def _check_length(length: int, limits: TargetLimits, place: str) -> None:
    if length > limits.max_position:
        raise StartupError(
            f"{place}: {length} tokens, the target takes {limits.max_position} "
            "(max_position_embeddings); cut the document"
        )


def _lines_of(file: Path, limits: TargetLimits, target: Path) -> PlacedDocuments:
    text: Text | None = None
    for place, line in _read(file):
        try:
            parsed = _lines.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StartupError(f"{place}: not a line of training data ({error})") from None
        if parsed.messages is not None and text is None:
            text = Text.load(target)
        yield place, _document(parsed, limits, text, place)


READERS: dict[str, Callable[[Path, TargetLimits, Path], PlacedDocuments]] = {
    SUFFIX: _segments_of,
    ".safetensors": _rollout_of,
}


def _read(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield "file:line" and the line, without blank lines."""
    try:
        with file.open("rb") as opened:
            number = 0
            while line := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise StartupError(
                        f"{file}:{number}: {len(line) + _rest(opened)} bytes, a line takes at most "
                        f"{MAX_LINE_BYTES}; split the document"
                    )
                if line.strip():
                    yield f"{file}:{number}", line
    except OSError as error:
        raise StartupError(f"{file}: cannot be read ({error.strerror})") from None


def _rest(opened: BinaryIO) -> int:
    """Count the remaining bytes of a line."""
    count = 0
    while part := opened.readline(MAX_LINE_BYTES):
        count += len(part)
        if part.endswith(b"\n"):
            break
    return count


def _document(line: DataLine, limits: TargetLimits, text: Text | None, place: str) -> Document:
    parts: list[tuple[list[int], bool]]
    if line.messages is not None:
        if line.prompt_ids is not None or line.response_ids is not None:
            raise StartupError(f"{place}: token ids and messages; give one of them")
        assert text is not None
        parts = _conversation(line.messages, text, place)
    elif line.prompt_ids is not None and line.response_ids is not None:
        parts = [(line.prompt_ids, False), (line.response_ids, True)]
    else:
        raise StartupError(
            f"{place}: neither 'prompt_ids' with 'response_ids' nor 'messages'; a line is an "
            "object with one or the other"
        )
    _check_length(sum(len(ids) for ids, _ in parts), limits, place)
    for ids, _ in parts:
        for at, token in enumerate(ids):
            if not 0 <= token < limits.vocab_size:
                raise StartupError(
                    f"{place}: id {token} at {at}, the target's vocabulary has "
                    f"{limits.vocab_size} (0 to {limits.vocab_size - 1}); was the text encoded "
                    "for another model?"
                )
    return Document(
        np.array([token for ids, _ in parts for token in ids], np.int32),
        np.array([counted for ids, counted in parts for _ in ids], np.bool_),
    )


def _conversation(
    messages: Sequence[TextTurn], text: Text, place: str
) -> list[tuple[list[int], bool]]:
    """Encode each answer separately from the text before it, as a server would."""
    turns = [{"role": each.role, "content": each.content} for each in messages]
    parts: list[tuple[str, bool]] = []
    known = ""
    try:
        for at, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            opened = text.render(turns[:at])
            closed = text.render(turns[: at + 1], options={"add_generation_prompt": False})
            if not opened.startswith(known) or not closed.startswith(opened):
                raise StartupError(
                    f"{place}: the chat template changes its earlier text before message {at}; "
                    "give token ids instead"
                )
            parts += [(opened[len(known) :], False), (closed[len(opened) :], True)]
            known = closed
        if not parts:
            raise StartupError(f"{place}: no message of role 'assistant', so nothing to learn")
        ids = text.encode([part for part, _ in parts], special=False)
    except InvalidRequest as error:
        raise StartupError(f"{place}: {error.message}") from None
    return [(each, counted) for each, (_, counted) in zip(ids, parts, strict=True)]
