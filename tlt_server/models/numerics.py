"""The two ways of matmuls: `strict` (a row's bits depend only on the row and the weights) or
`fast`.

A model owns one `Numerics` and sends every matmul through `linear`. Strict on a CPU is the first of
`METHODS` that keeps a row's bits in any company of rows, according to a self-test on the model's
weights. That depends on the library, the processor and whether `strict_environment()` was set in
time.

Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from copy import copy
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tlt_server.errors import StartupError
from tlt_server.models.split import folded

TESTED_ROWS = (1, 2, 3, 7, 16, 33, 64, 128, 300, 600)  # libraries change their kernel with the rows
# Multiply-adds, about 200 us: below, waking sleeping threads costs more than they bring.
WORTH_THREADS = 1 << 24
_LARGE = 1 << 22  # weights of a matmul from which on the self-test looks at fewer row counts

Mode = Literal["strict", "fast"]


def _by_torch(x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.mm(x_RK, weight_KN) if bias_N is None else torch.addmm(bias_N, x_RK, weight_KN)


def _by_onednn(x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply by oneDNN's inner product, which is fast for dense weights only. A slice of a wider
    weight is copied first; the copy takes a hundredth of the time of the slow kernel for slices.
    """
    weight_NK = weight_KN.t()
    if not (weight_KN.is_contiguous() or weight_NK.is_contiguous()):
        weight_NK = weight_NK.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_RK, weight_NK, bias_N, "none", [], "")


class MatmulMethod(NamedTuple):
    """A library's matmul, and the row counts that it is called with."""

    name: str
    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    min_rows: int = 1  # fewer are padded with zeros
    block: int = 0  # rows of every call, padded with zeros; 0: all rows in one call


# In order of preference. MKL's fixed-order modes hold for every row count on Intel's processors;
# on AMD's, MKL computes 1 to 3 rows by another kernel than more. oneDNN is faster on small matmuls,
# but keeps a kernel for every row count that it meets: 150 MB more in an engine of the shipped
# pair. On a processor with AVX-512 a matmul [1, 256] x [256, 768] took 19 us by oneDNN, 38 us by
# four rows of MKL, 84 us by a block.
BLOCKS = MatmulMethod("padded blocks of 16 rows", _by_torch, block=16)
METHODS = (
    MatmulMethod("library matmuls", _by_torch),
    MatmulMethod("library matmuls of at least 4 rows", _by_torch, min_rows=4),
    MatmulMethod("oneDNN's matmuls", _by_onednn),
    MatmulMethod("oneDNN's matmuls of at least 2 rows", _by_onednn, min_rows=2),
    BLOCKS,
)


class WeightSlice(NamedTuple):
    """A rank's slice of a wider weight."""

    weight_KN: Tensor
    widths: list[int]  # its parts, each a slice of a part of the wider weight
    ranks: int


class Numerics:
    def __init__(self, mode: Mode = "strict", *, threads: int | None = None) -> None:
        """`threads`: torch threads of a large matmul; None keeps the current setting."""
        if mode not in ("strict", "fast"):
            raise StartupError(f"numerics {mode!r} is not known; use 'strict' or 'fast'")
        self.mode, self.threads = mode, threads or torch.get_num_threads()
        self.method = METHODS[0]
        self.tested = 0  # weights that the self-test covered

    def linear(self, x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return `x @ weight (+ bias)`: [R, N]."""
        rows, method = len(x_RK), self.method
        if method.block:
            parts = pad(x_RK, (0, 0, 0, -rows % method.block)).split(method.block)
            return torch.cat([self._call(part, weight_KN, bias_N) for part in parts])[:rows]
        if rows < method.min_rows:
            padded_RK = pad(x_RK, (0, 0, 0, method.min_rows - rows))
            return self._call(padded_RK, weight_KN, bias_N)[:rows]
        return self._call(x_RK, weight_KN, bias_N)

    def sum_of_leaves(self, x_RK: Tensor, weight_KN: Tensor, leaves: int) -> Tensor:
        """Return `x @ weight`, [R, N], as the tree sum of the matmuls of `leaves` slices of K, the
        reduction segments.
        """
        if leaves == 1:
            return self.linear(x_RK, weight_KN)
        # A slice is copied, so that a leaf has the same memory layout at every width.
        slices = zip(x_RK.chunk(leaves, dim=1), weight_KN.chunk(leaves), strict=True)
        return folded([self.linear(x_RJ.contiguous(), w_JN) for x_RJ, w_JN in slices])

    def _call(self, x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None) -> Tensor:
        threads = 1 if len(x_RK) * weight_KN.numel() < WORTH_THREADS else self.threads
        before = torch.get_num_threads()
        if threads == before:
            return self.method.matmul(x_RK, weight_KN, bias_N)
        torch.set_num_threads(threads)
        try:
            return self.method.matmul(x_RK, weight_KN, bias_N)
        finally:
            torch.set_num_threads(before)

    def self_test(
        self, weights: Iterable[tuple[Tensor, Tensor | None]], slices: Iterable[WeightSlice] = ()
    ) -> None:
        """Choose the first method that is row-invariant on the model's own (weight_KN, bias_N) with
        any number of threads, and that gives a slice of a wider weight the bits of a dense copy;
        `StartupError` if there is none.
        """
        slices = list(slices)
        if self.mode == "fast":
            return
        distinct = {(w.shape, w.stride(), b is None): (w, b) for w, b in weights}
        self.tested = len(distinct)
        dependence = ""
        for self.method in METHODS:
            dependence = self._dependence(list(distinct.values()), slices)
            if not dependence:
                return
        raise StartupError(
            f"strict numerics: {dependence}, also in {BLOCKS.name}; set MKL_CBWR=AVX2,STRICT "
            "before the process starts, lower --threads, or choose numerics: fast (exact in "
            "distribution only)"
        )

    def _dependence(
        self, weights: Iterable[tuple[Tensor, Tensor | None]], slices: Iterable[WeightSlice]
    ) -> str:
        """Return a message about this method's first forbidden dependence; empty if there is
        none.
        """
        for weight_KN, bias_N in weights:
            matmul = f"the matmul by a weight of {list(weight_KN.shape)}"
            if not self._row_invariant(weight_KN, bias_N):
                return f"{matmul} depends on the rows around it"
            if not self._thread_invariant(weight_KN, bias_N):
                return f"{matmul} has other bits with {self.threads} threads than with 1"
        for cut in slices:
            if not self._slice_invariant(cut):
                shape = list(cut.weight_KN.shape)
                return f"the matmul by a weight of {shape} depends on the columns around it"
        return ""

    def _row_invariant(self, weight_KN: Tensor, bias_N: Tensor | None) -> bool:
        generator = torch.Generator().manual_seed(0)
        counts = (1, 2, 3, 7, 128) if weight_KN.numel() > _LARGE else TESTED_ROWS
        x_RK = torch.randn(max(counts) + 1, weight_KN.shape[0], generator=generator)
        try:
            expected_RN = self.linear(x_RK, weight_KN, bias_N)
        except (AttributeError, NotImplementedError):
            return False  # torch was built without this library
        for count in counts:
            for start in (0, len(x_RK) - count):
                found_RN = self.linear(x_RK[start : start + count], weight_KN, bias_N)
                if not torch.equal(found_RN, expected_RN[start : start + count]):
                    return False
        return True

    def _thread_invariant(self, weight_KN: Tensor, bias_N: Tensor | None) -> bool:
        """Compare with one thread: servers and ranks with any number of threads then have equal
        bits. Few rows take a tenth of the time of the other tests.
        """
        alone = copy(self)
        alone.threads = 1
        x_RK = torch.randn(4, len(weight_KN), generator=torch.Generator().manual_seed(2))
        own_RN = self.linear(x_RK, weight_KN, bias_N)
        return torch.equal(own_RN, alone.linear(x_RK, weight_KN, bias_N))

    def _slice_invariant(self, cut: WeightSlice) -> bool:
        """Compare the matmul of a slice with matmuls of its copies inside the wider weight, where
        the copies of each part are adjacent, as on a single rank.
        """
        weight_KN, widths, ranks = cut
        parts = weight_KN.split(widths, dim=1)
        wide_KX = torch.cat([part for part in parts for _ in range(ranks)], dim=1)
        generator = torch.Generator().manual_seed(1)
        x_RK = torch.randn(33, len(weight_KN), generator=generator)
        for count in (1, 3, len(x_RK)):
            own_RN = self.linear(x_RK[:count], weight_KN)
            expected = [own for own in own_RN.split(widths, dim=1) for _ in range(ranks)]
            if not torch.equal(self.linear(x_RK[:count], wide_KX), torch.cat(expected, dim=1)):
                return False
        return True

    def describe(self) -> str:
        """Return one line for start-up and `/server_info`."""
        if self.mode == "fast":
            return "fast: library matmuls as they come; exact in distribution, not bit for bit"
        library = f"MKL_CBWR={os.environ.get('MKL_CBWR', 'unset')}"
        return f"strict: {self.method.name} ({library}), self-test passed on {self.tested} shapes"
