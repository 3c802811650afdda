"""The plan of a fleet: what a launcher starts, or finds, and what its gateway is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_client import Tls
from tlt_server.config import Config

# Settings that the launcher chooses for each replica.
CHOSEN = ("host", "port", "link_port", "grpc_port", "probe_port", "state_dir", "api_key_variable")
KEY = "FLEET_KEY"  # the variable by which a replica gets the fleet's key
SPARE_S = 10.0  # to exit after the drain


class FleetPlan(NamedTuple):
    """The first four fields, and the flags of `tlt fleet serve` under their names."""

    config: Config  # the gateway's, with the engine's settings as the replicas have them
    flags: Sequence[str] = ()  # every replica's `tlt serve` gets them
    key: str = ""  # API key of the links, with scope `link`; empty: none
    tls: Tls | None = None  # files for links by TLS; None: plain links
    replicas: int | None = None
    addresses: str | None = None
    ray_labels: Mapping[str, str] | None = None
    replica_cpus: int | None = None  # None: by its processes
    take_over: bool = False
    consolidate: float = 0.0  # largest slow-down of a sequence by packing; 0: off
    sleep_idle: float = 0.0  # seconds until an empty replica gives its memory back; 0: never
    rebalance: bool = False

    @property
    def gpus_each(self) -> int:
        """Return the GPUs of a replica, if its device is not the CPU."""
        if self.config.device == "cpu":
            return 0
        trains = self.config.drafter_training == "device"
        return self.config.tensor_parallel + (
            trains and self.config.drafter_training_device != "cpu"
        )

    @property
    def stop_s(self) -> float:
        return self.config.drain_timeout_s + SPARE_S

    def directory(self, name: str) -> Path | None:
        """Return the state directory of a replica; None without one of the gateway."""
        state = self.config.state_dir
        return state.resolve() / "replicas" / name if state is not None else None

    def variables(self) -> dict[str, str]:
        """Return the variables of a replica: its settings among this process's, and the key."""
        chosen = {f"TLT_{name.upper()}" for name in CHOSEN}
        settings = {name: os.environ[name] for name in os.environ if name.startswith("TLT_")}
        kept = {name: value for name, value in settings.items() if name not in chosen}
        return {**kept, KEY: f"{self.key} scopes=link name=gateway"}
