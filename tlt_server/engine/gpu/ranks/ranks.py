"""The further ranks of a GPU engine, as rank 0 sees them: their processes, their weights, and what
the runner tells them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu.exchange import RankPeers, WindowSizes
from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.ranks import orders as told
from tlt_server.engine.gpu.ranks.joining import RankGroup, join
from tlt_server.engine.gpu.ranks.orders import RunStep
from tlt_server.engine.gpu.steps.agreement import WORDS, Agreement, differing, missed
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, Reported
from tlt_server.engine.gpu.steps.ring import PinnedBuffer
from tlt_server.engine.ranks.arena import Arena, arena_bytes
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import EngineFailed, Unavailable
from tlt_server.models.config import ModelConfig

if TYPE_CHECKING:
    from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable

SLEEP_S = 20e-6  # while a step is awaited; a newer one keeps the GPU busy
LOOK_S = 0.1  # between two looks whether the ranks live meanwhile
# For a step, at most: longer than kernels that signal wait, because a library's gather has no end.
STEP_S = 14.0


class GpuRanks(Ranks):
    moves = True
    answer_s = 14.0  # longer than kernels that signal wait

    def __init__(
        self,
        settings: DecidedSettings,
        config: ModelConfig,
        device: torch.device,
        sizes: WindowSizes,
    ) -> None:
        """`EngineFailed` or `StartupError` where one cannot start."""
        self._device, self._sizes, self._by = device, sizes, settings.exchange
        self._equipping = 0
        self._preparing: deque[int] = deque()  # orders of a policy's kernels without an answer
        self._step = 0  # the order of the newest one
        self.words = WORDS * settings.tensor_parallel
        super().__init__(settings, config)

    def join(self, directory: Path) -> None:
        group = RankGroup(directory, 0, self._count, self._device, self.check_ended)
        joined = join(group, self._sizes, self._by)
        self._closers.append(joined.close)
        self.peers: RankPeers = joined.peers
        self.peers.mute()
        self.agreement = Agreement(self.peers)

    def arena(self, rank: int, make: Callable[[], Any]) -> Arena | None:
        """Return memory on the rank's GPU. Rank 0 needs none of its own."""
        if not rank:
            return None
        device = self._device
        if device.type == "cuda":
            device = torch.device("cuda", (device.index or 0) + rank)
        return Arena.shared(arena_bytes(make().storage()), device)

    def equip(self, pages_per_sequence: int, keys: list[DraftKey | ExtendKey]) -> None:
        """Let the others make their passes, and prepare these steps, while this rank does."""
        drafts = [key for key in keys if isinstance(key, DraftKey)]
        extends = [key for key in keys if isinstance(key, ExtendKey)]
        self._equipping = self._send(told.Equip(pages_per_sequence, drafts, extends), asks=True)

    def begin(self) -> None:
        """Begin to exchange, once all ranks are prepared and quiet."""
        self.answered(self._equipping)
        if self.peers.device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Muted exchanges signal, too: none may be queued anywhere when the first rank resets.
        self.order(told.Settle(), wait=True)
        self.order(told.Begin(), wait=True)
        self.agreement.begin()

    def free(self) -> tuple[int, int]:
        """Return the bytes of the GPU that has least free: free, and in all."""
        self.free_dropped()
        found = self.ask(told.ReportMemory())
        return min((int(free), int(total)) for free, total in (text.split() for text in found))

    # -- what the runner tells ---------------------------------------------------------------------

    def upload(self, word_U: NDArray[np.int32]) -> None:
        if self._equipping:  # before that, no rank has where to put it
            self.order(told.UploadWords(word_U))

    def take_over(self) -> None:
        self.order(told.TakeOver())

    def run_step(
        self,
        draft: DraftKey | None,
        extend: ExtendKey,
        *,
        capped: bool,
        learns: bool,
        reported: Reported,
    ) -> RunStep:
        step = RunStep(draft, capped, extend, learns, reported)
        self._step = self._send(step, asks=False)
        return step

    def finish_step(self, step: RunStep, word_M: NDArray[np.int32]) -> None:
        self.order(told.FinishStep(word_M, step))

    def record(self, key: DraftKey | ExtendKey) -> None:
        if isinstance(key, DraftKey):
            self.order(told.RecordStep(key, None))
        else:
            self.order(told.RecordStep(None, key))

    def list_kernels(self, passes: Rehearsed, *, first: bool) -> None:
        self._preparing.append(self._send(told.ListKernels(passes, first), asks=True))

    def load_kernels(self, count: int, *, last: bool) -> None:
        self._preparing.append(self._send(told.LoadKernels(count, last), asks=True))

    def drop_kernels(self) -> None:
        while self._preparing:  # they are a part late at most
            with suppress(Unavailable):
                self.answered(self._preparing.popleft())
        self.order(told.DropKernels())

    def prepared(self) -> bool:
        with self._lock:
            while self._preparing and self._answers.complete(self._preparing[0]):
                self.answered(self._preparing.popleft())
        return not self._preparing

    def forget(self, slots: list[int]) -> None:
        self.order(told.ForgetTexts(slots))

    def table(self, name: str, table: DeviceTable) -> DeviceTable:
        table.on_write = lambda survival_K, hits_K, trials_K: self.order(
            told.WriteTable(name, survival_K.view(np.int32), hits_K, trials_K)
        )
        table.on_renew = lambda: self.order(told.RenewTable(name))
        return table

    def copy_sums(self, outcome: PinnedBuffer) -> SharedOutcome:
        found = self.agreement.found_TW.view(-1)
        outcome.tensor[-self.words :].copy_(found, non_blocking=True)
        return SharedOutcome(outcome, self._step, self)

    def wait(self, buffer: PinnedBuffer, step: int = 0) -> None:
        """Wait for a copy from this GPU. `step`: the order that makes it, if not the newest."""
        self._poll(lambda: buffer.arrived, step or self._step)

    def drain(self, stream: torch.cuda.Stream) -> None:
        """Wait for all that a stream of this GPU does. Errors as of `wait`."""
        if self._step:
            self._poll(stream.query, self._step)
        else:
            stream.synchronize()  # before the first step no kernel waits for a rank

    def drained(
        self, stream: torch.cuda.Stream, save: Callable[[list[int]], object]
    ) -> Callable[[list[int]], object]:
        """Return `save`, which copies to the host, with a bounded wait for the step in flight."""

        def saved(pages: list[int]) -> object:
            self.drain(stream)
            return save(pages)

        return saved

    def _poll(self, ended: Callable[[], bool], step: int) -> None:
        began_s = looked_s = time.monotonic()
        while not ended():
            time.sleep(SLEEP_S)  # a stage of a push needs the interpreter, too
            if time.monotonic() > looked_s + LOOK_S:
                self.check_ended()
                looked_s = time.monotonic()
            if looked_s > began_s + STEP_S:
                raise EngineFailed(
                    f"rank 0 waited {STEP_S:g} s for the GPUs to end order {step}; a "
                    "rank is stopped, or takes as long to compile a kernel"
                )

    def compare(self, words: Sequence[int], step: int) -> None:
        """`EngineFailed` where the sums of a step are not those of rank 0, or a rank was waited for
        in vain.
        """
        others, missed_T = differing(words), missed(words)
        if not others and not any(rank for rank, _ in missed_T):
            return
        self.check_ended()
        if waited := self.agreement.failure(missed_T):
            raise EngineFailed(f"{waited}, in order {step} or before")
        raise EngineFailed(
            f"ranks differ after order {step}: the states of rank "
            f"{', '.join(map(str, others))} are not those of rank 0"
        )


class SharedOutcome:
    """The outcome of a step of several ranks: no reader has it before their sums are compared."""

    def __init__(self, buffer: PinnedBuffer, step: int, ranks: GpuRanks) -> None:
        """`step`: its order."""
        self._buffer, self._step, self._ranks = buffer, step, ranks
        self._compared = False

    @property
    def array(self) -> NDArray[np.int32]:
        assert self._compared, "read before it was waited for"
        return self._buffer.array

    def wait(self) -> None:
        if self._compared:
            return
        self._ranks.wait(self._buffer, self._step)
        self._ranks.compare(self._buffer.array[-self._ranks.words :].tolist(), self._step)
        self._compared = True
