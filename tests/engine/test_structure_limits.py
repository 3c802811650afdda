"""Limits of a matcher: whether a sequence runs into one depends on its own tokens alone."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import EOS, LETTERS, VOCAB, write_alphabet, write_target
from tlt_server.engine.structures import Structure, Structures
from tlt_server.errors import StructureFailed
from tlt_server.records import Grammar

# The lexer has a state for each text of the last 21 letters.
MANY_STATES = Grammar(kind="regex", text="(a|b)*a(a|b){20}")
A, B = LETTERS.index("a"), LETTERS.index("b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(write_target(tmp_path_factory.mktemp("limits") / "target"))


@pytest.fixture
def structures(model: Path) -> Structures:
    return Structures(model, VOCAB, [EOS])


class Panic(BaseException):
    """An error as libraries in Rust raise them."""


def begun(structures: Structures, grammar: Grammar = MANY_STATES) -> Structure:
    found = structures.of(grammar, [EOS])
    assert found is not None
    return found


def mask(structure: Structure, path: list[int]) -> NDArray[np.int32]:
    mask_W = np.zeros(-(-VOCAB // 32), np.int32)
    structure.fill(path, mask_W)
    return mask_W


def walk(structure: Structure, seed: int, count: int, depth: int) -> list[list[int]]:
    """Return the masks of a sequence that has wrong drafts of this depth."""
    own, drafts, found = Random(seed), Random(-1 - seed), []
    for _ in range(count):
        found.append(mask(structure, []).tolist())
        if depth:
            assert mask(structure, drafts.choices((A, B), k=depth)).any()
        structure.commit([own.choice((A, B))])
    return found


def test_what_others_and_drafts_explore_ends_no_sequence(structures: Structures) -> None:
    plain = walk(begun(structures), 1, 400, 0)
    bystander = begun(structures)
    walk(bystander, 2, 10, 0)
    explored = begun(structures)
    masters = explored._masters
    before, drafts, count = masters.take(), Random(9), 0
    while masters.take() is before:  # until drafts have used the lexer up
        assert mask(explored, drafts.choices((A, B), k=40)).any()
        count += 1
        assert count < 20_000
    assert explored.error is None
    assert walk(begun(structures), 1, 400, 8) == plain
    assert walk(bystander, 2, 10, 0) == walk(begun(structures), 2, 20, 0)[10:]


def test_a_sequence_that_uses_the_limit_up_by_itself_fails_at_the_same_token(
    structures: Structures,
) -> None:
    from llguidance import LLParserLimits

    structures._compiler.__dict__["_limits"] = LLParserLimits(
        initial_lexer_fuel=500_000, max_lexer_states=1000, step_lexer_fuel=2_000_000
    )
    tokens = Random(5).choices((A, B), k=3000)

    def end(depth: int) -> int:
        structure = begun(structures)
        for at in range(3000):
            if not mask(structure, []).any():
                assert structure.error is not None and "too many states" in structure.error.message
                return at
            if depth:
                mask(structure, [*tokens[at : at + depth // 2], *Random(at).choices((A, B), k=4)])
            structure.commit([tokens[at]])
        return 3000

    first = end(0)
    assert 100 < first < 3000
    assert [end(0), end(8), end(0)] == [first] * 3


def test_an_error_of_drafts_is_not_the_error_of_what_comes_instead(structures: Structures) -> None:
    structure = begun(structures, Grammar(kind="regex", text="b{1,2}|a~"))  # no token has a tilde
    assert mask(structure, []).any()
    assert not mask(structure, [A]).any()
    assert isinstance(structure.error, StructureFailed)  # if the walk takes the draft
    structure.commit([B])
    assert mask(structure, []).any() and structure.error is None
    other = begun(structures, Grammar(kind="regex", text="b{1,2}|a~"))
    assert not mask(other, [A]).any()
    other.commit([A])
    assert other.error is not None


def test_an_unforeseen_error_of_a_compilation_ends_its_sequences_only(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(grammar: Grammar) -> Any:
        raise Panic

    monkeypatch.setattr(structures._compiler, "_compile", broken)
    monkeypatch.setattr(type(structures._compiler), "_tokenizer", property(broken))
    structure = begun(structures)
    assert not mask(structure, []).any()
    assert structure.error is not None and "does not compile" in structure.error.message
    structures.prepare()


def test_a_grammar_that_nothing_waits_for_any_more_is_not_compiled(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compiled = threading.Event(), list[str]()
    original = structures._compiler._compile

    def slow(grammar: Grammar) -> Any:
        assert go.wait(60)
        compiled.append(grammar.text)
        return original(grammar)

    monkeypatch.setattr(structures._compiler, "_compile", slow)
    first, *others = [begun(structures, Grammar(kind="regex", text=f"a{{{i}}}")) for i in range(5)]
    again = begun(structures, Grammar(kind="regex", text="a{1}"))
    del others
    assert not first.ready and not again.ready
    last = begun(structures, Grammar(kind="regex", text="a{3}"))  # asked for once more
    go.set()
    for structure in (first, again, last):
        assert mask(structure, []).any()
    assert compiled == ["a{0}", "a{1}", "a{3}"]
    assert structures.gauges()["structures_compiled"] == 3
