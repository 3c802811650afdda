"""Orders to the further ranks of a GPU engine: everything that rank 0's runner gives its device.

`engine/ranks/orders.py` says how they travel. A rank launches what a step names at once; the trees
and tokens that it makes are those of every rank, because their inputs have equal bits.
"""

from __future__ import annotations

from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, Reported
from tlt_server.engine.ranks.orders import Array, RankOrder


class ReportMemory(RankOrder, frozen=True):
    """Answer with the free bytes of the GPU and those in all."""


class Equip(RankOrder, frozen=True):
    """Make state, drafters and passes, and prepare these steps."""

    pages_per_sequence: int
    drafts: list[DraftKey]
    extends: list[ExtendKey]


class Begin(RankOrder, frozen=True):
    """Exchange from here on: every rank is ready, and has settled."""


class UploadWords(RankOrder, frozen=True):
    """Copy these words to the beginning of the upload buffer."""

    word_U: Array


class TakeOver(RankOrder, frozen=True):
    """Apply the upload, which had no room for all of a step's changes."""


class RunStep(RankOrder, frozen=True):
    """Draft, verify, learn, and gather logits that are reported; where masks are awaited, up to the
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
    """Record a step of this key, if this rank has the memory: nothing is launched."""

    draft: DraftKey | None
    extend: ExtendKey | None


class ListKernels(RankOrder, frozen=True):
    """List the kernels of these passes that this rank has not loaded: nothing is launched. `first`:
    a preparation begins, so forget the list of one that was given up.
    """

    passes: Rehearsed
    first: bool


class LoadKernels(RankOrder, frozen=True):
    """Load the next of what was listed, which rank 0 has had compiled; at `last` all that is
    left.
    """

    count: int
    last: bool


class DropKernels(RankOrder, frozen=True):
    """Give back what listing has made: the preparation was given up."""


class ForgetTexts(RankOrder, frozen=True):
    slots: list[int]


class WriteTable(RankOrder, frozen=True):
    """Set what a table has learnt."""

    table: str
    acceptance_K: Array  # the bits of float32
    hits_K: Array
    trials_K: Array


class RenewTable(RankOrder, frozen=True):
    """Put what a table has learnt in force."""

    table: str


class SwapModels(RankOrder, frozen=True):
    """Let two models change places: graphs know the storage of `resident`. Keys name storage."""

    resident: int
    other: int


class Settle(RankOrder, frozen=True):
    """Answer once everything before is done."""


class SetDrafterTable(RankOrder, frozen=True):
    """Begin again with a drafter's table, for the network that has just been swapped in."""

    edge_G: Array  # the bits of float32
    acceptance_K: Array
