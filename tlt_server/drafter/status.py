"""The command `tlt drafter status`: `GET /drafter` as tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlt_client import Client
from tlt_server.push.calling import call

MIB = 2**20


def run(arguments: argparse.Namespace) -> int:
    def show_state(client: Client, console: Console) -> None:
        show(console, client.drafter())

    return call(arguments, show_state)


def show(console: Console, state: Mapping[str, Any]) -> None:
    """Print a `DrafterState`."""
    _print(console, "recording", _recording(state))
    if state["trainer"] is not None:
        _print(console, "trainer", _trainer(state["trainer"]))
    for served in state["drafters"]:
        _print(console, f"drafter {served['name']}", _served(served))
    if not state["drafters"]:
        console.print("no drafter is loaded; tlt serve --drafter names one")


def _recording(state: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "target version", state["target_version"]
    yield "drafter_training", state["training"]
    buffer = state["buffer"]
    if buffer is None:
        return
    yield "sequences", f"{buffer['sequences']:,}"
    yield "tokens", f"{buffer['tokens']:,}"
    yield "size", f"{buffer['bytes'] / MIB:,.1f} MiB"
    if buffer["feature_tokens"]:
        features = f"{buffer['feature_tokens']:,} tokens, {buffer['feature_bytes'] / MIB:,.1f} MiB"
        yield "features", features
    for version, tokens in buffer["tokens_by_version"].items():
        yield f"output tokens of {version}", f"{tokens:,}"
    yield "files", buffer["directory"] or "none (--state-dir keeps them)"
    if buffer["disk_error"]:
        yield "disk", buffer["disk_error"]
    yield "offered, dropped", f"{buffer['offered']:,}, {buffer['dropped']:,}"
    yield "refused", f"{buffer['refused']:,}"
    for reason in buffer["refusals"]:
        yield "", reason


def _trainer(trainer: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "state", f"{trainer['state']} {trainer['reason']}".strip()
    if trainer["device"]:
        yield "device", trainer["device"]
    if (slowdown := trainer["slowdown"]) is not None:
        yield "steps while it runs", f"{slowdown:.2f} times as long"
    if trainer["error"]:
        yield "restarts", f"{trainer['restarts']}; the last one: {trainer['error']}"
    yield "steps, rounds", f"{trainer['steps']:,}, {trainer['rounds']:,}"
    loss = trainer["loss"]
    yield "tokens, loss", f"{trainer['tokens']:,}, {'none' if loss is None else f'{loss:.4f}'}"
    due = f"{trainer['recorded_tokens']:,} of {trainer['interval_tokens']:,} tokens"
    yield "recorded for the next round", due
    yield "adopted", f"{trainer['adopted']:,}"
    for reason, count in trainer["refused"].items():
        yield f"refused, {reason}", f"{count:,}"
    cycles = f"{trainer['different_cycles']:,} of {trainer['compared_cycles']:,} cycles"
    yield "differ in the self-check", cycles
    if (last := trainer["candidate"]) is not None:
        low, high = last["interval"]
        yield "last candidate", f"{last['outcome']}, judged on {last['groups']} prompts"
        yield "its gain", f"{last['gain']:.3f} ({low:.3f} to {high:.3f})"
        before, after = last["accept_length_before"], last["accept_length"]
        yield "replayed accept length", f"{after:.3f}, of the drafter in force {before:.3f}"
        for per in ("cycle", "token"):
            ms, ms_before = last[f"ms_per_{per}"], last[f"ms_per_{per}_before"]
            known = ms is not None and ms_before is not None
            said = f"{ms:.3f}, of the drafter in force {ms_before:.3f}" if known else "not known"
            yield f"replayed ms per {per}", said
    yield "memory", f"{trainer['memory_bytes'] / MIB:,.1f} MiB"
    yield "checkpoints", trainer["checkpoint_error"] or f"{trainer['checkpoints']:,}"


def _served(served: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if served["architecture"] is not None:
        yield "architecture", served["architecture"]
    if served["weight_version"] is not None:
        yield "weight version", served["weight_version"]
    if served["trained_for"] is not None:
        yield "trained for target", served["trained_for"]
    yield "resting", "yes, until weights change again" if served["resting"] else "no"
    if served["accept_length"] is None:
        yield "accept length", "not known: it has not drafted of late"
        return
    yield "accept length", f"{served['accept_length']:.3f} in {served['steps']} steps"
    shares = [f"{share:.1%}" for share in served["accepted_at_depth"]]
    yield "accepted at depth 1, 2, ...", " ".join(shares)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=Text(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)
