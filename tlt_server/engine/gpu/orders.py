"""Orders to the worker ranks of a GPU engine: everything that rank 0's runner gives its device.

`engine/ranks/orders.py` describes how they travel. A rank launches the named work at once. All
ranks make equal trees and tokens, because their inputs have equal bits.
"""

from __future__ import annotations

from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, Reported
from tlt_server.engine.ranks.orders import Array, RankOrder


class ReportMemory(RankOrder, frozen=True):
    """Answer with the free and total bytes of the GPU."""


class Equip(RankOrder, frozen=True):
    """Create state, drafters and passes, and prepare these steps."""

    pages_per_sequence: int
    drafts: list[DraftKey]
    extends: list[ExtendKey]


class Begin(RankOrder, frozen=True):
    """Start exchanging: every rank is prepared and quiet."""


class UploadWords(RankOrder, frozen=True):
    """Copy these words to the beginning of the upload buffer."""

    word_U: Array


class TakeOver(RankOrder, frozen=True):
    """Apply the upload early, when it is too small for all of a step's changes."""


class RunStep(RankOrder, frozen=True):
    """Draft, verify, learn, and gather the logits to report. If masks are pending, run only the
    first half of the pass.
    """

    draft: DraftKey | None
    capped: bool
    extend: ExtendKey
    learns: bool
    reported: Reported = Reported()


class FinishStep(RankOrder, frozen=True):
    """Run the second half of the step with these masks."""

    word_M: Array
    step: RunStep


class RecordStep(RankOrder, frozen=True):
    """Capture a step of this key, if this rank has the memory; launches nothing."""

    draft: DraftKey | None
    extend: ExtendKey | None


class ListKernels(RankOrder, frozen=True):
    """List the kernels of these passes that this rank has not loaded; launches nothing. `first`: a
    new preparation begins, so discard an earlier list.
    """

    passes: Rehearsed
    first: bool


class LoadKernels(RankOrder, frozen=True):
    """Load the next listed kernels, which rank 0 has had compiled; with `last`, all the rest."""

    count: int
    last: bool


class DropKernels(RankOrder, frozen=True):
    """Free the buffers of the listing: the preparation was given up."""


class ForgetTexts(RankOrder, frozen=True):
    slots: list[int]


class WriteTable(RankOrder, frozen=True):
    """Set a table's learned values."""

    table: str
    acceptance_K: Array  # the bits of float32
    hits_K: Array
    trials_K: Array


class RenewTable(RankOrder, frozen=True):
    """Activate a table's learned values."""

    table: str


class SwapModels(RankOrder, frozen=True):
    """Swap two models in place: graphs hold the storage of `resident`. Keys name storage."""

    resident: int
    other: int


class Settle(RankOrder, frozen=True):
    """Answer once all earlier work is done."""


class SetDrafterTable(RankOrder, frozen=True):
    """Start a drafter's table afresh, for the network that has just been swapped in."""

    edge_G: Array  # the bits of float32
    acceptance_K: Array
