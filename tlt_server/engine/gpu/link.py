"""The GPU half of rank 0's `Ranks`: the exchange, memory for shards, and waits for steps that all
ranks compute. `ALONE` serves an engine on one GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu.exchange import WindowSizes
from tlt_server.engine.exchange.joining import RankGroup, join
from tlt_server.engine.gpu.flight import AwaitedOutcome
from tlt_server.engine.gpu.memory.graphs import synchronize
from tlt_server.engine.gpu.orders import Begin, Settle
from tlt_server.engine.gpu.steps.agreement import WORDS, Agreement, differing, missed
from tlt_server.engine.gpu.steps.ring import PinnedBuffer
from tlt_server.engine.ranks.arena import Arena, arena_bytes
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.errors import EngineFailed
from tlt_server.models.split import Alone
from tlt_server.settings.server import ExchangeName

SLEEP_S = 20e-6  # while a step is awaited; a newer one keeps the GPU busy
LOOK_S = 0.1  # between two checks whether the ranks live meanwhile
# For a step, at most: longer than kernels that signal wait, because a library's gather has no end.
STEP_S = 14.0

Save = Callable[[list[int]], object]


class StepWaits:
    """Waits of rank 0 for a step. This base class is for one GPU."""

    words = 0  # int32 at the end of an outcome, for the sums of all ranks

    def begin(self) -> None:
        """Start exchanging; all ranks are prepared and quiet."""

    def copy_sums(self, outcome: PinnedBuffer) -> AwaitedOutcome:
        """Queue a copy of every rank's checksum to the end of the newest step's outcome, after
        everything that the step launches. Return the pending outcome. Its `wait` raises
        `EngineFailed` if a rank has died, hangs or differs.
        """
        return outcome

    @property
    def wait(self) -> Callable[[PinnedBuffer], None] | None:
        """Return the `wait` for pinned rings, which raises `EngineFailed` if a rank has died or
        hangs. None with one rank.
        """
        return None

    def drain(self, stream: torch.cuda.Stream) -> None:
        """Wait for all work on one of this GPU's streams. Raises as `wait` does."""
        synchronize(stream)

    def drained(self, stream: torch.cuda.Stream | None, save: Save) -> Save:
        """Return `save`, which copies to the host, with a bounded wait for the step in flight."""
        return save


ALONE = StepWaits()


class GpuLink(StepWaits):
    moves, answer_s = True, 14.0  # longer than kernels that signal wait
    exchange = Alone()  # layers add up by `peers`

    def __init__(
        self,
        ranks: Ranks[Any],
        directory: Path,
        device: torch.device,
        sizes: WindowSizes,
        by: ExchangeName,
    ) -> None:
        """Join the other ranks. Raises `EngineFailed` or `StartupError` if one cannot join."""
        self._ranks, self._device, self._begun = ranks, device, False
        joined = join(RankGroup(directory, 0, ranks.count, device, ranks.check_ended), sizes, by)
        self.close, self.peers = joined.close, joined.peers
        self.peers.mute()
        self.agreement = Agreement(self.peers)
        self.words = WORDS * ranks.count

    def ready(self) -> None:
        """Do nothing: a GPU's waits keep their limits."""

    def arena(self, rank: int, make: Callable[[], Any]) -> Arena | None:
        """Return memory on the rank's GPU. Rank 0 needs none for itself."""
        if not rank:
            return None
        device = self._device
        if device.type == "cuda":
            device = torch.device("cuda", (device.index or 0) + rank)
        return Arena.shared(arena_bytes(make().storage()), device)

    def begin(self) -> None:
        self._ranks.finish()
        if self.peers.device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Muted exchanges signal, too: none may be queued anywhere when the first rank resets.
        self._ranks.order(Settle(), wait=True)
        self._ranks.order(Begin(), wait=True)
        self.agreement.begin()
        self._begun = True

    def copy_sums(self, outcome: PinnedBuffer) -> SharedOutcome:
        found = self.agreement.found_TW.view(-1)
        outcome.tensor[-self.words :].copy_(found, non_blocking=True)
        return SharedOutcome(outcome, self._ranks.sent, self)

    @property
    def wait(self) -> Callable[[PinnedBuffer], None]:
        return lambda buffer: self.wait_for(buffer, self._ranks.sent)

    def wait_for(self, buffer: PinnedBuffer, step: int) -> None:
        """Wait for a copy from this GPU. `step`: number of the step's last order."""
        self._poll(lambda: buffer.arrived, step)

    def drain(self, stream: torch.cuda.Stream) -> None:
        if self._begun:
            self._poll(stream.query, self._ranks.sent)
        else:
            stream.synchronize()  # no kernel waits for a rank yet

    def drained(self, stream: torch.cuda.Stream | None, save: Save) -> Save:
        if stream is None:
            return save

        def saved(pages: list[int]) -> object:
            self.drain(stream)
            return save(pages)

        return saved

    def _poll(self, ended: Callable[[], bool], step: int) -> None:
        began_s = looked_s = time.monotonic()
        while not ended():
            time.sleep(SLEEP_S)  # a stage of a push needs the interpreter, too
            if time.monotonic() > looked_s + LOOK_S:
                self._ranks.check_ended()
                looked_s = time.monotonic()
            if looked_s > began_s + STEP_S:
                raise EngineFailed(
                    f"rank 0 waited {STEP_S:g} s for order {step} on the GPUs; another "
                    "rank has stopped or is still compiling a kernel"
                )

    def compare(self, words: Sequence[int], step: int) -> None:
        """Raise `EngineFailed` if a rank's checksum differs from rank 0's, or a wait for a rank ran
        out of time.
        """
        others, missed_T = differing(words), missed(words)
        if not others and not any(rank for rank, _ in missed_T):
            return
        self._ranks.check_ended()
        if waited := self.agreement.failure(missed_T):
            raise EngineFailed(f"{waited}, in order {step} or before")
        raise EngineFailed(
            f"ranks differ after order {step}: the states of rank "
            f"{', '.join(map(str, others))} are not those of rank 0"
        )


class SharedOutcome:
    """The outcome of a step of several ranks. It is readable only after their checksums were
    compared.
    """

    def __init__(self, buffer: PinnedBuffer, step: int, link: GpuLink) -> None:
        """`step`: number of the step's last order."""
        self._buffer, self._step, self._link = buffer, step, link
        self._compared = False

    @property
    def array(self) -> NDArray[np.int32]:
        assert self._compared, "read before it was waited for"
        return self._buffer.array

    def wait(self) -> None:
        if self._compared:
            return
        self._link.wait_for(self._buffer, self._step)
        self._link.compare(self._buffer.array[-self._link.words :].tolist(), self._step)
        self._compared = True
