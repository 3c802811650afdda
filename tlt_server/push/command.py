"""The command `tlt weights`: calls the server through the client and prints the result. Each
failure is one line with its remedy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tlt_client import Client
from tlt_client.channels.checksums import digest
from tlt_client.channels.http import HttpSender
from tlt_server.errors import StartupError
from tlt_server.push.calling import call


def run(arguments: argparse.Namespace) -> int:
    verb = VERBS[arguments.verb]
    return call(
        arguments,
        lambda client, console: verb(client, arguments, console),
        "To see the result of a push that broke off: tlt weights status",
    )


def _push(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    path: Path = arguments.path
    for named in filter(None, (path, arguments.drafter)):
        if not named.exists():
            raise StartupError(f"{named} does not exist; give a directory of safetensors files")
    if arguments.drafter is not None and arguments.role == "drafter":
        raise StartupError(
            f"--role drafter says that {path} is a drafter, and --drafter gives another one; leave "
            "one of them out"
        )
    fields: dict[str, Any] = {
        "in_flight": arguments.in_flight,
        "commit": not arguments.stage,
        "role": "all" if arguments.drafter is not None else arguments.role,
    }
    if arguments.channel == "http":
        reply = _sent(client, arguments, fields, console)
    else:
        if not path.is_dir():
            raise StartupError(
                f"{path} is one file, but by disk the server reads a directory; give its "
                "directory, or use --channel http"
            )
        if arguments.drafter is not None:
            fields["drafter_path"] = str(arguments.drafter.resolve())
        reply = client.push_weights(arguments.version, path=str(path.resolve()), **fields)
    _print_reply(reply, console)


def _sent(
    client: Client, arguments: argparse.Namespace, fields: dict[str, Any], console: Console
) -> Mapping[str, Any]:
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*bars, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def on_bytes(part: str, stored: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=total)
            progress.update(tasks[part], completed=stored)

        sender = HttpSender(client, on_bytes=on_bytes)
        return sender.push_directory(
            arguments.path, arguments.version, drafter=arguments.drafter, **fields
        )


def _print_reply(reply: Mapping[str, Any], console: Console) -> None:
    whose = {"all": "target and drafter"}.get(reply["role"], reply["role"])
    console.print(
        f"{reply['state']}: version {reply['version']!r} of the {whose}; live is "
        f"{reply['weight_version']!r}",
        markup=False,
    )
    phases = ", ".join(
        f"{name} {seconds * 1e3:.0f} ms" for name, seconds in reply["phases_s"].items()
    )
    if phases:
        console.print(
            f"phases: {phases}; the loop paused for {reply['pause_ms']:.2f} ms", markup=False
        )
    sums = reply["checksums"]
    if sums:
        console.print(
            f"checksums: {len(sums)} tensors, together sha256:{digest(sums)}", markup=False
        )


def _status(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    state = client.weights()
    console.print(
        f"live: target {state['target']!r}"
        + (f", drafter {state['drafter']!r}" if state["drafter"] else ""),
        markup=False,
    )
    before = ", ".join(f"{role} {version!r}" for role, version in state["previous"].items())
    console.print(f"before: {before or 'nothing to roll back to'}", markup=False)
    if state["open"]:
        console.print(
            f"open: {state['open']['version']!r} of the {state['open']['role']}, "
            f"{state['open']['state']}",
            markup=False,
        )
    for upload in state.get("uploads", ()):
        console.print(
            f"upload: {upload['version']!r}, {upload['parts']} parts, {upload['bytes']} of "
            f"{upload['total']} bytes, started {upload['age_s']:.0f} s ago, last byte "
            f"{upload['idle_s']:.0f} s ago; tlt weights abort VERSION ends it",
            markup=False,
        )
    update = state.get("update")
    if update is not None:
        console.print(
            f"a weight update of the {update['selector']} has been open for {update['age_s']:.0f} "
            "s: every push stays staged until POST /end_weight_update commits it. POST "
            f"/begin_weight_update drops it, and so does the server in {update['ends_in_s']:.0f} s "
            "without a call",
            style="bold yellow",
            markup=False,
        )
    for reason in state["quarantined"].values():
        console.print(f"generation is stopped: {reason}", style="bold red", markup=False)
    console.print(
        f"kept over a restart: {'yes' if state['spooled'] else 'no (--state-dir keeps them)'}"
    )


def _rollback(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    asked = {"to": arguments.to, "role": arguments.role}
    fields = {name: value for name, value in asked.items() if value}
    _print_reply(client.roll_back_weights(**fields), console)


def _abort(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    reply = client.abort_weights(arguments.version)
    console.print(
        f"{reply['state']}: version {reply['version']!r}; live is {reply['weight_version']!r}",
        markup=False,
    )


VERBS: dict[str, Callable[[Client, argparse.Namespace, Console], None]] = {
    "push": _push,
    "status": _status,
    "rollback": _rollback,
    "abort": _abort,
}
