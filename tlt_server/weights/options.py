"""Options of pushes: where weights may come from, are staged, and are kept once committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tlt_client.channels import Intake
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import Free, Storage


@dataclass(frozen=True)
class Options:
    channels: tuple[str, ...] = ()  # the open ones; without any there are no pushes
    intake: Intake = Intake()
    spool: Spool | None = None
    storage: Storage = field(
        default_factory=lambda: Storage(
            "device", lambda: Free(2**62, 0, 0), torch.device("cpu"), None
        )
    )
