"""Exchange of contents between pairs of GPU tensors, each of which is read and written once.

One launch moves all pairs. Their places stand in a table, and programs that stay on the GPU take
the blocks of all pairs in turn, so that small tensors cost no launch and large ones leave no
program without work. A second launch moves the bytes that are no whole words, if there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 8
_ALIGNED = 16  # bytes of a vector access
_BLOCK = 1024  # elements of each tensor per block
_RESIDENT = 8  # programs per multiprocessor

Row = tuple[int, int, int]  # two addresses and a number of elements


@triton.jit(do_not_specialize=["blocks"])
def _swap(row_T4, blocks, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A row: where two tensors begin, in elements from the table; their elements; the first block
    of the next row. Integers are moved, so a NaN keeps its payload.
    """
    table = row_T4 if WORDS else row_T4.to(tl.pointer_type(tl.uint8))
    i_E = tl.arange(0, BLOCK)
    t = 0
    begin = tl.zeros((), tl.int64)
    end = tl.load(row_T4 + 3)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        while block >= end:
            begin = end
            t += 1
            end = tl.load(row_T4 + 4 * t + 3)
        one, other = tl.load(row_T4 + 4 * t), tl.load(row_T4 + 4 * t + 1)
        if WORDS:  # what follows from an address itself, the compiler does not see
            one, other = tl.multiple_of(one, 2), tl.multiple_of(other, 2)
        left = tl.load(row_T4 + 4 * t + 2) - (block - begin) * BLOCK
        one_E = table + one + (block - begin) * BLOCK + i_E
        other_E = table + other + (block - begin) * BLOCK + i_E
        if left >= BLOCK:  # no mask, because a mask would have to cover whole vectors
            mine_E, theirs_E = tl.load(one_E), tl.load(other_E)
            tl.store(one_E, theirs_E)
            tl.store(other_E, mine_E)
        else:
            mine_E, theirs_E = tl.load(one_E, i_E < left), tl.load(other_E, i_E < left)
            tl.store(one_E, theirs_E, i_E < left)
            tl.store(other_E, mine_E, i_E < left)


def swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchange the contents of each pair, on the current stream. The tensors of a pair are
    contiguous, of one shape and type; all are on one device, and no two share memory.
    """
    words, rest = list[Row](), list[Row]()
    for one, other in pairs:
        assert (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.is_contiguous()
            and other.is_contiguous()
        )
        mine, theirs = one.data_ptr(), other.data_ptr()
        whole = 0 if (mine | theirs) % _ALIGNED else one.nbytes // WORD_BYTES
        words.append((mine, theirs, whole))
        moved = whole * WORD_BYTES
        rest.append((mine + moved, theirs + moved, one.nbytes - moved))
    for rows, are_words in ((words, True), (rest, False)):
        if filled := [row for row in rows if row[2]]:
            _launch(filled, pairs[0][0].device, words=are_words)


def _launch(rows: list[Row], device: torch.device, *, words: bool) -> None:
    row_T4 = torch.empty(len(rows), 4, dtype=torch.int64, device=device)
    table, width, blocks = list[list[int]](), WORD_BYTES if words else 1, 0
    for *addresses, count in rows:
        blocks += triton.cdiv(count, _BLOCK)
        places = [(address - row_T4.data_ptr()) // width for address in addresses]
        table.append([*places, count, blocks])
    row_T4.copy_(torch.tensor(table))
    _swap[(min(blocks, _programs(device)),)](row_T4, blocks, WORDS=words, BLOCK=_BLOCK)


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return _RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
