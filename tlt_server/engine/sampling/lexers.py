"""Compiled grammars and the budgets of their masks.

A lexer caches its states, so the work of a mask depends on all earlier masks of that lexer. Whether
a structure fails must not. So a sequence fails only by its account on a separate lexer (`sole`),
which sees only its emitted tokens: each token adds REFILL, up to FUEL, and each mask deducts its
work; below zero the structure fails. While all sequences and drafts of a shared lexer together have
spent less than SHARED, no account can be empty, so nothing is counted. A lexer is a function of its
grammar and tokens, so freeing its memory (`Lexers`) changes no token and no failure.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from tlt_server.grammars import KEPT
from tlt_server.grammars.compiler import FUEL
from tlt_server.grammars.masks import CannotFollow, MaskedText
from tlt_server.wire.records import Grammar

REFILL = 1024  # units that a token adds to its sequence's account
SHARED = FUEL // 2  # half, since fuel depends a little on the order of what is found
DEAR = 2048  # units of one mask, about 0.1 ms, after which masks are found in threads
SLICE, SLICE_WORK = 64, FUEL // 4  # tokens of one turn in a thread, and units after which it ends
TOO_DEAR = "its masks take too much work"
FEW = 8  # sequences that wear a lexer out: it is of no use to share one
LEAST_BYTES, FUEL_BYTES = 2**16, 32  # memory of a lexer, and per unit of fuel that it has spent
LIMIT = 2**28  # bytes of all lexers
IDLE_S = 60.0
SELDOM = 64  # questions for memory between two comparisons of all lexers
_turns = itertools.count()


class User(Protocol):
    """A sequence with a text in a lexer."""

    def begin_again(self, lexer: Lexer) -> None:
        """Drop the text and follow the sequence's tokens again, from the first, on this lexer."""


class Lexer:
    """A grammar, compiled or not, with the states that its lexer has cached."""

    def __init__(
        self,
        compile: Callable[[], Future[MaskedText]],
        owner: str = "",
        *,
        sole: bool = False,
        need: int = LEAST_BYTES,
    ) -> None:
        """`compile` starts the compilation. `owner` requested it first. `sole`: for one sequence,
        without its drafts. `need`: bytes known to be needed.
        """
        self._compile, self.owner, self.sole, self._need = compile, owner, sole, need
        self.compiled: Future[MaskedText] | None = None
        self.admitted = False  # whether it may hold memory, see `Lexers`
        self.users = weakref.WeakSet[User]()
        self.turn = next(_turns)  # the place of its first running sequence among all
        self.used_s = 0.0  # when a sequence last joined
        self.joined = 0  # sequences that have used it
        self.text_bytes = 0  # the text, where one sequence has it alone
        self._running = 0
        self._spent = 0  # fuel
        self._compiled_fuel: int | None = None  # once that is known
        self._spoiled = False  # it ran into a limit, so its texts are unusable
        self.worn = False  # a sequence on it may have spent its account

    def begin(self) -> Future[MaskedText]:
        """Start the compilation, unless it has started."""
        if self.compiled is None:
            self.compiled = self._compile()
        return self.compiled

    def join(self, user: User) -> None:
        self.users.add(user)
        self.joined += 1

    def leave(self, user: User) -> None:
        """Remove a sequence. After the last one, cancel a compilation that has not started."""
        self.users.discard(user)
        if not self.users and self.compiled is not None:
            self.compiled.cancel()

    def run(self) -> None:
        """Note that one of its sequences starts to run."""
        self._running += 1
        if self._running == 1:
            self.turn = next(_turns)

    def rest(self) -> None:
        self._running -= 1

    @property
    def runs(self) -> bool:
        return self._running > 0

    @property
    def spent(self) -> int:
        """Fuel spent since the compilation."""
        return max(0, self._spent - self._compiling)

    @property
    def nbytes(self) -> int:
        """Return an estimate of its bytes, from the fuel spent."""
        found = FUEL_BYTES * max(self._spent, self._compiling) + self.text_bytes
        return found + LEAST_BYTES if self.compiled is not None else 0

    @property
    def need(self) -> int:
        """Bytes that it holds or will hold."""
        return max(self._need, self.nbytes)

    @property
    def _compiling(self) -> int:
        """Fuel spent by the compilation."""
        if self._compiled_fuel is not None:
            return self._compiled_fuel
        if self.compiled is not None and self.compiled.done():
            failed = self.compiled.cancelled() or self.compiled.exception()
            self._compiled_fuel = 0 if failed else self.compiled.result().fuel
        return self._compiled_fuel or 0

    def follow(self, text: MaskedText, token: int, *, aside: bool, last: bool = False) -> Followed:
        """Return a text of this lexer with one more token. `last` as in `MaskedText.follow`."""
        before = max(self._spent, text.fuel)
        try:
            found = text.follow(token, aside=aside, last=last)
        except CannotFollow as error:
            self._spoiled = self._spoiled or error.spoils
            self.worn = self.worn or (self._spoiled and not self.sole)
            raise
        new = 0
        if found.fuel > before:
            new, self._spent = found.fuel - before, max(self._spent, found.fuel)
            self.worn = self.worn or (self.spent > SHARED and not self.sole)
        return Followed(found, new + found.items_work)

    def keeps_accounts(self, followed: Followed) -> bool:
        """Return True if no account on this shared lexer can be below zero after this mask."""
        text = followed.text
        return text.items_work <= REFILL and text.fuel - self._compiling <= SHARED

    def give_back(self) -> Lexer:
        """Move its sequences to a new lexer, which may wait for memory, and return the new one."""
        found = Lexer(self._compile, self.owner, sole=self.sole, need=self.need)
        found.turn = self.turn
        for user in [*self.users]:
            user.begin_again(found)
        return found


class Lexers:
    """Divides LIMIT bytes of memory between lexers, at most half of them for each owner.

    Lexers of running sequences come first, then those of waiting ones; owners take turns. A lexer
    that is not admitted frees its memory, and its sequences sit out steps and start over later. At
    least one lexer is admitted, a running sequence's if possible, so all sequences end. The
    remaining memory keeps lexers for new sequences to share: those used most recently, each for at
    most IDLE_S.
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._kept: OrderedDict[Grammar, Lexer] = OrderedDict()  # used longest ago first
        self._all = weakref.WeakSet[Lexer]()
        self._asked = self._new = 0  # times since memory was shared out
        self._patience = SELDOM  # questions until the next division
        self._held = Counter[str]()  # bytes of sequences by owner, as they were shared out

    def __len__(self) -> int:
        """Return the number of lexers kept for new sequences."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(lexer.nbytes for lexer in self._all)

    @property
    def held_back(self) -> int:
        """Lexers whose sequences sit out steps because memory is short."""
        return sum(bool(lexer.users) and not lexer.admitted for lexer in self._all)

    def get(self, grammar: Grammar, owner: str = "") -> Lexer | None:
        """Return the kept lexer of a grammar. None if it is worn out, or while another owner's
        compilation of it waits, as this owner's sequence should not wait for that turn.
        """
        found = self._kept.get(grammar)
        if found is None or (found.worn and found.joined > FEW):
            return None
        compiled = found.compiled
        if compiled is not None and compiled.cancelled():
            return None
        if found.owner != owner and not (compiled is not None and compiled.done()):
            return None
        self._use(grammar, found)
        return found

    def keep(self, grammar: Grammar, lexer: Lexer) -> None:
        """Keep a sequence's new lexer for other sequences. Memory is divided again only once the
        new ones are 1/SELDOM of all, so the cost per lexer does not grow with their number.
        """
        self._use(grammar, lexer)
        self.add(lexer)
        self._new += 1
        if self._new * SELDOM >= len(self._all):
            self._share_out()
        elif len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def add(self, lexer: Lexer) -> None:
        """Count a new lexer that a sequence has joined. A step may add many, so memory is divided
        again only for one that exceeds the rest of the last division.
        """
        self._all.add(lexer)
        lexer.admitted = self._fits(lexer, self._held)
        if lexer.admitted:
            self._held[lexer.owner] += lexer.need
        elif self._asked * SELDOM >= len(self._all):
            self._share_out()

    def admits(self, lexer: Lexer) -> bool:
        """Return True if a lexer may hold memory now. Every sequence asks in every step, so the
        memory of all lexers is compared only occasionally.
        """
        self._asked += 1
        if self._asked > self._patience:
            self._share_out()
        return lexer.admitted

    def forget_idle(self) -> None:
        """Drop lexers that no sequence has joined for IDLE_S."""
        while self._kept:
            grammar, lexer = next(iter(self._kept.items()))
            if self._clock() - lexer.used_s < IDLE_S:
                return
            del self._kept[grammar]

    def _share_out(self) -> None:
        self._asked, self._new, self._patience = 0, 0, max(SELDOM, len(self._all))
        held = self._held = Counter[str]()
        for lexer in self._order():
            lexer.admitted = self._fits(lexer, held)
            if lexer.admitted:
                held[lexer.owner] += lexer.need
            elif lexer.nbytes:
                self._give_back(lexer)
        self._forget_unused(held.copy())

    def _fits(self, lexer: Lexer, held: Counter[str]) -> bool:
        """Return True if a lexer fits in addition to `held`, bytes by owner; the first one always
        does.
        """
        mine, everything = held[lexer.owner], held.total()
        fits = everything + lexer.need <= self._limit
        return (fits and (not mine or mine + lexer.need <= self._limit // 2)) or not everything

    def _order(self) -> list[Lexer]:
        """Return the lexers of sequences in order of admission."""
        rank, places = Counter[str](), list[tuple[int, bool, int, Lexer]]()
        used = [lexer for lexer in self._all if lexer.users]
        for lexer in sorted(used, key=lambda lexer: (not lexer.runs, lexer.turn)):
            places.append((rank[lexer.owner], not lexer.runs, lexer.turn, lexer))
            rank[lexer.owner] += 1
        return [lexer for *_, lexer in sorted(places, key=lambda place: place[:3])]

    def _give_back(self, lexer: Lexer) -> None:
        found = lexer.give_back()
        self._all.add(found)
        for grammar, kept in self._kept.items():
            if kept is lexer:
                self._kept[grammar] = found
                return

    def _forget_unused(self, held: Counter[str]) -> None:
        """Drop unused lexers until the others fit. `held`: bytes of lexers in use, by owner."""
        sizes = {each: kept.nbytes for each, kept in self._kept.items() if not kept.users}
        for each, size in sizes.items():
            held[self._kept[each].owner] += size
        for each, kept in [*self._kept.items()]:
            over = held[kept.owner] > self._limit // 2 or held.total() > self._limit
            if (over and each in sizes) or len(self._kept) > KEPT:
                held[kept.owner] -= sizes.get(each, 0)
                del self._kept[each]

    def _use(self, grammar: Grammar, lexer: Lexer) -> None:
        lexer.used_s = self._clock()
        self._kept[grammar] = lexer
        self._kept.move_to_end(grammar)


class Followed(NamedTuple):
    text: MaskedText
    work: int  # units spent on its mask


class Advanced(NamedTuple):
    """A text, and the number of tokens that it has followed."""

    text: MaskedText
    read: int  # tokens
    account: int
    work: int  # units of its dearest mask
    why: str = ""  # the text cannot go on after these tokens, on this lexer


def advance(lexer: Lexer, text: MaskedText, tokens: Sequence[int], account: int) -> Advanced:
    """Follow the next tokens, at most SLICE of them or SLICE_WORK units."""
    dearest = work = 0
    for count, token in enumerate(tokens[:SLICE]):
        try:
            followed = lexer.follow(text, token, aside=True, last=count > 0)
        except CannotFollow as error:
            return Advanced(text, count, account, dearest, str(error))
        dearest, work = max(dearest, followed.work), work + followed.work
        if lexer.sole:
            account = min(FUEL, account + REFILL) - followed.work
        text = followed.text
        if account < 0 or not (lexer.sole or lexer.keeps_accounts(followed)):
            return Advanced(text, count + 1, account, dearest, TOO_DEAR)
        if work > SLICE_WORK:
            return Advanced(text, count + 1, account, dearest)
    return Advanced(text, len(tokens[:SLICE]), account, dearest)
