"""The settings of a fleet: the flags of each replica's `tlt serve`, and those of the gateway.

Flags after `--` go to every replica and count for the gateway too, unless it is given the same one
before. Variables (`TLT_*`) count for both. Settings that must differ between replicas are chosen by
the launcher and refused here, as are those of an engine before `--`.
"""

from __future__ import annotations

import os
import secrets
from argparse import Namespace
from collections.abc import Set
from dataclasses import fields
from pathlib import Path

from tlt_server.config import Config, load
from tlt_server.errors import StartupError
from tlt_server.fleet.arguments import FLAGS
from tlt_server.fleet.launchers.plan import CHOSEN, KEY, LaunchPlan
from tlt_server.frontend.http.keys import read_keys
from tlt_server.frontend.link.launching import FleetOptions
from tlt_server.process.private import private_directory, private_file
from tlt_server.push.calling import key_in, tls_of
from tlt_server.settings.server import SharedSettings
from tlt_server.settings.sources import read_settings

# Settings of an engine that a gateway uses too.
OF_A_GATEWAY = (
    *("model", "served_model_name", "state_dir"),
    *("weight_root", "weight_marker", "weight_channels"),
)
LINK_FILES = ("link_ca", "link_cert", "link_cert_key")


def planned(arguments: Namespace) -> tuple[LaunchPlan, FleetOptions]:
    """Return what to start and what the gateway is asked for. `arguments.after`: the words after
    `--`, `arguments.served`: the same as flags of `tlt serve`. `StartupError` names each fault.
    """
    names = {_setting(flag.name) for flag in FLAGS} | {"run", "config", "verb", "after", "served"}
    own = {name: value for name, value in vars(arguments).items() if name not in names}
    served = {name: value for name, value in arguments.served.items() if name != "run"}
    file, static = served.pop("config"), arguments.launcher == "static"
    if file is not None and arguments.config is not None:
        raise StartupError(
            f"--config {arguments.config} stands before -- and --config {file} after it; give one "
            "file: after -- it is the replicas' and the gateway's"
        )
    before, after = (
        {*flags, *(read_settings(path) if path else ())}
        for flags, path in ((own, arguments.config), (served, file))
    )
    _check_sides(before, after)
    _check_launcher(arguments, static)
    config = load({**served, **own}, file=file or arguments.config)
    if config.channels and config.state_dir is None and not static:
        raise StartupError(
            f"weights can be pushed by {', '.join(config.channels)}, but there is no --state-dir, "
            "so a replica that starts again could not catch up; name one"
        )
    key = _key(arguments.link_key_file) if static else _made_key(config.state_dir)
    config = _admitting(config, key)
    options = FleetOptions(
        key,
        tls_of(arguments, LINK_FILES, by_default="tls_cert" in after and not static),
        arguments.take_over,
        arguments.consolidate,
        arguments.sleep_idle,
        arguments.rebalance,
    )
    plan = LaunchPlan(
        arguments.replicas or 0,
        arguments.after,
        config,
        key,
        arguments.addresses or "",
        labels_of(arguments.ray_labels or ""),
        arguments.replica_cpus,
    )
    return plan, options


def _check_sides(before: Set[str], after: Set[str]) -> None:
    """Refuse settings that stand on the wrong side of `--`."""
    engine = {field.name for field in fields(SharedSettings)} - {*OF_A_GATEWAY}
    faults = [
        f"{_flag(name)} stands after --, but it is different for each replica; leave it out there "
        "(before -- it is the gateway's)"
        for name in CHOSEN
        if name in after
    ]
    faults += [
        f"{_flag(name)} stands before --, but it is the replicas'; write it after --"
        for name in sorted(engine & before)
    ]
    if faults:
        raise StartupError("\n".join(faults))


def _check_launcher(arguments: Namespace, static: bool) -> None:
    if static and arguments.replicas is not None:
        raise StartupError(
            f"--replicas is {arguments.replicas}, but --launcher static starts none; leave it out"
        )
    if static != bool(arguments.addresses):
        raise StartupError(
            f"--launcher is {arguments.launcher} and --addresses "
            f"{arguments.addresses or 'not given'}; give addresses with --launcher static, and "
            "only there"
        )
    if not static and not arguments.replicas:
        raise StartupError("--replicas is not given; name how many replicas to start")


def labels_of(text: str) -> dict[str, str]:
    """Return the labels that `--ray-labels` asks for."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(name and value for name, _, value in pairs):
        raise StartupError(f"--ray-labels is {text!r}; write NAME=VALUE, with commas between")
    return {name: value for name, _, value in pairs}


def _admitting(config: Config, key: str) -> Config:
    """Return the gateway's settings with the fleet's key among its keys, if it asks for any: the
    replicas take uploads from it.
    """
    if not key or (config.api_key_file is None and not config.api_key_variable):
        return config
    if read_keys(config).find(key) is not None:
        return config
    own = os.environ.get(config.api_key_variable, "")
    os.environ[KEY] = f"{own}\n{key} scopes=link name=replicas"
    return config.model_copy(update={"api_key_variable": KEY})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _key(file: str | None) -> str:
    """Return the first key of a file, empty without one."""
    try:
        return key_in(Path(file)) or "" if file else ""
    except (OSError, UnicodeDecodeError) as error:
        said = f"cannot read --link-key-file {file}: {type(error).__name__}"
        raise StartupError(f"{said}; name a text file with a key") from None


def _made_key(state_dir: Path | None) -> str:
    """Return the fleet's key, kept in the state directory for its user alone."""
    made = secrets.token_urlsafe(32)
    if state_dir is None:
        return made
    private_directory(state_dir, parents=True, exist_ok=True)
    with open(state_dir / "fleet.key", "a+", opener=private_file) as file:
        file.seek(0)
        if kept := file.read().strip():
            return kept
        file.write(made)
    return made
