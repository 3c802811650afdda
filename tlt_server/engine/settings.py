"""Settings of an engine process: those that it shares with its server, and a few of its own.

None means that the engine decides: `devices.choice.choose` makes `DecidedSettings`, in which every
value is set. All computing code gets those.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import msgspec

from tlt_client.channels import PEER, TRAINED
from tlt_server.errors import StartupError
from tlt_server.samples.ring import WORK
from tlt_server.settings.server import (
    DtypeName,
    PolicyName,
    QuantizationName,
    SharedSettings,
    open_channels,
)
from tlt_server.speculation.drafters import DRAFTERS, to_load, weights_directory
from tlt_server.wire.records import Strategy, parse_strategy


@dataclass(frozen=True, kw_only=True)
class EngineSettings(SharedSettings):
    max_draft_rows: int = 1024  # draft rows per step
    random_weights: bool = False  # the target's: drawn, not read; its directory needs no tensors
    weight_version: str = "initial"  # version of the weights in the model directories
    sample_ring: Path | None = None  # finished sequences go there, see `samples.ring`
    feature_ring: Path | None = None  # their features go there, see `samples.hidden_states`
    feature_bytes: int = 0  # host memory for features on their way there; 0: none are captured
    ring_bytes: int = 0  # size of `feature_ring`
    activity: Path | None = None  # says when the trainer runs, see `samples.activity`
    link_port: int | None = None  # with one, a gateway may send it to other servers for weights
    # PEM files `ca`, `cert` and `key` for HTTPS to these servers; empty: the machine's CAs
    peer_tls: dict[str, str] = field(default_factory=dict)
    parent: int = 0  # process that started this one; the engine ends with it
    directory: Path | None = None  # for what the engine makes; removed after its end

    @property
    def strategy(self) -> Strategy | None:
        """The one strategy of the policy `fixed`."""
        return parse_strategy(self.sd_strategy) if self.sd_strategy else None

    @property
    def channels(self) -> tuple[str, ...]:
        own = (TRAINED,) if self.sample_ring else ()
        found = open_channels(self.weight_channels, self.weight_root) + own
        linked = self.link_port is not None and self.state_dir is not None
        return (*found, PEER) if found and linked else found  # a fleet without pushes needs none

    @property
    def quantises_kv(self) -> bool:
        return self.kv_cache_dtype is not None

    @property
    def records(self) -> bool:
        return self.sample_ring is not None

    @property
    def trained(self) -> Path | None:
        """Return the directory of the server's trained drafters; None without a trainer."""
        return Path(self.sample_ring).parent / WORK if self.sample_ring else None

    @property
    def trains_apart(self) -> bool:
        """Return True if the drafter is trained on `drafter_training_device`."""
        return self.drafter_training == "device"

    @property
    def checkpoint(self) -> Path | None:
        """Return the directory of the target's tensors; None: draw random values."""
        return None if self.random_weights else Path(self.model)

    @property
    def drafter_directory(self) -> Path | None:
        return weights_directory(self.drafter)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters to load."""
        return to_load(self.drafter)

    @property
    def deepest(self) -> int:
        """The length of the longest draft path."""
        halves = (DRAFTERS[name].half(self.device or "cuda") for name in self.drafters)
        own = self.strategy.depth if self.strategy else 0
        return max((own, *(half.deepest for half in halves)))


@dataclass(frozen=True, kw_only=True)
class DecidedSettings(EngineSettings):
    """Engine settings with every device-dependent value decided."""

    policy: PolicyName
    device: Literal["cpu", "cuda"]
    dtype: DtypeName
    quantization: QuantizationName
    drafter_quantization: QuantizationName
    drafter_training_device: str  # as torch names it; cuda: the engine's own GPU
    attention: str
    reduction_leaves: int
    threads: int
    max_running: int
    max_rows: int

    @property
    def types(self) -> str:
        """Return the type of weights and KV, for the fingerprint."""
        kv = f", KV {self.kv_cache_dtype}" if self.kv_cache_dtype else ""
        return f"{self.dtype}{kv}"

    @property
    def rank_threads(self) -> int:
        """Return the compute threads of each rank."""
        return max(1, self.threads // self.tensor_parallel)


def encode_settings(settings: EngineSettings) -> bytes:
    """Return the line for an engine process's standard input."""
    return msgspec.json.encode(settings, enc_hook=str) + b"\n"


def decode_decided(line: str) -> DecidedSettings:
    """Parse the settings in an engine's line for its ranks."""
    return msgspec.json.decode(line, type=DecidedSettings, dec_hook=lambda kind, value: kind(value))


def decode_settings(line: bytes) -> EngineSettings:
    """Parse and validate the settings in a line. `StartupError` for an unknown field."""
    unknown = set(msgspec.json.decode(line)) - {field.name for field in fields(EngineSettings)}
    if unknown:
        raise StartupError(
            f"the engine has no setting {', '.join(sorted(unknown))}; start it from the same "
            "version"
        )
    return msgspec.json.decode(line, type=EngineSettings, dec_hook=lambda kind, value: kind(value))
