"""Every setting once: name, type, default, unit and one sentence. Imports nothing heavy, so `tlt
serve --help` is quick.

`config.Config` inherits these fields and validates them; `__main__` makes one flag of each. The
flag `--max-queue`, the variable `TLT_MAX_QUEUE` and the YAML key `max_queue` are one setting; a
flag wins over a variable, a variable over the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

Auto = Literal["auto"]


@dataclass(frozen=True)
class Doc:
    """Unit, sentence and inclusive bounds of a setting."""

    unit: str
    sentence: str
    low: float | None = None
    high: float | None = None


class Settings:
    # what is served
    model: Annotated[
        Path,
        Doc(
            "directory",
            "Target model in the ordinary Hugging Face layout (config.json, safetensors, tokenizer.json).",
        ),
    ]
    drafter: Annotated[str, Doc("directory | history | none", "Where draft tokens come from.")] = (
        "none"
    )
    policy: Annotated[
        Literal["auto", "off", "fixed", "beg"],
        Doc("name", "Which strategy each step uses; auto is beg with a drafter, off without."),
    ] = "auto"
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
            "A drafter whose acceptance falls below this share of what it was before weights changed rests until they change again; "
            "history drafts instead. 0 = never.",
            0,
            1,
        ),
    ] = 0.5
    served_model_name: Annotated[
        str, Doc("name", "Name reported to clients; auto is the directory's name.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc(
            "device",
            "What computes; auto is cuda where torch sees a GPU that the kernels run on, else cpu.",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Doc(
            "type",
            "Type of weights and KV; auto is float32 on a CPU, on a GPU the checkpoint's own half precision, else bfloat16.",
        ),
    ] = "auto"
    attention: Annotated[
        str,
        Doc(
            "backend",
            "Attention backend: cpu or torch on a CPU, triton, torch or flash_attn on a GPU; auto is the first.",
        ),
    ] = "auto"
    graphs: Annotated[
        bool, Doc("true | false", "Capture CUDA graphs at start; false launches kernel by kernel.")
    ] = True
    numerics: Annotated[
        Literal["strict", "fast"],
        Doc(
            "mode",
            "strict: the same bits whatever the batch and the strategy; fast: exact in distribution only.",
        ),
    ] = "strict"
    threads: Annotated[
        int | Auto,
        Doc(
            "threads",
            "Compute threads of the engine; auto is the processors this process may use.",
            1,
            1024,
        ),
    ] = "auto"

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
        str,
        Doc(
            "names",
            "Channels that weights may come by, with commas between: disk, http, broadcast, ipc; auto is disk with a weight_root, "
            "else none.",
        ),
    ] = "auto"
    weight_staging: Annotated[
        Literal["auto", "device", "host", "disk", "none"],
        Doc(
            "place",
            "Where a pushed version lies until it is live: auto is the first with room, none writes over the weights in use.",
        ),
    ] = "auto"
    weight_timeout_s: Annotated[
        float,
        Doc(
            "s",
            "Longest wait of a push by broadcast or ipc for its trainer: for it to join, for the next tensors.",
            0.1,
            86400,
        ),
    ] = 120.0
    max_uploads: Annotated[
        int,
        Doc("versions", "Versions on their way by http at once; above it parts get 507.", 1, 1024),
    ] = 2
    max_upload_parts: Annotated[
        int, Doc("parts", "Parts of one version that comes by http.", 1, 65536)
    ] = 1024
    max_upload_mb: Annotated[
        int, Doc("MiB", "Size of all parts on their way by http together.", 1, 2**30)
    ] = 65536
    upload_ttl_s: Annotated[
        float,
        Doc("s", "Time after its last byte that an upload which nobody pushes is kept.", 1, 10**6),
    ] = 3600.0
    weight_update_ttl_s: Annotated[
        float,
        Doc(
            "s",
            "Time after its last call that a weight update which was begun and nobody ends stays open.",
            1,
            10**6,
        ),
    ] = 600.0
    state_dir: Annotated[
        Path | None,
        Doc(
            "directory",
            "Keeps committed weights and rollouts over a restart; none: they end with the process that holds them.",
        ),
    ] = None

    # rollouts: batches that outlive their connection
    max_rollouts: Annotated[
        int,
        Doc(
            "rollouts", "Rollouts kept, running and finished; above it new ones get 429.", 1, 2**20
        ),
    ] = 256
    max_rollout_mb: Annotated[
        int, Doc("MiB", "Size of all rollouts' journals together.", 1, 2**24)
    ] = 1024
    rollout_ttl_s: Annotated[
        float, Doc("s", "Time that a finished rollout can be fetched.", 1, 10**6)
    ] = 3600.0

    # memory and scheduling
    max_model_len: Annotated[
        int | Auto,
        Doc("tokens", "Longest prompt plus output; auto is the model's own limit.", 2, 2**24),
    ] = "auto"
    page_size: Annotated[int, Doc("tokens", "Positions per KV page.", 1, 1024)] = 16
    pages: Annotated[
        int | Auto, Doc("pages", "KV pages; auto is what kv_memory_mb holds.", 1, 2**31)
    ] = "auto"
    kv_memory_mb: Annotated[
        int | Auto,
        Doc(
            "MiB",
            "Memory for KV pages; auto is 1024 on a CPU, and what memory_fraction leaves on a GPU.",
            1,
            2**24,
        ),
    ] = "auto"
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
        int | Auto,
        Doc(
            "sequences",
            "Sequences that decode at once; auto is 64 on a CPU, 256 on a GPU.",
            1,
            65536,
        ),
    ] = "auto"
    max_rows: Annotated[
        int | Auto,
        Doc(
            "rows",
            "Prompt rows that one step processes; auto is 512 on a CPU, 4096 on a GPU.",
            1,
            65536,
        ),
    ] = "auto"

    # where it listens
    host: Annotated[
        str, Doc("address", "Address to bind; any but a loopback address needs API keys.")
    ] = "127.0.0.1"
    port: Annotated[int, Doc("TCP port", "Port to bind; 0 takes a free one.", 0, 65535)] = 8000
    grpc_port: Annotated[
        int | None,
        Doc("TCP port", "Port to bind for gRPC, too; 0 takes a free one, none: no gRPC.", 0, 65535),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Doc(
            "file",
            "API keys, one per line: the key or sha256:<hex>, then scopes=data,push-weights,operate and name=NAME; read again when it "
            "changes.",
        ),
    ] = None
    api_key_variable: Annotated[
        str, Doc("variable", "Name of an environment variable that holds such lines, too.")
    ] = ""
    tls_cert: Annotated[
        Path | None,
        Doc(
            "PEM file",
            "Certificate to serve HTTPS with, its chain below it; read again when it changes.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Doc("PEM file", "The certificate's private key, without a passphrase.")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Doc("PEM file", "Clients must show a certificate that one of these has signed."),
    ] = None

    # limits of one request
    max_batch_items: Annotated[int, Doc("items", "Items in one request.", 1, 2**16)] = 4096
    max_n: Annotated[int, Doc("choices", "Choices of one item.", 1, 65536)] = 256
    max_prompt_tokens: Annotated[
        int | Auto, Doc("tokens", "Longest prompt; auto is max_model_len - 1.", 1, 2**24)
    ] = "auto"
    max_output_tokens: Annotated[
        int | Auto,
        Doc("tokens", "Longest output of a choice; auto is max_model_len - 1.", 1, 2**24),
    ] = "auto"
    max_batch_prompt_tokens: Annotated[
        int, Doc("tokens", "Sum over a request of n x prompt length.", 1, 2**40)
    ] = 2**24
    max_batch_output_tokens: Annotated[
        int, Doc("tokens", "Sum over a request of n x max_tokens.", 1, 2**40)
    ] = 2**28
    max_stop_strings: Annotated[int, Doc("strings", "Stop strings of an item.", 0, 1024)] = 16
    max_stop_chars: Annotated[int, Doc("characters", "Length of one stop string.", 1, 65536)] = 256
    max_stop_token_ids: Annotated[int, Doc("ids", "Stop token ids of an item.", 0, 65536)] = 64
    max_logprobs: Annotated[
        int, Doc("alternatives", "Alternatives reported per token.", 0, 1024)
    ] = 20
    max_logit_bias: Annotated[int, Doc("entries", "Entries of an item's logit_bias.", 0, 65536)] = (
        1024
    )
    max_body_mb: Annotated[int, Doc("MiB", "Size of a request body.", 1, 65536)] = 16

    # limits of the server
    max_queue: Annotated[
        int,
        Doc(
            "sequences", "Sequences accepted and not finished; above it requests get 429.", 1, 2**24
        ),
    ] = 8192
    max_queue_tokens: Annotated[
        int,
        Doc(
            "tokens",
            "Prompt plus max_tokens of all sequences accepted and not finished; above it requests get 429.",
            1,
            2**40,
        ),
    ] = 2**29
    max_page_forecast: Annotated[
        float,
        Doc(
            "x all KV pages",
            "KV pages that these sequences are expected to need in all; above it requests get 429.",
            1,
            2**20,
        ),
    ] = 256.0
    max_connections: Annotated[
        int, Doc("connections", "Open connections; above it requests get 503.", 1, 65536)
    ] = 1024
    max_header_kb: Annotated[int, Doc("KiB", "Size of a request's line and headers.", 1, 1024)] = 32
    header_timeout_s: Annotated[
        float, Doc("s", "Time a client has to send its headers.", 0.1, 3600)
    ] = 10.0
    body_timeout_s: Annotated[float, Doc("s", "Time a client has to send its body.", 0.1, 3600)] = (
        60.0
    )
    send_timeout_s: Annotated[
        float,
        Doc("s", "Time a client may leave a reply unread before it is disconnected.", 0.1, 3600),
    ] = 60.0
    default_timeout_s: Annotated[
        float, Doc("s", "Deadline of a request that names none.", 0.1, 10**6)
    ] = 3600.0
    max_timeout_s: Annotated[
        float, Doc("s", "Longest deadline that a request may name.", 0.1, 10**6)
    ] = 86400.0
    queue_timeout_s: Annotated[
        float,
        Doc(
            "s",
            "Longest that a sequence may wait before the engine begins it; a request may ask for less.",
            0.01,
            10**6,
        ),
    ] = 3600.0
    drain_timeout_s: Annotated[
        float, Doc("s", "Time that running requests have to finish after SIGTERM.", 0, 86400)
    ] = 60.0
    startup_timeout_s: Annotated[
        float, Doc("s", "Time that the engine has to get ready.", 1, 86400)
    ] = 1800.0
    hang_timeout_s: Annotated[
        float,
        Doc("s", "An engine that says nothing for this long is killed and restarted.", 2, 86400),
    ] = 120.0
    max_restarts: Annotated[
        int,
        Doc(
            "restarts",
            "Restarts of a dead engine within restart_window_s; one more and the server exits.",
            0,
            10**6,
        ),
    ] = 5
    restart_window_s: Annotated[
        float, Doc("s", "Time over which max_restarts counts.", 1, 86400)
    ] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Doc("level", "Least severe log line written; prompts are never logged."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Doc("format", "Form of log lines; auto is console on a terminal, JSON elsewhere."),
    ] = "auto"


def open_channels(asked: str, weight_root: object) -> tuple[str, ...]:
    """Of `weight_channels`."""
    if asked == "auto":
        return ("disk",) if weight_root else ()
    return tuple(name.strip() for name in asked.split(",") if name.strip() not in ("", "none"))


class Setting(NamedTuple):
    name: str
    doc: Doc
    default: Any
    required: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TLT_" + self.name.upper()

    @property
    def help(self) -> str:
        default = (
            "required"
            if self.required
            else f"default {'none' if self.default in (None, '') else self.default}"
        )
        return f"{self.doc.sentence} [{self.doc.unit}; {default}]"


def settings() -> list[Setting]:
    """The table, in the order of `--help`."""
    hints = get_type_hints(Settings, include_extras=True)
    return [
        Setting(
            name, hint.__metadata__[0], getattr(Settings, name, None), not hasattr(Settings, name)
        )
        for name, hint in hints.items()
    ]
