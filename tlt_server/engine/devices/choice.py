"""The choice of device, dtype, attention and sizes: everything that settings leave to the device,
decided once, with the reason.

`look` asks torch for the GPU; the rest are pure functions of the settings, that answer and the
checkpoint. Called by `assembly.py`, which reports the choice once, and by `tlt doctor`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt_client.quantise import BLOCK
from tlt_server.attention import BACKENDS, GPU_BACKENDS
from tlt_server.engine.devices.training import OtherGpu, Place, training_device, with_form
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.loader import gpu_dtype, own_dtype
from tlt_server.models.shards import check_ranks, has_tokens, widths
from tlt_server.models.split import (
    CPU_LEAF_UNIT,
    GPU_LEAF_UNIT,
    GPU_LEAVES,
    Split,
    auto_gpu_leaves,
    check_leaves,
)
from tlt_server.process.machine import mps_enabled, named_twice
from tlt_server.settings.server import QuantizationName, available_processors, suited_policy

MIB = 2**20
MIN_CAPABILITY = (9, 0)  # the kernels use programmatic dependent launch
CPU_KV_MB = 1024
SAMPLED_BLOCK = 1024  # tokens; `tlt_kernels.gpu.sampling`, which needs Triton, has the same


class Gpu(NamedTuple):
    """The GPU that torch would use, or the reason why none is usable."""

    name: str = ""
    capability: tuple[int, int] = (0, 0)
    free_bytes: int = 0
    total_bytes: int = 0
    unusable: str = ""  # why; empty: it can be used
    twice: str = ""  # the GPU that CUDA_VISIBLE_DEVICES names twice
    mps: bool = False  # whether this process is a client of MPS there
    others: tuple[OtherGpu, ...] = ()  # further GPUs that this process sees

    @property
    def description(self) -> str:
        """Return the line for `/server_info`; empty without a GPU."""
        return (
            f"{self.name}, {self.total_bytes // MIB} MiB, compute capability "
            f"{dotted(self.capability)}"
            if self.name
            else ""
        )


class ModelFacts(Protocol):
    """Facts that only a model's files contain."""

    def dtype(self) -> str: ...

    def config(self) -> ModelConfig: ...


class ModelFiles(NamedTuple):
    directory: Path

    def dtype(self) -> str:
        return own_dtype(self.directory)

    def config(self) -> ModelConfig:
        return ModelConfig.read(self.directory)


class DeviceChoice(NamedTuple):
    settings: DecidedSettings
    reasons: dict[str, str]  # setting whose value depends on what was found -> the value and why

    def describe(self) -> str:
        """Return one line for start-up."""
        settings = self.settings
        in_fp8 = settings.quantization == "fp8"
        chosen = (
            f"{settings.device}, {settings.dtype}{', FP8 weights' * in_fp8}, attention "
            f"{settings.attention}, up to "
            f"{settings.max_running} sequences"
        )
        return " | ".join([chosen, *(f"{name} {reason}" for name, reason in self.reasons.items())])


def look() -> Gpu:
    """Ask torch for its GPU; allocates only the context that the engine would use."""
    import torch

    if torch.version.cuda is None:
        return Gpu(unusable="this torch is built without CUDA")
    if twice := named_twice(os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        return Gpu(unusable=f"CUDA_VISIBLE_DEVICES names GPU {twice} twice", twice=twice)
    try:
        if not torch.cuda.is_available():
            return Gpu(unusable="torch finds no GPU")
        found = Gpu(
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability(),
            *torch.cuda.mem_get_info(),
        )
    except RuntimeError as error:
        return Gpu(unusable=f"torch cannot use the GPU ({str(error).splitlines()[0]})")
    if found.capability < MIN_CAPABILITY:
        return found._replace(
            unusable=f"{found.name} has compute capability {dotted(found.capability)}, "
            "and the kernels need "
            f"{dotted(MIN_CAPABILITY)}"
        )
    if find_spec("triton") is None:
        return found._replace(
            unusable="Triton, which compiles the kernels of a GPU, is not installed"
        )
    seen = ((n, torch.cuda.get_device_properties(n)) for n in range(1, torch.cuda.device_count()))
    others = tuple(OtherGpu(n, gpu.name, gpu.total_memory) for n, gpu in seen)
    return found._replace(mps=mps_enabled(), others=others)


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def choose(settings: EngineSettings, gpu: Gpu, model: ModelFacts) -> DeviceChoice:
    """Return settings with everything decided. `StartupError` if a request cannot be met."""
    chosen, asked = _computing(settings, gpu, model), settings.drafter_training_device
    others = gpu.others[settings.tensor_parallel - 1 :]  # the first ones have ranks
    place = Place(chosen.settings.device, gpu.name, gpu.mps, others, asked)
    device = training_device(settings.drafter_training, place)
    reasons = chosen.reasons
    if settings.trains_apart and asked is None:
        reasons = {**reasons, "drafter_training_device": f"{device}: of the engine's kind"}
    # A push for which ranks have no room fails, see `_check_width`.
    own = settings.tensor_parallel > 1 and settings.weight_staging is None
    staging = "device" if own else settings.weight_staging
    decided = replace(chosen.settings, drafter_training_device=device, weight_staging=staging)
    return DeviceChoice(*with_form(settings, decided, reasons))


def _computing(settings: EngineSettings, gpu: Gpu, model: ModelFacts) -> DeviceChoice:
    """Decide everything that concerns the engine."""
    device: str | None = settings.device  # tests name another, the interpreter
    if device == "cpu":
        return for_cpu(settings, model)
    if device == "interpreter":
        return for_interpreter(settings, model)
    if gpu.twice:  # some versions of CUDA see none then, others all before it
        raise StartupError(f"{gpu.unusable}; name each GPU once, or start with --device cpu")
    if device == "cuda":
        if gpu.unusable:
            raise StartupError(
                f"device is cuda, but {gpu.unusable}; start with --device cpu, or check the "
                "machine with tlt doctor"
            )
        return for_cuda(settings, gpu, model)
    if device is not None:
        raise StartupError(f"device is {device!r}; it must be auto, cpu or cuda")
    chosen = for_cpu(settings, model) if gpu.unusable else for_cuda(settings, gpu, model)
    because = f"{chosen.settings.device}: {gpu.unusable or f'torch sees {gpu.description}'}"
    return DeviceChoice(chosen.settings, {"device": because, **chosen.reasons})


def for_cpu(settings: EngineSettings, model: ModelFacts) -> DeviceChoice:
    _check_width(settings)
    if settings.exchange != "auto":
        raise StartupError(
            f"exchange is {settings.exchange}, which needs GPUs; ranks on a CPU use gloo: "
            "leave the setting out"
        )
    if settings.drafter_parallel == "shared":
        raise StartupError(
            "drafter_parallel is shared, and on a CPU the first rank drafts alone; leave the "
            "setting out"
        )
    if settings.dtype not in (None, "float32"):
        raise StartupError(
            f"dtype is {settings.dtype}, and a CPU computes in float32; use auto or float32 (a "
            "checkpoint in half "
            "precision is read exactly)"
        )
    check_attention(settings.attention, "cpu")
    config, ranks = _config(settings, model), settings.tensor_parallel
    unit = BLOCK if config.quantization and ranks > 1 else CPU_LEAF_UNIT
    check_ranks(config, ranks, unit, str(settings.model))
    suited = filled(
        settings,
        device="cpu",
        dtype="float32",
        quantization=_quantization(config),
        attention="cpu",
        reduction_leaves=ranks,
        kv_memory_mb=CPU_KV_MB,
        max_running=64,
        max_rows=512,
    )
    unit = BLOCK if config.quantization and suited.reduction_leaves > 1 else CPU_LEAF_UNIT
    check_leaves(config, suited.reduction_leaves, unit, str(settings.model), ranks)
    kv = settings.kv_cache_dtype
    reasons = {"kv_cache_dtype": f"{kv}: rounded to it, and kept in float32"} if kv else {}
    return DeviceChoice(replace(suited, graphs=False), reasons)


def for_cuda(settings: EngineSettings, gpu: Gpu, model: ModelFacts) -> DeviceChoice:
    check_attention(settings.attention, "cuda")
    if settings.quantises_kv and settings.attention == "flash_attn":
        raise StartupError(
            f"kv_cache_dtype is {settings.kv_cache_dtype} and attention is flash_attn, which reads "
            "no scales; use attention triton, or kv_cache_dtype auto"
        )
    config, ranks = _config(settings, model), settings.tensor_parallel
    _check_sums(settings, config)
    if ranks > 1:
        _check_gpus(ranks, gpu, widths(config, GPU_LEAF_UNIT))
    reasons, dtype = {}, str(settings.dtype)
    if settings.dtype is None:
        own = model.dtype()
        dtype = gpu_dtype(own) if config.quantization is None else "bfloat16"
        other = f"{'half the size of' if own == 'float32' else 'FP8, and'} the checkpoint in {own}"
        reasons["dtype"] = f"{dtype}: {'as the checkpoint' if dtype == own else other}"
    if config.quantization is not None and dtype != "bfloat16":
        raise StartupError(
            f"quantization is fp8 and dtype {dtype}: what is computed with FP8 weights is in "
            "bfloat16: use dtype bfloat16"
        )
    if config.quantization is not None and settings.quantization is None:
        reasons["quantization"] = "fp8: as the checkpoint"
    suited = filled(
        settings,
        device="cuda",
        dtype=dtype,
        quantization=_quantization(config),
        attention="triton",
        reduction_leaves=settings.reduction_leaves or _auto_leaves(settings, config),
        max_running=256,
        max_rows=4096,
    )
    if suited.drafter_quantization == "fp8" and suited.dtype != "bfloat16":
        raise StartupError(
            f"drafter_quantization is fp8 and dtype {suited.dtype}: what is computed with FP8 "
            "weights is in bfloat16; use dtype bfloat16, or drafter_quantization none"
        )
    check_gpu_leaves(suited, config)
    if suited.attention == "torch" and suited.graphs:
        reasons["graphs"] = "off: attention torch waits for the device, which no graph can"
        suited = replace(suited, graphs=False)
    return DeviceChoice(suited, reasons)


def _auto_leaves(settings: EngineSettings, config: ModelConfig) -> int:
    plain = settings.numerics == "strict" and not settings.max_loras  # see `_check_sums`
    return auto_gpu_leaves(config, settings.tensor_parallel) if plain else GPU_LEAVES


def for_interpreter(settings: EngineSettings, model: ModelFacts) -> DeviceChoice:
    """Return the choice for the GPU engine without a GPU, for tests: small sizes."""
    config = _config(settings, model)
    _check_sums(settings, config)
    suited = filled(
        settings,
        dtype="float32",
        quantization=_quantization(config),
        attention="triton",
        reduction_leaves=max(GPU_LEAVES, settings.tensor_parallel),
        kv_memory_mb=16,
        max_running=8,
        max_rows=64,
    )
    check_gpu_leaves(suited, config)
    return DeviceChoice(replace(suited, graphs=False), {})


def _config(settings: EngineSettings, model: ModelFacts) -> ModelConfig:
    return model.config().stored_as(settings.quantization, str(settings.model))


def _quantization(config: ModelConfig) -> QuantizationName:
    return "fp8" if config.quantization is not None else "none"


def _check_width(settings: EngineSettings) -> None:
    """Raise `StartupError` for settings that allow only one rank."""
    ranks = settings.tensor_parallel
    if ranks > 1 and settings.max_loras:
        raise StartupError(
            f"tensor_parallel is {ranks} and max_loras {settings.max_loras}: LoRA adapters are "
            "computed by one rank; leave one of them out"
        )
    if ranks > 1 and settings.weight_staging in ("host", "disk"):
        raise StartupError(
            f"weight_staging is {settings.weight_staging}, and every rank keeps its slice on its "
            "own device; use auto, device or none"
        )


def _check_sums(settings: EngineSettings, config: ModelConfig) -> None:
    """Raise `StartupError` for ranks and reduction segments that GPU kernels cannot sum."""
    _check_width(settings)
    check_ranks(config, settings.tensor_parallel, GPU_LEAF_UNIT, str(settings.model))
    ranks, leaves = settings.tensor_parallel, settings.reduction_leaves
    if settings.numerics == "fast" and (ranks > 1 or leaves not in (None, GPU_LEAVES)):
        raise StartupError(
            f"numerics is fast, tensor_parallel {ranks} and reduction_leaves {leaves or 'auto'}: "
            "the library's matmuls have no leaves; use numerics strict, or one GPU and auto"
        )
    if settings.max_loras and leaves is not None and leaves > GPU_LEAVES:
        raise StartupError(
            f"reduction_leaves is {leaves} and max_loras {settings.max_loras}: adapters are added "
            f"to one of {GPU_LEAVES} leaves; use reduction_leaves {GPU_LEAVES}, or no adapters"
        )


def _check_gpus(ranks: int, gpu: Gpu, works: Sequence[int]) -> None:
    """Raise `StartupError` unless there are enough GPUs of one kind. `works`: the widths that the
    model supports.
    """
    others = gpu.others[: ranks - 1]
    seen = 1 + len(others)
    if seen < ranks:
        fewer = " or ".join(str(width) for width in works if width <= seen)
        raise StartupError(
            f"tensor_parallel is {ranks}, and torch sees {seen} GPU{'s' * (seen > 1)}, one for "
            f"each rank; use {fewer}, or name more in CUDA_VISIBLE_DEVICES"
        )
    for other in others:
        if (other.name, other.total_bytes) != (gpu.name, gpu.total_bytes):
            raise StartupError(
                f"tensor_parallel is {ranks}, and its GPUs differ: cuda:0 is "
                f"{gpu.description}, and {other.device} is {other.name} with "
                f"{other.total_bytes // MIB} MiB; name GPUs of one kind in CUDA_VISIBLE_DEVICES"
            )


def gpu_split(settings: DecidedSettings, config: ModelConfig, rank: int = 0) -> Split:
    """Return a rank's part of a target. The head stays whole if some rank would have no block of
    it.
    """
    leaves, ranks = settings.reduction_leaves, settings.tensor_parallel
    split = Split(leaves, rank, ranks, token_block=SAMPLED_BLOCK)
    return split if has_tokens(config, split) else replace(split, whole=("lm_head",))


def wider_settings(settings: DecidedSettings, config: ModelConfig) -> list[DecidedSettings]:
    """Return the settings at each larger width that this model supports on GPUs."""
    alone = settings.numerics == "fast" or settings.max_loras
    elsewhere = settings.weight_staging in ("host", "disk")
    if alone or elsewhere or settings.drafter_parallel == "shared":  # not every width can
        return []
    works, leaves = widths(config, GPU_LEAF_UNIT), settings.reduction_leaves
    return [
        replace(settings, tensor_parallel=ranks, reduction_leaves=max(ranks, leaves))
        for ranks in works
        if ranks > settings.tensor_parallel
    ]


def check_gpu_leaves(settings: DecidedSettings, config: ModelConfig) -> None:
    """Raise `StartupError` for reduction segments that GPUs cannot cut this model into."""
    ranks, leaves = settings.tensor_parallel, settings.reduction_leaves
    if ranks > 1 or leaves != GPU_LEAVES:  # two leaves of one rank may have any lengths
        check_leaves(config, leaves, GPU_LEAF_UNIT, str(settings.model), ranks)


def check_attention(name: str | None, device: str) -> None:
    """Raise `StartupError` unless `name` is None or an attention backend of the device, cpu or
    cuda.
    """
    tables = {"cpu": BACKENDS, "cuda": GPU_BACKENDS}
    if name is None or name in tables[device]:
        return
    others = [
        f"needs {'a CPU' if other == 'cpu' else 'a GPU'} (device {other})"
        for other, table in tables.items()
        if name in table
    ]
    *first, last = "auto", *tables[device]
    raise StartupError(
        f"attention is {name[:80]!r}, which {others[0] if others else 'no device has'}; use "
        f"{', '.join(first)} or {last}"
    )


def filled(settings: EngineSettings, **suited: Any) -> DecidedSettings:
    """Return the settings with a suited value wherever they leave one open."""
    suited |= {"policy": suited_policy(settings.drafter), "threads": available_processors()}
    suited["drafter_quantization"] = "none"
    given = {name: value for name, value in vars(settings).items() if value is not None}
    return DecidedSettings(**suited | given)
