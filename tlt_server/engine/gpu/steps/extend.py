"""The extend pass: a step's rows through the target, sampling, the walk, and the accepted KV.
Captured per key.

Plain decoding is the pass with one row per request; prompt rows follow. With drafts, rows are laid
out before the pass (`select`), because the number of candidate nodes depends on the draft; so all
depths share an extend graph.

Legend: V decode rows (of logits: vocabulary), P prompt rows, R = V + P, W prefill chunks, S = V + W
samples, B batch bucket, E = B + W entries, F fields, A entries with a report, N tokens of an entry,
K best tokens.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tlt_kernels.gpu.accept import accept, fields
from tlt_kernels.gpu.edits import count_emitted, count_text, edit
from tlt_kernels.gpu.gather import gather
from tlt_kernels.gpu.kept import commit_kv
from tlt_kernels.gpu.lora import AdapterRows, find_rows
from tlt_kernels.gpu.report import TokenScores, emitted, score
from tlt_kernels.gpu.rows import layout_prefill, select_rows
from tlt_kernels.gpu.sampling import sample
from tlt_kernels.gpu.structure import apply_masks
from tlt_kernels.gpu.tensors import KeptRows, Nodes, RowTable, Samples, Trees
from tlt_server.attention.gpu import GpuAttention
from tlt_server.engine.gpu.steps.drafts import DraftKey, RowReader
from tlt_server.engine.gpu.steps.head import SharedHead
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.models import Forward
from tlt_server.models.gpu.adapted import GpuAdaptedLayer
from tlt_server.models.gpu.layers import RowTensors


class ExtendKey(NamedTuple):
    """Static shapes of a pass. `filtered`: a request has top-k, top-p or min-p. `edited`: a request
    has penalties, biases or masked tokens. `structured`: the host fills a request's masks, so the
    pass has two halves. `adapted`: a request has a LoRA adapter.
    """

    batch: int
    decode_rows: int
    prompt_rows: int = 0
    chunks: int = 0
    filtered: bool = False
    edited: bool = False
    structured: bool = False
    adapted: bool = False

    @property
    def plain(self) -> bool:
        return self.decode_rows == self.batch


class SecondHalf(NamedTuple):
    """The key of a pass's second half among the captured graphs."""

    key: ExtendKey


def graphs_of(key: DraftKey | ExtendKey) -> list[DraftKey | ExtendKey | SecondHalf]:
    """Return the keys of the graphs that replay this pass."""
    if isinstance(key, ExtendKey) and key.structured:
        return [key, SecondHalf(key)]
    return [key]


def unrecorded(key: DraftKey | ExtendKey, graphs: Container[object]) -> int:
    """Return how many graphs of this pass are not captured yet."""
    return sum(graph not in graphs for graph in graphs_of(key))


class Report(NamedTuple):
    """Per entry with a report and per token that it emitted."""

    raw_logprob_AN: Tensor
    token_ANK: Tensor  # best first; -1 after the last one that filters keep
    logprob_ANK: Tensor


class Reported(NamedTuple):
    """The reports of a step that read logits gathered from all ranks."""

    tokens: bool = False  # log-probs of what it emits
    raw: bool = False  # raw ones, too
    prompts: tuple[tuple[int, int], ...] = ()  # the first row and the number of each piece


class Adapted(NamedTuple):
    """The rows of a pass with an adapter, and the adapter's addition to each layer."""

    rows: AdapterRows
    layers: list[GpuAdaptedLayer]


class Extend:
    """The pass of one key, with its buffers."""

    def __init__(
        self, key: ExtendKey, state: DeviceState, attention: GpuAttention, readers: list[RowReader]
    ) -> None:
        self.key, self.state, self._readers = key, state, readers
        rows, device = key.decode_rows + key.prompt_rows, state.upload_U.device.type
        assert rows <= len(state.hidden_RH), f"{key}: {rows} rows, {len(state.hidden_RH)} have room"
        self.rows = RowTable.allocate(rows, state.depth, device=device)
        self.trees = Trees.allocate(key.batch, key.chunks, key.decode_rows, device=device)
        self.kept = KeptRows.allocate(
            key.batch, key.chunks, key.decode_rows, key.prompt_rows, state.depth, device=device
        )
        self.outcome_EF = torch.empty(
            key.batch + key.chunks,
            fields(state.depth),
            dtype=torch.int32,
            device=state.upload_U.device,
        )
        self._adapted: Adapted | None = None
        if key.adapted:
            assert state.adapters is not None
            found = AdapterRows.allocate(state.adapters.count, rows, device=device)
            self._adapted = Adapted(found, state.adapters.of_rows(found))
        self.attend = attention.planned(rows, requests=key.batch, prompt_rows=key.prompt_rows)

    def select(self, nodes: Nodes | None, own_columns: int | None = None) -> None:
        """Lay out the decode rows: every live root and the nodes most likely to be accepted.
        Branches begin at column `own_columns`.
        """
        state, key = self.state, self.key
        select_rows(
            state.batch_slot_B(key.batch),
            state.batch_slots,
            nodes,
            self.rows,
            self.trees,
            self.kept,
            decode_rows=key.decode_rows,
            scratch_start=state.kv_slots.start,
            trash=state.kv_slots.trash,
            own_columns=own_columns,
        )

    def run(self) -> None:
        """Run the whole pass, or its first half. Hidden states and logits of the samples stay valid
        after it.
        """
        forwarded = self.forward()
        if self._head is not None:
            self.finish(forwarded, self._shared_samples(self._head))
            return
        logits_SV = self.logits()
        if self.key.edited:
            count_text(self.state.batch_slots)
            edit(logits_SV, self.trees.sample_row_S, self.rows, self.state.batch_slots)
        self._end_run(forwarded, logits_SV)

    def _end_run(self, forwarded: Forward, logits_SV: Tensor) -> None:
        self.finish(forwarded, self.sample(logits_SV))

    def forward(self) -> Forward:
        """Run the target over all rows."""
        state, key, rows = self.state, self.key, self.rows
        if key.plain:
            self.select(None)
        if key.prompt_rows:
            layout_prefill(
                state.layout.chunks_W(state.upload_U, key.chunks),
                state.batch_slots,
                rows,
                self.trees,
                self.kept,
                requests=key.batch,
                decode_rows=key.decode_rows,
                prefill_rows=key.prompt_rows,
                trash=state.kv_slots.trash,
            )
        self.attend.plan(rows, state.batch_slots.page_table_QP)
        if self._adapted is not None:
            find_rows(rows, state.batch_slots.adapter_Q, self._adapted.rows)
        return state.model.forward(
            RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R),
            state.cache,
            self.attend,
            self._hidden_RH,
            self._adapted.layers if self._adapted else None,
        )

    @property
    def _hidden_RH(self) -> Tensor:
        return self.state.hidden_RH[: len(self.rows.token_R)]

    @property
    def _head(self) -> SharedHead | None:
        """Return the head that samples in the ranks' blocks; None if this pass needs all logits."""
        key = self.key
        return None if key.filtered or key.edited or key.structured else self.state.head

    def _shared_samples(self, head: SharedHead) -> Samples:
        state, row_S = self.state, self.trees.sample_row_S
        return head.sample(
            state.model, self._hidden_SH(), self._logits_SV, row_S, self.rows, state.batch_slots
        )

    def _hidden_SH(self) -> Tensor:
        hidden_RH = self._hidden_RH
        return gather(hidden_RH, self.trees.sample_row_S) if self.key.prompt_rows else hidden_RH

    def logits(self) -> Tensor:
        """Return the logits of the samples, [S, V] fp32, valid until the next pass runs."""
        return self.state.logits(self._hidden_SH(), self._logits_SV)

    @property
    def _logits_SV(self) -> Tensor:
        return self.state.logits_SV[: self.key.decode_rows + self.key.chunks]

    def sample(self, logits_SV: Tensor) -> Samples:
        return sample(
            logits_SV,
            self.trees.sample_row_S,
            self.rows,
            self.state.batch_slots,
            filtered=self.key.filtered,
        )

    def report(self, entry_A: Tensor, best: int, *, raw: bool) -> Report:
        """Return details of the tokens that these entries emitted; `raw`: raw log-probs are needed.
        Call it once, after this pass and before the next: raw logits replace edited ones.
        """
        if self._head is not None:
            self.logits()
        sample_AN, row_S, token_S = emitted(entry_A, self.outcome_EF, self.trees, self.kept)
        logits_SV = self.state.logits_SV[: len(row_S)]
        rows, batch_slots = self.rows, self.state.batch_slots
        scored = score(
            logits_SV, row_S, token_S, rows, batch_slots, filtered=self.key.filtered, best=best
        )
        if raw and self._edits:
            again = score(self.logits(), row_S, token_S, rows, batch_slots, filtered=False, best=0)
            scored = scored._replace(raw_logprob_S=again.raw_logprob_S)
        return Report(*(values_S[sample_AN] for values_S in scored))

    def score_prompt(self, first: int, count: int, best: int) -> TokenScores:
        """Score the known tokens after rows [first, first + count), at most SCORED, under the raw
        distribution. Call it after `report` and before the next pass: it overwrites the step's
        logits. The result is padded to a power of two.
        """
        rows, batch_slots = self.rows, self.state.batch_slots
        logits_SV = self._prompt_logits(first, count)
        size = len(logits_SV)
        row_S = torch.arange(first, first + size, dtype=torch.int32, device=logits_SV.device)
        row_S[min(count, len(rows.token_R) - first) :] = -1  # a rehearsal has fewer rows
        at_S = row_S.clamp(min=0)
        token_S = batch_slots.token_QT[rows.batch_slot_R[at_S], rows.position_R[at_S] + 1]
        unscaled = batch_slots._replace(temperature_Q=torch.ones_like(batch_slots.temperature_Q))
        return score(logits_SV, row_S, token_S, rows, unscaled, filtered=False, best=best)

    def _prompt_logits(self, first: int, count: int) -> Tensor:
        state, size = self.state, triton.next_power_of_2(count)
        return state.logits(state.hidden_RH[first : first + size], state.logits_SV[:size])

    def follow_reports(self, reported: Reported) -> None:
        """Gather the logits that `report` and `score_prompt` read on rank 0."""
        if reported.tokens and self._head is not None:
            self.logits()
        if reported.raw and self._edits:
            self.logits()
        for first, count in reported.prompts:
            self._prompt_logits(first, count)
        self.end_reports(reported)

    def end_reports(self, reported: Reported) -> None:
        """Report to rank 0 whether a wait for a rank ran out of time during these reports."""
        if self.state.agreement is not None and reported != Reported():
            self.state.agreement.gather_again()

    @property
    def _edits(self) -> bool:
        """Return True if the pass samples from edited logits."""
        return self.key.edited or self.key.structured

    def finish(self, forwarded: Forward, sampled: Samples) -> None:
        """Walk, truncate and append; keep the KV of accepted rows. Readers read the rows'
        states.
        """
        state, key = self.state, self.key
        chunks = state.layout.chunks_W(state.upload_U, key.chunks) if key.chunks else None
        accept(
            state.batch_slot_B(key.batch),
            chunks,
            sampled,
            state.batch_slots,
            self.rows,
            self.trees,
            self.kept,
            self.outcome_EF,
            decode_rows=key.decode_rows,
        )
        if key.edited:
            count_emitted(state.batch_slot_B(key.batch), chunks, state.batch_slots, self.outcome_EF)
        commit_kv(self.kept, state.cache.k, state.cache.v, state.cache.scale)
        for reader in self._readers:
            reader.read_rows(self.rows, self.kept, forwarded)
        if state.agreement is not None:
            state.agreement.add(forwarded.hidden_RH, self.rows, self.outcome_EF)


class StructuredExtend(Extend):
    """A pass of two halves; the host fills the masks of its samples in between."""

    def __init__(
        self, key: ExtendKey, state: DeviceState, attention: GpuAttention, readers: list[RowReader]
    ) -> None:
        super().__init__(key, state, attention, readers)
        # A capture must not make them: each replay would lift all masks again.
        self._masks, model = state.masks, state.model
        self._features_RF = model.placement.empty(len(self.rows.token_R), model.feature_width)

    def _end_run(self, forwarded: Forward, logits_SV: Tensor) -> None:
        self._features_RF.copy_(forwarded.features_RF)

    def run_second(self) -> None:
        """Run the second half; the masks are uploaded."""
        logits_SV, trees = self._logits_SV, self.trees
        apply_masks(logits_SV, trees.sample_row_S, self._masks, self.rows.token_R, trees.count_E)
        self.finish(Forward(self._hidden_RH, self._features_RF), self.sample(logits_SV))
