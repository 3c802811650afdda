"""Text to token ids and back: the tokenizer and chat templates of a model directory, incremental
text, stop strings, and the bytes of single tokens. No torch.

`Incremental` and `StopStrings` process one token's text at a time, so their results do not depend
on how the engine groups tokens into outputs: the grouping changes with the speculation strategy,
the reply must not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers import Tokenizer

from tlt_server.errors import InvalidRequest, ModelError
from tlt_server.frontend.generation.templates import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplate,
    template_sources,
)
from tlt_server.grammars.vocabulary import read_tokenizer

REPLACEMENT = "\ufffd"
# tokens of context kept before new ones, since some decoders treat the first token of a text in a
# special way
KEPT = 4
MAX_PENDING = 512  # tokens; only a model that emits invalid bytes without end gets there


class Text:
    """The tokenizer of one model directory. A directory without `tokenizer.json` serves token ids
    only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        templates: str | Mapping[str, str] | None = None,
        tokens: dict[str, str] | None = None,
        directory: Path = Path(),
    ) -> None:
        """`templates`: chat templates by name, or the only one."""
        self.tokenizer, self.directory = tokenizer, directory
        self.longest_token = (
            max(map(len, tokenizer.get_vocab()), default=0) if tokenizer is not None else 0
        )  # characters
        self.tokens = tokens or {}
        named = {DEFAULT: templates} if isinstance(templates, str) else templates or {}
        self.templates = {
            name: ChatTemplate(source, self.tokens) for name, source in named.items() if source
        }

    @classmethod
    def load(cls, model: Path) -> Text:
        path = model / "tokenizer.json"
        if not path.exists():
            return cls(None, directory=model)
        try:
            tokenizer = Tokenizer.from_str(read_tokenizer(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {path}: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(model / "tokenizer_config.json")
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        try:
            return cls(tokenizer, template_sources(model, config), tokens, model)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {model} does not compile: {error}") from None

    @property
    def specials(self) -> dict[str, int]:
        """Return the special tokens, with their ids."""
        added = self.tokenizer.get_added_tokens_decoder() if self.tokenizer else {}
        return {token.content: id for id, token in added.items() if token.special}

    def template_for(self, *, tools: bool, name: str | None = None) -> ChatTemplate | None:
        """Return the template of this name, or the one for requests with or without tools."""
        if name is None:
            name = WITH_TOOLS if tools and WITH_TOOLS in self.templates else DEFAULT
        return self.templates.get(name)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Return the token ids of each text. `special`: add the tokenizer's tokens around a bare
        text; not after a chat template.
        """
        if self.tokenizer is None:
            raise InvalidRequest(
                "this model directory has no tokenizer.json, so texts cannot be read; send "
                "token_ids"
            )
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text, without special tokens unless `special`; empty without a tokenizer."""
        return (
            self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)
            if self.tokenizer is not None
            else ""
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        open_end: bool = False,
        name: str | None = None,
    ) -> str:
        """Apply the chat template of this name, or the one that suits the request, to messages."""
        template = self.template_for(tools=bool(tools), name=name)
        if template is None:
            others = ", ".join(self.templates)
            raise InvalidRequest(
                f"this model has no chat template named {DEFAULT}, only {others[:200]}: name one "
                "in chat_template, or send prompt or token_ids instead of messages"
                if others
                else "this model has no chat template; send prompt or token_ids instead of messages"
            )
        return template.render(messages, tools, options, open_end=open_end)


class Incremental:
    """The text that each further token adds; including `flush()`, the sum is `Text.decode` of all
    tokens.

    U+FFFD at the end may be the beginning of an incomplete character, so it is held back; earlier
    text is final.
    """

    def __init__(self, text: Text, *, special: bool = False) -> None:
        """`special`: special tokens appear as text."""
        self._text, self._special = text, special
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text already given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = len(text.rstrip(REPLACEMENT))
        delta = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if settled == len(text) and len(self._window) >= 4 * KEPT:
            self._shorten()
        if len(self._window) >= MAX_PENDING:
            delta += text[self._shown :]
            self._window, self._shown = [], 0
        return delta

    def _shorten(self) -> None:
        """Keep a few last tokens, cut between characters: some decoders spoil a whole run of bytes
        if one is incomplete.
        """
        for kept in range(KEPT, 2 * KEPT):
            text = self._decode(self._window[-kept:])
            if REPLACEMENT not in text:
                self._window, self._shown = self._window[-kept:], len(text)
                return

    def flush(self) -> str:
        delta = self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._text.decode(token_ids, special=self._special)


class StopStrings:
    """Finds the first stop string and holds back text that may be the start of one.

    `push` returns the text that may be shown. Once `matched` is set, that was the text before the
    stop string, and no more follows.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        """`keeps`: the text includes the stop string that ends it."""
        self._stops, self._keeps = stops, keeps
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, armed: bool = True) -> str:
        """Add text. `armed` false (before `min_tokens`): stop strings are ordinary text."""
        if not self._stops:
            return delta
        text = self._held + delta
        self._held = ""
        if armed:
            hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if hits:
                at, _, self.matched = min(hits)
                return text[: at + len(self.matched) * self._keeps]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Return the length of the longest end of `text` that is a proper beginning of a stop
        string.
        """
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) and len(stop) > length for stop in self._stops):
                return length
        return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return content if isinstance(content, dict) else {}


class Piece(NamedTuple):
    text: str
    bytes: bytes
    characters: int  # 0 for special tokens, which are left out of texts


class Pieces(dict[int, Piece]):
    """The piece of each token, created on first use."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        tokenizer = text.tokenizer
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder() if tokenizer is not None else {}
        decoder = (
            tokenizer.decoder.__getstate__()
            if tokenizer is not None and tokenizer.decoder is not None
            else b""
        )
        self._byte_of = (
            {letter: byte for byte, letter in enumerate(byte_letters())}
            if b"ByteLevel" in decoder
            else None
        )

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> Piece:
        added = self._added.get(token_id)
        data = added.content.encode() if added is not None else self._bytes(token_id)
        starting = sum(
            byte & 0xC0 != 0x80 for byte in data
        )  # the first byte of every UTF-8 character
        return Piece(
            data.decode(errors="replace"),
            data,
            0 if added is not None and added.special else starting,
        )

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if self._tokenizer is not None else None
        if token is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[letter] for letter in token if letter in self._byte_of)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def byte_letters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table)."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
