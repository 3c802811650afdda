"""Checks of the ports, files and directories in the settings. No torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tlt_server.build import listening
from tlt_server.config import Config
from tlt_server.doctor.checks import Finding, fail, ok, warn
from tlt_server.engine.knowledge_file import profile_in
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.access import OtlpTraces
from tlt_server.frontend.http.keys import REMEDY, read_keys, watched_certificates
from tlt_server.metrics.requests import disk
from tlt_server.speculation.drafters import weights_directory

GIB = 2**30
KEPT_VERSIONS = 3  # on disk while a push is staged: live, before that, and the new one
SPARE_BYTES = 64 * 2**20


def port(config: Config) -> Finding:
    with (
        listening(config) as listener,
        listening(config, "grpc_port"),
        listening(config, "link_port"),
        listening(config, "probe_port"),
    ):
        uses = {
            "gRPC": config.grpc_port,
            "a gateway": config.link_port,
            "probes": config.probe_port,
        }
        others = "".join(
            f", and {port or 'another'} for {use}" for use, port in uses.items() if port is not None
        )
        return ok(f"{config.host}:{config.port or listener.getsockname()[1]} is free{others}")


def api_keys(config: Config) -> Finding:
    keys, file = read_keys(config), config.api_key_file
    if not keys:
        return ok("none: programs of this machine may call the server")
    if file is not None and _others_may_open(file):
        return warn(f"other users may open {file}", f"chmod 600 {file}")
    if keys.unscoped:
        return warn(f"all scopes have the keys {', '.join(keys.unscoped)}", REMEDY)
    return ok(", ".join(keys.names))


def certificates(config: Config) -> Finding:
    if watched_certificates(config) is None:
        return ok("none: plain HTTP")
    assert config.tls_key is not None
    if _others_may_open(config.tls_key):
        return warn(f"other users may open {config.tls_key}", f"chmod 600 {config.tls_key}")
    return ok(
        f"{config.tls_cert}"
        + (f", clients' by {config.tls_client_ca}" if config.tls_client_ca is not None else "")
    )


def traces(config: Config) -> Finding:
    if not config.otlp_endpoint:
        return ok("none")
    OtlpTraces(config.otlp_endpoint).close()
    return ok("the OpenTelemetry SDK is installed")


def _others_may_open(file: Path) -> bool:
    return bool(file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def weight_root(config: Config) -> Finding:
    root = config.weight_root
    if root is None:
        return ok("none: weight pushes are refused")
    if not os.access(root, os.R_OK | os.X_OK):
        return fail(
            f"{root} is a directory that this user may not read",
            f"chmod u+rx {root}, or name another --weight-root",
        )
    if root.stat().st_mode & stat.S_IWOTH:
        return warn(f"every user of this machine may write below {root}", f"chmod o-w {root}")
    return ok(str(root))


def state_directory(config: Config) -> Finding:
    directory = config.state_dir
    if directory is None:
        if config.weight_root is None:
            return ok("none, and no weights can be pushed")
        return warn(
            "none: a restarted engine has lost the weights that were pushed", "name a --state-dir"
        )
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return fail(
            f"{existing} is not a directory that this user may write",
            "name another --state-dir, or change its owner",
        )
    if existing == directory and directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return warn(f"other users may write to {directory}", f"chmod 700 {directory}")
    return ok(str(directory) if existing == directory else f"{directory} will be made")


def step_times(config: Config) -> Finding:
    return ok(profile_in(config.state_dir))


def disk_space(config: Config) -> Finding:
    if config.state_dir is None:
        return ok("nothing is written")
    version = sum(path.stat().st_size for path in _checkpoints(config))
    free, need = disk(config.state_dir).free, KEPT_VERSIONS * version + SPARE_BYTES
    found = (
        f"{free / GIB:.1f} GiB free for {config.state_dir}; {KEPT_VERSIONS} weight versions take "
        f"{need / GIB:.1f} GiB"
    )
    if free < version + SPARE_BYTES:
        return fail(
            found, "free some, or name a --state-dir on another file system; no push could be kept"
        )
    return (
        ok(found)
        if free >= need
        else warn(found, "free some, or name a --state-dir on another file system; pushes may fail")
    )


def _checkpoints(config: Config) -> list[Path]:
    folders = [config.model, weights_directory(config.drafter)]
    return [path for folder in folders if folder for path in folder.glob("*.safetensors")]


def tokenizer(config: Config) -> Finding:
    text = Text.load(config.model)
    if text.tokenizer is None:
        return warn(
            f"there is no {config.model / 'tokenizer.json'}: requests must give token ids, and "
            "replies have no text",
            "save the tokenizer into the model directory",
        )
    if not text.templates:
        return warn(
            f"{text.tokenizer.get_vocab_size()} tokens, no chat template: messages are refused, "
            "prompts are taken",
            "add chat_template to tokenizer_config.json if the model chats",
        )
    return ok(f"{text.tokenizer.get_vocab_size()} tokens, with a chat template")
