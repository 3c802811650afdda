"""Checkpoints of a trainer's state: trained tensors, AdamW's moments, step and cursor, without
frozen tensors.

`begin` starts to copy the state into host memory, on a GPU on a side stream during the next step's
forward; `settle`, which the trainer calls before it changes a weight, waits for that copy. A thread
then writes it: a draft file, fsync, an atomic rename, fsync of the directory. Two are kept.
`newest` reads the newest intact checkpoint and names the damaged ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_server.errors import StorageFailed
from tlt_server.process.private import private_directory, private_file
from tlt_server.trainer.learning.step import State, Trainer
from tlt_server.weights.checksums import checksum

KEPT = 2
PREFIX, SUFFIX = "step-", ".safetensors"
NAMES = ("weights", "means", "squares")
CHECKSUM = "xxh3"


class CheckpointLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of a file."""

    step: int
    rate_scale: float
    cursor: tuple[int, ...]
    identity: dict[str, str]  # a run resumes only its own checkpoints
    sums: dict[str, str]


class Found(NamedTuple):
    state: State
    path: Path


class Checkpoints:
    """Writes a trainer's states. The last copy serves to restore the state. A write error is kept
    in `failure`, and training continues.
    """

    def __init__(self, directory: Path, trainer: Trainer, identity: Mapping[str, str]) -> None:
        self.directory, self.failure = directory, ""
        self.written = self.skipped = 0
        self.stall_s = 0.0  # in which the last copy kept the trainer waiting
        self._trainer, self._identity = trainer, dict(identity)
        trainer.before_update = self.settle
        state = trainer.state
        self._copies = [state.host_copy(), state.host_copy()]  # good, and the next
        self._stream = torch.cuda.Stream() if state.weight_P.is_cuda else None
        self._copying: State | None = None
        self._writer: threading.Thread | None = None

    def begin(self) -> bool:
        """Start a checkpoint of the present state. While another is being copied or written, return
        False and count it as skipped.
        """
        if self._copying is not None or (self._writer is not None and self._writer.is_alive()):
            self.skipped += 1
            return False
        began = time.monotonic()
        copy = self._copies[1]
        if self._stream is None:
            copy.copy_from(self._trainer.state)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                copy.copy_from(self._trainer.state)
        self._copying = copy
        self.stall_s = time.monotonic() - began
        return True

    def settle(self) -> None:
        """Wait until the started copy is complete, and hand it to the writer. It stays unchanged
        until the next `begin`.
        """
        copy, self._copying = self._copying, None
        if copy is None:
            return
        began = time.monotonic()
        if self._stream is not None:
            self._stream.synchronize()
        self.stall_s += time.monotonic() - began
        self._copies.reverse()
        self._writer = threading.Thread(target=self._write, args=(copy,), name="checkpoint")
        self._writer.start()
        self._trainer.good = copy

    def close(self) -> None:
        """Write the started checkpoint, and wait for it."""
        self.settle()
        if self._writer is not None:
            self._writer.join()

    def finish(self) -> None:
        """Write the last state, after any checkpoint that is being written."""
        self.close()
        self.begin()
        self.close()

    def _write(self, copy: State) -> None:
        try:
            private_directory(self.directory, parents=True, exist_ok=True)
            write(self.directory, copy, self._identity)
            for old in _files(self.directory)[KEPT:]:
                old.unlink(missing_ok=True)
            self.written, self.failure = self.written + 1, ""
        except (OSError, SafetensorError) as error:
            self.failure = f"{self.directory}: no checkpoint was written ({error})"


def write(directory: Path, state: State, identity: Mapping[str, str]) -> Path:
    """Write a state as one file, atomically."""
    tensors = dict(zip(NAMES, state.tensors(), strict=True))
    sums = {name: checksum(CHECKSUM, tensor) for name, tensor in tensors.items()}
    layout = CheckpointLayout(state.step, state.rate_scale, state.cursor, dict(identity), sums)
    path = directory / f"{PREFIX}{state.step:010}{SUFFIX}"
    draft = path.with_suffix(".part")
    os.close(private_file(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC))  # others may not read it
    save_file(tensors, draft, metadata={"layout": msgspec.json.encode(layout).decode()})
    _sync(draft)
    os.replace(draft, path)
    _sync(directory)
    return path


def newest(directory: Path, identity: Mapping[str, str]) -> tuple[Found | None, list[str]]:
    """Return the newest intact checkpoint of a run, and the faults of newer ones.

    `StorageFailed` if every intact checkpoint belongs to another run.
    """
    faults: list[str] = []
    for path in _files(directory):
        try:
            state, layout = read(path)
        except (OSError, SafetensorError, ValueError) as error:
            faults.append(f"{path}: not a whole checkpoint ({error}); an older one is used")
            continue
        if layout.identity != dict(identity):
            theirs = layout.identity
            key = next(k for k in {**theirs, **identity} if theirs.get(k) != identity.get(k))
            raise StorageFailed(
                f"{path}: {key} is {theirs.get(key)!r} there and {identity.get(key)!r} "
                "here; name another directory, or remove the checkpoints to start from the drafter"
            )
        return Found(state, path), faults
    return None, faults


def read(path: Path) -> tuple[State, CheckpointLayout]:
    """Read a checkpoint. `ValueError`, `SafetensorError` or `OSError` if it is damaged."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = file.metadata() or {}
        layout = msgspec.json.decode(metadata.get("layout", ""), type=CheckpointLayout)
        if set(file.keys()) != set(NAMES):
            raise ValueError(f"it holds {sorted(file.keys())}, expected {sorted(NAMES)}")
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in NAMES}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.dim() != 1:
            raise ValueError(
                f"{name!r} must be a float32 vector, found {tensor.dtype} {list(tensor.shape)}"
            )
        found = checksum(CHECKSUM, tensor)
        if found != layout.sums.get(name):
            raise ValueError(f"{name!r} has checksum {found}, recorded is {layout.sums.get(name)}")
    if len({len(tensor) for tensor in tensors.values()}) != 1:
        raise ValueError("its tensors must have the same length")
    weight_P, mean_P, square_P = (tensors[name] for name in NAMES)
    return State(weight_P, mean_P, square_P, layout.step, layout.rate_scale, layout.cursor), layout


def _files(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, newest first."""
    return sorted(directory.glob(f"{PREFIX}*{SUFFIX}"), reverse=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
