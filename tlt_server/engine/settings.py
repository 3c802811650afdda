"""What the engine process is told at start: frozen, checked once more on arrival.

`devices.choice.choose` gives what is left to the device ("auto", or 0) a value; everything behind
it sees only values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from tlt_server.records import Strategy
from tlt_server.settings import open_channels
from tlt_server.speculation.drafters import to_load, weights_directory


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # directory
    served_model_name: str = ""  # default: the directory's name
    drafter: str = "history"  # directory of an EAGLE-3 head, "history" or "none"
    policy: str = "beg"
    strategy: Strategy | None = None  # for the policy `fixed`
    numerics: Literal["strict", "fast"] = "strict"
    device: str = "cpu"  # a name of `devices.DEVICES`, or auto
    dtype: str = "auto"  # of weights, activations and KV
    attention: str = "auto"
    threads: int = 2
    page_size: int = 16  # tokens
    pages: int = 0  # 0 = as many as kv_memory_mb holds
    kv_memory_mb: int = (
        0  # 0 = what suits the device: a constant on a CPU, what memory_fraction leaves on a GPU
    )
    memory_fraction: float = 0.9  # of a GPU's memory, for everything: weights, KV, graphs
    max_model_len: int = 0  # tokens; 0 = what the model allows
    max_running: int = 0  # sequences; 0 = what suits the device
    max_rows: int = (
        0  # certain rows (roots, what pads them, prompt rows) per step; 0 = what suits the device
    )
    max_draft_rows: int = 1024  # draft rows per step
    sd_max_batch: int = (
        0  # decoding requests above which nothing is drafted; 0 = the policy decides
    )
    sd_canary: float = 0.5  # acceptance after a change of weights over that before, below which a drafter rests; 0 = never
    weight_version: str = "initial"  # of what the model directories hold
    weight_root: str = ""  # directory that pushes may come from; empty = none
    weight_channels: str = "auto"  # that pushes may come by; auto: disk with a weight_root
    weight_staging: Literal["auto", "device", "host", "disk", "none"] = "auto"
    weight_timeout_s: float = 120.0  # of one wait for the trainer
    weight_marker: str = ""  # file that a complete pushed directory holds
    state_dir: str = ""  # directory that keeps committed weights for a restart; empty = none
    graphs: bool = True  # capture CUDA graphs at start
    parent: int = 0  # process that started this one; when it is gone, so is whoever could ask

    @property
    def channels(self) -> tuple[str, ...]:
        return open_channels(self.weight_channels, self.weight_root)

    @property
    def drafter_directory(self) -> Path | None:
        return weights_directory(self.drafter)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters to load."""
        return to_load(self.drafter)
