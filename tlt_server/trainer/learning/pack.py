"""Packs: documents in a static budget of slots, so that shapes never change.

A document of T tokens has slots 1 .. T-1. Its positions count from its start; it attends only to
itself (`Pack.bounds`), and prompt tokens have no weight. The unused end of a pack is slots of no
weight.

A document with more slots than the budget is cut into windows of the budget's size. Every root
belongs to exactly one window, which also has the tokens of all its unrolled steps. Before its first
root a window has a quarter of the budget as context, so windows overlap. Positions in a window are
the document's.

The same assembly pads: a placed document may get more slots than it has, for a comparison of padded
batches with packs.

Legend: T tokens, N slots, F feature width, H hidden.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tlt_server.errors import InvalidRequest
from tlt_server.trainer.learning.objectives import pair

CONTEXT = 4  # a window's context is the budget divided by this
SMALL = ("token_N", "position_N", "root_N", "counted_N", "left_N")  # a pack's tensors but states


class DocumentPart(NamedTuple):
    """Consecutive tokens of a document with the target's states."""

    tokens_T: Tensor  # int64
    features_TF: Tensor  # inputs of the drafter's feature layers, side by side
    hidden_TH: Tensor  # last hidden state, after the final norm
    counted_T: Tensor  # bool: is the token of the response?


class DocumentSource(Protocol):
    """Documents of one target version; the features may come from anywhere."""

    @property
    def lengths(self) -> Sequence[int]:
        """Return the number of tokens of each document."""
        ...

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        """Return tokens [start, stop) of a document."""
        ...


class Window(NamedTuple):
    """Tokens [start, stop) of a document, of which positions [first, end) are roots."""

    document: int
    start: int
    stop: int
    first: int
    end: int

    @property
    def slots(self) -> int:
        return self.stop - self.start - 1


class Placed(NamedTuple):
    window: Window
    width: int  # slots that it is given, at least its own


@dataclass(frozen=True)
class Pack:
    token_N: Tensor  # int64
    position_N: Tensor  # int64
    feature_NF: Tensor
    teacher_NH: Tensor
    root_N: Tensor  # float32, weight of a slot as a root
    counted_N: Tensor  # bool
    left_N: Tensor  # int64: slots of the same document that follow
    bounds: tuple[int, ...]  # first slot of each document, and the end of the last
    roots: tuple[tuple[int, int], ...]  # spans of slots outside of which `root_N` is 0
    tokens: int  # tokens that carry weight

    def __len__(self) -> int:
        return len(self.token_N)

    def first_queries(self) -> tuple[int, ...]:
        """Return the first slot of each document with a query: its first root, or the last slot of
        a document without roots. Earlier slots are only attended to.
        """
        firsts = []
        for start, end in zip(self.bounds, self.bounds[1:], strict=False):
            own = [max(first, start) for first, stop in self.roots if first < end and stop > start]
            firsts.append(min(own, default=end - 1))
        return tuple(firsts)

    def pinned(self) -> Pack:
        """Copy into pinned memory, from which a GPU copies at full speed."""
        names = (*SMALL, "feature_NF", "teacher_NH")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

    def to(self, device: torch.device, dtype: torch.dtype) -> Pack:
        """Copy to a device, with features and hidden states in `dtype`."""
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in SMALL}
        return replace(
            self,
            **tensors,
            feature_NF=self.feature_NF.to(device, dtype, non_blocking=True),
            teacher_NH=self.teacher_NH.to(device, dtype, non_blocking=True),
        )


def windows(document: int, length: int, budget: int, steps: int) -> Iterator[Window]:
    """Cut a document of `length` tokens into windows of at most `budget` slots for `steps` unrolled
    steps. A document without roots has none.
    """
    if length < 3:
        return  # a root needs a token before it and one after it
    context = budget // CONTEXT
    if budget <= context + steps:
        raise InvalidRequest(
            f"a pack of {budget} slots is too small for {steps} unrolled steps and {context} slots "
            f"of context; use at least {CONTEXT * steps}"
        )
    start, first = 0, 1
    while True:
        stop = min(start + budget + 1, length)
        if stop == length:
            yield Window(document, start, stop, first, length)
            return
        end = stop - steps  # the last root whose steps all have their token here
        yield Window(document, start, stop, first, end)
        start, first = end - 1 - context, end


def fit(pieces: Sequence[Window], budget: int) -> list[list[Placed]]:
    """Put windows into packs of `budget` slots, each into the fullest pack with room. Packs of
    long-tailed lengths are full to within a few per cent.
    """
    bins: list[list[Placed]] = []
    room: list[tuple[int, int]] = []  # (free slots, bin), ascending
    for window in pieces:
        at = bisect_left(room, (window.slots, -1))
        if at == len(room):
            bins.append([])
            free, into = budget, len(bins) - 1
        else:
            free, into = room.pop(at)
        bins[into].append(Placed(window, window.slots))
        insort(room, (free - window.slots, into))
    return bins


def assemble(source: DocumentSource, placed: Sequence[Placed], slots: int) -> Pack:
    """Read the documents and lay them out in `slots` slots, on the host."""
    tokens_N = torch.zeros(slots, dtype=torch.int64)
    position_N, left_N = torch.zeros_like(tokens_N), torch.zeros_like(tokens_N)
    root_N, counted_N = torch.zeros(slots), torch.zeros(slots, dtype=torch.bool)
    feature_NF = teacher_NH = torch.empty(0)
    bounds: list[int] = []
    roots: list[tuple[int, int]] = []
    tokens = at = 0
    for (document, start, stop, first, end), width in placed:
        piece = source.read(document, start, stop)
        pairs = pair(*piece)
        own = slice(at, at + stop - start - 1)
        if not bounds:
            feature_NF, teacher_NH = (
                torch.zeros(slots, x.shape[1], dtype=x.dtype) for x in piece[1:3]
            )
        tokens_N[own], feature_NF[own], teacher_NH[own], counted_N[own] = pairs
        position_N[own] = torch.arange(start + 1, stop)
        left_N[own] = torch.arange(stop - start - 2, -1, -1)
        span = (at + first - start - 1, at + end - start - 1)
        root_N[slice(*span)] = counted_N[slice(*span)].float()
        weighing = root_N[slice(*span)].nonzero()[:, 0]
        if len(weighing):
            roots.append((span[0] + int(weighing[0]), span[0] + int(weighing[-1]) + 1))
        tokens += len(weighing)
        bounds.append(at)
        at += width
    assert at <= slots, f"{at} slots are placed in a pack of {slots}"
    if at < slots:
        bounds.append(at)
    return Pack(
        tokens_N,
        position_N,
        feature_NF,
        teacher_NH,
        root_N,
        counted_N,
        left_N,
        (*bounds, slots),
        tuple(roots),
        tokens,
    )


class Cursor(NamedTuple):
    """A position in the endless sequence of epochs."""

    epoch: int = 0
    pack: int = 0


class Packer:
    """Yields every window of a source once per epoch. The order depends only on seed and epoch, so
    a cursor suffices to resume.
    """

    def __init__(self, source: DocumentSource, budget: int, steps: int, seed: int = 0) -> None:
        self.source, self.budget, self.seed = source, budget, seed
        self._windows = [
            window
            for document, length in enumerate(source.lengths)
            for window in windows(document, length, budget, steps)
        ]
        if not self._windows:
            raise InvalidRequest(
                f"all {len(source.lengths)} documents have fewer than three tokens; training "
                "needs a longer one"
            )
        self._planned: tuple[int, list[list[Placed]]] = (-1, [])

    def plan(self, epoch: int) -> list[list[Placed]]:
        """Return the packs of an epoch."""
        planned = self._planned  # another thread may put the next epoch in its place
        if planned[0] != epoch:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self._windows), generator=random).tolist()
            packs = fit([self._windows[i] for i in order], self.budget)
            mixed = torch.randperm(len(packs), generator=random).tolist()
            planned = self._planned = epoch, [packs[i] for i in mixed]
        return planned[1]

    def next(self, cursor: Cursor) -> tuple[Pack, Cursor]:
        """Return the pack at a cursor, and the next cursor."""
        packs = self.plan(cursor.epoch)
        pack = assemble(self.source, packs[cursor.pack], self.budget)
        last = cursor.pack + 1 == len(packs)
        after = Cursor(cursor.epoch + 1, 0) if last else Cursor(cursor.epoch, cursor.pack + 1)
        return pack, after


class PacksAhead:
    """The packs of a `Packer`, on a device. On a GPU a thread reads the next pack during a step: at
    a 7B model's shapes a pack has 58 MB of states, and reading them may take as long as a step of
    EAGLE. A CPU needs its processors for the step. Leaving the `with` waits for the thread.
    """

    def __init__(
        self, packer: Packer, device: torch.device, dtype: torch.dtype, *, ahead: bool | None = None
    ) -> None:
        """`ahead`: read in a thread; None: only on a GPU."""
        self._packer, self._device, self._dtype = packer, device, dtype
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._thread = ThreadPoolExecutor(1, "packs")
        self._coming: tuple[Cursor, Future[tuple[Pack, Cursor]]] | None = None

    def __enter__(self) -> PacksAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    def next(self, cursor: Cursor) -> tuple[Pack, Cursor]:
        """Return the pack at a cursor, and the next cursor."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == cursor:
            pack, after = coming[1].result()
        else:
            pack, after = self._read(cursor)
        if self._ahead:
            self._coming = after, self._thread.submit(self._read, after)
        return pack.to(self._device, self._dtype), after

    def _read(self, cursor: Cursor) -> tuple[Pack, Cursor]:
        pack, after = self._packer.next(cursor)
        return pack.pinned() if self._device.type == "cuda" else pack, after
