"""Recomputes the states of recorded texts, in idle time.

The requested texts run as sequences without output while the engine is idle. They neither find nor
leave cached prefixes; they take free pages first, then the pages unused for longest. The next
command ends them between two chunks. Unfinished texts restart at the next idle time, until other
texts are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.record.hidden_states import Capture
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.errors import InvalidRequest
from tlt_server.wire.commands import Recompute
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy

if TYPE_CHECKING:
    from tlt_server.engine.schedule.scheduler import Scheduler
    from tlt_server.engine.schedule.sequence import Emission

PROMPT_ONLY = Sampling(temperature=0.0, max_tokens=0)


class Recomputing:
    """The texts requested last. Like a `Trace`, it notes the ends of their sequences."""

    def __init__(
        self,
        scheduler: Scheduler,
        capture: Capture,
        make_sequence: Callable[[GenerateRequest], Sequence],
    ) -> None:
        self._scheduler, self._capture = scheduler, capture
        self._make_sequence = make_sequence
        self._asked: dict[str, NDArray[np.int32]] = {}  # by the id of its sequence
        self._numbers = count()
        self.recomputed = 0  # sequences

    def ask(self, command: Recompute) -> None:
        """Replace the earlier request by these texts."""
        texts = [np.frombuffer(text, np.dtype("<i4")) for text in command.texts]
        self._asked = {f"recompute-{next(self._numbers)}": token_T for token_T in texts}

    def start(self) -> bool:
        """Start all requested texts, if nothing runs. Return False if there are none."""
        for id, token_T in list(self._asked.items()):
            request = GenerateRequest(
                id=id, token_ids=token_T.tolist(), sampling=PROMPT_ONLY, seed=0, sd=False
            )
            try:
                sequence = self._make_sequence(request)
                sequence.background, sequence.trace = True, self
                self._scheduler.submit([sequence])
            except InvalidRequest:  # longer than this server's sequences
                del self._asked[id]
        return bool(self._asked)

    def emitted(
        self, sequence: Sequence, emission: Emission, strategy: Strategy, *, decodes: bool
    ) -> None:
        """Do nothing: such a sequence emits no token."""

    def ended(self, sequence: Sequence, reason: str) -> None:
        """Offer the states of a sequence that was read to its end. An abandoned one stays
        requested.
        """
        if reason == "abort":
            return
        self._asked.pop(sequence.id, None)
        if reason == "length":
            self.recomputed += 1
            self._capture.ended(sequence, self._scheduler.weight_version)

    def gauges(self) -> Mapping[str, float]:
        return {"states_recomputed": self.recomputed}
