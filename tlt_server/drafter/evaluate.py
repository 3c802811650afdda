"""`tlt drafter evaluate`: drafters on one record, side by side."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.tables import show
from tlt_server.drafter.device import device_of, memory_refused
from tlt_server.drafter.records import EvaluatedRecord, load_record
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.split import auto_gpu_leaves
from tlt_server.settings.server import QuantizationName, available_processors
from tlt_server.speculation.drafters import find_loader
from tlt_server.trainer.judging import figures
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, Walked, evaluate
from tlt_server.trainer.replaying.plans import PinnedPlan, RecordedPlan, RootPlan, own_rows
from tlt_server.trainer.replaying.replay import ReplayedDrafter
from tlt_server.trainer.replaying.self_check import SelfCheck, of_version, self_check
from tlt_server.trainer.target.prefill import PREFILLS, load_prefill
from tlt_server.trainer.target.recompute import RecomputedFeatures
from tlt_server.wire.records import Strategy

Tick = Callable[[int], None]


class Evaluated(NamedTuple):
    """One drafter on the record."""

    drafter: ReplayedDrafter
    plan: RootPlan
    walked: Walked


def run(args: argparse.Namespace) -> int:
    """Print tables and one line of JSON. Exit status 1: the self-check found a difference."""
    record = load_record(args.record, args.target)
    version = _version(args, record)
    chosen = np.flatnonzero(of_version(record.samples, version))[: args.responses].tolist()
    if not chosen:
        raise StartupError(
            f"{args.record} has no response that version {version!r} computed from start to end; "
            f"it has {', '.join(record.samples.legend.versions)}: name another with --version"
        )
    torch.set_num_threads(args.threads or available_processors())
    args.device = device_of(args.device, record.device)
    console = wide_console()
    check = None
    with memory_refused(args.device), progress_bar(console) as progress:
        if args.self_check:
            task = progress.add_task("self-check", total=len(chosen))
            check = _self_checked(args, record, version, lambda n: progress.advance(task, n))
        task = progress.add_task("replay", total=len(chosen) * len(args.drafter))
        found = _evaluated(args, record, chosen, lambda n: progress.advance(task, n))
    report = {
        "verb": "drafter evaluate",
        "version": version,
        "responses": len(chosen),
        "responses_of_other_versions": int((~of_version(record.samples, version)).sum()),
        "strategy": "as recorded" if args.as_recorded else _pinned(args, "eagle").name,
        **record.described,
        "self_check": _check_figures(check) if check else None,
        "rows": _rows(args, record, chosen, found),
    }
    show_report(console, report)
    if check is not None and check.different and not record.device:
        console.print(
            f"{args.record} does not say what recorded it, and only the same kind of device "
            f"repeats every count: this replay ran on {args.device}, try the other --device"
        )
    if record.device not in (args.device, ""):
        console.print(
            f"recorded on {record.device}, which rounds otherwise than this replay on {args.device}"
        )
    recorded, own = record.described.get("fingerprint", {}).get("leaves"), _leaves(args)
    if record.device == args.device and recorded not in (None, own):
        console.print(
            f"recorded with {recorded} reduction leaves, which round otherwise than this replay "
            f"with {own}, the default"
        )
    for refused in record.refused:
        console.print(refused, highlight=False, markup=False)
    finish(args, report, on_gpu=args.device == "cuda", recorded_on=record.machine)
    return int(check is not None and (check.different > 0 or not check.compared))


def _leaves(args: argparse.Namespace) -> int:
    return auto_gpu_leaves(ModelConfig.read(args.target)) if args.device == "cuda" else 1


def _version(args: argparse.Namespace, record: EvaluatedRecord) -> str:
    known = record.samples.legend.versions
    if args.version is None and len(known) == 1:
        return known[0]
    if args.version not in known:
        asked = f"version {args.version!r} is not in it" if args.version else "name one of them"
        raise StartupError(
            f"{args.record} has responses of the versions {', '.join(known)}; {asked}: give the "
            "one whose weights --target holds as --version"
        )
    return str(args.version)


def _quantization(args: argparse.Namespace, record: EvaluatedRecord) -> QuantizationName:
    found: QuantizationName = record.described.get("drafter_quantization", "none")
    return args.drafter_quantization or found


def loaded(
    args: argparse.Namespace,
    record: EvaluatedRecord,
    drafters: Sequence[Path],
    device: str,
    quantization: QuantizationName = "none",
) -> tuple[RecomputedFeatures, list[ReplayedDrafter]]:
    """Load the target and these drafters, which must read the same layers."""
    served = record.described.get("fingerprint", {}).get("quantization")
    config = ModelConfig.read(args.target).stored_as(served, str(args.target))
    target = load_prefill(
        args.target,
        device,
        find_loader(drafters[0], device).feature_layers(drafters[0], config),
        replace(config, max_position=record.positions(config)),
    )
    replayed = [
        ReplayedDrafter.load(each, target.model, device=device, quantization=quantization)
        for each in drafters
    ]
    return RecomputedFeatures(target), replayed


def _self_checked(
    args: argparse.Namespace, record: EvaluatedRecord, version: str, tick: Tick
) -> SelfCheck:
    if record.device not in (args.device, ""):
        remedy = f"use --device {record.device}, or " if record.device in PREFILLS else ""
        raise StartupError(
            f"--self-check compares bits, and {args.record} was recorded on {record.device}: "
            f"{remedy}leave it out"
        )
    how = _quantization(args, record)
    source, (drafter,) = loaded(args, record, args.drafter[:1], args.device, how)
    return self_check(
        record.head(args.responses), drafter, ReplayStage(source), version=version, on_response=tick
    )


def _evaluated(
    args: argparse.Namespace, record: EvaluatedRecord, chosen: Sequence[int], tick: Tick
) -> list[Evaluated]:
    """Evaluate drafters, grouped by the layers that they read."""
    config = ModelConfig.read(args.target)

    def layers(place: int) -> tuple[int, ...]:
        directory = args.drafter[place]
        return find_loader(directory, args.device).feature_layers(directory, config)

    found: dict[int, Evaluated] = {}
    places = sorted(range(len(args.drafter)), key=layers)
    for _, group in groupby(places, layers):
        same = list(group)
        given, how = [args.drafter[place] for place in same], _quantization(args, record)
        source, drafters = loaded(args, record, given, args.device, how)
        tasks = [Task(drafter, _plan(args, record, drafter.kind)) for drafter in drafters]
        walks = evaluate(
            record.samples.responses, chosen, tasks, ReplayStage(source), on_response=tick
        )
        for place, task, walked in zip(same, tasks, walks, strict=True):
            found[place] = Evaluated(task.drafter, task.plan, walked)
    return [found[place] for place in range(len(args.drafter))]


def _pinned(args: argparse.Namespace, drafter: str) -> Strategy:
    return Strategy(drafter, args.depth, args.width, args.rows)


def _plan(args: argparse.Namespace, record: EvaluatedRecord, kind: str) -> RootPlan:
    if not args.as_recorded:
        return PinnedPlan(_pinned(args, kind))
    strategies = record.samples.legend.strategies
    drafts_V = own_rows(strategies, record.samples.verified, kind) > 0
    return RecordedPlan(strategies, record.run(args.policy, drafts_V), kind)


def _rows(
    args: argparse.Namespace,
    record: EvaluatedRecord,
    chosen: Sequence[int],
    found: Sequence[Evaluated],
) -> list[dict[str, Any]]:
    """Return each drafter's figures, and the differences of the others from the first one."""
    responses, batch = record.samples.responses, args.batch or record.decoding
    kinds = _kinds(args, record) if args.kind else None
    rows, sums = [], []
    for drafter, plan, walked in found:
        ms_C = None
        if record.cost is not None:
            ms_C = figures.cycle_ms(walked, plan.strategies, record.cost, batch)
        sums.append(figures.by_response(walked, ms_C))
        depth = max(strategy.depth for strategy in plan.strategies)
        row: dict[str, Any] = {
            "drafter": drafter.label,
            "cycles": len(walked),
            "tokens": int(walked.emitted_C.sum()),
            "accept_length": round(figures.accept_length(walked), 4),
            "accepted_at_depth": [round(x, 4) for x in figures.by_depth(walked, depth)],
            "by_length": [(n, round(x, 4)) for n, x in figures.by_length(walked, responses)],
            "coverage": round(figures.coverage(responses, chosen, drafter.vocabulary()), 5),
            "batch": batch,
            **{
                f"ms_{name}": None if ms is None else round(ms, 4)
                for name, ms in figures.mean_ms(walked, ms_C)._asdict().items()
            },
        }
        if kinds is not None:
            by_kind = figures.by_kind(walked, kinds)
            row["by_kind"] = {name: round(x, 4) for name, x in by_kind.items()}
        if len(sums) > 1:
            against = figures.paired(sums[0], sums[-1], responses.group_N)
            row["against_first"] = {
                name: [round(x, 5) for x in interval]
                for name, interval in against._asdict().items()
                if interval is not None
            }
        rows.append(row)
    return rows


def _kinds(args: argparse.Namespace, record: EvaluatedRecord) -> list[str]:
    """Return the kind of each response: the first whose expression occurs in its prompt's text."""
    file = args.target / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"{file} is missing, but --kind reads text: leave --kind out")
    tokenizer, responses = Tokenizer.from_file(str(file)), record.samples.responses
    kinds = []
    for n in range(len(responses)):
        prompt = responses.tokens(n)[: responses.prompt_len_N[n]].tolist()
        text = tokenizer.decode(prompt)
        names = (name for name, pattern in args.kind if re.search(pattern, text))
        kinds.append(next(names, "other"))
    return kinds


def _check_figures(check: SelfCheck) -> dict[str, Any]:
    return {
        "cycles": check.compared,
        "different": check.different,
        "first_differences": [str(each) for each in check.shown[:5]],
        "not_compared": dict(check.unknown),
    }


def _saved(name: str) -> str:
    value, low, high = (f"{{against_first[{name}][{i}]:+.1%}}" for i in range(3))
    return f"{value} ({low} to {high})"


DRAFTER = {"drafter": "{name}"}
CYCLES = DRAFTER | {
    "cycles": "{cycles}",
    "accept length": "{accept_length:.3f}",
    "coverage": "{coverage:.2%}",
    "ms/cycle": "{ms_per_cycle:.3f}",
    "ms/token": "{ms_per_token:.3f}",
    "cycles saved": _saved("cycles_saved"),
    "time saved": _saved("time_saved"),
}


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report of an evaluation."""
    check = report["self_check"]
    if check is not None:
        console.print(
            f"self-check: {check['different']} of {check['cycles']} cycles differ from what the "
            "server accepted",
            highlight=False,
        )
        for said in check["first_differences"]:
            console.print(f"  {said}", highlight=False, markup=False)
        for reason, count in check["not_compared"].items():
            console.print(f"  {count} not compared: {reason}", highlight=False, markup=False)
    names = _short([row["drafter"] for row in report["rows"]])
    rows = [{**row, "name": name} for row, name in zip(report["rows"], names, strict=True)]
    show(console, f"{report['responses']} responses, {report['strategy']}", CYCLES, rows)
    depth = max(len(row["accepted_at_depth"]) for row in rows)
    _print(
        console,
        "share of cycles that accept at least this many drafts",
        [str(d + 1) for d in range(depth)],
        rows,
        lambda row: [f"{share:.3f}" for share in row["accepted_at_depth"]],
    )
    _print(
        console,
        "accept length by tenths of the responses, up to this many tokens",
        [f"{10 * (i + 1)} %: {most}" for i, (most, _) in enumerate(rows[0]["by_length"])],
        rows,
        lambda row: [f"{found:.2f}" for _, found in row["by_length"]],
    )
    kinds = [*rows[0].get("by_kind", ())]
    _print(
        console,
        "accept length by kind",
        kinds,
        rows,
        lambda row: [
            f"{row['by_kind'][kind]:.3f}" if kind in row["by_kind"] else "" for kind in kinds
        ],
    )


def _print(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Callable[[Mapping[str, Any]], list[str]],
) -> None:
    """Print a table with a column for each heading, if there is any."""
    columns = {heading: f"{{cells[{i}]}}" for i, heading in enumerate(headings)}
    none = [""] * len(headings)
    if headings:
        show(
            console, title, DRAFTER | columns, [{**row, "cells": cells(row) + none} for row in rows]
        )


def _short(labels: Sequence[str]) -> list[str]:
    """Return the last parts of paths that tell them apart."""
    parts = [label.rstrip("/").split("/") for label in labels]
    for count in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(labels)):
            return short
    return list(labels)
