"""A third drafter with weights: a table that says which token follows each, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.oracle import chained
from tlt_server.models.config import ModelConfig
from tlt_server.models.loader import check_files, fill
from tlt_server.settings.server import QuantizationName
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights, Sleeper
from tlt_server.wire.records import Strategy

ARCHITECTURE = "SuccessorTable"


def write_successors(directory: Path, target: str, token: Sequence[int]) -> Path:
    """Write a table for the target in the directory `target`, whose sizes it repeats."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = json.loads((Path(target) / "config.json").read_text())
    config = {**sizes, "architectures": [ARCHITECTURE]}
    (directory / "config.json").write_text(json.dumps(config))
    table_V = torch.tensor(token, dtype=torch.float32)
    save_file({"successor.weight": table_V}, directory / "model.safetensors")
    return directory


class SuccessorTable:
    """The network: the successor of each token, as a float so that it is pushed like any weight."""

    own_embedding, own_head, part, kv_layers = False, True, None, 0
    vocabulary_map = frozenset[str]()
    quantization: QuantizationName = "none"

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.draft_vocab_size = config, config.vocab_size
        self.target_ids = torch.arange(config.vocab_size)
        self.successor_V = torch.zeros(config.vocab_size)

    def parameters(self) -> dict[str, Tensor]:
        return {"successor.weight": self.successor_V}

    def blank(self, target: object, *, own_embedding: bool) -> SuccessorTable:
        return SuccessorTable(self.config)

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        raise AssertionError("this drafter has the target's vocabulary")

    def follow(self, target: object) -> None:
        """Share nothing with the target."""


class Target:
    config: ModelConfig


class SuccessorLoader:
    def feature_layers(self, directory: Path, target: ModelConfig) -> tuple[int, ...]:
        return ()

    def empty(
        self, directory: Path, target: Target, *, quantization: QuantizationName = "none"
    ) -> SuccessorTable:
        return SuccessorTable(replace(target.config, architecture=ARCHITECTURE))

    def fill(self, network: SuccessorTable, directory: Path) -> None:
        fill(network.parameters(), directory, ignored=())

    def check(self, network: SuccessorTable, directory: Path) -> None:
        check_files(network.parameters(), directory, ignored=())

    def calibration(self, directory: Path) -> object:
        return None

    def parse_calibration(self, content: bytes, source: str) -> object:
        return None


class Successors:
    """Proposes a chain of the successors of a request's last token."""

    def __init__(self, network: SuccessorTable) -> None:
        self.network = network
        self.proposed = self.accepted = 0

    @classmethod
    def make(cls, setup: DraftSetup) -> Successors:
        assert setup.weights is not None, "a directory was named"
        return cls(setup.weights.network)

    @property
    def caches(self) -> Sequence[Sleeper]:
        return ()

    @property
    def tables(self) -> Mapping[str, OnlineTable]:
        return {}

    def install(self, weights: DraftWeights | None) -> None:
        assert weights is not None
        self.network = weights.network

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        chains = []
        for b, tokens in enumerate(batch.tokens):
            chain = [int(tokens[-1])]
            for _ in range(min(strategy.depth, int(batch.max_depth_B[b]))):
                chain.append(int(self.network.successor_V[chain[-1]]))
            chains.append(chain[1:])
        self.proposed += sum(map(len, chains))
        return chained(chains)

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.accepted += int((np.asarray(accepted_N) == 1).sum())

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        """Remember nothing of a request."""

    def gauges(self) -> Mapping[str, float]:
        return {
            "successors_proposed": float(self.proposed),
            "successors_accepted": float(self.accepted),
        }
