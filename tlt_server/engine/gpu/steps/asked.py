"""Values that the device is told of a sequence at its admission, for the runner. No tensors."""

from __future__ import annotations

from tlt_kernels.gpu.upload import NO_EDITS, Edits
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.wire.tree_limits import MAX_ROWS


def limits_rows(sequence: Sequence) -> bool:
    limits = sequence.request.draft_limits
    return limits is not None and limits.max_rows < MAX_ROWS


def edits_of(sequence: Sequence) -> Edits:
    """Return the edits of its logits in the form of an admission."""
    state = sequence.state
    if not state.edits:
        return NO_EDITS
    return Edits(
        *state.penalties,
        prompt=sequence.prompt_len,
        masked_to=state.masked_to,
        bias_ids=state.bias_ids,
        bias=state.bias,
        mask_ids=state.mask_ids,
        allowed_ids=state.allowed_ids,
    )
