"""The structured outputs of sequences: which tokens may follow, after the tokens of a sequence and
drafts on top of them.

What may follow is a function of the grammar and of the tokens before, so it is the same whether
these are drafts or not. `SamplingState.edit` and the GPU's runner ask; `SamplingState.commit` tells
what was appended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import InvalidRequest, StructureFailed
from tlt_server.grammars.compiler import Compiler
from tlt_server.records import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT = 128  # compiled grammars, those in use not counted
NO_TOKEN = "no token of this model can follow in the structure; use another one"
WORD = 32  # tokens whose bits share one number


@dataclass
class Cost:
    """The work that structures have caused since the engine started."""

    compiled: int = 0  # grammars
    cached: int = 0  # sequences whose grammar was there
    compile_s: float = 0.0
    mask_s: float = 0.0


class Structure:
    """One sequence's matcher. Its grammar may still be being compiled."""

    def __init__(
        self, compiled: Future[LLMatcher], stop_ids: Collection[int], vocab_size: int, cost: Cost
    ) -> None:
        """`stop_ids` may come wherever the text is complete."""
        self._compiled, self._words, self._cost = compiled, -(-vocab_size // WORD), cost
        self._matcher: LLMatcher | None = None
        self._committed: list[int] = []
        self._consumed = 0  # committed tokens that the matcher has seen
        self._stop_ids = frozenset(id for id in stop_ids if 0 <= id < vocab_size)
        self._stops_W = np.zeros(self._words, np.int32)
        for id in self._stop_ids:
            self._stops_W.view(np.uint32)[id // WORD] |= np.uint32(1 << id % WORD)
        self.error: StructureFailed | None = None  # why nothing could follow, where `fill` said so
        self._over = False  # nothing can follow the committed tokens

    @property
    def ready(self) -> bool:
        """Tell whether the grammar is compiled, or has failed to."""
        return self._compiled.done()

    def commit(self, tokens: Sequence[int]) -> None:
        """Note output tokens that were appended to the sequence. None follows a stop token."""
        self._committed += [token for token in tokens if token not in self._stop_ids]

    def fill(self, path: Sequence[int], mask_W: NDArray[np.int32]) -> None:
        """Set the bit of each token that may follow the committed tokens and the drafts of `path`;
        all bits where these drafts break the structure, since the walk never gets there. No bit is
        set where nothing can follow.
        """
        assert mask_W.shape == (self._words,) and mask_W.flags.c_contiguous
        started = time.perf_counter()
        self._fill(path, mask_W)
        self._cost.mask_s += time.perf_counter() - started

    def _fill(self, path: Sequence[int], mask_W: NDArray[np.int32]) -> None:
        matcher = self._at_end()
        if matcher is None:
            mask_W.fill(0)
            return
        accepted = matcher.try_consume_tokens([*path]) if path else 0
        if accepted < len(path):
            mask_W.fill(-1)
        else:
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if matcher.is_accepting():
                mask_W |= self._stops_W
        if matcher.is_error():
            self._failed(matcher, drafts=bool(path))
            mask_W.fill(0)
        elif accepted:
            matcher.rollback(accepted)
        if not mask_W.any() and self._matcher is not None:
            self.error = StructureFailed(NO_TOKEN)

    def _at_end(self) -> LLMatcher | None:
        """Return the matcher after all committed tokens; None once it has failed."""
        if self._matcher is None and not self._over:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except InvalidRequest as error:
                self.error, self._over = StructureFailed(error.message), True
        matcher, known = self._matcher, len(self._committed)
        if matcher is not None and self._consumed < known:
            new, self._consumed = self._committed[self._consumed :], known
            if not matcher.consume_tokens(new):
                self._failed(matcher, drafts=False)
        return self._matcher

    def _failed(self, matcher: LLMatcher, *, drafts: bool) -> None:
        """Drop a matcher that ran into a limit. If that was on drafts, another one may go on."""
        self._matcher, self._consumed, self._over = None, 0, not drafts
        why = " ".join(matcher.get_error().partition("\n")[0].split())[:200]
        limit = f"the structure cannot go on: {why}; simplify it"
        self.error = StructureFailed(NO_TOKEN if "NoExtension" in why else limit)


class Structures:
    """Compiled grammars for the tokens of one model, those used last."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiler = Compiler(model, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._cost = Cost()

    def of(self, grammar: Grammar | None, stop_ids: Collection[int]) -> Structure | None:
        """Return the structure of a new sequence, whose grammar is compiled in the background."""
        if grammar is None:
            return None
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._begin(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        else:
            self._cost.cached += 1
            self._compiled.move_to_end(grammar)
        return Structure(found, stop_ids, self._vocab_size, self._cost)

    def prepare(self) -> None:
        """Do what the first structure would wait for, unless that was done."""
        self._compiler.prepare()

    def gauges(self) -> dict[str, float]:
        return {f"structures_{name}": value for name, value in asdict(self._cost).items()}

    def _begin(self, grammar: Grammar) -> Future[LLMatcher]:
        started = time.perf_counter()

        def done(_: Future[LLMatcher]) -> None:
            self._cost.compiled += 1
            self._cost.compile_s += time.perf_counter() - started

        compiled = self._compiler.begin(grammar)
        compiled.add_done_callback(done)
        return compiled
