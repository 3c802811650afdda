"""The settings that a server and its engine share, each declared once.

`settings.ServerSettings` adds those of the frontend, `engine.settings.EngineSettings` those that no
user sets. A user writes `auto` for a value that the server decides; in the code that is None.
Imports nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tlt_client.channels import CHANNELS

AUTO = "auto"
PolicyName = Literal["off", "fixed", "beg", "goodput"]
ExchangeName = Literal["auto", "nvlink", "nccl"]
DrafterParallel = Literal["auto", "shared", "replicated"]
SPLITS = (1, 2, 4, 8)  # numbers of ranks, and of leaves


@dataclass(frozen=True)
class Doc:
    """A setting's documentation: unit, sentence, inclusive bounds, and whether the server can
    decide it (`auto`).
    """

    unit: str
    sentence: str
    low: float | None = None
    high: float | None = None
    auto: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings of the server that its engine needs too."""

    # what is served
    model: Annotated[
        Path,
        Doc(
            "directory",
            "Target model in the ordinary Hugging Face layout (config.json, safetensors, "
            "tokenizer.json).",
        ),
    ]
    drafter: Annotated[str, Doc("directory | history | none", "Where draft tokens come from.")] = (
        "none"
    )
    policy: Annotated[
        PolicyName | None,
        Doc(
            "name",
            "Which strategy each step uses; auto is goodput with a drafter, off without.",
            auto=True,
        ),
    ] = None
    sd_strategy: Annotated[
        str,
        Doc(
            "drafter:DEPTHxWIDTHxROWS",
            "The one strategy of the policy `fixed`, such as eagle:7x4x32.",
        ),
    ] = ""
    sd_max_batch: Annotated[
        int,
        Doc(
            "requests",
            "Never speculate above this many decoding requests; 0 = the policy decides.",
            0,
            65536,
        ),
    ] = 0
    sd_canary: Annotated[
        float,
        Doc(
            "ratio",
            "A drafter whose acceptance falls below this share of what it was before weights "
            "changed rests until they change again; history drafts instead. 0 = never.",
            0,
            1,
        ),
    ] = 0.5
    served_model_name: Annotated[
        str | None,
        Doc("name", "Name reported to clients; auto is the directory's name.", auto=True),
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        Doc(
            "device",
            "What computes; auto is cuda where torch sees a GPU that the kernels run on, else cpu.",
            auto=True,
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Doc(
            "type",
            "Type of weights and KV; auto is float32 on a CPU, on a GPU the checkpoint's own half "
            "precision, else bfloat16.",
            auto=True,
        ),
    ] = None
    attention: Annotated[
        str | None,
        Doc(
            "backend",
            "Attention backend: cpu or torch on a CPU, triton, torch or flash_attn on a GPU; auto "
            "is the first.",
            auto=True,
        ),
    ] = None
    graphs: Annotated[
        bool, Doc("true | false", "Capture CUDA graphs at start; false launches kernel by kernel.")
    ] = True
    numerics: Annotated[
        Literal["strict", "fast"],
        Doc(
            "mode",
            "strict: the same bits in every batch and with every strategy; fast: exact in "
            "distribution only.",
        ),
    ] = "strict"
    tensor_parallel: Annotated[
        int,
        Doc(
            "ranks",
            "Processes that share the target, a power of two; tokens are the same at every width "
            "with the same reduction_leaves.",
            1,
            8,
        ),
    ] = 1
    reduction_leaves: Annotated[
        int | None,
        Doc(
            "leaves",
            "Slices of each long sum, added as a fixed tree: 1, 2, 4 or 8, and tensor_parallel at "
            "least. Tokens depend on it; auto is tensor_parallel, on a GPU at least 4 where these "
            "divide the heads, else 2, as with max_loras or numerics fast.",
            1,
            8,
            auto=True,
        ),
    ] = None
    exchange: Annotated[
        ExchangeName,
        Doc(
            "name",
            "How GPUs of one target exchange sums: nvlink, in memory that they map; nccl, slower; "
            "auto: nvlink where they can. Tokens are the same.",
        ),
    ] = "auto"
    drafter_parallel: Annotated[
        DrafterParallel,
        Doc(
            "how",
            "Whether GPUs of one target share the drafter: shared; replicated, whole on each; "
            "auto: shared where that is faster. Tokens are the same.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Doc(
            "threads",
            "Compute threads of the engine; auto is the processors this process may use.",
            1,
            1024,
            auto=True,
        ),
    ] = None

    # weights that are pushed while serving
    weight_root: Annotated[
        Path | None,
        Doc(
            "directory",
            "Weights may be pushed from below this directory; none: pushes are refused.",
        ),
    ] = None
    weight_marker: Annotated[
        str,
        Doc(
            "file name", "A pushed directory must hold this file; empty: no such file is asked for."
        ),
    ] = ""
    weight_channels: Annotated[
        str | None,
        Doc(
            "names",
            f"Channels that weights may come by, with commas between: {', '.join(CHANNELS)}; auto "
            "is disk with a weight_root, else none.",
            auto=True,
        ),
    ] = None
    weight_staging: Annotated[
        Literal["device", "host", "disk", "none"] | None,
        Doc(
            "place",
            "Where a pushed version lies until it is live: auto is the first with room (of "
            "several ranks: device), none writes over the weights in use.",
            auto=True,
        ),
    ] = None
    weight_timeout_s: Annotated[
        float,
        Doc(
            "s",
            "Longest wait of a push by broadcast or ipc for its trainer: for it to join, for the "
            "next tensors.",
            0.1,
            86400,
        ),
    ] = 120.0
    state_dir: Annotated[
        Path | None,
        Doc(
            "directory",
            "Keeps committed weights, rollouts and measured step times over a restart; none: they "
            "end with the process that holds them.",
        ),
    ] = None

    # LoRA adapters of the target
    max_loras: Annotated[
        int, Doc("adapters", "LoRA adapters that can be loaded at once; 0: none.", 0, 1024)
    ] = 0
    max_lora_rank: Annotated[
        int, Doc("rank", "Largest rank of an adapter; memory is set apart for it at start.", 1, 128)
    ] = 16

    # a drafter that follows the target
    drafter_training: Annotated[
        Literal["off", "idle", "device", "share"],
        Doc(
            "mode",
            "All but off keep finished sequences, prompts included, in memory and below state_dir, "
            "and train the drafter on them: idle while the engine is idle, device on another "
            "device while requests run, share on the engine's, which on a GPU needs MPS.",
        ),
    ] = "off"
    drafter_training_device: Annotated[
        str | None,
        Doc(
            "device",
            "Where drafter_training device trains: cpu where the engine computes on one, else "
            "another GPU of the engine's kind, such as cuda:1. auto is the first of those.",
            auto=True,
        ),
    ] = None
    drafter_training_mb: Annotated[
        int | None,
        Doc(
            "MiB",
            "Memory in which the drafter is trained: of the GPU that trains, set apart at start "
            "where the engine computes on it, or of the host where a CPU trains. Less makes packs "
            "shorter. auto is what packs of 2,048 tokens need, of 512 on a CPU.",
            1,
            2**20,
            auto=True,
        ),
    ] = None

    # memory and scheduling
    max_model_len: Annotated[
        int | None,
        Doc(
            "tokens",
            "Longest prompt plus output; auto is the model's own limit.",
            2,
            2**24,
            auto=True,
        ),
    ] = None
    page_size: Annotated[int, Doc("tokens", "Positions per KV page.", 1, 1024)] = 16
    pages: Annotated[
        int | None, Doc("pages", "KV pages; auto is what kv_memory_mb holds.", 1, 2**31, auto=True)
    ] = None
    kv_memory_mb: Annotated[
        int | None,
        Doc(
            "MiB",
            "Memory for KV pages of each rank; auto is 1024 on a CPU, and what memory_fraction "
            "leaves on a GPU.",
            1,
            2**24,
            auto=True,
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        Doc(
            "share",
            "Share of a GPU's memory for everything: weights, those being pushed, KV, graphs.",
            0.05,
            0.99,
        ),
    ] = 0.9
    max_running: Annotated[
        int | None,
        Doc(
            "sequences",
            "Sequences that decode at once; auto is 64 on a CPU, 256 on a GPU.",
            1,
            65536,
            auto=True,
        ),
    ] = None
    max_rows: Annotated[
        int | None,
        Doc(
            "rows",
            "Prompt rows that one step processes; auto is 512 on a CPU, 4096 on a GPU.",
            1,
            65536,
            auto=True,
        ),
    ] = None


def open_channels(asked: str | None, weight_root: object) -> tuple[str, ...]:
    """Return the channels that the setting `weight_channels` opens."""
    if asked is None:
        return ("disk",) if weight_root else ()
    return tuple(name.strip() for name in asked.split(",") if name.strip() not in ("", "none"))


def available_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suited_policy(drafter: str) -> PolicyName:
    """Return the policy where none is asked for."""
    return "off" if drafter == "none" else "goodput"
