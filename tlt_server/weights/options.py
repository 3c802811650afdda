"""Options of pushes: where weights may come from, are staged, and are kept once committed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from tlt_client.channels import Intake
from tlt_server.errors import Conflict, Forbidden
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import Free, Storage


@dataclass(frozen=True)
class Options:
    channels: tuple[str, ...] = ()  # the open ones; without any there are no pushes
    intake: Intake = Intake()
    spool: Spool | None = None
    max_loras: int = 0  # adapters that can be loaded
    max_lora_rank: int = 0
    # content, where it is from -> the table that a drafter reads
    parse_calibration: Callable[[bytes, str], object] = lambda content, source: None
    storage: Storage = field(
        default_factory=lambda: Storage(
            "device", lambda: Free(2**62, 0, 0), torch.device("cpu"), None
        )
    )

    def check_slot(self, adapter: str, loaded: Collection[str]) -> None:
        """Refuse an adapter that finds no slot next to those that are loaded."""
        if not self.max_loras:
            raise Forbidden(
                "this server takes no LoRA adapters; start it with --max-loras and --max-lora-rank"
            )
        if adapter not in loaded and len(loaded) >= self.max_loras:
            raise Conflict(
                f"{len(loaded)} adapters are loaded ({', '.join(loaded)[:200]}), and the limit is "
                f"{self.max_loras} (--max-loras); unload one first (DELETE /adapters/NAME)"
            )
