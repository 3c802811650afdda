"""The tokens that may follow a text of a grammar, and the work to find them. No torch.

The work is counted in units of the library: fuel of its lexer, and items of its parser. Lexers
cache their results, and copies share a lexer, so the fuel of a mask depends on earlier requests;
`fuel` is the lexer's total so far. The items depend only on the text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLInterpreter

WORD = 32  # tokens whose bits share one number
# Completing a row of the parser takes time with the square of its items: this much is one unit.
ITEMS = 10
ITEM_BYTES = 80  # memory of a text for each item
_STATS = re.compile(
    r'"rows":(\d+),"cached_rows":(\d+),"all_items":(\d+),"lexer_cost":(\d+),', re.ASCII
)


class CannotFollow(Exception):
    """A limit of the library, or a token that does not fit. `spoils`: all texts of the lexer have
    become unusable.
    """

    def __init__(self, why: str, *, spoils: bool = False) -> None:
        super().__init__(" ".join(why.partition("\n")[0].split())[:200])
        self.spoils = spoils

    @classmethod
    def of(cls, error: BaseException) -> CannotFollow:
        """Convert an error of the library, whose panics are not an `Exception`."""
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise error
        panic = not isinstance(error, ValueError | RuntimeError)
        why = f"the library failed with {type(error).__name__}" if panic else str(error)
        return cls(why, spoils=panic or "lexer error" in why)


class MaskedText:
    """The text of some tokens, with the immutable mask of the tokens that may follow."""

    __slots__ = ("_eos_W", "_interpreter", "accepting", "fuel", "items_work", "mask_W", "nbytes")

    def __init__(
        self,
        interpreter: LLInterpreter,
        eos_W: NDArray[np.int32],
        spent: int = 0,
        *,
        aside: bool = True,
    ) -> None:
        """`interpreter`: has the text's tokens. `eos_W`: the bits of tokens that end an output.
        `spent`: the lexer's fuel already reported. `aside`: compute in a thread, which takes longer
        but lets others run.
        """
        self._interpreter, self._eos_W = interpreter, eos_W
        self.mask_W = np.zeros(len(eos_W), np.int32)
        try:
            said = self._mask_aside() if aside else self._mask()
        except BaseException as error:
            raise CannotFollow.of(error) from None
        self.accepting: bool = interpreter.is_accepting()
        self.mask_W |= eos_W
        if not self.accepting:
            # Where nothing can follow, the library lets the text end, though it is not complete.
            self.mask_W ^= eos_W
        found = _STATS.search(said)
        assert found is not None, said
        rows, cached, items, fuel = map(int, found.groups())
        self.items_work = items * items // (ITEMS * max(1, rows + cached))
        self.nbytes = ITEM_BYTES * items  # without those of its lexer
        self.fuel = spent + fuel

    def _mask(self) -> str:
        """Fill the mask with the interpreter's lock held. Return the statistics."""
        mask_W = self.mask_W
        said: str = self._interpreter.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        return said

    def _mask_aside(self) -> str:
        mask, said = self._interpreter.compute_mask()
        if mask is not None:  # a byte for each token
            bits = np.packbits(np.frombuffer(mask, np.uint8), bitorder="little")
            self.mask_W.view(np.uint8)[: len(bits)] = bits
        return str(said)

    def allows(self, token: int) -> bool:
        """Return True if this token may follow and does not end the text."""
        word, bit = divmod(token, WORD)
        if not 0 <= word < len(self.mask_W):
            return False
        return bool(int(self.mask_W[word]) & ~int(self._eos_W[word]) & 1 << bit)

    def follow(self, token: int, *, aside: bool = True, last: bool = False) -> MaskedText:
        """Return the text with one more token. `last`: this text will not be followed again, so
        its interpreter is reused instead of copied.
        """
        if not self.allows(token):
            raise CannotFollow("the tokens do not fit")
        interpreter = self._interpreter if last else self._interpreter.deep_copy()
        try:
            interpreter.commit_token(token)
        except BaseException as error:
            raise CannotFollow.of(error) from None
        return MaskedText(interpreter, self._eos_W, self.fuel, aside=aside)
