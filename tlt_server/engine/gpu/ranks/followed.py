"""The further ranks as the runner of rank 0 sees them: what it tells its own device, it tells them,
and before it launches its own part.

`NO_FOLLOWERS` is for one GPU, where there is nothing to tell. Every method is called between two
launches of the runner, in the order of its stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.gpu.flight import AwaitedOutcome
from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.ranks.orders import RunStep
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, Reported
from tlt_server.engine.gpu.steps.ring import PinnedBuffer

if TYPE_CHECKING:
    from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable

Words = NDArray[np.int32]


class Followers(Protocol):
    words: int  # int32 at the end of an outcome, for the sums of all ranks

    def upload(self, word_U: Words) -> None: ...

    def take_over(self) -> None: ...

    def run_step(
        self,
        draft: DraftKey | None,
        extend: ExtendKey,
        *,
        capped: bool,
        learns: bool,
        reported: Reported,
    ) -> RunStep: ...

    def finish_step(self, step: RunStep, word_M: Words) -> None: ...

    def record(self, key: DraftKey | ExtendKey) -> None: ...

    def list_kernels(self, passes: Rehearsed, *, first: bool) -> None: ...

    def load_kernels(self, count: int, *, last: bool) -> None:
        """Let them load as many of what they have listed; at `last` all that is left."""

    def drop_kernels(self) -> None:
        """Let them give back what listing has made."""

    def prepared(self) -> bool:
        """Return True once they have listed and loaded all that was asked, without a wait.
        `Unavailable` where one could not.
        """

    def forget(self, slots: list[int]) -> None: ...

    def table(self, name: str, table: DeviceTable) -> DeviceTable:
        """Return the table, which tells them what it is told."""

    def copy_sums(self, outcome: PinnedBuffer) -> AwaitedOutcome:
        """Queue a copy of the sums of all ranks to the end of the newest step's outcome, after all
        that the step launches. Return what waits for it: `EngineFailed` where a rank has ended, is
        stopped, was waited for in vain, or differs.
        """

    def check(self) -> None:
        """`EngineFailed` where a rank has ended."""

    @property
    def wait(self) -> Callable[[PinnedBuffer], None] | None:
        """Return the `wait` of rings: `EngineFailed` where a rank has ended, or is stopped. None
        where this rank waits for no other.
        """


class NoFollowers:
    words = 0
    wait = None

    def upload(self, word_U: Words) -> None: ...

    def take_over(self) -> None: ...

    def run_step(
        self,
        draft: DraftKey | None,
        extend: ExtendKey,
        *,
        capped: bool,
        learns: bool,
        reported: Reported,
    ) -> RunStep:
        return RunStep(draft, capped, extend, learns, reported)

    def finish_step(self, step: RunStep, word_M: Words) -> None: ...

    def record(self, key: DraftKey | ExtendKey) -> None: ...

    def list_kernels(self, passes: Rehearsed, *, first: bool) -> None: ...

    def load_kernels(self, count: int, *, last: bool) -> None: ...

    def drop_kernels(self) -> None: ...

    def prepared(self) -> bool:
        return True

    def forget(self, slots: list[int]) -> None: ...

    def table(self, name: str, table: DeviceTable) -> DeviceTable:
        return table

    def copy_sums(self, outcome: PinnedBuffer) -> AwaitedOutcome:
        return outcome

    def check(self) -> None: ...


NO_FOLLOWERS = NoFollowers()
