"""Limits of a matcher: whether a sequence runs into one depends on its own tokens alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine import families
from tests.engine.tiny import EOS, LETTERS, VOCAB, write_alphabet, write_target
from tests.tokenizers import FAMILIES
from tests.waiting import until
from tlt_server.engine.sampling.grammar_threads import GrammarThreads
from tlt_server.engine.sampling.lexers import (
    DEAR,
    FUEL_BYTES,
    IDLE_S,
    LEAST_BYTES,
    LIMIT,
    SLICE_WORK,
    Lexer,
    Lexers,
)
from tlt_server.engine.sampling.structures import Structure, Structures
from tlt_server.grammars import KEPT, compiler
from tlt_server.grammars.compiler import FUEL
from tlt_server.wire.records import Grammar

# The lexer has a state for each text of the last 21 letters.
MANY_STATES = Grammar(kind="regex", text="(a|b)*a(a|b){20}")
# Each letter adds to the work of the next mask, without an end.
GROWING = [
    Grammar(kind="regex", text="((a{1,20}){1,20}){1,20}b"),
    Grammar(kind="lark", text='start: e\ne: e e | e "+" e | "a"'),
]
A, B = LETTERS.index("a"), LETTERS.index("b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(write_target(tmp_path_factory.mktemp("limits") / "target"))


@pytest.fixture
def structures(model: Path) -> Structures:
    return Structures(model, VOCAB, [EOS])


@pytest.fixture(scope="module", params=families.CASES)
def spelled(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Structures, int]:
    """Structures with the tokenizer of a family, and its token of the letter a."""
    if request.param == families.ALPHABET:
        return Structures(model, VOCAB, [EOS]), A
    tokenizer = FAMILIES[request.param].write(tmp_path_factory.mktemp("family"))
    return Structures(tokenizer, families.SHAPE.vocab, [families.EOS]), ord("a")


class Panic(BaseException):
    """An error as libraries in Rust raise them."""


def begun(structures: Structures, grammar: Grammar = MANY_STATES, owner: str = "") -> Structure:
    found = structures.of(grammar, [EOS], owner)
    assert found is not None
    return found


def wait(structure: Structure) -> None:
    """Sit out steps until a step may sample for the sequence."""
    deadline = time.monotonic() + 60
    while not structure.ready:
        assert time.monotonic() < deadline
        time.sleep(0.0002)


def mask(structure: Structure) -> NDArray[np.int32]:
    mask_W = np.zeros(structure._words, np.int32)
    wait(structure)
    while not structure.fill([], mask_W):
        wait(structure)
    return mask_W


def drafted(structure: Structure, path: list[int]) -> NDArray[np.int32] | None:
    """Return the mask after drafts, unless the step leaves the row out."""
    mask_W = np.zeros(structure._words, np.int32)
    return mask_W if structure.fill(path, mask_W) else None


def walk(structure: Structure, seed: int, count: int, depth: int) -> list[list[int]]:
    """Return the masks of a sequence that has wrong drafts of this depth."""
    own, drafts, found = Random(seed), Random(-1 - seed), []
    for _ in range(count):
        found.append(mask(structure).tolist())
        assert structure.error is None
        path = drafts.choices((A, B), k=depth)
        for end in range(1, depth + 1):
            drafted(structure, path[:end])
        structure.commit([own.choice((A, B))])
    return found


def test_exploration_by_drafts_and_siblings_ends_no_sequence(structures: Structures) -> None:
    plain = walk(begun(structures), 1, 120, 0)
    bystander = begun(structures)
    walk(bystander, 2, 10, 0)
    explored = begun(structures)
    wait(explored)
    drafts, count = Random(9), 0
    while explored.quick:  # until drafts have worn the lexer out
        path = drafts.choices((A, B), k=40)
        for end in range(1, 41):
            drafted(explored, path[:end])
        count += 1
        assert count < 20_000
    assert mask(explored).any() and explored.error is None
    assert structures.gauges()["structures_alone"] > 0
    assert walk(begun(structures), 1, 120, 8) == plain
    assert walk(bystander, 2, 10, 0) == walk(begun(structures), 2, 20, 0)[10:]


@pytest.mark.parametrize("grammar", GROWING, ids=lambda grammar: grammar.kind)
def test_structure_fails_at_the_same_token_under_any_drafts(
    spelled: tuple[Structures, int], grammar: Grammar
) -> None:
    structures, letter = spelled

    def end(*, drafts: int = 0, accepted: int = 1, resumed: int = 0) -> tuple[int, str]:
        structure, at = begun(structures, grammar), resumed
        structure.commit([letter] * resumed)
        while at < 1000:
            if not mask(structure).any():
                assert structure.error is not None
                return at, structure.error.message
            kept = 1
            for count in range(1, drafts + 1):
                if drafted(structure, [letter] * count) is None:
                    break
                kept = min(accepted, count + 1)
            structure.commit([letter] * kept)
            at += kept
        raise AssertionError("no end")

    first, message = end()
    assert 15 < first < 400 and "take too much work" in message
    assert f"after {first} tokens" in message
    kind = {"regex": "regex", "lark": "grammar"}[grammar.kind]
    assert message.startswith(f"the {kind} cannot go on")
    company = begun(structures, grammar)
    mask(company)
    ends = [end(drafts=4), end(drafts=4, accepted=3), end(drafts=8, accepted=9)]
    ends += [end(resumed=first // 2), end(resumed=first - 1), end()]
    assert ends == [(first, message)] * 6


def test_step_spends_bounded_time_on_slow_masks(structures: Structures) -> None:
    """A step gives up after one dear mask and leaves the rest to threads."""
    structure = begun(structures, GROWING[0])
    dear = 0
    for _ in range(400):
        mask_W = np.zeros(-(-VOCAB // 32), np.int32)
        wait(structure)
        before = structure._lexer.spent
        structure.fill([], mask_W)
        dear += structure._lexer.spent - before > DEAR
        if structure.error is not None:
            break
        structure.commit([A])
    assert structure.error is not None and dear <= 1


def test_one_owner_holds_at_most_half_of_the_threads() -> None:
    threads, begun = GrammarThreads(4), list[str]()
    go = {name: threading.Event() for name in ("a1", "a2", "a3", "b1", "b2", "b3", "c1")}

    def work(name: str) -> None:
        begun.append(name)
        assert go[name].wait(60)

    jobs = [threads.submit(name[0], partial(work, name)) for name in go]

    def running(*names: str) -> None:
        until(lambda: len(begun) >= len(names))
        assert sorted(begun) == sorted(names)
        assert max(threads.running.values()) <= threads.most == 2

    running("a1", "a2", "b1", "b2")
    go["b1"].set()
    running("a1", "a2", "b1", "b2", "c1")  # not b3, whose owner has had a turn
    go["a1"].set()
    running("a1", "a2", "b1", "b2", "c1", "a3")
    for event in go.values():
        event.set()
    for job in jobs:
        job.result(60)
    until(lambda: not threads.running)
    assert sorted(begun) == sorted(go)


def test_cached_grammars_are_bounded_in_bytes_and_per_owner(structures: Structures) -> None:
    now = [0.0]
    kept = structures.lexers = Lexers(limit=20 * LEAST_BYTES, clock=lambda: now[0])

    def ask(count: int, owner: str) -> list[Grammar]:
        grammars = [Grammar(kind="regex", text=f"{owner}{{{i + 1}}}") for i in range(count)]
        for grammar in grammars:
            wait(begun(structures, grammar, owner))
            assert kept.nbytes <= 22 * LEAST_BYTES
        return grammars

    [other] = ask(1, "b")
    mine = ask(30, "a")
    assert kept.get(other) is not None, "what one owner asks for costs others nothing"
    assert kept.get(mine[0]) is None and kept.get(mine[-1]) is not None
    assert 4 <= len(kept) < 12
    now[0] = IDLE_S - 1
    assert kept.get(other) is not None
    kept.forget_idle()
    now[0] = IDLE_S + 1
    structures.prepare()
    assert len(kept) == 1 and kept.get(other) is not None
    now[0] = 3 * IDLE_S
    structures.prepare()
    assert len(kept) == 0 == structures.gauges()["structures_bytes"]


def ends_in_company(
    structures: Structures, grammars: list[Grammar], owners: str, limit: int
) -> list[tuple[int, str]]:
    """Return where sequences end that take turns, with `limit` bytes for their lexers."""
    lexers = structures.lexers = Lexers(limit)
    running = {
        at: begun(structures, grammar, owners[at % len(owners)])
        for at, grammar in enumerate(grammars)
    }
    found, lengths, waited = dict[int, tuple[int, str]](), [0] * len(grammars), 0
    deadline = time.monotonic() + 120
    while running:
        assert time.monotonic() < deadline, "no sequence goes on"
        for at, structure in [*running.items()]:
            mask_W = np.zeros(-(-VOCAB // 32), np.int32)
            if not (structure.ready and structure.fill([], mask_W)):
                continue
            if structure.error is not None or lengths[at] == 60:
                found[at] = lengths[at], structure.error.message if structure.error else ""
                del running[at]
                continue
            structure.commit([A])
            lengths[at] += 1
            if Random(f"{at} {lengths[at]}").random() < 0.05:
                structure.rest()  # it has lost its batch slot
        del structure
        lexers._share_out()
        growing = structures.threads._count * FUEL_BYTES * (SLICE_WORK + FUEL)
        assert sum(lexer.nbytes for lexer in lexers._all if lexer.users) <= limit + growing
        waited += lexers.held_back
    assert bool(waited) == (limit < LIMIT)
    lexers._clock = lambda: 1e9
    structures.prepare()
    # Threads are done with those given back.
    until(lambda: not structures.gauges()["structures_bytes"])
    return [found[at] for at in range(len(grammars))]


def test_total_lexer_memory_is_bounded_and_changes_no_outcome(structures: Structures) -> None:
    """Private ones that grow until their structure fails, and shared ones of many grammars."""
    own = [GROWING[0], GROWING[0], GROWING[1]] * 2
    different = [Grammar(kind="regex", text=f"(a|b{{{i + 1}}}){{1,400}}") for i in range(12)]
    for grammars, limit in ((own, 10 * 2**20), (different, 10 * LEAST_BYTES)):
        free = ends_in_company(structures, grammars, "ab", LIMIT)
        assert ends_in_company(structures, grammars, "abc", limit) == free
        assert ends_in_company(structures, grammars, "a", limit) == free


def test_lexer_memory_goes_to_running_sequences_by_turns() -> None:
    lexers = Lexers(limit=5 * LEAST_BYTES)

    class Begun:
        def __init__(self, owner: str, *, runs: bool = False) -> None:
            self.lexer = Lexer(Future, owner)
            self.lexer.join(self)
            if runs:
                self.lexer.run()
            lexers.add(self.lexer)

        def begin_again(self, lexer: Lexer) -> None:
            lexer.join(self)
            self.lexer = lexer

    def admitted() -> list[str]:
        lexers._share_out()
        return [name for name, each in sequences.items() if each.lexer.admitted]

    sequences = {f"a{i}": Begun("a") for i in range(4)}
    assert admitted() == ["a0", "a1"], "half is left for others"
    sequences["a2"].lexer.run()
    assert admitted() == ["a0", "a2"], "what runs comes first"
    sequences |= {name: Begun(name[0], runs=True) for name in ("b0", "b1", "c0")}
    assert admitted() == ["a0", "a2", "b0", "b1", "c0"]
    sequences["d0"] = Begun("d")
    assert admitted() == ["a2", "b0", "b1", "c0", "d0"]
    sequences["d0"].lexer.text_bytes, sequences["d0"].lexer.compiled = LIMIT, Future()
    assert "d0" not in admitted() and sequences["d0"].lexer.need > LIMIT
    sequences = {"d0": sequences["d0"]}
    assert admitted() == ["d0"], "the last one goes on in any case"


def test_many_new_lexers_cost_less_than_quadratic_work(monkeypatch: pytest.MonkeyPatch) -> None:
    lexers, looks, share_out = Lexers(limit=100 * LEAST_BYTES), [], Lexers._share_out
    monkeypatch.setattr(Lexers, "_share_out", lambda self: looks.append(1) or share_out(self))
    waiting = [Lexer(Future, f"k{i % 3}") for i in range(1000)]
    for lexer in waiting:
        lexer.join(lexer)
        lexers.add(lexer)
        lexers.admits(lexer)
    assert len(looks) < 200 and sum(lexer.admitted for lexer in waiting) == 100


def test_many_new_grammars_cost_less_than_quadratic_work(monkeypatch: pytest.MonkeyPatch) -> None:
    lexers, compared = Lexers(limit=100 * LEAST_BYTES), [0]
    fits = Lexers._fits

    def counted(self: Lexers, *asked: Any) -> bool:
        compared[0] += 1
        return fits(self, *asked)

    monkeypatch.setattr(Lexers, "_fits", counted)
    waiting, counts = list[Lexer](), list[int]()
    for count in (1000, 1000):
        for _ in range(count):
            lexer = Lexer(Future, f"k{len(waiting) % 3}")
            lexer.join(lexer)  # type: ignore[arg-type]
            lexers.keep(Grammar(kind="regex", text=f"a{{{len(waiting)}}}"), lexer)
            waiting.append(lexer)
        counts.append(compared[0])
    first, both = counts
    assert both < 2.5 * first and both < 100 * len(waiting), "as many again cost as much again"
    assert len(lexers) == KEPT
    lexers._share_out()
    assert sum(lexer.admitted for lexer in waiting) == 100


def test_a_new_lexer_takes_the_memory_of_unused_ones() -> None:
    lexers = Lexers(limit=100 * LEAST_BYTES)
    for owner in "ab":
        unused = Lexer(Future, owner)
        unused.text_bytes, unused.compiled = 44 * LEAST_BYTES, Future()
        lexers.keep(Grammar(kind="regex", text=owner), unused)
    assert len(lexers) == 2
    new = Lexer(Future, "c", need=40 * LEAST_BYTES)
    new.join(new)
    lexers.add(new)
    assert lexers.admits(new)


def test_a_new_lexer_takes_the_memory_of_ended_sequences() -> None:
    lexers = Lexers(limit=100 * LEAST_BYTES)
    for _ in range(9):
        new = Lexer(Future)
        new.join(new)
        new.text_bytes, new.compiled = 90 * LEAST_BYTES, Future()
        lexers.add(new)
        assert lexers.admits(new)
        new.leave(new)


def test_error_of_a_draft_does_not_end_its_sequence(structures: Structures) -> None:
    grammar = Grammar(kind="regex", text="b{1,2}|a~")  # no token has a tilde
    structure = begun(structures, grammar)
    assert mask(structure).any()
    assert drafted(structure, [A]) is None and structure.error is None
    structure.commit([B])
    assert mask(structure).any() and structure.error is None
    other = begun(structures, grammar)
    assert mask(other).any() and drafted(other, [A]) is None
    other.commit([A])
    assert not mask(other).any() and other.error is not None


def test_compilation_error_ends_its_sequences_only(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(grammar: Grammar) -> Any:
        raise Panic

    monkeypatch.setattr(structures._compiler, "start", broken)
    monkeypatch.setattr(type(structures._compiler), "_tokenizer", property(broken))
    structure = begun(structures)
    assert not mask(structure).any()
    assert structure.error is not None and "does not compile" in structure.error.message
    structures.prepare()


def test_grammar_without_waiting_requests_is_not_compiled(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compiled = threading.Event(), list[str]()
    original = structures._compiler.start

    def slow(grammar: Grammar) -> Any:
        assert go.wait(60)
        compiled.append(grammar.text)
        return original(grammar)

    monkeypatch.setattr(structures._compiler, "start", slow)
    first, *others = [begun(structures, Grammar(kind="regex", text=f"a{{{i}}}")) for i in range(5)]
    again = begun(structures, Grammar(kind="regex", text="a{1}"))
    del others
    assert not first.ready and not again.ready
    last = begun(structures, Grammar(kind="regex", text="a{3}"))  # asked for once more
    go.set()
    for structure in (first, again, last):
        assert mask(structure).any()
    assert compiled == ["a{0}", "a{1}", "a{3}"]
    assert structures.gauges()["structures_compiled"] == 3


def test_compile_seconds_leave_out_the_time_in_the_queue(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, go, original = [0.0], threading.Event(), structures._compiler._source

    def slow(grammar: Grammar) -> Any:
        assert go.wait(60)
        now_s[0] += 5.0
        return original(grammar)

    monkeypatch.setattr(structures._compiler, "_source", slow)
    monkeypatch.setattr(compiler, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    both = [begun(structures, Grammar(kind="regex", text=f"a{{{i}}}"), "one") for i in (1, 2)]
    go.set()
    for structure in both:
        assert mask(structure).any()
    until(lambda: structures.gauges()["structures_compile_s"] == now_s[0] == 10.0)


def test_ended_sequences_cancel_their_mask_jobs(structures: Structures) -> None:
    structures.threads, go = GrammarThreads(2), threading.Event()
    structures.threads.submit("", partial(go.wait, 60))
    for grammar in GROWING:
        structure = begun(structures, grammar)
        wait(structure)
        structure.commit([A] * 40)
        assert not structure.ready
        job = structure._job
        assert job is not None
        del structure
        assert job.cancelled()
    go.set()


def test_slow_compilation_of_one_owner_delays_no_other_owner(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, start = threading.Event(), structures._compiler.start
    grammars = [Grammar(kind="regex", text=f"{letter}{{2}}") for letter in "abcd"]

    def slow(grammar: Grammar) -> Any:
        assert grammar != grammars[0] or go.wait(60)
        return start(grammar)

    monkeypatch.setattr(structures._compiler, "start", slow)
    held = [begun(structures, grammar, "a") for grammar in grammars]
    other = begun(structures, grammars[-1], "b")
    assert mask(other).any() and not any(each.ready for each in held)
    go.set()
    assert all(mask(each).any() for each in held)
