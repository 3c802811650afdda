"""Every setting of a server, once: name, type, default, unit, bounds and, below it, a sentence.
Imports nothing heavy, so `tlt serve --help` is quick.

`settings` builds the table for flags, variables, keys of the YAML file, help and messages: the flag
`--max-queue`, the variable `TLT_MAX_QUEUE` and the key `max_queue` are one setting; a flag
overrides a variable, a variable the file. `config.Config` inherits the fields of `ServerSettings`
and validates them; the engine's own settings add to `SharedSettings`. A user writes `auto` for a
value that the server decides; in the code that is None.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

AUTO = "auto"
PolicyName = Literal["off", "fixed", "beg", "goodput"]
ExchangeName = Literal["auto", "nvlink", "nccl"]
DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "fp8"]
KvDtypeName = Literal["fp8_e4m3"]
StagingName = Literal["device", "host", "disk", "none"]
DrafterParallel = Literal["auto", "shared", "replicated"]
SPLITS = (1, 2, 4, 8)  # numbers of ranks, and of leaves


@dataclass(frozen=True)
class Doc:
    """A setting's unit, inclusive bounds, whether the server can decide it (`auto`), and the
    sentence below it.
    """

    unit: str
    low: float | None = None
    high: float | None = None
    auto: bool = False
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings of the server that its engine needs too."""

    # what is served
    model: Annotated[Path, Doc("directory")]
    """Target model in the ordinary Hugging Face layout (config.json, safetensors,
    tokenizer.json)."""
    drafter: Annotated[str, Doc("directory | history | none")] = "none"
    """Where draft tokens come from."""
    policy: Annotated[PolicyName | None, Doc("name", auto=True)] = None
    """Which strategy each step uses; auto is goodput with a drafter, off without."""
    sd_strategy: Annotated[str, Doc("drafter:DEPTHxWIDTHxROWS")] = ""
    """The one strategy of the policy `fixed`, such as eagle:7x4x32."""
    sd_max_batch: Annotated[int, Doc("requests", 0, 65536)] = 0
    """Never speculate above this many decoding requests; 0 = the policy decides."""
    sd_canary: Annotated[float, Doc("ratio", 0, 1)] = 0.5
    """A drafter whose acceptance falls below this share of what it was before weights changed rests
    until they change again; history drafts instead. 0 = never."""
    served_model_name: Annotated[str | None, Doc("name", auto=True)] = None
    """Name reported to clients; auto is the directory's name."""
    device: Annotated[Literal["cpu", "cuda"] | None, Doc("device", auto=True)] = None
    """What computes; auto is cuda where torch sees a GPU that the kernels run on, else cpu."""
    dtype: Annotated[DtypeName | None, Doc("type", auto=True)] = None
    """Type of weights and KV; auto is float32 on a CPU, on a GPU the checkpoint's own half
    precision, else bfloat16."""
    quantization: Annotated[QuantizationName | None, Doc("name", auto=True)] = None
    """Form in which the target's linear maps are kept: none, as dtype says, or fp8, with a scale
    per block of 128 x 128, into which other checkpoints are quantised as they load; auto is the
    checkpoint's."""
    kv_cache_dtype: Annotated[KvDtypeName | None, Doc("type", auto=True)] = None
    """Type of the target's KV: auto is dtype; fp8_e4m3 rounds it to half the bytes, with a scale
    per token and head. Tokens depend on it."""
    attention: Annotated[str | None, Doc("backend", auto=True)] = None
    """Attention backend: cpu or torch on a CPU, triton, torch or flash_attn on a GPU; auto is the
    first."""
    graphs: Annotated[bool, Doc("true | false")] = True
    """Capture CUDA graphs at start; false launches kernel by kernel."""
    numerics: Annotated[Literal["strict", "fast"], Doc("mode")] = "strict"
    """strict: the same bits in every batch and with every strategy; fast: exact in distribution
    only."""
    tensor_parallel: Annotated[int, Doc("ranks", 1, 8)] = 1
    """Processes that share the target, a power of two; tokens are the same at every width with the
    same reduction_leaves."""
    reduction_leaves: Annotated[int | None, Doc("leaves", 1, 8, auto=True)] = None
    """Slices of each long sum, added as a fixed tree: 1, 2, 4 or 8, and tensor_parallel at least.
    Tokens depend on it; auto is tensor_parallel, on a GPU at least 4 where these divide the heads,
    else 2, as with max_loras or numerics fast."""
    exchange: Annotated[ExchangeName, Doc("name")] = "auto"
    """How GPUs of one target exchange sums: nvlink, in memory that they map; nccl, slower; auto:
    nvlink where they can. Tokens are the same."""
    drafter_parallel: Annotated[DrafterParallel, Doc("how")] = "auto"
    """Whether GPUs of one target share the drafter: shared; replicated, whole on each; auto: shared
    where that is faster. Tokens are the same."""
    drafter_quantization: Annotated[QuantizationName | None, Doc("name", auto=True)] = None
    """Form in which the drafter's linear maps are kept: none, or fp8, into which a drafter is
    quantised as it loads. Tokens are the same. auto is none; with drafter_training and a state_dir
    it is fp8 from the start on after replays on a GPU lost less than 0.5 % of the accept length."""
    threads: Annotated[int | None, Doc("threads", 1, 1024, auto=True)] = None
    """Compute threads of the engine; auto is the processors this process may use."""

    # weights that are pushed while serving
    weight_root: Annotated[Path | None, Doc("directory")] = None
    """Weights may be pushed from below this directory; none: pushes are refused."""
    weight_marker: Annotated[str, Doc("file name")] = ""
    """A pushed directory must hold this file; empty: no such file is asked for."""
    weight_channels: Annotated[str | None, Doc("names", auto=True)] = None
    """Channels that weights may come by, with commas between: disk, http, broadcast, ipc; auto is
    disk with a weight_root, else none."""
    weight_staging: Annotated[StagingName | None, Doc("place", auto=True)] = None
    """Where a pushed version lies until it is live: auto is the first with room (of several ranks:
    device), none writes over the weights in use."""
    weight_timeout_s: Annotated[float, Doc("s", 0.1, 86400)] = 120.0
    """Longest wait of a push by broadcast or ipc for its trainer: for it to join, for the next
    tensors."""
    state_dir: Annotated[Path | None, Doc("directory")] = None
    """Keeps committed weights, rollouts and measured step times over a restart; none: they end with
    the process that holds them."""

    # LoRA adapters of the target
    max_loras: Annotated[int, Doc("adapters", 0, 1024)] = 0
    """LoRA adapters that can be loaded at once; 0: none."""
    max_lora_rank: Annotated[int, Doc("rank", 1, 128)] = 16
    """Largest rank of an adapter; memory is set apart for it at start."""

    # a drafter that follows the target
    drafter_training: Annotated[Literal["off", "idle", "device", "share"], Doc("mode")] = "off"
    """All but off keep finished sequences, prompts included, in memory and below state_dir, and
    train the drafter on them: idle while the engine is idle, device on another device while
    requests run, share on the engine's, which on a GPU needs MPS."""
    drafter_training_device: Annotated[str | None, Doc("device", auto=True)] = None
    """Where drafter_training device trains: cpu where the engine computes on one, else another GPU
    of the engine's kind, such as cuda:1. auto is the first of those."""
    drafter_training_mb: Annotated[int | None, Doc("MiB", 1, 2**20, auto=True)] = None
    """Memory in which the drafter is trained: of the GPU that trains, set apart at start where the
    engine computes on it, or of the host where a CPU trains. Less makes packs shorter. auto is what
    packs of 2,048 tokens need, of 512 on a CPU."""

    # memory and scheduling
    max_model_len: Annotated[int | None, Doc("tokens", 2, 2**24, auto=True)] = None
    """Longest prompt plus output; auto is the model's own limit."""
    page_size: Annotated[int, Doc("tokens", 1, 1024)] = 16
    """Positions per KV page."""
    pages: Annotated[int | None, Doc("pages", 1, 2**31, auto=True)] = None
    """KV pages; auto is what kv_memory_mb holds."""
    kv_memory_mb: Annotated[int | None, Doc("MiB", 1, 2**24, auto=True)] = None
    """Memory for KV pages of each rank; auto is 1024 on a CPU, and what memory_fraction leaves on a
    GPU."""
    memory_fraction: Annotated[float, Doc("share", 0.05, 0.99)] = 0.9
    """Share of a GPU's memory for everything: weights, those being pushed, KV, graphs."""
    max_running: Annotated[int | None, Doc("sequences", 1, 65536, auto=True)] = None
    """Sequences that decode at once; auto is 64 on a CPU, 256 on a GPU."""
    max_rows: Annotated[int | None, Doc("rows", 1, 65536, auto=True)] = None
    """Prompt rows that one step processes; auto is 512 on a CPU, 4096 on a GPU."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings(SharedSettings):
    """Every setting of a server."""

    # weights that come by http, and updates of several pushes
    max_uploads: Annotated[int, Doc("versions", 1, 1024)] = 2
    """Versions on their way by http at once; above it parts get 507."""
    max_upload_parts: Annotated[int, Doc("parts", 1, 65536)] = 1024
    """Parts of one version that comes by http."""
    max_upload_mb: Annotated[int, Doc("MiB", 1, 2**30)] = 65536
    """Size of all parts on their way by http together."""
    upload_ttl_s: Annotated[float, Doc("s", 1, 10**6)] = 3600.0
    """Time after its last byte that an upload is kept without a push."""
    weight_update_ttl_s: Annotated[float, Doc("s", 1, 10**6)] = 600.0
    """Time after its last call that a weight update stays open without its end."""

    # sequences that are kept to train the drafter
    drafter_buffer_tokens: Annotated[int, Doc("tokens", 1024, 2**34)] = 4_000_000
    """Tokens kept for drafter_training; the oldest go first."""
    drafter_buffer_mb: Annotated[int, Doc("MiB", 1, 2**20)] = 256
    """Size of what is kept for drafter_training, in memory and on disk."""
    drafter_ring_mb: Annotated[int | None, Doc("MiB", 1, 2**16, auto=True)] = None
    """Shared memory through which features of finished sequences reach the trainer; a full one
    drops them, and a longer sequence never fits. auto holds 16,384 tokens, in at most an eighth of
    the memory that is available."""
    drafter_feature_mb: Annotated[int, Doc("MiB", 0, 2**20)] = 0
    """Features of kept sequences that the trainer holds, with an EAGLE drafter; on a GPU as much
    again for those on their way. 0 captures none."""
    drafter_training_percent: Annotated[int, Doc("%", 1, 100)] = 20
    """Multiprocessors of the GPU that drafter_training share may use at once, by MPS."""
    feature_staleness: Annotated[int, Doc("versions", 0, 64)] = 0
    """Weight versions before the newest one whose features are held."""

    # rollouts: batches that outlive their connection
    max_rollouts: Annotated[int, Doc("rollouts", 1, 2**20)] = 256
    """Rollouts kept, running and finished; above it new ones get 429."""
    max_rollout_mb: Annotated[int, Doc("MiB", 1, 2**24)] = 1024
    """Size of all rollouts' journals together."""
    rollout_ttl_s: Annotated[float, Doc("s", 1, 10**6)] = 3600.0
    """Time that a finished rollout can be fetched."""

    # responses of /v1/responses, kept to be continued
    max_responses: Annotated[int, Doc("responses", 0, 2**20)] = 1024
    """Responses kept in memory; 0 keeps none."""
    max_responses_mb: Annotated[int, Doc("MiB", 1, 2**20)] = 64
    """Size of all kept responses together."""

    # where it listens
    host: Annotated[str, Doc("address")] = "127.0.0.1"
    """Address to bind; any but a loopback address needs API keys."""
    port: Annotated[int, Doc("TCP port", 0, 65535)] = 8000
    """Port to bind; 0 takes a free one."""
    probe_port: Annotated[int | None, Doc("TCP port", 0, 65535)] = None
    """Port to bind for probes and /metrics alone, too; 0 takes a free one, none: only the other
    port answers them."""
    grpc_port: Annotated[int | None, Doc("TCP port", 0, 65535)] = None
    """Port to bind for gRPC, too; 0 takes a free one, none: no gRPC."""
    link_port: Annotated[int | None, Doc("TCP port", 0, 65535)] = None
    """Port to bind for the gateway of a fleet, which then commands this server; 0 takes a free one,
    none: no gateway can."""
    api_key_file: Annotated[Path | None, Doc("file")] = None
    """API keys, one per line: the key or sha256:<hex>, then scopes=data,push-weights,operate,link
    and name=NAME; read again when it changes."""
    api_key_variable: Annotated[str, Doc("variable")] = ""
    """Name of an environment variable that holds such lines, too."""
    tls_cert: Annotated[Path | None, Doc("PEM file")] = None
    """Certificate to serve HTTPS with, its chain below it; read again when it changes."""
    tls_key: Annotated[Path | None, Doc("PEM file")] = None
    """The certificate's private key, without a passphrase."""
    tls_client_ca: Annotated[Path | None, Doc("PEM file")] = None
    """Clients must show a certificate that one of these has signed."""

    allowed_origins: Annotated[str, Doc("origins")] = ""
    """Origins of pages that may call this server from a browser, with commas between, as in
    https://chat.example,http://localhost:3000; empty: its own page alone."""

    # limits of one request
    max_batch_items: Annotated[int, Doc("items", 1, 2**16)] = 4096
    """Items in one request."""
    max_n: Annotated[int, Doc("choices", 1, 65536)] = 256
    """Choices of one item."""
    max_prompt_tokens: Annotated[int | None, Doc("tokens", 1, 2**24, auto=True)] = None
    """Longest prompt; auto is max_model_len - 1."""
    max_output_tokens: Annotated[int | None, Doc("tokens", 1, 2**24, auto=True)] = None
    """Longest output of a choice; auto is max_model_len - 1."""
    max_batch_prompt_tokens: Annotated[int, Doc("tokens", 1, 2**40)] = 2**24
    """Sum over a request of n x prompt length."""
    max_batch_output_tokens: Annotated[int, Doc("tokens", 1, 2**40)] = 2**28
    """Sum over a request of n x max_tokens."""
    max_stop_strings: Annotated[int, Doc("strings", 0, 1024)] = 16
    """Stop strings of an item."""
    max_stop_chars: Annotated[int, Doc("characters", 1, 65536)] = 256
    """Length of one stop string."""
    max_stop_token_ids: Annotated[int, Doc("ids", 0, 4096)] = 64
    """Stop token ids of an item."""
    max_logprobs: Annotated[int, Doc("alternatives", 0, 1024)] = 20
    """Alternatives reported per token."""
    max_logit_bias: Annotated[int, Doc("entries", 0, 4096)] = 1024
    """Entries of an item's logit_bias."""
    max_body_mb: Annotated[int, Doc("MiB", 1, 65536)] = 16
    """Size of a request body."""
    max_bodies_mb: Annotated[int, Doc("MiB", 1, 2**20)] = 256
    """Bodies on their way at once, by HTTP and again by gRPC; above it the slowest get 503."""

    # limits of the server
    max_queue: Annotated[int, Doc("sequences", 1, 2**24)] = 8192
    """Sequences accepted and not finished; above it requests get 429, but keys within their share
    up to twice the limit."""
    max_queue_tokens: Annotated[int, Doc("tokens", 1, 2**40)] = 2**29
    """Prompt plus max_tokens of all sequences accepted and not finished; above it requests get
    429."""
    max_page_forecast: Annotated[float, Doc("x all KV pages", 1, 2**20)] = 256.0
    """KV pages that these sequences are expected to need in all; above it requests get 429."""
    max_connections: Annotated[int, Doc("requests", 1, 65536)] = 1024
    """Requests in progress by HTTP, and as many by gRPC; above it they get 503. As many silent
    connections again are kept open, and the oldest of more are closed."""
    max_header_kb: Annotated[int, Doc("KiB", 1, 1024)] = 32
    """Size of a request's line and headers."""
    header_timeout_s: Annotated[float, Doc("s", 0.1, 3600)] = 10.0
    """Time a client has to send its headers."""
    body_timeout_s: Annotated[float, Doc("s", 0.1, 3600)] = 60.0
    """Time a client has to send its body."""
    send_timeout_s: Annotated[float, Doc("s", 0.1, 3600)] = 60.0
    """Time a client may leave a reply unread before it is disconnected."""
    default_timeout_s: Annotated[float, Doc("s", 0.1, 10**6)] = 3600.0
    """Deadline of a request that names none."""
    max_timeout_s: Annotated[float, Doc("s", 0.1, 10**6)] = 86400.0
    """Longest deadline that a request may name."""
    queue_timeout_s: Annotated[float, Doc("s", 0.01, 10**6)] = 3600.0
    """Longest that a sequence may wait before the engine begins it; a request may ask for less."""
    drain_timeout_s: Annotated[float, Doc("s", 0, 86400)] = 60.0
    """Time that running requests have to finish after SIGTERM, or when their adapter is
    unloaded."""
    startup_timeout_s: Annotated[float, Doc("s", 1, 86400)] = 1800.0
    """Time that the engine has to get ready."""
    hang_timeout_s: Annotated[float, Doc("s", 2, 86400)] = 120.0
    """An engine that says nothing for this long is killed and restarted."""
    max_restarts: Annotated[int, Doc("restarts", 0, 10**6)] = 5
    """Restarts of a dead engine within restart_window_s; one more and the server exits."""
    restart_window_s: Annotated[float, Doc("s", 1, 86400)] = 300.0
    """Time over which max_restarts counts."""
    allow_chat_template: Annotated[bool, Doc("true | false")] = False
    """Requests may bring a chat template, which runs in a process of its own, in a sandbox, for 2 s
    at most."""
    tool_call_parser: Annotated[str | None, Doc("parser", auto=True)] = None
    """Form in which the model writes calls: hermes, llama3_json, pythonic, or none, which leaves
    them text; auto is the form that the chat template asks for."""
    reasoning_parser: Annotated[str, Doc("parser")] = "none"
    """Form in which the model writes reasoning, which comes apart from the content: think,
    deepseek_r1 (never opened), or none."""
    otlp_endpoint: Annotated[str, Doc("URL")] = ""
    """OpenTelemetry collector that traces are sent to, by OTLP over HTTP."""
    metrics_aliases: Annotated[str, Doc("engines")] = ""
    """Engines whose names for metrics /metrics shows too, with commas between: vllm, sglang."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Doc("level")] = "info"
    """Least severe log line written; prompts are never logged."""
    log_format: Annotated[Literal["console", "json"] | None, Doc("format", auto=True)] = None
    """Form of log lines; auto is console on a terminal, JSON elsewhere."""


class Setting(NamedTuple):
    name: str
    doc: Doc
    default: Any
    required: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)  # its flag alone stands for true

    @property
    def variable(self) -> str:
        return "TLT_" + self.name.upper()

    @property
    def help(self) -> str:
        absent = AUTO if self.doc.auto else "none"
        default = absent if self.default in (None, "") else self.default
        return (
            f"{self.doc.sentence} [{self.doc.unit}; "
            f"{'required' if self.required else f'default {default}'}]"
        )


def settings() -> list[Setting]:
    """Return the table, in the order of `--help`."""
    sentences = _sentences(Path(__file__).read_text("utf-8"))
    hints = get_type_hints(ServerSettings, include_extras=True)
    return [
        Setting(
            name,
            replace(hint.__metadata__[0], sentence=sentences[name]),
            getattr(ServerSettings, name, None),
            not hasattr(ServerSettings, name),
        )
        for name, hint in hints.items()
    ]


def _sentences(source: str) -> dict[str, str]:
    """Map each field of a file's classes to the string below it."""
    found = dict[str, str]()
    for each in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(each.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as sentence)),
                ):
                    found[name] = " ".join(sentence.split())
    return found


def open_channels(asked: str | None, weight_root: object) -> tuple[str, ...]:
    """Return the channels that the setting `weight_channels` opens."""
    if asked is None:
        return ("disk",) if weight_root else ()
    return tuple(name.strip() for name in asked.split(",") if name.strip() not in ("", "none"))


def available_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suited_policy(drafter: str) -> PolicyName:
    """Return the default policy."""
    return "off" if drafter == "none" else "goodput"
