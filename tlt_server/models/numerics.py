"""How matmuls are computed: `strict` (a row's bits depend on the row and the weights only)
or `fast`.

A model owns one `Numerics` and sends every matmul through `linear`. Strict on a CPU is the
library's own matmul, made row-invariant by `strict_environment()`; where the self-test finds that
it is not (another library, another processor, the variable set too late), rows go in zero-padded
blocks of 16 with a pinned thread count, tested likewise.

Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from tlt_server.errors import StartupError

BLOCK = 16  # rows of a padded block
TESTED_ROWS = (
    1,
    2,
    7,
    16,
    33,
    64,
    128,
    300,
    600,
)  # libraries change their method with the row count
WORTH_THREADS = (
    1 << 24
)  # multiply-adds, about 200 us: below, waking sleeping threads costs more than they bring
_LARGE = 1 << 22  # weights of a matmul from which on the self-test looks at fewer row counts

Mode = Literal["strict", "fast"]


class Numerics:
    def __init__(self, mode: Mode = "strict", *, threads: int | None = None) -> None:
        """`threads`: torch threads of a large matmul, and of every padded block; None takes what
        is set now.
        """
        if mode not in ("strict", "fast"):
            raise StartupError(f"numerics {mode!r} is not known; use 'strict' or 'fast'")
        self.mode, self.threads = mode, threads or torch.get_num_threads()
        self.padded = False
        self.tested = 0  # matmuls that the self-test covered

    def linear(self, x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`x @ weight (+ bias)`: [R, N]."""
        if self.padded:
            return self._padded(x_RK, weight_KN, bias_N)
        if self.threads == 1 or len(x_RK) * weight_KN.numel() >= WORTH_THREADS:
            return _matmul(x_RK, weight_KN, bias_N)
        torch.set_num_threads(1)
        out_RN = _matmul(x_RK, weight_KN, bias_N)
        torch.set_num_threads(self.threads)
        return out_RN

    def _padded(self, x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None) -> Tensor:
        rows = x_RK.shape[0]
        before = torch.get_num_threads()
        if before != self.threads:
            torch.set_num_threads(self.threads)
        padded_RK = torch.nn.functional.pad(x_RK, (0, 0, 0, -rows % BLOCK))
        out_RN = torch.cat([torch.mm(block_RK, weight_KN) for block_RK in padded_RK.split(BLOCK)])[
            :rows
        ]
        if before != self.threads:
            torch.set_num_threads(before)
        return out_RN if bias_N is None else out_RN + bias_N

    def self_test(self, matmuls: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Check row invariance on the model's own (weight_KN, bias_N); fall back to padded blocks,
        or raise `StartupError`.
        """
        if self.mode == "fast":
            return
        distinct = {(w.shape, w.stride(), b is None): (w, b) for w, b in matmuls}
        self.tested = len(distinct)
        for padded in (False, True):
            self.padded = padded
            broken = [
                weight_KN.shape
                for weight_KN, bias_N in distinct.values()
                if not self._row_invariant(weight_KN, bias_N)
            ]
            if not broken:
                return
        raise StartupError(
            f"strict numerics: the matmul by a weight of {list(broken[0])} depends on the rows around it, also in blocks of {BLOCK} rows; "
            "set MKL_CBWR=AVX2,STRICT before the process starts, or choose numerics: fast (exact in distribution only)"
        )

    def _row_invariant(self, weight_KN: Tensor, bias_N: Tensor | None) -> bool:
        generator = torch.Generator().manual_seed(0)
        counts = (1, 2, 7, 128) if weight_KN.numel() > _LARGE else TESTED_ROWS
        x_RK = torch.randn(max(counts) + 1, weight_KN.shape[0], generator=generator)
        expected_RN = self.linear(x_RK, weight_KN, bias_N)
        for count in counts:
            for start in (0, len(x_RK) - count):
                if not torch.equal(
                    self.linear(x_RK[start : start + count], weight_KN, bias_N),
                    expected_RN[start : start + count],
                ):
                    return False
        return True

    def describe(self) -> str:
        """One line for start-up and `/server_info`."""
        if self.mode == "fast":
            return "fast: library products as they come; exact in distribution, not bit for bit"
        library = f"MKL_CBWR={os.environ.get('MKL_CBWR', 'unset')}"
        how = (
            f"padded blocks of {BLOCK} rows, {self.threads} threads pinned"
            if self.padded
            else "library products"
        )
        return f"strict: {how} ({library}), self-test passed on {self.tested} shapes"


def _matmul(x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.mm(x_RK, weight_KN) if bias_N is None else torch.addmm(bias_N, x_RK, weight_KN)
