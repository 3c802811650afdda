"""Records running sequences for the training of a drafter.

A `Trace` belongs to one sequence and takes six small numbers per cycle. At the sequence's end the
`Recorder` packs them with its tokens and offers them to the ring that the trainer process reads. No
step waits: a full ring drops the sequence and counts it. Without training there are no traces.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, get_args

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from tlt_kernels.filters import Filters
from tlt_server.engine.record.hidden_states import Capture, StateSource
from tlt_server.errors import StartupError
from tlt_server.samples.ring import RingProducer
from tlt_server.samples.sample import EndReason, HowDrafted, Sample, cycles_of, encode_sample
from tlt_server.samples.tables import TableFile, table_file
from tlt_server.speculation.drafters import networked
from tlt_server.wire.records import OFF, DraftLimits, GenerateRequest, Strategy

if TYPE_CHECKING:
    from tlt_server.engine.schedule.sequence import Emission, Sequence
    from tlt_server.engine.settings import EngineSettings

KEPT = 4096  # strategies with limits that are remembered
TURN = 4096  # steps for which a calibration table is active


class HeldTable(Protocol):
    """The table of a drafter; only `renew` changes it."""

    def renew(self) -> NDArray[np.float32]:
        """Activate the learned table, and return it, [K]."""


class Trace:
    """The cycles and the version spans of one sequence."""

    __slots__ = ("_how", "_recorder", "cycles", "spans")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._how: dict[HowDrafted, int] = {}
        self.cycles = array("q")
        self.spans: list[tuple[int, str]] = []

    def emitted(
        self, sequence: Sequence, emission: Emission, strategy: Strategy, *, decodes: bool
    ) -> None:
        """Note a step's result for the sequence, which does not have the tokens yet."""
        if not emission.tokens:
            return
        version = emission.weight_version
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((sequence.output_len, version))
        if decodes:
            own = 0 if emission.own_drafted is None else 1 + emission.own_drafted
            drafted = self._recorder.drafted(strategy, sequence.request.draft_limits)
            how = self._how.setdefault(drafted, len(self._how))
            accepted = emission.followed
            self.cycles.extend((sequence.length - 1, 1 + emission.drafted, own, *accepted, how))

    def ended(self, sequence: Sequence, reason: str) -> None:
        """Offer the sequence, which still has its pages. A sequence without new tokens, or one that
        ended with an error, is not recorded.
        """
        if self.spans and reason in get_args(EndReason):
            self._recorder.offer(sequence, self, [*self._how], cast(EndReason, reason))


class Recorder:
    def __init__(
        self,
        ring: RingProducer,
        drafter: str,
        capture: Capture | None = None,
        table: HeldTable | None = None,
        tables: TableFile | None = None,
    ) -> None:
        """`drafter`: its key. `table`: its calibration, if it has one; active tables
        are written to `tables`.
        """
        self._ring, self._drafter, self.capture = ring, drafter, capture
        self._table, self._tables = table, tables
        self._calibration, self._steps = drafter, TURN  # the first step names the table
        self._drafted: dict[tuple[Strategy, DraftLimits | None], HowDrafted] = {}
        self.offered = self.dropped = 0

    def trace(self, request: GenerateRequest) -> Trace | None:
        """Return a trace for a sequence that may be recorded: not for one with an adapter, as the
        drafter learns to follow the target alone. One that another engine started is recorded from
        the first token that this engine computes.
        """
        return Trace(self) if request.train and not request.lora else None

    def installed(self, drafter: str) -> None:
        """Note that the drafter with this key is active, with its table."""
        self._drafter = drafter
        self.renew()

    @property
    def due(self) -> bool:
        """Return True if the table should be renewed; called once per step."""
        self._steps += 1
        return self._steps > TURN

    def renew(self) -> None:
        """Activate the drafter's learned table. No step is in flight."""
        self._steps, self._calibration = 0, self._drafter
        if self._table is not None and self._tables is not None:
            self._calibration = self._tables.add(self._drafter, self._table.renew())
        self._drafted.clear()

    def drafted(self, strategy: Strategy, limits: DraftLimits | None) -> HowDrafted:
        """Return the draft settings of a step of this strategy for a request with these limits."""
        found = self._drafted.get((strategy, limits))
        if found is None:
            if limits is None or not strategy.drafter or not limits.permits(strategy.drafter):
                found = HowDrafted(OFF, "")
            else:
                depth = min(strategy.depth, limits.max_depth)
                shape = Strategy(strategy.drafter, depth, strategy.width)
                # A chain is the same under any table of the drafter.
                table = self._calibration if strategy.width > 1 else self._drafter
                found = HowDrafted(shape, table)
            if len(self._drafted) >= KEPT:
                self._drafted.clear()
            self._drafted[strategy, limits] = found
        return found

    def offer(
        self, sequence: Sequence, trace: Trace, drafted: list[HowDrafted], reason: EndReason
    ) -> None:
        """Pack the sequence and put it into the ring, or count it as dropped."""
        self.offered += 1
        try:
            cycles = cycles_of(trace.cycles, drafted)
        except ValueError:  # more strategies or rows than the format holds
            self.dropped += 1
            return
        request, sampling = sequence.request, sequence.request.sampling
        sample = Sample(
            tokens=sequence.tokens.astype("<i4").tobytes(),
            prompt_len=sequence.prompt_len,
            group=request.group_id,
            owner=request.owner,
            seed=request.seed,
            temperature=sampling.temperature,
            **asdict(Filters.of(sampling)),
            max_tokens=sampling.max_tokens,
            end=reason,
            spans=trace.spans,
            **cycles,
        )
        kept = self._ring.offer(encode_sample(sample))
        self.dropped += not kept
        if kept and self.capture:
            self.capture.ended(sequence, sample.version)

    def gauges(self) -> dict[str, float]:
        own = {"samples_offered": self.offered, "samples_dropped": self.dropped}
        return own | (self.capture.gauges() if self.capture else {})


def recorder_of(
    settings: EngineSettings,
    drafter: str,
    states: StateSource | None,
    tables: Mapping[str, HeldTable],
) -> Recorder | None:
    """Return the recorder of an engine; None without a ring. `StartupError` if features are to be
    captured and the device keeps none.

    `drafter`: its key. `tables`: those of all drafters, by name.
    """
    if settings.sample_ring is None:
        return None
    capture = None
    if settings.feature_ring is not None:
        if states is None:
            raise StartupError(
                "drafter_feature_mb asks for features, which are captured only with an EAGLE "
                "drafter; set it to 0"
            )
        capture = Capture(RingProducer(Path(settings.feature_ring)), states)
    ring = Path(settings.sample_ring)
    own = networked(settings.drafters)
    table = tables[own] if own else None
    return Recorder(RingProducer(ring), drafter, capture, table, TableFile(table_file(ring)))
