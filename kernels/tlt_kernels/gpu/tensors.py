"""The tensors that the kernels of a step share: one NamedTuple per group, all of static size, all
on the device.

Tensors are int32 unless a comment says otherwise. An index of -1 means none. A dead row has
position -1, the idle batch slot, the trash KV slot and base 0.

Legend: Q batch slots (the last one is idle), T tokens, P pages per batch slot, K stop ids, H
hidden, R rows, V decode rows (the first of R), X draft rows, D longest path, B requests of the
batch, W prefill chunks, E = B + W entries, S = V + W samples, C nodes per request, N = B * C nodes,
Z calibration cells, V vocabulary for token counts, L listed tokens, F filters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tlt_kernels.filters import NO_FILTERS, Filters

PAGE_SIZE = 16
IN_PROMPT = 2**30  # added to a token's count where the prompt holds it
ALLOWED = 2**29  # likewise where the sequence may sample it, if it may not sample all


class BatchSlots(NamedTuple):
    """The device state of sequences, one row each. A batch slot whose sequence has ended keeps its
    text until the next sequence starts there, because siblings draft from it. `token_QT`,
    `length_Q`, `group_Q` and `first_Q` have extra rows after the idle one, only for texts.
    """

    token_QT: Tensor  # prompt + output
    length_Q: Tensor  # tokens known
    limit_Q: Tensor  # prompt + max_tokens
    capacity_Q: Tensor  # positions that the reserved pages hold
    page_table_QP: Tensor
    seed_Q: Tensor  # int64, bits of a uint64
    temperature_Q: Tensor  # float32
    filters_QF: Tensor  # words of `Filters`
    stop_QK: Tensor  # stop ids, -1 padded
    done_Q: Tensor
    drafters_Q: Tensor  # bit d: drafter d may draft; 0: never speculated on
    max_depth_Q: Tensor  # tokens of a draft path
    max_rows_Q: Tensor  # verified in a step, the root included
    group_Q: Tensor  # sequences that may draft from each other's text; -1 none
    first_Q: Tensor  # position from which on they do: the prompt, which they share, is left out
    hint_QH: Tensor  # activation dtype: the drafter's fused feature of the last position computed
    repetition_Q: Tensor  # float32 penalty; 1 = none
    presence_Q: Tensor  # float32 penalty; 0 = none
    frequency_Q: Tensor  # float32 penalty; 0 = none
    prompt_Q: Tensor  # tokens of the prompt
    masked_to_Q: Tensor  # first position at which the masked tokens are allowed
    biases_Q: Tensor  # listed tokens with a bias, the first of listed_QL
    masks_Q: Tensor  # masked tokens, which follow them
    allowed_Q: Tensor  # the only tokens to sample, which follow those; 0: all may be sampled
    listed_QL: Tensor
    bias_QL: Tensor  # float32
    uncounted_Q: Tensor  # 1 = count_QV has not been made from the text and the lists
    adapter_Q: Tensor  # slot of its LoRA adapter; -1 none
    count_QV: Tensor  # occurrences in the output, IN_PROMPT and ALLOWED

    @property
    def idle(self) -> int:
        return self.done_Q.shape[0] - 1

    @staticmethod
    def allocate(
        batch_slots: int,
        tokens: int,
        *,
        hidden: int,
        texts: int = 0,
        stops: int = 8,
        listed: int = 1,
        vocabulary: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> BatchSlots:
        """Return empty batch slots. `batch_slots` includes the idle one."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def none(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        f, q = torch.float32, batch_slots
        return BatchSlots(
            token_QT=zeros(q + texts, tokens),
            length_Q=zeros(q + texts),
            limit_Q=zeros(q),
            capacity_Q=zeros(q),
            page_table_QP=zeros(q, -(-tokens // PAGE_SIZE)),
            seed_Q=zeros(q, dtype=torch.int64),
            temperature_Q=zeros(q, dtype=f),
            filters_QF=filters_table(NO_FILTERS, q, device),
            stop_QK=none(q, stops),
            done_Q=torch.ones(q, dtype=torch.int32, device=device),
            drafters_Q=zeros(q),
            max_depth_Q=zeros(q),
            max_rows_Q=zeros(q),
            group_Q=none(q + texts),
            first_Q=zeros(q + texts),
            hint_QH=zeros(q, hidden, dtype=dtype),
            repetition_Q=torch.ones(q, dtype=f, device=device),
            presence_Q=zeros(q, dtype=f),
            frequency_Q=zeros(q, dtype=f),
            prompt_Q=zeros(q),
            masked_to_Q=zeros(q),
            biases_Q=zeros(q),
            masks_Q=zeros(q),
            allowed_Q=zeros(q),
            listed_QL=zeros(q, listed),
            bias_QL=zeros(q, listed, dtype=f),
            uncounted_Q=zeros(q),
            adapter_Q=none(q),
            count_QV=zeros(q, vocabulary),
        )


def filters_table(
    filters: Filters, batch_slots: int, device: str | torch.device = "cuda"
) -> Tensor:
    """Return the words of these filters for all batch slots; nothing is copied from the host."""
    words = filters.words().tolist()
    table_QF = torch.empty((batch_slots, len(words)), dtype=torch.int32, device=device)
    for f, word in enumerate(words):
        table_QF[:, f] = word
    return table_QF


class PrefillChunks(NamedTuple):
    """The prompt positions that a step reads. A chunk with a count of 0 is empty."""

    batch_slot_W: Tensor
    start_W: Tensor  # first position
    count_W: Tensor


class RowTable(NamedTuple):
    """Rows of an extend. Key position p of row r is in the pages of batch_slot_R[r] for p <
    base_R[r], else at path_RD[r, p - base_R[r]].
    """

    token_R: Tensor
    position_R: Tensor  # -1 = dead
    kv_slot_R: Tensor  # where the row's own KV goes
    batch_slot_R: Tensor
    base_R: Tensor
    path_RD: Tensor  # KV slots of the in-flight ancestors and of the row itself, root side first
    parent_R: Tensor  # row of the position before, in this step

    def part(self, first: int, count: int) -> RowTable:
        """Return views of rows [first, first + count). `parent_R` keeps counting from the start of
        the whole.
        """
        return RowTable._make(t[first : first + count] for t in self)

    @staticmethod
    def allocate(rows: int, depth: int, *, device: str = "cuda") -> RowTable:
        def none(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return RowTable(
            none(rows),
            none(rows),
            none(rows),
            none(rows),
            none(rows),
            none(rows, max(depth, 1)),
            none(rows),
        )


class Nodes(NamedTuple):
    """Draft trees: one table of C columns per request, parents in lower columns than their
    children.
    """

    parent_BC: Tensor  # column; -1 = the root
    token_BC: Tensor
    depth_BC: Tensor  # 1 = child of the root
    cell_BC: Tensor  # index into the calibration table
    source_BC: Tensor  # draft row whose hidden state predicted the node
    kv_slot_BC: Tensor  # where its KV lies in the drafter's cache; -1 = not expanded
    acceptance_BC: Tensor  # float32; never above the parent's; -1 = no node in this column

    def head(self, requests: int) -> Nodes:
        """Return views of the first requests."""
        return Nodes._make(t[:requests] for t in self)

    @staticmethod
    def allocate(requests: int, columns: int, *, device: str = "cuda") -> Nodes:
        def none(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((requests, columns), -1, dtype=dtype, device=device)

        return Nodes(none(), none(), none(), none(), none(), none(), none(torch.float32))


class Draft(NamedTuple):
    """Rows of a draft graph, all levels: level 0 = rows [0, B), level l > 0 = rows [B + (l - 1) B
    width, B + l B width).

    `source_X`: the source of the row's feature g. On level 0 it is a batch slot (its `hint_QH`),
    later a draft row's hidden state.
    """

    rows: RowTable
    source_X: Tensor
    node_X: Tensor  # column of the node that the row expands; -1 = the root
    acceptance_X: Tensor  # float32, of that node; 1 for a root, -1 for a dead row
    root_position_B: Tensor
    limit_B: Tensor  # deepest draft token that is of use; 0 = none

    @staticmethod
    def size(requests: int, depth: int, width: int) -> int:
        """Return the draft rows of a graph."""
        return requests + max(depth - 1, 0) * requests * width

    @staticmethod
    def level(requests: int, width: int, level: int) -> tuple[int, int]:
        """Return (first row, rows) of a level."""
        return (
            (0, requests)
            if level == 0
            else (requests + (level - 1) * requests * width, requests * width)
        )

    @staticmethod
    def allocate(requests: int, depth: int, width: int, *, device: str = "cuda") -> Draft:
        count = Draft.size(requests, depth, width)

        def none(size: int) -> Tensor:
            return torch.full((size,), -1, dtype=torch.int32, device=device)

        return Draft(
            RowTable.allocate(count, depth, device=device),
            none(count),
            none(count),
            torch.full((count,), -1.0, device=device),
            none(requests),
            none(requests),
        )


class Trees(NamedTuple):
    """The trees to verify. Entry e < B is request e of the batch; entry B + w is prefill chunk w, a
    tree of its last row alone.
    """

    root_E: Tensor  # row
    count_E: Tensor  # rows from the root on; 0 = nothing
    node_V: Tensor  # per decode row request * C + column of its node; -1 = root or dead
    own_V: Tensor  # per draft row: 1 = a node of the drafter's own, 0 = of a branch
    # Row whose logits a sample needs: sample v < V is decode row v, V + w the last row of chunk w.
    sample_row_S: Tensor

    @staticmethod
    def allocate(requests: int, chunks: int, decode_rows: int, *, device: str = "cuda") -> Trees:
        entries, samples = requests + chunks, decode_rows + chunks
        sizes = entries, entries, decode_rows, decode_rows, samples
        return Trees(*(torch.full((size,), -1, dtype=torch.int32, device=device) for size in sizes))


class KeptRows(NamedTuple):
    """The rows of an extend that later steps need: KV to move to its pages, and features to read
    again.
    """

    on_path_V: Tensor  # 1 = on the walk (also after a stop id) of an entry that is not broken
    count_B: Tensor  # accepted draft rows that become text
    source_BD: Tensor  # KV slots of those rows, in path order
    target_BD: Tensor  # KV slots that their KV moves to
    hint_row_E: Tensor  # last row that became text; -1 = none
    hint_batch_slot_E: Tensor
    page_R: Tensor  # page that this kept row fills; -1 = none

    @staticmethod
    def allocate(
        requests: int,
        chunks: int,
        decode_rows: int,
        prefill_rows: int,
        depth: int,
        *,
        device: str = "cuda",
    ) -> KeptRows:
        def none(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        entries, depth = requests + chunks, max(depth, 1)
        return KeptRows(
            none(decode_rows),
            none(requests),
            none(requests, depth),
            none(requests, depth),
            none(entries),
            none(entries),
            none(decode_rows + prefill_rows),
        )


class Samples(NamedTuple):
    """The target's samples, in the order of `Trees.sample_row_S`."""

    token_S: Tensor
    logprob_S: Tensor  # float32, under the processed distribution


class CalibrationTable(NamedTuple):
    """Probabilities that a node is on the path if its parent is: a prior, corrected by verification
    results.
    """

    prior_Z: Tensor  # float32
    acceptance_Z: Tensor  # float32, active
    hits_Z: Tensor
    trials_Z: Tensor

    @staticmethod
    def of(prior_Z: Tensor) -> CalibrationTable:
        """Return a table with no observations. The prior lies in [0, 1]."""
        prior_Z = prior_Z.float().contiguous()
        hits_Z, trials_Z = (torch.zeros_like(prior_Z, dtype=torch.int32) for _ in range(2))
        return CalibrationTable(prior_Z, prior_Z.clone(), hits_Z, trials_Z)
