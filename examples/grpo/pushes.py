"""Pushes of a policy and its drafters: unchanged, or inside the shapes of a large model.

A padded pair has the small pair's outputs at the large one's cost. No real trainer pads, so the
seconds of padding are counted separately from those of the push.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.grpo.record import RunDirectory
from tlt_client import Client
from tlt_client.channels import Sender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_server.bench.padding.recipe import Pair, pad
from tlt_server.bench.padding.shapes import Shape
from tlt_server.models.config import read_json

Named = Iterable[tuple[str, Tensor]]


class Pushes:
    """Pushes of a run's weights, unchanged. `padding_s`: seconds of padding since the last call of
    `taken`.
    """

    channel = "http"

    def __init__(self, run: RunDirectory, asked: argparse.Namespace, client: Client) -> None:
        self._run, self._asked, self._client, self.padding_s = run, asked, client, 0.0

    def target(self, policy: nn.Module, version: str) -> float:
        """Push a policy and return the seconds."""
        return self._send(HttpSender(self._client), dict(policy.named_parameters()), version)

    def drafter(self, directory: Path, version: str) -> float:
        """Push a drafter and return the seconds."""
        started_s = time.perf_counter()
        HttpSender(self._client).push_directory(directory, version, role="drafter")
        return time.perf_counter() - started_s

    def taken(self) -> float:
        padding_s, self.padding_s = self.padding_s, 0.0
        return padding_s

    def _send(
        self, sender: Sender, tensors: dict[str, Tensor], version: str, **fields: str
    ) -> float:
        started_s = time.perf_counter()
        sender.push(tensors, version, **fields)
        return time.perf_counter() - started_s


class PaddedPushes(Pushes):
    """Pushes in the shapes of the server's pair, from this machine's memory."""

    channel = "ipc"

    def __init__(self, run: RunDirectory, asked: argparse.Namespace, client: Client) -> None:
        super().__init__(run, asked, client)
        self._shape = Shape.read(asked.padded)
        name = read_json(asked.padded / "target" / "config.json")["torch_dtype"]
        self._dtype = getattr(torch, name)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._small = run.path / "padding"

    def target(self, policy: nn.Module, version: str) -> float:
        self._run.write_model(policy, self._asked.model, self._small)
        return self._pushed(self._asked.drafter, version, "target")

    def drafter(self, directory: Path, version: str) -> float:
        return self._pushed(directory, version, "drafter")

    def _pushed(self, drafter: Path, version: str, role: str) -> float:
        tensors = self._padded(drafter, role)
        seconds = self._send(IpcSender(self._client), tensors, version, role=role)
        del tensors
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return seconds

    def _padded(self, drafter: Path, role: str) -> dict[str, Tensor]:
        """Return one model of the padded pair: of the last written policy and a drafter."""
        started_s = time.perf_counter()
        target = self._small if self._small.exists() else self._asked.model
        pair: Pair = pad(target, drafter, self._shape, self._dtype, device=self._device)
        tensors = dict(getattr(pair, role).tensors())
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.padding_s += time.perf_counter() - started_s
        return tensors
