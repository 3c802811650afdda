"""Masks of texts of a grammar: those that a thread finds are those that a step finds, and what they
take is a function of the tokens.
"""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import EOS, LETTERS, VOCAB, write_alphabet, write_target
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.masks import WORD, CannotFollow, MaskedText
from tlt_server.wire.records import Grammar

GRAMMARS = [
    Grammar(kind="regex", text="[a-f]{3,9}:[0-9]+"),
    Grammar(kind="regex", text="(yes|no)"),
    Grammar(kind="lark", text='start: item ("," item)*\nitem: /[a-z]{1,3}/ | "[" start "]"'),
    Grammar(kind="lark", text='start: e\ne: e e | e "+" e | "a"'),
    Grammar(kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "number"}}}'),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    model = write_alphabet(write_target(tmp_path_factory.mktemp("masks") / "target"))
    return Compiler(model, VOCAB, [EOS])


def walk(text: MaskedText, seed: int, *, aside: bool) -> list[tuple[list[int], bool, int, int]]:
    """Return the masks of a random text, with the work that each has taken."""
    draw, found = Random(seed), []
    for _ in range(40):
        found.append((text.mask_W.tolist(), text.accepting, text.fuel, text.items_work))
        fits = [id for id in range(VOCAB) if text.allows(id)]
        if not fits:
            break
        text = text.follow(draw.choice(fits), aside=aside)
    return found


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:12])
def test_masks_and_their_work_depend_only_on_the_tokens(
    compiler: Compiler, grammar: Grammar
) -> None:
    for seed in range(3):
        here, there, again = (
            walk(compiler.start(grammar), seed, aside=aside) for aside in (False, True, True)
        )
        assert here == there == again
    shared = compiler.start(grammar)
    for seed in range(3):
        own = walk(compiler.start(grammar), seed, aside=True)
        seen = walk(shared, seed, aside=True)
        assert [(mask, ends, items) for mask, ends, _, items in seen] == [
            (mask, ends, items) for mask, ends, _, items in own
        ]
        assert seen[-1][2] >= own[-1][2], "what all have spent is at least what each would have"


class Panic(BaseException):
    """An error as libraries in Rust raise them."""


class Broken:
    """An interpreter that fails at its second token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> str:
        ctypes.memset(pointer, 255, size)
        return '"rows":1,"cached_rows":0,"all_items":1,"lexer_cost":1,'

    def is_accepting(self) -> bool:
        return False

    def deep_copy(self) -> Broken:
        return self

    def commit_token(self, token: int) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "says", "spoils"),
    [
        (ValueError("lexer error: too much\nat row 3"), "^lexer error: too much$", True),
        (ValueError("row has too many items"), "too many items", False),
        (Panic("index out of bounds"), "failed with Panic", True),
    ],
)
def test_library_error_ends_only_the_text_that_caused_the_error(
    error: BaseException, says: str, spoils: bool
) -> None:
    broken: Any = Broken(error)
    text = MaskedText(broken, np.zeros(2, np.int32), aside=False)
    with pytest.raises(CannotFollow, match=says) as found:
        text.follow(3)
    assert found.value.spoils == spoils


def test_token_that_does_not_fit_is_refused(compiler: Compiler) -> None:
    text = compiler.start(Grammar(kind="regex", text="a*"))
    assert text.accepting and int(text.mask_W.view(np.uint32)[EOS // WORD]) >> EOS % WORD & 1
    for token in (EOS, LETTERS.index("b"), VOCAB, -1):
        with pytest.raises(CannotFollow, match="do not fit"):
            text.follow(token)
