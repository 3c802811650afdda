"""One part of a push in its thread: received, checked and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tlt_client.channels import CHANNELS, TRAINED, Receiver
from tlt_server.commands import Manifest
from tlt_server.errors import PushFailed, TltError
from tlt_server.registry import Registry
from tlt_server.threads import started
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.options import Options
from tlt_server.weights.parts import Changed, Live
from tlt_server.weights.spool import not_recorded

# The trainer's own candidates come from a directory of the server.
RECEIVERS = Registry(
    "channel",
    {name: channel.receiver for name, channel in CHANNELS.items()}
    | {TRAINED: "tlt_client.channels.disk:TrainedReceiver"},
)
LOOK_S = 0.05  # between two looks whether a push that waits was aborted


@dataclass(frozen=True)
class Hooks:
    """Callables with which the thread asks the transaction."""

    options: Options
    memory_is_free: Callable[[], list[threading.Event]]  # set once what was dropped is freed
    live: Callable[[], Live]  # with checksums
    unsummed: Callable[[], Live]  # with those that were needed before
    on_phase: Callable[[str], None]
    clock: Callable[[], float]


class _Aborted(Exception):
    """Raised at the next phase."""


class Staging:
    """The state of a push while the thread works. The loop writes `aborted`, `gap` and
    `out_of_step`. The thread writes `outcome`, which the loop reads after the end: complete
    weights, an error, or None where what came is in order and more is to come.
    """

    name: ClassVar = "staging"

    def __init__(
        self,
        manifest: Manifest,
        candidate: Candidate,
        seconds: dict[str, float],
        hooks: Hooks,
        *,
        out_of_step: bool,
    ) -> None:
        """`seconds`: by phase, added to. `Unavailable` when the system gives no thread."""
        self.aborted = False
        self.gap = ""  # why a tensor of the push is missing for good
        self.out_of_step = out_of_step  # its group also brings a push that nothing takes
        self.outcome: Changed | TltError | None = PushFailed(
            "the staging thread ended without a result; nothing has changed: push again"
        )
        self.phase = ""
        self._since_s = 0.0
        self._manifest, self._candidate, self._seconds = manifest, candidate, seconds
        self._hooks = hooks
        self._thread = started("stage weights", self._run)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def abort(self) -> None:
        """End the wait for a trainer, and the thread at its next phase."""
        self.aborted = True
        self._candidate.stop()

    def _run(self) -> None:
        for freed in self._hooks.memory_is_free():
            while not (freed.wait(LOOK_S) or self.aborted):
                pass  # what was dropped may take the room that this part needs
        try:
            self.outcome = self._staged()
        except _Aborted:
            pass
        except TltError as error:
            # A new error: the frames of this one's traceback hold the network.
            self.outcome = type(error)(error.message)
        except OSError as error:
            self.outcome = not_recorded(error)
        except BaseException as error:  # the loop must learn of any
            self.outcome = PushFailed(
                f"staging broke off ({type(error).__name__}: {error}); nothing has changed: "
                "push again"
            )

    def _staged(self) -> Changed | None:
        spool, hooks = self._hooks.options.spool, self._hooks
        # An adapter is compared with no other weights, but recorded with them.
        live = (
            hooks.unsummed() if spool is None and self._manifest.role == "adapter" else hooks.live()
        )
        if spool is not None:
            spool.begin()
        changed = self._candidate.take(self._manifest, live, self._receiver, self._enter)
        if spool is not None and changed is not None:
            self._enter("spool")
            spool.prepare(changed, live.updated(changed))
        self._enter("done")
        return changed

    def _receiver(self, manifest: Manifest) -> Receiver:
        receiver: Receiver = RECEIVERS.resolve(manifest.channel)(
            manifest, self._hooks.options.intake
        )
        return receiver

    def _enter(self, phase: str) -> None:
        if self.aborted:
            raise _Aborted
        now_s = self._hooks.clock()
        if self.phase:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        self._hooks.on_phase(phase)
