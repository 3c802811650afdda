"""The description of this server, in one reply for every dialect: its own keys, and keys that
clients of other servers read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from tlt_server import __version__
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.service import Service
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.labels import label_of

SECRETS = {"api_key_file", "api_key_variable", "tls_cert", "tls_key", "tls_client_ca"}
PLACES = {"model", "drafter", "weight_root", "state_dir", "host", "port"}


class TransferConfig(Struct, frozen=True):
    backend: Annotated[
        Literal["disk", "gloo", "nccl"],
        "gloo, nccl: from the trainer's process group; disk: from a directory",
    ]


class ModelConfigInfo(Struct, frozen=True):
    dtype: Annotated[str, "dtype of weights and KV; empty until the engine has been ready"]
    max_model_len: Annotated[
        int | None, "the longest prompt plus output; null until the engine has been ready"
    ]
    logprobs_mode: Annotated[
        str, "log-probs are those of the distribution that was sampled from"
    ] = "processed_logprobs"


class ParallelConfigInfo(Struct, frozen=True):
    tensor_parallel_size: Annotated[int, "ranks that share the target"] = 1
    data_parallel_size: Annotated[int, "replicas; of a plain server 1"] = 1


class LoraConfigInfo(Struct, frozen=True):
    max_loras: Annotated[int, "adapters that can be loaded at once"]
    max_lora_rank: Annotated[int, "largest rank of an adapter"]


class VllmConfigInfo(Struct, frozen=True):
    """The configuration in the form that clients of vLLM read."""

    model_config: Annotated[ModelConfigInfo, "what is served"]
    weight_transfer_config: Annotated[TransferConfig, "how weights come"]
    parallel_config: Annotated[ParallelConfigInfo, "how it is spread"]
    lora_config: Annotated[LoraConfigInfo | None, "null: no LoRA adapters are taken"] = None


class ServerInfo(Struct, frozen=True, kw_only=True):
    version: Annotated[str, "version of the server"]
    served_model_name: Annotated[str, "the name to send as `model`"]
    ready: Annotated[bool, "whether a request sent now would be taken"]
    paused: Annotated[bool, "whether a pause holds"]
    asleep: Annotated[list[str], "memory that is given back: weights, kv_cache"]
    numerics: Annotated[
        str, "the guarantee that the tokens have: strict or fast, with how it is kept"
    ]
    engine: Annotated[
        EngineInfo | None, "the engine's own description; null until it has been ready"
    ]
    open_sequences: Annotated[int, "accepted and not finished"]
    max_queue: Annotated[int, "limit on open sequences"]
    config: Annotated[
        dict[str, Any],
        "every setting by name, except those of keys and certificates; settings that name places "
        "only for a key that may push weights or operate",
    ]
    vllm_config: Annotated[VllmConfigInfo, "for clients of vLLM"]
    model_path: Annotated[
        str,
        "the directory of the model, or its name for a key that may neither push nor operate; this "
        "and the following keys are for clients of SGLang",
    ]
    tokenizer_path: Annotated[str, "the same"]
    weight_version: Annotated[
        str, "the label of the target's version that is live; empty until the engine has been ready"
    ]
    max_total_num_tokens: Annotated[
        int, "positions of all KV pages; 0 until the engine has been ready"
    ]
    max_running_requests: Annotated[
        int, "sequences that decode at once; 0 until the engine has been ready"
    ]
    context_length: Annotated[
        int, "the longest prompt plus output; 0 until the engine has been ready"
    ]
    enable_memory_saver: Annotated[
        bool,
        "always false: the GPUs are shared with no trainer; memory can be lent in any case "
        "(/release_memory_occupation)",
    ] = False
    host: Annotated[
        str | None, "the address bound; null for a key that may neither push nor operate"
    ]
    port: Annotated[int | None, "the port bound; null for the same keys"]
    nnodes: Annotated[int, "always 1"] = 1
    node_rank: Annotated[int, "always 0"] = 0
    base_gpu_id: Annotated[int, "the first GPU, of those visible: always 0"] = 0
    gpu_id_step: Annotated[int, "always 1"] = 1
    tp_size: Annotated[int, "ranks that share the target"]
    pp_size: Annotated[int, "always 1"] = 1
    dp_size: Annotated[int, "replicas; of a plain server 1"] = 1
    ep_size: Annotated[int, "always 1"] = 1
    dtype: Annotated[str, "dtype of weights and KV; empty until the engine has been ready"]
    enable_metrics: Annotated[bool, "always true: GET /metrics"] = True
    enable_lora: Annotated[bool, "whether LoRA adapters are taken"]
    max_loras_per_batch: Annotated[int, "adapters that can be loaded at once"]
    max_lora_rank: Annotated[int, "largest rank of an adapter"]
    num_gpus: Annotated[int, "GPUs that compute, in all replicas; 0 on CPUs"]
    disaggregation_mode: Annotated[
        str, "always null, in letters: prompts and outputs are computed here"
    ] = "null"


def model_path(service: Service, caller: Caller) -> str:
    """Return the directory of the model, or its name for a key that may not see paths."""
    return str(service.config.model) if _trusted(caller) else service.config.served_model_name


def _trusted(caller: Caller) -> bool:
    return caller.may("push-weights") or caller.may("operate")


def server_info(service: Service, caller: Caller) -> ServerInfo:
    engine, config = service.engine, service.config
    info, model, trusted = engine.info, model_path(service, caller), _trusted(caller)
    replicas, ranks = (
        engine.replicas.count,
        info.tensor_parallel if info else config.tensor_parallel,
    )
    return ServerInfo(
        version=__version__,
        served_model_name=config.served_model_name,
        ready=service.ready,
        paused=engine.pauses.paused,
        asleep=sorted(engine.pauses.asleep),
        numerics=service.numerics,
        engine=info,
        open_sequences=len(engine),
        max_queue=config.max_queue,
        config=config.model_dump(mode="json", exclude=SECRETS if trusted else SECRETS | PLACES),
        vllm_config=VllmConfigInfo(
            ModelConfigInfo(info.dtype if info else "", info.max_model_len if info else None),
            TransferConfig(_transfer(config.channels, info)),
            ParallelConfigInfo(ranks, replicas),
            lora_config=LoraConfigInfo(config.max_loras, config.max_lora_rank)
            if config.max_loras
            else None,
        ),
        model_path=model,
        tokenizer_path=model,
        weight_version=label_of(info.weight_version) if info else "",
        max_total_num_tokens=info.pages * info.page_size if info else 0,
        max_running_requests=info.max_running if info else 0,
        context_length=info.max_model_len if info else 0,
        host=config.host if trusted else None,
        port=config.port if trusted else None,
        tp_size=ranks,
        dp_size=replicas,
        dtype=info.dtype if info else "",
        enable_lora=config.max_loras > 0,
        max_loras_per_batch=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        num_gpus=replicas * ranks if info and info.device == "cuda" else 0,
    )


def _transfer(
    channels: tuple[str, ...], info: EngineInfo | None
) -> Literal["disk", "gloo", "nccl"]:
    if "broadcast" not in channels:
        return "disk"
    return "nccl" if info is not None and info.device == "cuda" else "gloo"
