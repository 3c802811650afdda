"""Tokens one by one: their bytes join to the bytes of the text, and their characters are counted
once.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.frontend.tiny_model import byte_tokenizer
from tlt_server.frontend.generation.text import Pieces, Text

TEXT = Text(byte_tokenizer([(b"\xa9", b"\xe2"), (b"\xf0", b"\x9f"), (b"a", b"\xe2")]))
PIECES = Pieces(TEXT)


@given(st.text(alphabet="ab \u00e9\u20ac\U0001f680\n", max_size=30))
def test_bytes_join_to_the_text_and_characters_add_up(text: str) -> None:
    pieces = [PIECES[token] for token in TEXT.encode([text])[0]]
    assert b"".join(piece.bytes for piece in pieces) == text.encode()
    assert sum(piece.characters for piece in pieces) == len(text)


def test_special_tokens_have_text_but_no_characters() -> None:
    assert PIECES[256] == ("<|end|>", b"<|end|>", 0)
    assert PIECES[10_000] == ("", b"", 0)


def test_byte_fallback_tokenizers_give_bytes_and_spaces() -> None:
    tokenizer = Tokenizer(
        models.Unigram(
            [("<0xE2>", 0.0), ("\u2581hi", 0.0), ("x", 0.0)], byte_fallback=True, unk_id=2
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("own", special=False)])
    pieces = Pieces(Text(tokenizer))
    assert [pieces[i] for i in (0, 1, 3)] == [
        ("\ufffd", b"\xe2", 1),
        (" hi", b" hi", 3),
        ("own", b"own", 3),
    ]
