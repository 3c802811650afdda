"""The tokens of a model as text. No torch.

An added token is ordinary text unless its file calls it special. Marks of reasoning and calls are
always text, since answers are parsed by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
MARKS = frozenset((*THINK, *CALL))
SHORT, REMEMBERED = 64, 4096  # characters, and texts of at most these, whose tokens are kept
# A string, regex or comment of a grammar in Lark's form, or a token by its text.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/|#[^\n]*|<[^<>\s"\[\]]+>')


def read_tokenizer(path: Path) -> str:
    """Return the text of a `tokenizer.json` in which no mark is special."""
    text = path.read_text("utf-8")
    content = json.loads(text)
    marks = [token for token in content.get("added_tokens", ()) if token["content"] in MARKS]
    if not any(token["special"] for token in marks):
        return text
    for token in marks:
        token["special"] = False
    return json.dumps(content)


class Vocabulary:
    """The bytes of each token and an encoder, in the form that `LLTokenizer` takes.

    The library itself would treat every added token in angle brackets as special. In a structure's
    text a token that is not special stands for its bytes, and its bytes may also be spelled out.
    Special tokens are never part of a text: text that looks like one is spelled out.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: str, size: int, eos: Sequence[int]) -> None:
        """`tokenizer` is the text of its `tokenizer.json`."""
        from llguidance import LLTokenizer

        self._encoder = LLTokenizer(tokenizer, n_vocab=size, eos_token=[*eos], slices=[])
        self.eos_token_id = eos[0]
        added = json.loads(tokenizer).get("added_tokens", ())
        text = {token["id"] for token in added if not token["special"]}.difference(eos)
        ids = range(self._encoder.vocab_size)
        self.tokens = [self._encoder.decode_bytes([id]) for id in ids]
        self.special_token_ids = [
            id for id in ids if self._encoder.is_special_token(id) and id not in text
        ]
        self._special = frozenset(self.special_token_ids)
        self._encoded = dict[str, list[int]]()  # short texts, with their tokens
        self._named = {token["content"]: token["id"] for token in added if token["id"] in text}

    def by_id(self, lark: str) -> str:
        """Return a grammar whose rules name tokens that are not special by id."""

        def named(found: re.Match[str]) -> str:
            id = self._named.get(found[0])
            return found[0] if id is None else f"<[{id}]>"

        return _LARK.sub(named, lark)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a structure requires. Masks request the same short ones
        repeatedly.
        """
        found = self._encoded.get(text)
        if found is None:
            found = self._encode(text)
            if len(text) <= SHORT:
                if len(self._encoded) >= REMEMBERED:
                    self._encoded.clear()
                self._encoded[text] = found
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.tokenize_str(text)
        spelled = b"".join(self.tokens[id] for id in ids)
        if self._special.isdisjoint(ids) and spelled == text.encode():
            return ids
        greedy: list[int] = self._encoder.greedy_tokenize(text)
        return greedy
