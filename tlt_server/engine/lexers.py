"""Compiled grammars and the budgets of their masks.

A lexer keeps what it has found, so what a mask takes depends on what others have asked. Whether a
structure fails must not. So a sequence fails by its own account only: of a lexer that has seen its
emitted tokens and no others (`sole`). It has one account from its start: each token adds REFILL, up
to FUEL, and each mask takes its work; below zero the structure fails. While all sequences and
drafts of a shared lexer together have spent less than SHARED, none of them can have spent its
account, so nothing is counted.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tlt_server.grammars import KEPT
from tlt_server.grammars.compiler import FUEL
from tlt_server.grammars.masks import CannotFollow, MaskedText
from tlt_server.records import Grammar

REFILL = 1024  # units that a token adds to its sequence's account
SHARED = FUEL // 2  # half, since fuel depends a little on the order of what is found
DEAR = 2048  # units of one mask, about 0.1 ms, after which masks are found in threads
SLICE = 64  # tokens of one turn in a thread
TOO_DEAR = "its masks take too much work"
FEW = 8  # sequences that wear a lexer out: it is of no use to share one
LEAST_BYTES, FUEL_BYTES = 2**16, 32  # memory of a lexer, and per unit of fuel that it has spent
LIMIT = 2**28  # bytes of the lexers that are kept
IDLE_S = 60.0


class Lexer:
    """A compiled grammar, perhaps still being compiled, with what its lexer has found."""

    def __init__(
        self, compiled: Future[MaskedText], owner: str = "", *, sole: bool = False
    ) -> None:
        """`owner` asked for it first. `sole`: for one sequence, and none of its drafts."""
        self.compiled, self.owner, self.sole = compiled, owner, sole
        self.used_s = 0.0  # when a sequence last joined
        self.joined = 0  # sequences that have used it
        self._users = 0
        self._spent = 0  # fuel
        self._compiled_fuel: int | None = None  # once that is known
        self._spoiled = False  # it ran into a limit: no text tells any more what fits

    def join(self, user: object) -> None:
        """Note what needs it as long as it lives. Without any, compiling it is called off if that
        has not begun.
        """
        self._users += 1
        self.joined += 1
        weakref.finalize(user, self._leave).atexit = False

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self.compiled.cancel()

    @property
    def used(self) -> bool:
        return self._users > 0

    @property
    def spent(self) -> int:
        """Fuel since it was compiled."""
        return max(0, self._spent - self._compiling)

    @property
    def nbytes(self) -> int:
        """Return about what it holds: what it has found takes memory as it took fuel."""
        return LEAST_BYTES + FUEL_BYTES * max(self._spent, self._compiling)

    @property
    def _compiling(self) -> int:
        """Fuel that compiling it has taken."""
        if self._compiled_fuel is None and self.compiled.done():
            failed = self.compiled.cancelled() or self.compiled.exception()
            self._compiled_fuel = 0 if failed else self.compiled.result().fuel
        return self._compiled_fuel or 0

    @property
    def worn(self) -> bool:
        """Return True if a sequence on it may have spent its account."""
        return not self.sole and (self._spoiled or self.spent > SHARED)

    def follow(self, text: MaskedText, token: int, *, aside: bool) -> Followed:
        """Return a text of this lexer with one more token."""
        try:
            found = text.follow(token, aside=aside)
        except CannotFollow as error:
            self._spoiled = self._spoiled or error.spoils
            raise
        new = max(0, found.fuel - max(self._spent, text.fuel))
        self._spent = max(self._spent, found.fuel)
        return Followed(found, new + found.items_work)

    def keeps_accounts(self, followed: Followed) -> bool:
        """Return True if no account on this shared lexer can be below zero after this mask."""
        spent = followed.text.fuel - self.compiled.result().fuel
        return spent <= SHARED and followed.text.items_work <= REFILL


class KeptLexers:
    """The lexers that new sequences share, those used last: LIMIT bytes at most, half for each
    owner, and none that no sequence has used for IDLE_S.
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._lexers: OrderedDict[Grammar, Lexer] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._lexers)

    @property
    def nbytes(self) -> int:
        return sum(lexer.nbytes for lexer in self._lexers.values())

    def get(self, grammar: Grammar, owner: str = "") -> Lexer | None:
        """Return the lexer of a grammar, unless it is of no use to a new sequence of this owner,
        who does not wait for what another one has asked for before.
        """
        found = self._lexers.get(grammar)
        if found is None or found.compiled.cancelled() or (found.worn and found.joined > FEW):
            return None
        if found.owner != owner and not found.compiled.done():
            return None
        self._use(grammar, found)
        return found

    def keep(self, grammar: Grammar, lexer: Lexer) -> None:
        """Keep a new lexer, in the place of others where the memory is used up."""
        self._use(grammar, lexer)
        sizes = {grammar: lexer.nbytes for grammar, lexer in self._lexers.items()}
        of_owner = Counter[str]()
        for each, kept in self._lexers.items():
            of_owner[kept.owner] += sizes[each]
        for each, kept in [*self._lexers.items()][:-1]:
            over = of_owner[kept.owner] > self._limit // 2 or of_owner.total() > self._limit
            if over or len(self._lexers) > KEPT:
                of_owner[kept.owner] -= sizes[each]
                del self._lexers[each]

    def forget_idle(self) -> None:
        """Give back what no sequence has asked for lately."""
        while self._lexers:
            grammar, lexer = next(iter(self._lexers.items()))
            if self._clock() - lexer.used_s < IDLE_S:
                return
            del self._lexers[grammar]

    def _use(self, grammar: Grammar, lexer: Lexer) -> None:
        lexer.used_s = self._clock()
        self._lexers[grammar] = lexer
        self._lexers.move_to_end(grammar)


class Followed(NamedTuple):
    text: MaskedText
    work: int  # units spent on its mask


class Advanced(NamedTuple):
    """A text, and how far it has got with the tokens that were to follow."""

    text: MaskedText
    read: int  # tokens
    account: int
    work: int  # units of its dearest mask
    why: str = ""  # the text cannot go on after these tokens, on this lexer


def advance(lexer: Lexer, text: MaskedText, tokens: Sequence[int], account: int) -> Advanced:
    """Follow the next tokens, a slice of them at most."""
    dearest = 0
    for count, token in enumerate(tokens[:SLICE]):
        try:
            followed = lexer.follow(text, token, aside=True)
        except CannotFollow as error:
            return Advanced(text, count, account, dearest, str(error))
        dearest = max(dearest, followed.work)
        if lexer.sole:
            account = min(FUEL, account + REFILL) - followed.work
        text = followed.text
        if account < 0 or not (lexer.sole or lexer.keeps_accounts(followed)):
            return Advanced(text, count + 1, account, dearest, TOO_DEAR)
    return Advanced(text, len(tokens[:SLICE]), account, dearest)
