"""Orders to the further ranks of a GPU engine: everything that rank 0's runner gives its device.

`engine/ranks/orders.py` says how they travel. A rank launches what a step names at once; the trees
and tokens that it makes are those of every rank, because their inputs have equal bits.
"""

from __future__ import annotations

from msgspec import Struct

from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, Reported
from tlt_server.engine.ranks.orders import Allocate, Array, Install, MemoryOrder

Key = DraftKey | ExtendKey


class ReportMemory(Struct, frozen=True, tag="memory"):
    """Answer with the free bytes of the GPU and those in all."""


class Equip(Struct, frozen=True, tag="equip"):
    """Make state, drafters and passes, and prepare these steps."""

    pages_per_sequence: int
    drafts: list[DraftKey]
    extends: list[ExtendKey]


class Begin(Struct, frozen=True, tag="begin"):
    """Exchange from here on: every rank is ready, and has settled."""


class UploadWords(Struct, frozen=True, tag="upload"):
    """Copy these words to the beginning of the upload buffer."""

    word_U: Array


class TakeOver(Struct, frozen=True, tag="take"):
    """Apply the upload, which had no room for all of a step's changes."""


class RunStep(Struct, frozen=True, tag="step"):
    """Draft, verify, learn, and gather logits that are reported; where masks are awaited, up to the
    first half of the pass.
    """

    draft: DraftKey | None
    capped: bool
    extend: ExtendKey
    learns: bool
    reported: Reported = Reported()


class FinishStep(Struct, frozen=True, tag="finish"):
    """Run the second half of the step with these masks."""

    word_M: Array
    step: RunStep


class RecordStep(Struct, frozen=True, tag="record"):
    """Record a step of this key, if this rank has the memory: nothing is launched."""

    draft: DraftKey | None
    extend: ExtendKey | None


class ListKernels(Struct, frozen=True, tag="list"):
    """List the kernels of these passes that this rank has not loaded: nothing is launched. `first`:
    a preparation begins, so forget the list of one that was given up.
    """

    passes: Rehearsed
    first: bool


class LoadKernels(Struct, frozen=True, tag="kernels"):
    """Load the next of what was listed, which rank 0 has had compiled; at `last` all that is
    left.
    """

    count: int
    last: bool


class DropKernels(Struct, frozen=True, tag="drop_kernels"):
    """Give back what listing has made: the preparation was given up."""


class ForgetTexts(Struct, frozen=True, tag="forget"):
    slots: list[int]


class WriteTable(Struct, frozen=True, tag="table"):
    """Set what a table has learnt."""

    table: str
    survival_K: Array  # the bits of float32
    hits_K: Array
    trials_K: Array


class RenewTable(Struct, frozen=True, tag="renew"):
    """Put what a table has learnt in force."""

    table: str


class SwapModels(Struct, frozen=True, tag="swap"):
    """Let two models change places: graphs know the storage of `resident`. Keys name storage."""

    resident: int
    other: int


class Settle(Struct, frozen=True, tag="settle"):
    """Answer once everything before is done."""


class SetDrafterTable(Struct, frozen=True, tag="drafter"):
    """Begin again with a drafter's table, for the network that has just been swapped in."""

    edge_G: Array  # the bits of float32
    survival_K: Array


KernelOrder = ListKernels | LoadKernels | DropKernels
LaunchOrder = UploadWords | TakeOver | RunStep | FinishStep | RecordStep | KernelOrder
TableOrder = WriteTable | RenewTable | SetDrafterTable
MakeOrder = ReportMemory | Allocate | Equip | Begin | Install | SwapModels
GpuOrder = LaunchOrder | ForgetTexts | TableOrder | MakeOrder | Settle | MemoryOrder
