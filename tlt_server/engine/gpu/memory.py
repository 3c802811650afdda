"""Where a GPU's memory goes, as arithmetic: asked by the device before it allocates, by `tlt doctor`, and when memory has run out.

Figures are bytes unless named otherwise. What is free counts what other programs hold, so nothing here needs to know them. Messages say
by how much memory is short and which settings would make it fit. No tensors.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tlt_server.engine.gpu.buckets import MOST_VERIFIED
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig

MIB, GIB = 2**20, 2**30
RESERVE = 2 * GIB  # for graphs, libraries and fragmentation
MOST_FRACTION = 0.98  # that we advise
BUSY = "end what else uses this GPU (nvidia-smi lists it)"


class Needs(NamedTuple):
    """What is known of a model before anything of it is on the device."""

    weights: int  # target and drafter
    per_page: int  # of KV, and of what a drafter keeps beside it
    per_row: int  # activations of one row of a step
    logits: int

    @classmethod
    def of(cls, settings: EngineSettings, config: ModelConfig, drafter: ModelConfig | None, values: int) -> Needs:
        """`values`: parameters of target and drafter together; `settings`: nothing left to the device."""
        itemsize = 4 if settings.dtype == "float32" else 2
        per_page = settings.page_size * slot_values(config, config.layers)
        if drafter is not None:
            per_page += settings.page_size * slot_values(drafter, 1) + drafter.hidden_size  # and a hint per page
        return cls(values * itemsize, per_page * itemsize, 8 * config.intermediate_size + 64 * config.hidden_size,
                   4 * config.vocab_size * (MOST_VERIFIED + settings.max_running))


def slot_values(config: ModelConfig, layers: int) -> int:
    """Keys and values of one position."""
    return 2 * layers * config.kv_heads * config.head_dim


class Budget(NamedTuple):
    pages: int
    kv: int  # that the pages take
    staging: int  # for a version that is pushed, and the one before
    working: int  # the largest step

    def told(self, needs: Needs) -> str:
        staging = f", {_size(self.staging)} for pushed ones" if self.staging else ""
        return (f"{_size(needs.weights)} of weights{staging}, {_size(self.working)} for steps, {_size(RESERVE)} for graphs, "
                f"{_size(self.kv)} of KV: {self.pages} pages")


def check_weights(settings: EngineSettings, needs: Needs, free: int, total: int) -> None:
    """Before they are loaded."""
    if needs.weights > free:
        smaller = "dtype bfloat16 (halves them), " if settings.dtype == "float32" else ""
        raise StartupError(f"the weights take {_size(needs.weights)} in {settings.dtype}, {_size(free)} of the GPU's {_size(total)} are "
                           f"free, {_size(needs.weights - free)} too few; serve {smaller}a smaller model, or {BUSY}")


def plan_pages(settings: EngineSettings, needs: Needs, max_model_len: int, *, free: int, total: int) -> Budget:
    """How many KV pages there will be. `free` and `total`: of the device, once the weights are loaded.

    `StartupError` when not even one sequence of `max_model_len` would fit, or when what was asked for does not.
    """
    working = settings.max_rows * needs.per_row + needs.logits
    staging = 2 * needs.weights if settings.weight_root else 0
    need = -(-max_model_len // settings.page_size)
    if settings.pages or settings.kv_memory_mb:
        asked = settings.pages or settings.kv_memory_mb * MIB // needs.per_page
        if asked < need and not settings.pages:
            raise StartupError(
                f"kv_memory_mb {settings.kv_memory_mb} holds {asked} pages, one sequence of max_model_len {max_model_len} needs {need}; "
                f"raise it to {-(-need * needs.per_page // MIB)}{_shorter(settings, asked)}")
        pages = settings.pages or min(asked, need * settings.max_running)  # more could never be in use at once
        short = pages * needs.per_page + working - free
        if short > 0:
            fit = max(0, free - working) // needs.per_page
            lower = f"pages to {fit}" if settings.pages else f"kv_memory_mb to {fit * needs.per_page // MIB}"
            raise StartupError(f"{pages} KV pages take {_size(pages * needs.per_page)}, the GPU is {_size(short)} short beside "
                               f"{_size(working)} for steps; lower {lower}, or {BUSY}")
        return Budget(pages, pages * needs.per_page, staging, working)
    room = int(free - total * (1 - settings.memory_fraction) - staging - working - RESERVE)
    fit = max(0, room) // needs.per_page
    if fit < need:
        raise StartupError(_too_small(settings, needs, need * needs.per_page - room, fit, max_model_len, staging, total))
    pages = min(fit, need * settings.max_running)
    return Budget(pages, pages * needs.per_page, staging, working)


def _too_small(settings: EngineSettings, needs: Needs, short: int, fit: int, max_model_len: int, staging: int, total: int) -> str:
    remedies = [f"lower max_model_len to {fit * settings.page_size}"] if fit else []
    fraction = _up(settings.memory_fraction + short / total)
    if fraction <= MOST_FRACTION:
        remedies.append(f"raise memory_fraction to {fraction:g}")
    if staging >= short:
        remedies.append(f"leave weight_root out ({_size(staging)} are kept for pushed weights)")
    rows = settings.max_rows - -(-short // needs.per_row)
    if rows >= MOST_VERIFIED:
        remedies.append(f"lower max_rows to {rows}")
    remedies.append(BUSY)
    return (f"memory_fraction {settings.memory_fraction:g} of the GPU's {_size(total)} is {_size(short)} short of one sequence of "
            f"max_model_len {max_model_len}; {', or '.join(remedies)}")


def _shorter(settings: EngineSettings, pages: int) -> str:
    return f", or lower max_model_len to {pages * settings.page_size}" if pages else ""


def exhausted(settings: EngineSettings, what: str, said: str, *, free: int, total: int) -> str:
    """Memory ran out where it was planned to suffice; `said` is the allocator's message."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", said)
    asked = int(float(found[1]) * {"KiB": 1024, "MiB": MIB, "GiB": GIB}[found[2]]) if found else 0
    more = f"{_size(asked)} more were asked for and {_size(free)}" if asked else _size(free)
    fraction = math.floor((settings.memory_fraction - max(asked - free, RESERVE // 2) / total) * 100) / 100
    setting = "kv_memory_mb or pages" if settings.pages or settings.kv_memory_mb else f"memory_fraction to {fraction:g}"
    return f"the GPU has no room for {what}: {more} of its {_size(total)} are free; lower {setting}, or max_running, or {BUSY}"


def _up(fraction: float) -> float:
    return math.ceil(fraction * 100 - 1e-9) / 100


def _size(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= 10 * GIB else f"{math.ceil(amount / MIB)} MiB"
