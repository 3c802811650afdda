"""Checks of device, checkpoints and memory by the rules of the engine, without reading weights. Run
in the child process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tlt_client.quantise import SCALE_SUFFIX
from tlt_server.attention import BACKENDS, GPU_BACKENDS
from tlt_server.build import engine_settings
from tlt_server.config import Config
from tlt_server.doctor.checks import Finding, fail, ok, warn
from tlt_server.engine.devices.choice import DeviceChoice, Gpu, ModelFiles, choose, gpu_split, look
from tlt_server.engine.devices.sizing import training_share
from tlt_server.engine.gpu.memory.budget import MemoryPlan, size
from tlt_server.engine.gpu.start.planning import in_fp8, plan_start, shapes_of, version_bytes
from tlt_server.engine.sampling.lexers import LIMIT as GRAMMARS
from tlt_server.engine.settings import DecidedSettings
from tlt_server.engine.start.checkpoints import (
    check_drafter,
    check_target,
    empty_drafter,
    empty_model,
    kv_bytes,
)
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import tensor_files
from tlt_server.models.numerics import BLOCKS, Numerics, WeightSlice
from tlt_server.models.shards import Stored, rank_config, stored_bytes
from tlt_server.models.split import Split
from tlt_server.process.machine import host_memory
from tlt_server.speculation.drafters import drafter_in, weights_directory
from tlt_server.weights.spool import Spool

GIB = 2**30
WIDEST = 8192  # outputs of a product that the self-test looks at
# Time of a 7B step on two H200s, as a share of its time on one, at batch 1 and 256: see
# docs/several_gpus.md.
STEP_ON_TWO = 0.63
COST = (
    "it fits one GPU, too, and a server on each gives more tokens in all: at a width of 2, each "
    f"GPU has {0.5 / STEP_ON_TWO:.2f} of that throughput (7B on H200s, docs/several_gpus.md)"
)
UNDECIDED = fail(
    "not checked, as nothing is chosen that would compute", "follow the remedy of the check device"
)


def _choice(config: Config) -> tuple[DeviceChoice, Gpu]:
    """Return the engine's choice of device."""
    gpu = look()
    return choose(engine_settings(config), gpu, ModelFiles(config.model)), gpu


def device(config: Config) -> Finding:
    choice, _ = _choice(config)
    if choice.settings.device == "cuda":
        raw, settings = ModelConfig.read(config.model), choice.settings
        own = rank_config(raw, gpu_split(settings, raw))
        GPU_BACKENDS.resolve(settings.attention)(  # refuses what it cannot serve
            heads=own.heads,
            kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            context=own.max_position,
            device=torch.device("cuda"),
            dtype=getattr(torch, settings.dtype),
            numerics=settings.numerics,
        )
    else:
        BACKENDS.resolve(choice.settings.attention)
    return ok(choice.describe())


def target(config: Config) -> Finding:
    settings = engine_settings(config)
    model = empty_model(settings)
    check_target(settings, model, on_gpu=_on_gpu(config))
    values = _values(model.parameters())
    return ok(
        f"{model.config.architecture}, {values / 1e6:,.1f} M parameters, every tensor is there"
    )


def drafter(config: Config) -> Finding:
    directory = weights_directory(config.drafter)
    if directory is None:
        return ok(config.drafter)
    settings = engine_settings(config)
    network = empty_drafter(
        directory, empty_model(settings), settings.drafter_quantization or "none"
    )
    check_drafter(settings, network, "cuda" if _on_gpu(config) else "cpu")
    values = _values(network.parameters())
    return ok(f"{drafter_in(directory)}, {values / 1e6:,.1f} M parameters, fits the target")


def numerics(config: Config) -> Finding:
    """Run the loader's self-test on matmuls of a rank's shapes, with other values."""
    chosen = _chosen(config)
    if chosen is None:
        return UNDECIDED
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    if config.numerics == "fast":
        return warn(
            "fast: exact in distribution, not bit for bit",
            "--numerics strict where tokens must not depend on the batch",
        )
    if _on_gpu(config):
        return ok(
            "strict: kernels that add in a fixed order, tested where they are made and not here"
        )
    settings, tested = chosen[0].settings, Numerics("strict", threads=config.threads)
    of_rank = empty_model(settings, Split(settings.reduction_leaves, 0, settings.tensor_parallel))
    tested.self_test(*_stand_ins(of_rank))
    if tested.method is BLOCKS:
        return warn(
            tested.describe(),
            "matmuls in blocks are slower; use a build of torch with oneDNN, or an x86 processor "
            "with AVX2",
        )
    return ok(tested.describe())


def _stand_ins(model: Decoder) -> tuple[list[tuple[Tensor, Tensor | None]], list[WeightSlice]]:
    """Return random values in the layouts of `model.tested()`, not wider than the self-test
    needs.
    """
    random = torch.Generator().manual_seed(0)

    def like(weight_KN: Tensor, outputs: int) -> Tensor:
        inputs, transposed = len(weight_KN), weight_KN.stride(0) == 1
        sizes = (outputs, inputs) if transposed else (inputs, outputs)
        values = torch.randn(sizes, generator=random)
        return values.t() if transposed else values

    def matmul(weight_KN: Tensor, bias_N: Tensor | None) -> tuple[Tensor, Tensor | None]:
        outputs = min(weight_KN.shape[1], WIDEST)
        bias = torch.randn(outputs, generator=random) if bias_N is not None else None
        return like(weight_KN, outputs), bias

    def narrowed(cut: WeightSlice) -> WeightSlice:
        widths = [min(width, WIDEST) for width in cut.widths]
        return WeightSlice(like(cut.weight_KN, sum(widths)), widths, cut.ranks)

    weights, slices = model.tested()
    return [matmul(*each) for each in weights], [narrowed(cut) for cut in slices]


def memory(config: Config) -> Finding:
    chosen = _chosen(config)
    if chosen is None:
        return UNDECIDED
    settings = chosen[0].settings
    if settings.device == "cuda":
        return _gpu_memory(config)
    model, ranks = empty_model(settings), settings.tensor_parallel
    kv = kv_bytes(settings)
    staged = config.channels and config.weight_staging in (None, "device", "host")
    versions = 3 if staged else 1  # live, before that, and the one being staged
    weights = stored_bytes(model.parameters())
    need = weights * versions + ranks * kv + GRAMMARS
    found = (
        f"{versions} x {weights / GIB:.2f} GiB of float32 weights and "
        f"{kv / GIB:.2f} GiB of KV{f' on each of {ranks} ranks' * (ranks > 1)}, "
        f"{GRAMMARS / GIB:.2f} GiB of grammars"
    )
    directory = weights_directory(config.drafter)
    if settings.feature_bytes and directory is not None:
        share = training_share(settings, empty_drafter(directory, model)).host
        need, found = need + share, f"{found}, {share / GIB:.2f} GiB to train the drafter"
    available, total = host_memory()
    found += f"; {available / GIB:.2f} GiB are available"
    remedy = "lower --kv-memory-mb, serve a smaller model, or use a machine with more memory"
    if need > total:
        return fail(f"{found}, {total / GIB:.2f} in all", remedy)
    return ok(found) if need <= available else warn(found, f"end other programs, or {remedy}")


def _gpu_memory(config: Config) -> Finding:
    (chosen, gpu), directory = _choice(config), weights_directory(config.drafter)
    settings, model = chosen.settings, ModelConfig.served(chosen.settings)

    def planned(settings: DecidedSettings) -> MemoryPlan:
        memory = gpu.free_bytes, gpu.total_bytes
        return plan_start(settings, model, shapes_of(settings), *memory)

    plan = planned(settings)
    ranks, found = settings.tensor_parallel, plan.describe()
    if ranks > 1:
        found += f" on each of {ranks} GPUs"
        with contextlib.suppress(StartupError):
            planned(replace(settings, tensor_parallel=1))
            found += f"; {COST}"
    found += f"; {_versions(plan, model)}"
    found += f"; {GRAMMARS / GIB:.2f} GiB of grammars in the host's memory"
    if directory is None or not plan.needs.per_state:
        return ok(found)
    rooms = {other.device: other.total_bytes for other in gpu.others}
    device = settings.drafter_training_device
    network = empty_drafter(directory, empty_model(settings))
    share = training_share(settings, network, rooms.get(device))
    return ok(found + share.describe(device))


def _versions(plan: MemoryPlan, model: ModelConfig) -> str:
    """Return the size of a version of the weights, what a pushed one and the one before would leave
    of the KV, and the time to read one.
    """
    settings = plan.settings
    own = version_bytes(settings, model)
    found = f"a version of the target has {size(own.all)}"
    if halved := in_fp8(settings, model):
        found += f", {size(version_bytes(settings, halved).all)} with --quantization fp8"
    if not plan.staging:
        pushed = plan.changed("free", plan.free - 2 * plan.needs.weights)
        left = f"{pushed.pages} pages of KV" if pushed.fits else "too little KV"
        found += f"; pushed versions on the GPU would leave {left}"
    if speed := memory_speed():
        found += (
            f"; a step takes at least {1e3 * own.read / speed:.2f} ms, in which the GPU's memory "
            f"gives the {size(own.read)} that it reads, at {speed / 1e12:.1f} TB/s"
        )
    return found


def memory_speed() -> float:
    """Return the bytes that the GPU's memory gives in a second, as its clock and width say; 0 if
    torch does not name them.
    """
    if not torch.cuda.is_available():
        return 0.0
    gpu = torch.cuda.get_device_properties(0)
    clock_khz, bits = getattr(gpu, "memory_clock_rate", 0), getattr(gpu, "memory_bus_width", 0)
    return 2e3 * clock_khz * bits / 8  # two transfers per clock


def _chosen(config: Config) -> tuple[DeviceChoice, Gpu] | None:
    """Return choice and GPU; None if the check `device` fails."""
    try:
        return _choice(config)
    except StartupError:
        return None


def _on_gpu(config: Config) -> bool:
    """Return True if the model runs on a GPU; False also if the check `device` fails."""
    chosen = _chosen(config)
    return chosen is not None and chosen[0].settings.device == "cuda"


def committed_weights(config: Config) -> Finding:
    if config.state_dir is None or not (config.state_dir / "weights").is_dir():
        return ok("none are kept")
    spool = Spool(config.state_dir, str(config.model.resolve()))
    kept = spool.current()
    target = kept.get("target")
    if target is not None and target.directory:
        files = tensor_files(spool.directory / target.directory)
        was = any(name.endswith(SCALE_SUFFIX) for name in files)
        if was != (empty_model(engine_settings(config)).config.quantization is not None):
            found = (
                f"target {target.version} was kept {'in' if was else 'without'} FP8, so it is lost"
            )
            other = "fp8" if was else "none"
            return fail(found, f"start with --quantization {other}, or push it again")
    return ok(", ".join(f"{role} {part.version}" for role, part in kept.items()) or "none are kept")


def _values(parameters: Mapping[str, Stored]) -> int:
    return sum(view.numel() for view in parameters.values())
