"""What the staging thread does with a push: receive, check and keep what comes. The loop reads what
`Push` says once it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from tlt_client.channels import CHANNELS, Intake, Receiver
from tlt_server.errors import PushFailed, TltError
from tlt_server.records import Manifest
from tlt_server.registry import Registry
from tlt_server.weights.parts import Live
from tlt_server.weights.push import Push
from tlt_server.weights.spool import Spool
from tlt_server.weights.staging import Staging, Steps
from tlt_server.weights.storage import Free, Storage

RECEIVERS = Registry("channel", CHANNELS)


@dataclass(frozen=True)
class Options:
    """Where weights may come from, and where committed ones are kept."""

    channels: tuple[str, ...] = ()  # that are open; none: no pushes
    intake: Intake = Intake()
    spool: Spool | None = None
    storage: Storage = field(
        default_factory=lambda: Storage(
            "device", lambda: Free(2**62, 0, 0), torch.device("cpu"), None
        )
    )


class _Aborted(Exception):
    """Raised at the next phase."""


@dataclass(frozen=True)
class Work:
    options: Options
    parse_calibration: Callable[[bytes, str], object]
    clock: Callable[[], float]

    def do(self, push: Push, live: Callable[[], Live], on_phase: Callable[[str], None]) -> None:
        spool, options = self.options.spool, self.options
        enter = partial(self._enter, push, on_phase)
        push.phase = ""

        def receive(manifest: Manifest) -> Receiver:
            receiver: Receiver = RECEIVERS.resolve(manifest.channel)(manifest, options.intake)
            return receiver

        try:
            used = live()
            if push.staging is None:
                if spool is not None:
                    spool.begin()
                push.staging = Staging(
                    used,
                    Steps(
                        spool.keep if spool is not None else None,
                        self.parse_calibration,
                        options.storage.make,
                        push.overwritten.add if options.storage.in_place else None,
                    ),
                )
            parts = push.staging.take(push.manifest, receive, enter)
            if spool is not None and parts is not None:
                enter("spool")
                spool.prepare(parts, used.updated(parts))
            enter("done")
            push.parts, push.incomplete = parts, parts is None
        except _Aborted:
            pass
        except TltError as error:
            push.error = error
        except OSError as error:
            push.error = not_recorded(error)
        except BaseException as error:  # the loop must learn of it, whatever it is
            push.error = PushFailed(
                f"staging broke off ({type(error).__name__}: {error}); nothing has changed: push again"
            )

    def _enter(self, push: Push, on_phase: Callable[[str], None], name: str) -> None:
        if push.aborted:
            raise _Aborted
        now = self.clock()
        if push.phase:
            push.phases[push.phase] = push.phases.get(push.phase, 0.0) + now - push.since
        push.phase, push.since = name, now
        on_phase(name)


def not_recorded(error: OSError) -> TltError:
    return PushFailed(
        f"the commit cannot be recorded in the state directory ({error}), so nothing has changed; make room there and push "
        "again"
    )
