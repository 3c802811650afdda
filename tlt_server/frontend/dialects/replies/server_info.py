"""The description of this server, in one reply for every dialect: its own keys, and those that
clients of other servers look for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tlt_server import __version__
from tlt_server.events import EngineInfo
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.service import Service
from tlt_server.labels import label_of

SECRETS = {"api_key_file", "api_key_variable", "tls_cert", "tls_key", "tls_client_ca"}
PLACES = {"model", "drafter", "weight_root", "state_dir", "host", "port"}


class TransferConfig(Struct, frozen=True):
    backend: Annotated[
        Literal["disk", "gloo", "nccl"],
        Meta(description="gloo, nccl: from the trainer's process group; disk: from a directory"),
    ]


class ModelConfigInfo(Struct, frozen=True):
    dtype: Annotated[
        str, Meta(description="dtype of weights and KV; empty until the engine has been ready")
    ]
    max_model_len: Annotated[
        int | None,
        Meta(description="the longest prompt plus output; null until the engine has been ready"),
    ]
    logprobs_mode: Annotated[
        str, Meta(description="log-probs are those of the distribution that was sampled from")
    ] = "processed_logprobs"


class ParallelConfigInfo(Struct, frozen=True):
    tensor_parallel_size: Annotated[int, Meta(description="ranks that share the target")] = 1
    data_parallel_size: Annotated[int, Meta(description="always 1")] = 1


class LoraConfigInfo(Struct, frozen=True):
    max_loras: Annotated[int, Meta(description="adapters that can be loaded at once")]
    max_lora_rank: Annotated[int, Meta(description="largest rank of an adapter")]


class VllmConfigInfo(Struct, frozen=True):
    """The configuration in the form that clients of vLLM read."""

    model_config: Annotated[ModelConfigInfo, Meta(description="what is served")]
    weight_transfer_config: Annotated[TransferConfig, Meta(description="how weights come")]
    parallel_config: Annotated[ParallelConfigInfo, Meta(description="how it is spread")]
    lora_config: Annotated[
        LoraConfigInfo | None, Meta(description="null: no LoRA adapters are taken")
    ] = None


class ServerInfo(Struct, frozen=True, kw_only=True):
    version: Annotated[str, Meta(description="version of the server")]
    served_model_name: Annotated[str, Meta(description="the name to send as `model`")]
    ready: Annotated[bool, Meta(description="whether a request sent now would be taken")]
    paused: Annotated[bool, Meta(description="whether a pause holds")]
    asleep: Annotated[list[str], Meta(description="memory that is given back: weights, kv_cache")]
    numerics: Annotated[
        str,
        Meta(description="the guarantee that the tokens have: strict or fast, with how it is kept"),
    ]
    engine: Annotated[
        EngineInfo | None,
        Meta(description="the engine's own description; null until it has been ready"),
    ]
    open_sequences: Annotated[int, Meta(description="accepted and not finished")]
    max_queue: Annotated[int, Meta(description="limit on open sequences")]
    config: Annotated[
        dict[str, Any],
        Meta(
            description="every setting by name, except those of keys and certificates; settings "
            "that name places only for a key that may push weights or operate"
        ),
    ]
    vllm_config: Annotated[VllmConfigInfo, Meta(description="for clients of vLLM")]
    model_path: Annotated[
        str,
        Meta(
            description="the directory of the model, or its name for a key that may neither push "
            "nor operate; this and the following keys are for clients of SGLang"
        ),
    ]
    tokenizer_path: Annotated[str, Meta(description="the same")]
    weight_version: Annotated[
        str,
        Meta(
            description="the label of the target's version that is live; empty until the engine "
            "has been ready"
        ),
    ]
    max_total_num_tokens: Annotated[
        int, Meta(description="positions of all KV pages; 0 until the engine has been ready")
    ]
    max_running_requests: Annotated[
        int, Meta(description="sequences that decode at once; 0 until the engine has been ready")
    ]
    context_length: Annotated[
        int, Meta(description="the longest prompt plus output; 0 until the engine has been ready")
    ]
    enable_memory_saver: Annotated[
        bool,
        Meta(
            description="always false: the GPUs are shared with no trainer; memory can be lent in "
            "any case (/release_memory_occupation)"
        ),
    ] = False
    host: Annotated[
        str | None,
        Meta(description="the address bound; null for a key that may neither push nor operate"),
    ]
    port: Annotated[int | None, Meta(description="the port bound; null for the same keys")]
    nnodes: Annotated[int, Meta(description="always 1")] = 1
    node_rank: Annotated[int, Meta(description="always 0")] = 0
    base_gpu_id: Annotated[int, Meta(description="the first GPU, of those visible: always 0")] = 0
    gpu_id_step: Annotated[int, Meta(description="always 1")] = 1
    tp_size: Annotated[int, Meta(description="ranks that share the target")]
    pp_size: Annotated[int, Meta(description="always 1")] = 1
    dp_size: Annotated[int, Meta(description="always 1")] = 1
    ep_size: Annotated[int, Meta(description="always 1")] = 1
    dtype: Annotated[
        str, Meta(description="dtype of weights and KV; empty until the engine has been ready")
    ]
    enable_metrics: Annotated[bool, Meta(description="always true: GET /metrics")] = True
    enable_lora: Annotated[bool, Meta(description="whether LoRA adapters are taken")]
    max_loras_per_batch: Annotated[int, Meta(description="adapters that can be loaded at once")]
    max_lora_rank: Annotated[int, Meta(description="largest rank of an adapter")]
    num_gpus: Annotated[int, Meta(description="GPUs that compute; 0 on a CPU")]
    disaggregation_mode: Annotated[
        str, Meta(description="always null, in letters: prompts and outputs are computed here")
    ] = "null"


def model_path(service: Service, caller: Caller) -> str:
    """Return the directory of the model, or its name for a key that may not know places."""
    return str(service.config.model) if _trusted(caller) else service.config.served_model_name


def _trusted(caller: Caller) -> bool:
    return caller.may("push-weights") or caller.may("operate")


def server_info(service: Service, caller: Caller) -> ServerInfo:
    engine, config = service.engine, service.config
    info, model, trusted = engine.info, model_path(service, caller), _trusted(caller)
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
            ParallelConfigInfo(config.tensor_parallel),
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
        tp_size=config.tensor_parallel,
        dtype=info.dtype if info else "",
        enable_lora=config.max_loras > 0,
        max_loras_per_batch=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        num_gpus=config.tensor_parallel if info and info.device == "cuda" else 0,
    )


def _transfer(
    channels: tuple[str, ...], info: EngineInfo | None
) -> Literal["disk", "gloo", "nccl"]:
    if "broadcast" not in channels:
        return "disk"
    return "nccl" if info is not None and info.device == "cuda" else "gloo"
