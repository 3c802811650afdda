"""One sequence while the engine owns it: its tokens, pages and progress. Only the scheduler changes
it.

`computed` positions have committed KV. A decoding sequence has computed = length - 1: its last
token is the root of the next step. A runner may deliver its results a step late, so steps can be in
flight: `launched` positions are non-draft rows of finished or in-flight steps, and the in-flight
steps will append at least `sure` and at most `ahead` tokens. A preempted sequence has computed = 0
and is treated as a fresh prompt; so is one that an earlier engine started
(`GenerateRequest.generated`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.filters import NO_FILTERS, Filters
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.pages import PageKey, next_key, root_key
from tlt_server.errors import TltError
from tlt_server.wire.records import (
    DraftLimits,
    GenerateRequest,
    LoadedAdapter,
    Strategy,
    TokenLogprobs,
)


class SavedKV(NamedTuple):
    """KV saved from the pages of a preempted sequence."""

    kv: object
    computed: int


@dataclass
class Emission:
    """The result of a step for one chunk: accepted draft tokens and the bonus token, or no token
    for a prefill chunk that does not reach the end.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] | None = None
    top_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafted: int = 0
    accepted: int = 0  # also those that a stop cut off
    # The parts of both that are the drafter's own, without history's branches; None: not known.
    own_drafted: int | None = None
    own_accepted: int = 0
    weight_version: str = ""
    error: TltError | None = None  # why the sequence cannot go on
    # A chunk's steps with tokens, and the accepted drafts and tokens of those with drafts.
    steps: int = 1
    accepted_each: list[int] = field(default_factory=list)
    draft_tokens: int = 0

    @property
    def followed(self) -> tuple[int, int]:
        """Return the accepted draft tokens that the sequence kept (none after its end), and how
        many of them are the drafter's own.
        """
        followed = min(self.accepted, len(self.tokens))
        return followed, min(self.own_accepted, followed)

    def extend(self, later: Emission) -> None:
        """Make one chunk of this and the result of a later step under the same version."""
        self.steps += bool(later.tokens)
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        if later.raw_logprobs is not None:
            self.raw_logprobs = (self.raw_logprobs or []) + later.raw_logprobs
        if later.drafted:
            self.drafted += later.drafted
            self.accepted += later.accepted
            self.accepted_each.append(later.accepted)
            self.draft_tokens += len(later.tokens)
        self.weight_version = later.weight_version or self.weight_version


class Noting(Protocol):
    """Records the events of one sequence."""

    def emitted(
        self, sequence: Sequence, emission: Emission, strategy: Strategy, *, decodes: bool
    ) -> None: ...

    def ended(self, sequence: Sequence, reason: str) -> None: ...


class Sequence:
    def __init__(
        self,
        request: GenerateRequest,
        state: SamplingState,
        page_size: int,
        trace: Noting | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.request = request
        self.state = state
        self.adapter = adapter
        self.trace = trace  # its record, where it is kept for training
        self.prompt_len = len(request.token_ids)
        self.length = self.prompt_len + len(request.generated)
        self._tokens = np.empty(self.prompt_len + request.sampling.max_tokens, np.int32)
        self._tokens[: self.length] = [*request.token_ids, *request.generated]
        self.computed = self.launched = 0
        self.sure = self.ahead = 0
        self.epoch = 0  # advances when the sequence is preempted or ends: earlier chunks are void
        # Prompt tokens found in the prefix index at first admission.
        self.cached_tokens: int | None = None
        self.arrived_s = self.emitted_s = 0.0  # by the scheduler's clock; of its last tokens
        self.queued_s: float | None = None  # from arrival until its first admission
        self.pages: list[int] = []
        self.published = 0  # leading pages offered to the prefix index
        self.batch_slot = -1  # row of the page table while running
        self.preemptions = 0
        self.turn = 0  # the last one that it had among its owner's sequences, where they take turns
        self.mixed_version = False  # its KV is of more than one weight version
        self.private = False  # some of its KV is older than a flush
        self.background = False  # read for its states only, see `recompute.py`
        # KV of a preempted sequence, if it cannot be computed again.
        self.saved: SavedKV | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # until they go out
        sampling = request.sampling
        self.is_filtered = sampling.temperature > 0 and Filters.of(sampling) != NO_FILTERS
        self._page_size = page_size
        self._keys: list[PageKey] = []  # under the version that reads it, see `start_over`

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def owner(self) -> str:
        return self.request.owner

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output; a view."""
        return self._tokens[: self.length]

    @property
    def output_len(self) -> int:
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return len(self._tokens) - self.length

    @property
    def capacity(self) -> int:
        """Number of positions in its pages."""
        return len(self.pages) * self._page_size

    @property
    def decoding(self) -> bool:
        """Return True if only the last token is uncomputed: one row then makes the sequence sample,
        and draft rows may follow that row.
        """
        return self.computed == self.length - 1

    @property
    def unlaunched(self) -> int:
        """Known positions that no step computes yet, including the root of the next decoding
        step.
        """
        return self.length - self.launched

    @property
    def due(self) -> bool:
        """Return True if a decoding step may follow: the in-flight steps are not certain to end the
        sequence, and its mask is ready.
        """
        if self.sure:
            return self.sure < self.remaining and self.state.quick
        return self.state.ready

    @property
    def reports(self) -> bool:
        """Return True if the request reports more than the log-probs of its tokens."""
        return self.state.raw or self.state.alternatives > 0

    @property
    def scores_prompt(self) -> bool:
        """Return True if log-probs of the prompt are to be reported. After the first output a
        prompt that is read again needs none.
        """
        return self.request.sampling.prompt_logprobs is not None and self.output_len == 0

    @property
    def is_edited(self) -> bool:
        """Return True if the next token's logits are edited. The host may not know the last few
        tokens, but edits only end as a sequence grows.
        """
        return self.state.edits_at(self.length)

    @property
    def is_structured(self) -> bool:
        """Return True if the host fills the sequence's masks: for a structured output or bad
        words.
        """
        return self.state.structure is not None

    @property
    def shares(self) -> bool:
        """Return True if other sequences may use its KV."""
        return not (self.mixed_version or self.private or self.background)

    @property
    def slot(self) -> int:
        """Return the slot of its adapter; -1 if it has no adapter."""
        return self.adapter.slot if self.adapter else -1

    def version_of(self, target: str) -> str:
        """Return the version to report for tokens that this target version computes for it."""
        return self.adapter.version_of(target) if self.adapter else target

    @property
    def draft_limits(self) -> DraftLimits | None:
        """Return the limits on its drafts in the next step; None if it takes no drafts."""
        return self.request.draft_limits if self.state.quick else None

    @property
    def has_started(self) -> bool:
        return self.output_len > 0 or self.batch_slot >= 0 or self.preemptions > 0

    def start_over(self, version: str) -> None:
        """Recompute all of its KV with `version`. The scheduler calls this when it accepts the
        sequence, and again when KV is dropped.
        """
        assert self.batch_slot < 0 and self.saved is None
        content = self.adapter.digest if self.adapter else ""
        self._keys = [root_key(version, self.request.tenant, content)]
        self.mixed_version = False
        if not self.output_len:
            self.cached_tokens = None

    def leave(self) -> None:
        """Record that batch slot and pages were taken back; in-flight results become void."""
        self.batch_slot, self.pages, self.computed, self.published = -1, [], 0, 0
        self.launched = self.sure = self.ahead = 0
        self.private = False
        self.epoch += 1
        self.state.rest()

    def page_keys(self, count: int) -> list[PageKey]:
        """Return the keys of the first `count` pages, whose tokens must all be known."""
        size = self._page_size
        while len(self._keys) <= count:
            i = len(self._keys) - 1
            self._keys.append(
                next_key(self._keys[-1], self._tokens[i * size : (i + 1) * size].tolist())
            )
        return self._keys[1 : count + 1]

    def append(self, tokens: list[int]) -> None:
        self._tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.state.commit(tokens)
