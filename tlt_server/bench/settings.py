"""The engine that a bench measures: settings from its flags, and the settings that a reader of the
figures needs. No torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tlt_client import Client
from tlt_server.bench.flags import SETTINGS
from tlt_server.demo.server import ServerProcess
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.config import ModelConfig
from tlt_server.settings.server import available_processors
from tlt_server.speculation.drafters import DRAFTERS, networked
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.records import OFF, Strategy

STORED_AS = {"kv_cache_dtype": "auto", "drafter_quantization": "none"}  # in engines by default


def settings_of(args: argparse.Namespace, longest: int = 0, **changes: Any) -> EngineSettings:
    """Return settings from the flags, with defaults suited to a bench and these changes. longest:
    tokens of the longest request, the bound of max_model_len; None: the model's own.
    """
    from tlt_server.demo.workload import DRAFTER, TARGET

    on_gpu = args.device == "cuda"
    found = EngineSettings(
        model=args.model or TARGET,
        drafter=str(args.drafter or DRAFTER),
        threads=args.threads or available_processors(),
        device=args.device,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"),
        attention="triton" if on_gpu else "cpu",
        kv_memory_mb=None if on_gpu else 2048,
        **{name: getattr(args, name) for name in SETTINGS if hasattr(args, name)},
    )
    found = replace(found, **changes)
    if not longest:
        return found
    return replace(found, max_model_len=at_most_what_it_takes(found.model, longest))


def own(strategy: Strategy, settings: EngineSettings) -> Strategy:
    """Return the strategy with the network that is loaded, of any kind, if it drafts with one."""
    network = networked(settings.drafters)
    drafts = strategy != OFF and DRAFTERS[strategy.drafter].needs_weights
    return msgspec.structs.replace(strategy, drafter=network) if network and drafts else strategy


def asked(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags of `tlt serve` for settings that a bench's own flags name, and their values;
    none for what is the default.
    """
    defaults = {each.name: each.default for each in fields(EngineSettings)}
    return {
        f"--{name.replace('_', '-')}": str(getattr(args, name))
        for name in SETTINGS
        if getattr(args, name, defaults[name]) != defaults[name]
    }


def asked_words(args: argparse.Namespace) -> list[str]:
    """Return these flags as a command line's words."""
    return [word for pair in asked(args).items() for word in pair]


def serve_flags(args: argparse.Namespace, longest: int) -> list[str]:
    """Return the flags of `tlt serve` for the bench's own server; longest: see `settings_of`."""
    settings = settings_of(args)
    max_model_len = at_most_what_it_takes(settings.model, longest)
    return [
        *("--model", str(settings.model), "--drafter", settings.drafter),
        *("--device", args.device, "--dtype", str(settings.dtype)),
        *("--threads", str(settings.threads), "--max-running", str(args.max_running)),
        *("--max-model-len", str(max_model_len), "--log-level", "warning"),
        *("--default-timeout-s", "600"),
        *asked_words(args),
    ]


def at_most_what_it_takes(model: Path, tokens: int) -> int:
    """Return a max_model_len of `tokens`, or the model's own limit."""
    return min(tokens, ModelConfig.read(model).max_position)


def shape_of(model: Path) -> dict[str, int]:
    """Return the sizes of a model, which tell results of the same work."""
    config, names = ModelConfig.read(model), ("hidden", "intermediate", "vocab")
    sizes = {name: getattr(config, name) for name in ("layers", "heads", "kv_heads")}
    return sizes | {name: getattr(config, f"{name}_size") for name in names}


def fingerprint_of(client: Client) -> Fingerprint:
    """Return the fingerprint of a running server's engine."""
    return msgspec.convert(client.server_info()["engine"]["fingerprint"], Fingerprint)


def quantization_of(model: Path, asked: str | None) -> str:
    """Return the quantization of a target's weights: what is asked for, or the checkpoint's."""
    return asked or ("fp8" if ModelConfig.read(model).quantization else "none")


def described(
    settings: EngineSettings, fingerprint: Fingerprint | None = None
) -> dict[str, object]:
    """Return the settings that a reader of figures has to know. `fingerprint`: of the engines that
    were measured, where they are of one kind.
    """
    named = {"fingerprint": msgspec.structs.asdict(fingerprint)} if fingerprint else {}
    fields = ("device", "dtype", "attention", "numerics", "max_running", "tensor_parallel")
    return {
        **named,
        "shape": shape_of(settings.model),
        "drafter": next(iter(settings.drafters), "none"),
        **{name: getattr(settings, name) for name in fields},
        "quantization": quantization_of(settings.model, settings.quantization),
        **{name: getattr(settings, name) or chosen for name, chosen in STORED_AS.items()},
    }


def heading(
    args: argparse.Namespace,
    bench: str,
    settings: EngineSettings,
    fingerprint: Fingerprint | None = None,
) -> dict[str, Any]:
    """Return the first figures of a bench of one engine."""
    return {"bench": bench, "quick": bool(args.quick), **described(settings, fingerprint)}


@contextmanager
def served(
    console: Console,
    flags: Sequence[str],
    timeout_s: float = 60,
    key: str | None = None,
    verb: Sequence[str] = ("serve",),
) -> Iterator[tuple[ServerProcess, Client]]:
    """Start a server of the bench's own, or a fleet, whose log the console shows."""

    def on_line(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    with (
        ServerProcess(*flags, on_line=on_line, verb=verb) as server,
        Client(server.url, timeout_s=timeout_s, api_key=key) as client,
    ):
        yield server, client
