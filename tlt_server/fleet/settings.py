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
from tlt_server.fleet.launchers.plan import CHOSEN, KEY, FleetPlan
from tlt_server.frontend.http.keys import read_keys
from tlt_server.process.private import private_directory, private_file
from tlt_server.push.calling import key_in, tls_of
from tlt_server.settings.server import SharedSettings, settings
from tlt_server.settings.sources import read_settings

# Settings of an engine that a gateway uses too. Replicas that a launcher starts need the last ones.
OF_A_GATEWAY = {"served_model_name", "state_dir", "weight_channels"}
OF_BOTH = {"model", "weight_root", "weight_marker"}
LINK_FILES = ("link_ca", "link_cert", "link_cert_key")
# The launchers that a flag is for.
ONLY_FOR = {
    "replicas": ("local", "ray"),
    "addresses": ("static",),
    "link_key_file": ("static",),
    "ray_labels": ("ray",),
    "replica_cpus": ("ray",),
}


def planned(arguments: Namespace) -> FleetPlan:
    """Return the plan. `arguments.after`: the words after `--`, `arguments.served`: the same as
    flags of `tlt serve`. `StartupError` names each fault.
    """
    static, files = arguments.launcher == "static", (arguments.config, arguments.served["config"])
    if None not in files:
        raise StartupError(
            f"--config {files[0]} stands before -- and --config {files[1]} after it; give one "
            "file: after -- it is the replicas' and the gateway's"
        )
    names = {each.name for each in settings()}
    own, served = (
        {name: value for name, value in given.items() if name in names}
        for given in (vars(arguments), arguments.served)
    )
    before, after = (
        {*flags, *(read_settings(path) if path else ())}
        for flags, path in zip((own, served), files, strict=True)
    )
    _check_sides(before, after, static)
    _check_launcher(arguments)
    config = load({**served, **own}, file=files[0] or files[1])
    if config.channels and config.state_dir is None and not static:
        raise StartupError(
            f"weights can be pushed by {', '.join(config.channels)}, but there is no --state-dir, "
            "so a replica that starts again could not catch up; name one"
        )
    key = key_in(arguments.link_key_file) or "" if static else _made_key(config.state_dir)
    config = _admitting(config, key)
    tls = tls_of(arguments, LINK_FILES, by_default="tls_cert" in after and not static)
    given = {name: getattr(arguments, name) for name in FleetPlan._fields[4:]}
    return FleetPlan(config, arguments.after, key, tls, **given)


def _check_sides(before: Set[str], after: Set[str], static: bool) -> None:
    """Refuse settings that stand on the wrong side of `--`."""
    engine = {field.name for field in fields(SharedSettings)} - OF_A_GATEWAY - OF_BOTH
    only_before = set[str]() if static else OF_BOTH & before - after
    faults = [
        f"{_flag(name)} stands after --, but it is different for each replica; leave it out there "
        "(before -- it is the gateway's)"
        for name in CHOSEN
        if name in after
    ]
    faults += [
        f"{_flag(name)} stands before --, but it is the replicas'; write it after --"
        for name in sorted(engine & before | only_before)
    ]
    if faults:
        raise StartupError("\n".join(faults))


def _check_launcher(arguments: Namespace) -> None:
    launcher = arguments.launcher
    for name, launchers in ONLY_FOR.items():
        if getattr(arguments, name) is not None and launcher not in launchers:
            raise StartupError(
                f"{_flag(name)} is given, but --launcher is {launcher}; leave it out, or use "
                f"--launcher {' or '.join(launchers)}"
            )
    needed = "addresses" if launcher == "static" else "replicas"
    if getattr(arguments, needed) is None:
        raise StartupError(f"--launcher is {launcher}, which needs {_flag(needed)}; give it")


def _admitting(config: Config, key: str) -> Config:
    """Return the gateway's settings with the fleet's key among its keys, if it asks for any: the
    replicas take uploads from it. A variable with keys is no longer passed on to them.
    """
    if not key or (config.api_key_file is None and not config.api_key_variable):
        return config
    if read_keys(config).find(key) is not None:
        return config
    own = os.environ.pop(config.api_key_variable, "")
    os.environ[KEY] = f"{own}\n{key} scopes=link name=replicas"
    return config.model_copy(update={"api_key_variable": KEY})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
