"""Every setting of a server once: name, type, default, unit and one sentence. Imports nothing
heavy, so `tlt serve --help` is quick.

`config.Config` inherits these fields and validates them; `__main__` makes one flag of each. The
flag `--max-queue`, the variable `TLT_MAX_QUEUE` and the YAML key `max_queue` are one setting; a
flag wins over a variable, a variable over the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from tlt_server.settings.shared import AUTO, Doc, SharedSettings


@dataclass(frozen=True, kw_only=True)
class ServerSettings(SharedSettings):
    """Every setting of a server."""

    # weights that come by http, and updates of several pushes
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
        float, Doc("s", "Time after its last byte that an upload is kept without a push.", 1, 10**6)
    ] = 3600.0
    weight_update_ttl_s: Annotated[
        float,
        Doc(
            "s",
            "Time after its last call that a weight update stays open without its end.",
            1,
            10**6,
        ),
    ] = 600.0

    # sequences that are kept to train the drafter
    drafter_buffer_tokens: Annotated[
        int, Doc("tokens", "Tokens kept for drafter_training; the oldest go first.", 1024, 2**34)
    ] = 4_000_000
    drafter_buffer_mb: Annotated[
        int,
        Doc("MiB", "Size of what is kept for drafter_training, in memory and on disk.", 1, 2**20),
    ] = 256
    drafter_ring_mb: Annotated[
        int | None,
        Doc(
            "MiB",
            "Shared memory through which features of finished sequences reach the trainer; a full "
            "one drops them, and a longer sequence never fits. auto holds 16,384 tokens, in at "
            "most an eighth of the memory that is available.",
            1,
            2**16,
            auto=True,
        ),
    ] = None
    drafter_feature_mb: Annotated[
        int,
        Doc(
            "MiB",
            "Features of kept sequences that the trainer holds, with an EAGLE drafter; on a GPU as "
            "much again for those on their way. 0 captures none.",
            0,
            2**20,
        ),
    ] = 0
    drafter_training_percent: Annotated[
        int,
        Doc(
            "%",
            "Multiprocessors of the GPU that drafter_training share may use at once, by MPS.",
            1,
            100,
        ),
    ] = 20
    feature_staleness: Annotated[
        int,
        Doc("versions", "Weight versions before the newest one whose features are held.", 0, 64),
    ] = 0

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

    # responses of /v1/responses, kept to be continued
    max_responses: Annotated[
        int, Doc("responses", "Responses kept in memory; 0 keeps none.", 0, 2**20)
    ] = 1024
    max_responses_mb: Annotated[
        int, Doc("MiB", "Size of all kept responses together.", 1, 2**20)
    ] = 64

    # where it listens
    host: Annotated[
        str, Doc("address", "Address to bind; any but a loopback address needs API keys.")
    ] = "127.0.0.1"
    port: Annotated[int, Doc("TCP port", "Port to bind; 0 takes a free one.", 0, 65535)] = 8000
    probe_port: Annotated[
        int | None,
        Doc(
            "TCP port",
            "Port to bind for probes and /metrics alone, too; 0 takes a free one, none: only the "
            "other port answers them.",
            0,
            65535,
        ),
    ] = None
    grpc_port: Annotated[
        int | None,
        Doc("TCP port", "Port to bind for gRPC, too; 0 takes a free one, none: no gRPC.", 0, 65535),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Doc(
            "file",
            "API keys, one per line: the key or sha256:<hex>, then "
            "scopes=data,push-weights,operate and name=NAME; read again when it "
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

    allowed_origins: Annotated[
        str,
        Doc(
            "origins",
            "Origins of pages that may call this server from a browser, with commas between, as "
            "in https://chat.example,http://localhost:3000; empty: its own page alone.",
        ),
    ] = ""

    # limits of one request
    max_batch_items: Annotated[int, Doc("items", "Items in one request.", 1, 2**16)] = 4096
    max_n: Annotated[int, Doc("choices", "Choices of one item.", 1, 65536)] = 256
    max_prompt_tokens: Annotated[
        int | None, Doc("tokens", "Longest prompt; auto is max_model_len - 1.", 1, 2**24, auto=True)
    ] = None
    max_output_tokens: Annotated[
        int | None,
        Doc(
            "tokens", "Longest output of a choice; auto is max_model_len - 1.", 1, 2**24, auto=True
        ),
    ] = None
    max_batch_prompt_tokens: Annotated[
        int, Doc("tokens", "Sum over a request of n x prompt length.", 1, 2**40)
    ] = 2**24
    max_batch_output_tokens: Annotated[
        int, Doc("tokens", "Sum over a request of n x max_tokens.", 1, 2**40)
    ] = 2**28
    max_stop_strings: Annotated[int, Doc("strings", "Stop strings of an item.", 0, 1024)] = 16
    max_stop_chars: Annotated[int, Doc("characters", "Length of one stop string.", 1, 65536)] = 256
    max_stop_token_ids: Annotated[int, Doc("ids", "Stop token ids of an item.", 0, 4096)] = 64
    max_logprobs: Annotated[
        int, Doc("alternatives", "Alternatives reported per token.", 0, 1024)
    ] = 20
    max_logit_bias: Annotated[int, Doc("entries", "Entries of an item's logit_bias.", 0, 4096)] = (
        1024
    )
    max_body_mb: Annotated[int, Doc("MiB", "Size of a request body.", 1, 65536)] = 16
    max_bodies_mb: Annotated[
        int,
        Doc(
            "MiB",
            "Bodies on their way at once, by HTTP and again by gRPC; above it the slowest get 503.",
            1,
            2**20,
        ),
    ] = 256

    # limits of the server
    max_queue: Annotated[
        int,
        Doc(
            "sequences",
            "Sequences accepted and not finished; above it requests get 429, but keys within their "
            "share up to twice the limit.",
            1,
            2**24,
        ),
    ] = 8192
    max_queue_tokens: Annotated[
        int,
        Doc(
            "tokens",
            "Prompt plus max_tokens of all sequences accepted and not finished; above it requests "
            "get 429.",
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
        int,
        Doc(
            "requests",
            "Requests in progress by HTTP, and as many by gRPC; above it they get 503. As many "
            "silent connections again are kept open, and the oldest of more are closed.",
            1,
            65536,
        ),
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
            "Longest that a sequence may wait before the engine begins it; a request may ask for "
            "less.",
            0.01,
            10**6,
        ),
    ] = 3600.0
    drain_timeout_s: Annotated[
        float,
        Doc(
            "s",
            "Time that running requests have to finish after SIGTERM, or when their adapter is "
            "unloaded.",
            0,
            86400,
        ),
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
    allow_chat_template: Annotated[
        bool,
        Doc(
            "true | false",
            "Requests may bring a chat template, which runs in a process of its own, in a sandbox, "
            "for 2 s at most.",
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Doc(
            "parser",
            "Form in which the model writes calls: hermes, llama3_json, pythonic, or none, which "
            "leaves them text; auto is the form that the chat template asks for.",
            auto=True,
        ),
    ] = None
    reasoning_parser: Annotated[
        str,
        Doc(
            "parser",
            "Form in which the model writes reasoning, which comes apart from the content: think, "
            "deepseek_r1 (never opened), or none.",
        ),
    ] = "none"
    otlp_endpoint: Annotated[
        str, Doc("URL", "OpenTelemetry collector that traces are sent to, by OTLP over HTTP.")
    ] = ""
    metrics_aliases: Annotated[
        str,
        Doc(
            "engines",
            "Engines whose names for metrics /metrics shows too, with commas between: vllm, "
            "sglang.",
        ),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Doc("level", "Least severe log line written; prompts are never logged."),
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"] | None,
        Doc(
            "format", "Form of log lines; auto is console on a terminal, JSON elsewhere.", auto=True
        ),
    ] = None


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
    hints = get_type_hints(ServerSettings, include_extras=True)
    return [
        Setting(
            name,
            hint.__metadata__[0],
            getattr(ServerSettings, name, None),
            not hasattr(ServerSettings, name),
        )
        for name, hint in hints.items()
    ]
