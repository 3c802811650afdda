"""KV pages and the trainer's memory: as settings ask for, checked against what the machine has."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from tlt_server.engine.sampling.lexers import LIMIT as GRAMMARS
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.training_memory import CONTEXT, LEAST_SLOTS, TrainingShape
from tlt_server.process.machine import host_memory

MIB = 2**20


class Drafting(Protocol):
    """A drafter's network, with storage or without."""

    config: ModelConfig
    draft_vocab_size: int
    kv_layers: int


class TrainingShare(NamedTuple):
    """Bytes that the trainer of the drafter takes, with the features it holds."""

    device: int  # GPU memory; 0 where a CPU computes
    host: int

    def describe(self, device: str) -> str:
        """`device`: the one that trains, as torch names it."""
        where = "the GPU" if device == "cuda" else device
        gpu = f"{self.device // MIB} MiB of {where} and " if self.device else ""
        return f"; the trainer has {gpu}up to {self.host // MIB} MiB of the host"


def training_share(
    settings: DecidedSettings, drafter: Drafting, room: int | None = None
) -> TrainingShare:
    """Return the memory reserved for training. `StartupError` if the host has less, or if
    `drafter_training_mb` is too small for one pack. `room`: GPU memory outside the engine's plan;
    None: the engine's plan counts the trainer, or a CPU trains.
    """
    on_gpu = settings.device == "cuda"
    shape = TrainingShape.of(drafter.config, drafter.draft_vocab_size, on_gpu=on_gpu)
    training = (settings.drafter_training_mb or 0) * MIB or shape.most_bytes
    if not shape.slots_in(training):
        raise StartupError(
            f"drafter_training_mb {settings.drafter_training_mb} is too little to train this "
            f"drafter; set drafter_training_mb to {-(-shape.device_bytes(LEAST_SLOTS) // MIB)}, or "
            "leave drafter_training off"
        )
    if room is not None and training + CONTEXT > room:
        raise StartupError(
            f"to train the drafter takes {(training + CONTEXT) // MIB} MiB of "
            f"{settings.drafter_training_device}, which has {room // MIB}; set "
            f"drafter_training_mb to {max(0, room - CONTEXT) // MIB} at most, or leave "
            "drafter_training off"
        )
    features = settings.ring_bytes + settings.feature_bytes * (2 if on_gpu else 1)
    host = shape.host_bytes + features + (0 if on_gpu else training)
    total = host_memory().total
    if host > total:
        raise StartupError(
            f"training the drafter takes {host // MIB} MiB of the host, {features // MIB} of them "
            f"for features, but it has {total // MIB}; lower drafter_feature_mb, leave "
            "drafter_training off, or use a machine with more memory"
        )
    return TrainingShare(training if on_gpu else 0, host)


def kv_pages(settings: DecidedSettings, bytes_per_page: int, max_model_len: int) -> int:
    """Return the pages asked for, or as many as fit and could be in use at once. `StartupError`
    when they are too few or too many.
    """
    need = -(-max_model_len // settings.page_size)
    pages = settings.pages
    if pages is None:
        assert settings.kv_memory_mb is not None, "a CPU has a default"
        pages = settings.kv_memory_mb * 2**20 // bytes_per_page
        if pages < need:
            raise StartupError(
                f"kv_memory_mb {settings.kv_memory_mb} holds {pages} pages, one sequence of "
                f"max_model_len {max_model_len} needs {need}; raise it to "
                f"{-(-need * bytes_per_page // 2**20)} or lower max_model_len"
            )
        pages = min(pages, need * settings.max_running)  # more could never be in use at once
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * bytes_per_page + GRAMMARS > installed:
        raise StartupError(
            f"{pages} pages of {settings.page_size} tokens take {pages * bytes_per_page // MIB} "
            f"MiB and grammars {GRAMMARS // MIB}, this machine has {installed // MIB}; lower "
            "pages, page_size or kv_memory_mb"
        )
    return pages
