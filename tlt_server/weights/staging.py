"""The thread that stages a push: it receives, checks and keeps the tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tlt_client.channels import CHANNELS, PEER, TRAINED, Receiver
from tlt_server.errors import PushFailed, TltError
from tlt_server.process.threads import started
from tlt_server.registry import Registry
from tlt_server.weights.parts import Changed
from tlt_server.weights.spool import not_recorded
from tlt_server.weights.storage import Options
from tlt_server.weights.update import InThread, Push
from tlt_server.weights.versions import Versions
from tlt_server.wire.commands import Manifest

# Channels of the server's own trainer and of other servers have no sender.
RECEIVERS = Registry(
    "channel",
    {name: channel.receiver for name, channel in CHANNELS.items()}
    | {
        TRAINED: "tlt_client.channels.disk:TrainedReceiver",
        PEER: "tlt_client.channels.peer:PeerReceiver",
    },
)
LOOK_S = 0.05  # between two checks whether a push that waits was aborted


class _Aborted(Exception):
    """Raised at the next phase of an aborted push."""


class Staging(InThread):
    """The state of a push while its thread works. The thread sets `outcome`, and the loop reads it
    after the thread ends: complete weights under their name, an error, or None if more parts
    follow.
    """

    def __init__(
        self,
        push: Push,
        versions: Versions,
        options: Options,
        freed: list[threading.Event],
        on_phase: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`freed`: set once dropped weights are freed. `on_phase` is called in the thread.
        `Unavailable` if the system cannot start a thread.
        """
        self.outcome: Changed | TltError | None = PushFailed(
            "the staging thread ended without a result; nothing has changed: push again"
        )
        self.phase = ""
        self._since_s = 0.0
        self._push, self._manifest = push, push.manifest
        self._versions, self._options, self._freed = versions, options, freed
        self._on_phase, self._clock = on_phase, clock
        self._thread = started("stage weights", self._run)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        for freed in self._freed:
            while not (freed.wait(LOOK_S) or self._push.candidate.stopped):
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
        spool, versions, manifest = self._options.spool, self._versions, self._manifest
        # An adapter is compared with no other weights, but recorded with them.
        unsummed = spool is None and manifest.role == "adapter"
        live = versions.live if unsummed else versions.completed()
        if spool is not None:
            spool.begin()
        changed = self._push.candidate.take(manifest, live, self._receiver, self._enter)
        if changed is not None:
            changed = versions.named(changed, labelled=manifest.labelled)
            if spool is not None:
                self._enter("spool")
                spool.prepare(changed, live.updated(changed))
        self._enter("done")
        return changed

    def _receiver(self, manifest: Manifest) -> Receiver:
        receiver: Receiver = RECEIVERS.resolve(manifest.channel)(manifest, self._options.intake)
        return receiver

    def _enter(self, phase: str) -> None:
        if self._push.candidate.stopped:
            raise _Aborted
        now_s, phases = self._clock(), self._push.phases
        if self.phase:
            phases[self.phase] = phases.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        self._on_phase(phase)
