"""The structured outputs of sequences: which tokens may follow, after the tokens of a sequence and
drafts on top of them.

What may follow is a function of the grammar and of the tokens before, so it is the same whether
these are drafts or not. `SamplingState.edit` and the GPU's runner ask; `SamplingState.commit` tells
what was appended.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import InvalidRequest, StructureFailed
from tlt_server.grammars import KEPT
from tlt_server.grammars.compiler import Compiler
from tlt_server.records import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

UNMASKED = 32  # tokens that a lexer may read between masks, each of which renews its limit on work
SPOILS = "lexer error"  # in the library's words about a limit of the lexer
NO_TOKEN = "no token of this model can follow in the structure; use another one"
WORD = 32  # tokens whose bits share one number


@dataclass
class Cost:
    """The work that structures have caused since the engine started."""

    compiled: int = 0  # grammars
    cached: int = 0  # sequences whose grammar was there
    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass(eq=False)
class Master:
    """A compiled matcher, of which sequences have copies that share its lexer."""

    compiled: Future[LLMatcher]
    copies: int = 0
    spoiled: bool = False  # its lexer ran into a limit: no copy tells any more what fits


class Masters:
    """The matchers of one grammar, the newest in use. What sequences make of a lexer decides for no
    other: after one is spoiled, they go on with a new one, which has seen none of it.
    """

    def __init__(self, compiler: Compiler, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        self._begin = partial(compiler.begin_again, grammar)
        self._now = Master(compiled)
        self._spare: Future[LLMatcher] | None = None  # once it seems that one is needed
        self._users = 0

    def join(self, user: object) -> None:
        """Note what needs the grammar as long as it lives. Without any, compiling it is called off
        if that has not begun.
        """
        self._users += 1
        weakref.finalize(user, self._leave).atexit = False

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._now.compiled.cancel()

    @property
    def ready(self) -> bool:
        """Tell whether the grammar is compiled, or has failed to."""
        return self.take().compiled.done()

    @property
    def called_off(self) -> bool:
        return self._now.compiled.cancelled()

    def take(self) -> Master:
        """Return a master that is not spoiled. It may still be being compiled."""
        if self._now.spoiled:
            self._now = Master(self._spare or self._begin())
            self._spare = self._begin()
        return self._now


class Structure:
    """One sequence's matcher. Its grammar may still be being compiled."""

    def __init__(
        self, masters: Masters, stop_ids: Collection[int], vocab_size: int, cost: Cost
    ) -> None:
        """`stop_ids` may come wherever the text is complete."""
        self._masters, self._words, self._cost = masters, -(-vocab_size // WORD), cost
        masters.join(self)
        self._master: Master | None = None
        self._matcher: LLMatcher | None = None  # a copy of it
        self._committed: list[int] = []
        self._consumed = 0  # committed tokens that the matcher has seen
        self._drafts: list[int] = []  # those that it has seen after them
        self._stop_ids = frozenset(id for id in stop_ids if 0 <= id < vocab_size)
        self._stops_W = np.zeros(self._words, np.int32)
        for id in self._stop_ids:
            self._stops_W.view(np.uint32)[id // WORD] |= np.uint32(1 << id % WORD)
        # The texts after which nothing can follow, of those that the sequence may still have.
        self._errors: dict[tuple[int, ...], StructureFailed] = {}

    @property
    def ready(self) -> bool:
        return self._masters.ready

    @property
    def error(self) -> StructureFailed | None:
        """The reason why nothing can follow, if `fill` has found one on the sequence's way."""
        return next(iter(self._errors.values()), None)

    def commit(self, tokens: Sequence[int]) -> None:
        """Note output tokens that were appended to the sequence. None follows a stop token."""
        self._committed += [token for token in tokens if token not in self._stop_ids]
        if self._errors:
            text = tuple(self._committed)
            self._errors = {
                end: error
                for end, error in self._errors.items()
                if end[: len(text)] == text[: len(end)]
            }

    def fill(self, path: Sequence[int], mask_W: NDArray[np.int32]) -> None:
        """Set the bit of each token that may follow the committed tokens and the drafts of `path`;
        all bits where these drafts break the structure, since the walk never gets there. No bit is
        set where nothing can follow. That depends on these tokens alone.
        """
        assert mask_W.shape == (self._words,) and mask_W.flags.c_contiguous
        started = time.perf_counter()
        if self._errors and self._fails(path):
            mask_W.fill(0)
        elif (error := self._fill(path, mask_W)) is not None:
            mask_W.fill(0)
            self._errors[(*self._committed, *path)] = error
        self._cost.mask_s += time.perf_counter() - started

    def _fails(self, path: Sequence[int]) -> bool:
        text = (*self._committed, *path)
        return any(text[: len(end)] == end for end in self._errors)

    def _fill(self, path: Sequence[int], mask_W: NDArray[np.int32]) -> StructureFailed | None:
        while True:
            master, alone = self._choose()
            if (error := master.compiled.exception()) is not None:
                return StructureFailed(
                    error.message
                    if isinstance(error, InvalidRequest)
                    else f"the grammar does not compile: {type(error).__name__}; use another one"
                )
            if self._matcher is None:
                self._matcher = master.compiled.result().deep_copy()
            why = self._try(self._matcher, path, mask_W)
            if not why:
                return None
            self._matcher = None
            if SPOILS in why:
                master.spoiled = True
                if not alone:
                    continue  # others, or drafts, may have used up what there is
            why = " ".join(why.partition("\n")[0].split())[:200]
            limit = f"the structure cannot go on: {why}; simplify it"
            return StructureFailed(NO_TOKEN if "NoExtension" in why else limit)

    def _choose(self) -> tuple[Master, bool]:
        """Return the master that the matcher is, or is to be, a copy of, and whether nothing else
        has used its lexer.
        """
        if self._matcher is not None and self._master and not self._master.spoiled:
            return self._master, False
        self._master, self._matcher = self._masters.take(), None
        self._consumed, self._drafts = 0, []
        self._master.copies += 1
        return self._master, self._master.copies == 1

    def _try(self, matcher: LLMatcher, path: Sequence[int], mask_W: NDArray[np.int32]) -> str:
        """Fill the mask. Return why that fails, if it does; the matcher is of no use then. Drafts
        stay in it, because the next row's path often begins with them.
        """
        behind = self._consumed < len(self._committed)
        shared = 0 if behind else _shared(self._drafts, path)
        if len(self._drafts) > shared:
            matcher.rollback(len(self._drafts) - shared)
            del self._drafts[shared:]
        while new := self._committed[self._consumed : self._consumed + UNMASKED]:
            if not matcher.consume_tokens(new):
                return matcher.get_error() or "the tokens do not fit"
            self._consumed += len(new)
            if len(new) == UNMASKED:
                matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        rest = [*path[shared:]]
        accepted = matcher.try_consume_tokens(rest) if rest else 0
        self._drafts += rest[:accepted]
        if accepted < len(rest):
            mask_W.fill(-1)
        else:
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if matcher.is_accepting():
                mask_W |= self._stops_W
        if matcher.is_error():
            return matcher.get_error() or "the limit is not named"
        return "" if mask_W.any() else "NoExtension"


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two paths have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Structures:
    """Compiled grammars for the tokens of one model, those used last."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiler = Compiler(model, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._masters: OrderedDict[Grammar, Masters] = OrderedDict()
        self._cost = Cost()

    def of(self, grammar: Grammar | None, stop_ids: Collection[int]) -> Structure | None:
        """Return the structure of a new sequence, whose grammar is compiled in the background."""
        if grammar is None:
            return None
        found = self._masters.get(grammar)
        if found is None or found.called_off:
            found = Masters(self._compiler, grammar, self._begin(grammar))
            self._masters[grammar] = found
            if len(self._masters) > KEPT:
                self._masters.popitem(last=False)
        else:
            self._cost.cached += 1
        self._masters.move_to_end(grammar)
        return Structure(found, stop_ids, self._vocab_size, self._cost)

    def prepare(self) -> None:
        """Do what the first structure would wait for, unless that was done."""
        self._compiler.prepare()

    def gauges(self) -> dict[str, float]:
        return {f"structures_{name}": value for name, value in asdict(self._cost).items()}

    def _begin(self, grammar: Grammar) -> Future[LLMatcher]:
        started = time.perf_counter()

        def done(compiled: Future[LLMatcher]) -> None:
            if not compiled.cancelled():
                self._cost.compiled += 1
                self._cost.compile_s += time.perf_counter() - started

        compiled = self._compiler.begin(grammar)
        compiled.add_done_callback(done)
        return compiled
