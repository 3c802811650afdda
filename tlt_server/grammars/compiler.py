"""Compiles grammars to matchers, which return the tokens allowed after some tokens. No torch.

llguidance does the work, and does not block other threads. Its limits bound the time and memory of
a compilation, and of each mask. The engine asks an `LLInterpreter`, which reports the work of each
mask; an `LLMatcher` checks whole texts.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.masks import WORD, CannotFollow, MaskedText
from tlt_server.grammars.vocabulary import Vocabulary, read_tokenizer
from tlt_server.wire.records import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

# Fuel of the library's lexer that one mask may take: about 5 ms.
FUEL = 2**18
STACK_BYTES = 2**26  # the library descends once per rule or reference
# White space between the tokens of JSON: a space, or a line break with an indent. With more than a
# pretty print needs a model could fill its output with spaces.
WHITE_SPACE = r" |\n( {0,24}|\t{0,8})"
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_WRAPPED = re.compile(r"regex parse error:\n +(?P<text>[^\n]*)\n(?P<at> *)\^+\nerror: (?P<why>.*)")


class Compiler:
    """The compiler for the tokens of one model. Copies of an interpreter share its lexer and one
    limit on explored states. An error of one copy makes all others unusable.
    """

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`model` is the model's directory; the first compilation reads its `tokenizer.json`."""
        self._model, self._vocab_size, self._eos = model, vocab_size, [*eos_token_ids]
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._prepared = False
        self._lock, self.start_s = threading.Lock(), 0.0  # time spent in `start`, in all threads

    def prepare(self) -> None:
        """Read the tokenizer; a large vocabulary holds the interpreter for a second."""
        if not self._prepared:
            self._prepared = True
            # Any error, a panic of the library too, is for those who ask for a structure.
            with contextlib.suppress(BaseException):
                _ = self._tokenizer

    def start(self, grammar: Grammar) -> MaskedText:
        """Return the grammar's matcher state for an empty output. `InvalidRequest` names the error
        in the grammar and its position. The calling thread needs a stack of STACK_BYTES.
        """
        began_s = time.perf_counter()
        try:
            return self._started(grammar)
        finally:
            with self._lock:
                self.start_s += time.perf_counter() - began_s

    def _started(self, grammar: Grammar) -> MaskedText:
        from llguidance import LLInterpreter

        tokenizer = self._tokenizer
        with _phrased(grammar):
            interpreter = LLInterpreter(
                tokenizer,
                self._source(grammar),
                enable_backtrack=False,
                enable_ff_tokens=False,
                log_level=0,
                limits=self._limits,
            )
            interpreter.start_without_prompt()
            return MaskedText(interpreter, self._eos_W)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher of whole texts. Raise `InvalidRequest` as `start` does."""
        before = threading.stack_size(STACK_BYTES)
        try:
            matcher = self._thread.submit(self._matcher, grammar)  # the first one starts the thread
        finally:
            threading.stack_size(before)
        return matcher.result()

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._tokenizer
        with _phrased(grammar):
            source = self._source(grammar)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some limits show only here
        if matcher.is_error():
            raise InvalidRequest(_phrase(grammar, matcher.get_error()))
        return matcher

    @cached_property
    def _eos_W(self) -> NDArray[np.int32]:
        words = np.zeros(-(-self._vocab_size // WORD), np.uint32)
        for id in self._eos:
            if 0 <= id < self._vocab_size:
                words[id // WORD] |= np.uint32(1 << id % WORD)
        return words.view(np.int32)

    def _source(self, grammar: Grammar) -> str:
        """Return a grammar in the library's form."""
        from llguidance import LLMatcher

        if grammar.kind == "json_schema":
            found: str = LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": WHITE_SPACE}
            )
        elif grammar.kind == "regex":
            found = LLMatcher.grammar_from_regex(grammar.text)
        else:
            found = LLMatcher.grammar_from_lark(self._vocabulary.by_id(grammar.text))
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        vocabulary = cast("TokenizerWrapper", self._vocabulary)  # in form
        return LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=self._eos)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        path = self._model / "tokenizer.json"
        if not path.exists():
            raise InvalidRequest(
                "structured_outputs needs text, and this model directory has no tokenizer.json"
            )
        try:
            return Vocabulary(read_tokenizer(path), self._vocab_size, self._eos)
        except Exception as error:  # the libraries raise bare Exception, too
            raise InvalidRequest(
                f"structured_outputs cannot be kept with this model's tokenizer: {str(error)[:200]}"
            ) from None

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=500_000,
            max_grammar_size=100_000,
            max_lexer_states=50_000,  # about 100 MB
            step_lexer_fuel=FUEL,
            verbose_errors=False,
        )


@contextlib.contextmanager
def _phrased(grammar: Grammar) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, CannotFollow) as error:
        raise InvalidRequest(_phrase(grammar, str(error))) from None


def _phrase(grammar: Grammar, error: str) -> str:
    """Return the library's message about a grammar, in one line, with a position in the grammar's
    text.
    """
    what = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar"}[grammar.kind]
    inner = _WRAPPED.search(error)
    if grammar.kind == "regex" and inner:
        place = f" at character {len(inner['at']) - 3}" if inner["text"] else ""
        return f"the {what} does not compile: {inner['why']}{place}"
    place = ""
    if found := _PLACE.match(error):
        if grammar.kind == "lark":
            place = f" at line {found[1]}, column {found[2]}"
        error = error[found.end() :]
    if inner:
        error = f"{inner['why']} in {inner['text'][:80]!r}"
    line = " ".join(error.partition("\n")[0].split())
    line = "it allows no text" if line in ("", "NoExtensionBias") else line
    return f"the {what} does not compile{place}: {line[:200]}"
