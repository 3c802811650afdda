"""A token by itself: its bytes, those bytes as text, and the number of characters that start in it.

A token may hold a part of a character, so its text alone may show U+FFFD; its bytes are exact for
byte-level and byte-fallback tokenizers, and joined they are the bytes of the text.
"""

from __future__ import annotations

from typing import NamedTuple

from tlt_server.frontend.generation.text import Text


class Piece(NamedTuple):
    text: str
    bytes: bytes
    characters: int  # 0 for special tokens, which are left out of texts


class Pieces(dict[int, Piece]):
    """The piece of each token, made when it is first asked for."""

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
