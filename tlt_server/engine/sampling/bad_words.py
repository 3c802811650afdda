"""Forbidden words of several tokens. A word's last token may not follow its other tokens, whether
these are drafts or not.

Their masks are filled like those of structured outputs (`structures.py`). Forbidden words of one
token are biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.grammars.masks import WORD


class _Ban(NamedTuple):
    before: list[int]
    last: int


class BadWords:
    """One sequence's bad words, in the form of a `Structure`."""

    ready, quick, error = True, True, None  # nothing is compiled, and some token can always follow

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: the tokens of each word, at least two."""
        self._bans: dict[int, list[_Ban]] = {}  # by the token before the last
        for *before, last in words:
            self._bans.setdefault(before[-1], []).append(_Ban(before, last))
        self._longest = max(map(len, words)) - 1
        self._committed: list[int] = []  # the newest output tokens

    def commit(self, tokens: Sequence[int]) -> None:
        """Note output tokens that were appended to the sequence."""
        self._committed = [*self._committed, *tokens][-self._longest :]

    def rest(self) -> None:
        """Do nothing: it holds no memory to free."""

    def fill(self, path: Sequence[int], mask_W: NDArray[np.int32], certain: int = 0) -> bool:
        """Set the bit of each token that may follow the committed tokens and the drafts of `path`:
        all but those that would complete a word. Words count in the output only.
        """
        mask_W.fill(-1)
        text = [*self._committed, *path]
        for before, last in self._bans.get(text[-1], ()) if text else ():
            if text[-len(before) :] == before:
                mask_W.view(np.uint32)[last // WORD] &= ~np.uint32(1 << last % WORD)
        return True
