"""The structured outputs of sequences: which tokens may follow the tokens of a sequence and the
drafts after them.

The allowed tokens depend on the grammar and the earlier tokens, drafts or not; so does whether a
structure fails (`lexers.py`). `SamplingState.edit` and the GPU's runner ask for masks;
`SamplingState.commit` reports appended tokens. Masks that take long are computed in threads, and
the sequence sits out steps until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.sampling.grammar_threads import GrammarThreads
from tlt_server.engine.sampling.lexers import DEAR, Advanced, Lexer, Lexers, advance
from tlt_server.errors import InvalidRequest, StructureFailed
from tlt_server.grammars.compiler import FUEL, Compiler
from tlt_server.grammars.masks import WORD, CannotFollow, MaskedText
from tlt_server.wire.records import Grammar

NO_TOKEN = "no token of this model can follow in the structure; use another one"
FORMS = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar"}
PATIENCE = 32  # cheap masks after a dear one until they are found within steps again
NEAR = 8  # tokens that a step may follow; more are followed in a thread


@dataclass
class Cost:
    """The work of structures since the engine started."""

    compiled: int = 0  # grammars
    cached: int = 0  # sequences whose grammar was there
    compile_s: float = 0.0
    mask_s: float = 0.0
    alone: int = 0  # sequences with a lexer of their own
    dropped: int = 0  # rows left out, as their masks took too long for a step


class Structure:
    """One sequence's text in its grammar, which may not be compiled yet."""

    def __init__(
        self,
        grammar: Grammar,
        owner: str,
        stop_ids: Collection[int],
        vocab_size: int,
        lexer: Lexer,
        structures: Structures,
    ) -> None:
        """`stop_ids`: allowed wherever the text is complete."""
        self._job: Future[Advanced] | None = None
        self._grammar, self._owner, self._lexer = grammar, owner, lexer
        self._structures = structures
        lexer.join(self)
        self._runs = False  # it has a batch slot, and was asked for a mask
        self._words = -(-vocab_size // WORD)
        self.error: StructureFailed | None = None  # why no token can follow those of the sequence
        self._committed: list[int] = []
        self._text: MaskedText | None = None  # text of the first `_read` tokens
        self._read = 0
        self._ahead: dict[tuple[int, ...], MaskedText] = {}  # by the tokens after `_text`
        self._account = FUEL
        self._dear = 0  # cheap masks still needed until steps find them
        self._stop_ids = frozenset(id for id in stop_ids if 0 <= id < vocab_size)
        self._stops_W = np.zeros(self._words, np.int32)
        for id in self._stop_ids:
            self._stops_W.view(np.uint32)[id // WORD] |= np.uint32(1 << id % WORD)

    def __del__(self) -> None:
        """Cancel a thread's work for a sequence that has ended."""
        self._leave()

    @property
    def quick(self) -> bool:
        """Return True if steps compute the masks themselves, also for drafts."""
        return not (self._lexer.sole or self._dear or self._job or self._lexer.worn)

    @property
    def ready(self) -> bool:
        """Return True if a step may sample for the sequence. If not, start a thread that computes
        its mask.
        """
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            self._take(job)
        if self.error is not None:
            return True
        if self._lexer.worn and self._job is None:
            self._go_alone()
        if not self._structures.lexers.admits(self._lexer):
            return False  # begins again once there is memory
        if self._job is not None or not (self._text is not None or self._began()):
            return False
        behind = len(self._committed) - self._read
        if self.error is not None or not behind or (behind <= NEAR and self.quick):
            return True
        assert self._text is not None
        rest = self._committed[self._read :]
        work = partial(advance, self._lexer, self._text, rest, self._account)
        self._job = self._structures.threads.submit(
            self._owner, partial(_timed, self._structures.cost, work)
        )
        return False

    def _began(self) -> bool:
        """Return True if the grammar is compiled or has failed to compile."""
        compiled = self._lexer.begin()
        if not compiled.done():
            return False
        why = compiled.exception()
        if why is None:
            self._text = compiled.result()
        elif isinstance(why, InvalidRequest):
            self.error = StructureFailed(why.message)
        else:
            self.error = StructureFailed(
                f"the {FORMS[self._grammar.kind]} does not compile: {type(why).__name__}; use "
                "another one"
            )
        return True

    def _take(self, job: Future[Advanced]) -> None:
        """Take a thread's result, or its error."""
        if (error := job.exception()) is not None:
            self._fail(f"the library failed with {type(error).__name__}")
            return
        found = job.result()
        self._text, self._account = found.text, found.account
        if self._lexer.sole:
            self._lexer.text_bytes = found.text.nbytes
        self._ahead.clear()
        self._read += found.read
        self._note(found.work)
        if found.why:
            self._fail(found.why)

    def _note(self, work: int) -> None:
        self._dear = PATIENCE if work > DEAR else max(0, self._dear - 1)

    def _fail(self, why: str) -> None:
        """End the structure if its lexer is its own; else repeat the test on a separate lexer."""
        if not self._lexer.sole:
            self._go_alone()
            return
        form = FORMS[self._grammar.kind]
        self.error = StructureFailed(
            f"the {form} cannot go on after {self._read} tokens: {why}; simplify it, above all its "
            "repetitions and rules that allow a text in several ways"
        )

    def _go_alone(self) -> None:
        lexer = self._structures.sole(self._grammar, self._owner)
        self.begin_again(lexer)
        self._structures.lexers.add(lexer)

    def begin_again(self, lexer: Lexer) -> None:
        """Follow the sequence's tokens again, from the first, on another lexer."""
        lexer.join(self)
        if self._runs:
            lexer.run()
        self._leave()
        self._lexer, self._job = lexer, None
        self._text, self._read, self._account = None, 0, FUEL
        self._ahead.clear()

    def _leave(self) -> None:
        if self._job is not None:
            self._job.cancel()
        if self._runs:
            self._lexer.rest()
        self._lexer.leave(self)

    def rest(self) -> None:
        """Note that the sequence has lost its batch slot."""
        if self._runs:
            self._runs = False
            self._lexer.rest()

    def commit(self, tokens: Sequence[int]) -> None:
        """Note appended output tokens. No token follows a stop token."""
        for token in tokens:
            if token in self._stop_ids:
                continue
            caught_up = self._read == len(self._committed)
            self._committed.append(token)
            if not (caught_up and self._ahead):
                continue
            text = self._ahead.get((token,))
            self._ahead = {
                path[1:]: found
                for path, found in self._ahead.items()
                if path[0] == token and path[1:]
            }
            if text is not None:
                self._text, self._read = text, self._read + 1

    def fill(self, path: Sequence[int], mask_W: NDArray[np.int32], certain: int = 0) -> bool:
        """Set the bit of each token that may follow the committed tokens and those of `path`. Its
        first `certain` tokens belong to the sequence, the others are drafts. No bit is set if
        nothing may follow the certain tokens. Return False to leave the row out of the step: after
        drafts that do not fit or end the structure, or if a mask takes too long.
        """
        assert mask_W.shape == (self._words,) and mask_W.flags.c_contiguous
        if not self._runs:
            self._runs = True
            self._lexer.run()
        started = time.perf_counter()
        found = self._find((*path,), certain)
        self._structures.cost.mask_s += time.perf_counter() - started
        if self.error is not None and len(path) == certain:
            mask_W.fill(0)
            return True
        if found is None or self.error is not None:
            mask_W.fill(-1)
            self._structures.cost.dropped += 1
            return False
        mask_W[:] = found.mask_W
        if found.accepting:
            mask_W |= self._stops_W
        return True

    def _find(self, path: tuple[int, ...], certain: int) -> MaskedText | None:
        if not self.ready or self.error is not None:
            return None
        while self._read < len(self._committed):
            assert self._text is not None
            last = self._read > 0  # the text of no token belongs to all sequences
            text = self._next(self._text, self._committed[self._read], certain=True, last=last)
            if text is None:
                return None
            self._text, self._read = text, self._read + 1
            self._ahead.clear()
        text = self._text
        assert text is not None
        for at, token in enumerate(path):
            here = path[: at + 1]
            if (found := self._ahead.get(here)) is None:
                found = self._next(text, token, certain=at < certain)
                if found is None:
                    return None
                self._ahead[here] = found
            text = found
        if not (text.accepting or text.mask_W.any()):
            if len(path) == certain:
                self.error = StructureFailed(NO_TOKEN)
            return None
        return text

    def _next(
        self, text: MaskedText, token: int, *, certain: bool, last: bool = False
    ) -> MaskedText | None:
        """Follow a token within a step, if that is quick."""
        if not (self.quick and (certain or text.allows(token))):
            return None
        try:
            followed = self._lexer.follow(text, token, aside=False, last=last)
        except CannotFollow:
            followed = None
        if followed is not None and self._lexer.keeps_accounts(followed):
            self._note(followed.work)
            return followed.text
        if certain:
            self._go_alone()
        return None


def _timed(cost: Cost, work: Callable[[], Advanced]) -> Advanced:
    started = time.perf_counter()
    try:
        return work()
    finally:
        cost.mask_s += time.perf_counter() - started


class Structures:
    """The most recently used compiled grammars for the tokens of one model."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiler = Compiler(model, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self.lexers = Lexers()
        self.threads, self.cost = GrammarThreads(), Cost()
        self.compiling = GrammarThreads(2, nice=False)  # for new grammars

    def of(
        self, grammar: Grammar | None, stop_ids: Collection[int], owner: str = ""
    ) -> Structure | None:
        """Return the structure of a new sequence, whose grammar is compiled in the background."""
        if grammar is None:
            return None
        known = self.lexers.get(grammar, owner)
        lexer = known or self._lexer(grammar, owner)
        found = Structure(grammar, owner, stop_ids, self._vocab_size, lexer, self)
        if known is not None:
            self.cost.cached += 1
            return found
        self.lexers.keep(grammar, lexer)
        if lexer.admitted:
            lexer.begin()
        return found

    def sole(self, grammar: Grammar, owner: str) -> Lexer:
        """Return a lexer for one sequence, compiled when its owner gets a thread."""
        self.cost.alone += 1
        return self._lexer(grammar, owner, sole=True)

    def _lexer(self, grammar: Grammar, owner: str, *, sole: bool = False) -> Lexer:
        threads = self.threads if sole else self.compiling
        work = partial(self._compiler.start, grammar)
        return Lexer(lambda: self._counted(threads.submit(owner, work)), owner, sole=sole)

    def prepare(self) -> None:
        """Read the tokenizer and drop idle lexers; called in idle time."""
        self._compiler.prepare()
        self.lexers.forget_idle()

    def gauges(self) -> dict[str, float]:
        found = {f"structures_{name}": value for name, value in asdict(self.cost).items()}
        return found | {
            "structures_bytes": self.lexers.nbytes,
            "structures_held_back": self.lexers.held_back,
        }

    def _counted(self, compiled: Future[MaskedText]) -> Future[MaskedText]:
        def done(compiled: Future[MaskedText]) -> None:
            if not compiled.cancelled():
                self.cost.compiled += 1
                self.cost.compile_s = self._compiler.start_s

        compiled.add_done_callback(done)
        return compiled
