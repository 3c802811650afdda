"""The messages for too little GPU memory: by how much it is short, next to what, and which settings
would make it fit.

A remedy is offered only if it was tried on the plan and fits: the mildest value of one setting, or,
where no single one will do, of a few together. Called by the device before it allocates and when
the allocator fails, and by `tlt doctor`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tlt_server.engine.gpu.buckets import MAX_VERIFIED
from tlt_server.engine.gpu.memory import GIB, MIB, RESERVE, MemoryPlan, Needs, size
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError

MAX_FRACTION = 0.98  # the largest that we advise
MIN_FRACTION = 0.05  # the smallest that the setting takes
MIN_LENGTH = 256  # a limit on sequences below it is no help
CONTEXT = GIB // 2  # bytes that are not free even on a GPU that nothing else uses
BUSY = "end what else uses this GPU (nvidia-smi lists it)"
SMALLER = "serve a smaller model or use a GPU with more memory"


class Lever(NamedTuple):
    """A setting that frees memory."""

    setting: str
    values: Sequence[Any]  # from the one that frees most to the mildest
    verb: str = "lower"

    def advice(self, plan: MemoryPlan, value: Any) -> str:
        if self.setting == "weight_staging":
            return (
                f"set weight_staging to {value} ({size(plan.staging)} are kept on the GPU for "
                "pushed weights)"
            )
        return (
            f"{self.verb} {self.setting} to {value:g}"
            if isinstance(value, float)
            else f"{self.verb} {self.setting} to {value}"
        )


def check_weights(settings: DecidedSettings, needs: Needs, free: int, total: int) -> None:
    """Raise `StartupError` where weights do not fit, before they are loaded."""
    if needs.weights <= free:
        return
    halved = settings.dtype == "float32" and needs.weights // 2 <= free
    remedies = [
        *(["serve dtype bfloat16 (halves them)"] if halved else []),
        *([BUSY] if needs.weights <= total - CONTEXT else []),
        SMALLER,
    ]
    raise StartupError(
        f"the weights take {size(needs.weights)} in {settings.dtype}, {size(free)} of the GPU's "
        f"{size(total)} are free, "
        f"{size(needs.weights - free)} too few; {', or '.join(remedies)}"
    )


def check_plan(plan: MemoryPlan) -> None:
    """Raise `StartupError` when not even one sequence would fit, or when what was asked for does
    not.
    """
    if plan.fits:
        return
    settings, sequence = plan.settings, f"one sequence of max_model_len {plan.max_model_len}"
    if plan.too_few:
        found = (
            f"kv_memory_mb {settings.kv_memory_mb} holds {plan.held} pages, {sequence} needs "
            f"{plan.least}"
        )
    elif settings.pages or settings.kv_memory_mb:
        found = (
            f"{plan.wanted} KV pages take {size(plan.kv)}, the GPU is {size(plan.short)} short "
            f"next to {plan.rest}"
        )
    else:
        found = (
            f"memory_fraction {settings.memory_fraction:g} of the GPU's {size(plan.total)} is "
            f"{size(plan.short)} short of {sequence} "
            f"next to {plan.rest}"
        )
    raise StartupError(f"{found}; {', or '.join(_remedies(plan))}")


def _remedies(plan: MemoryPlan) -> list[str]:
    remedies, idle = _settings(plan), plan._replace(free=plan.total - plan.needs.weights - CONTEXT)
    if plan.free < idle.free:
        if idle.fits:
            remedies.append(BUSY)
        elif not remedies:
            remedies = [f"{BUSY} and {remedy}" for remedy in _settings(idle)]
    return remedies or [SMALLER]


def _settings(plan: MemoryPlan) -> list[str]:
    levers = _levers(plan)
    tried = [(lever, _mildest(plan, lever)) for lever in levers]
    return [lever.advice(plan, value) for lever, value in tried if value is not None] or _together(
        plan, levers
    )


def _levers(plan: MemoryPlan) -> list[Lever]:
    settings, page = plan.settings, plan.settings.page_size
    shorter = Lever("max_model_len", range(-(-MIN_LENGTH // page) * page, plan.max_model_len, page))
    a_sequence = -(-plan.least * plan.needs.per_page // MIB)
    if settings.pages:
        levers = [Lever("pages", range(plan.least, settings.pages))]
    elif plan.too_few:
        levers = [Lever("kv_memory_mb", [a_sequence], "raise"), shorter]
    elif settings.kv_memory_mb:
        levers = [Lever("kv_memory_mb", range(a_sequence, settings.kv_memory_mb)), shorter]
    else:
        percents = range(round(MAX_FRACTION * 100), int(settings.memory_fraction * 100 + 1e-9), -1)
        levers = [
            shorter,
            Lever("memory_fraction", [percent / 100 for percent in percents], "raise"),
        ]
    if plan.staging:
        levers.append(Lever("weight_staging", ["host"]))
    return [
        *levers,
        Lever("max_rows", range(MAX_VERIFIED, settings.max_rows)),
        Lever("max_running", range(1, settings.max_running)),
    ]


def _mildest(plan: MemoryPlan, lever: Lever) -> Any:
    """Return the value with which the plan fits; None without one."""
    fitting = bisect_left(
        lever.values, True, key=lambda value: not changed(plan, {lever.setting: value}).fits
    )
    return lever.values[fitting - 1] if fitting else None


def _together(plan: MemoryPlan, levers: Sequence[Lever]) -> list[str]:
    """Return one remedy of several settings, those that free most; none where all together do not
    do.
    """
    useful = sorted(
        (lever for lever in levers if lever.values),
        key=lambda lever: changed(plan, {lever.setting: lever.values[0]}).short,
    )
    values: dict[str, Any] = {}
    for lever in useful:
        if not changed(plan, values).fits:
            values[lever.setting] = lever.values[0]
    if not changed(plan, values).fits:
        return []
    for setting in reversed(list(values)):
        without = {name: value for name, value in values.items() if name != setting}
        values = without if changed(plan, without).fits else values
    chosen = [lever for lever in useful if lever.setting in values]
    for lever in chosen:
        others = {name: value for name, value in values.items() if name != lever.setting}
        values[lever.setting] = _mildest(changed(plan, others), lever)
    return [" and ".join(lever.advice(plan, values[lever.setting]) for lever in chosen)]


def changed(plan: MemoryPlan, values: Mapping[str, Any]) -> MemoryPlan:
    """Return the plan with other settings; `max_model_len` among them."""
    rest = {name: value for name, value in values.items() if name != "max_model_len"}
    return plan._replace(
        settings=replace(plan.settings, **rest),
        max_model_len=values.get("max_model_len", plan.max_model_len),
    )


def exhausted(plan: MemoryPlan | None, what: str, said: str, *, free: int, total: int) -> str:
    """Describe memory that ran out where it was planned to suffice; `plan`: of KV, if it was made;
    `said` is the allocator's message.
    """
    remedies = _less_kv(plan, max(_asked(said) - free, RESERVE // 2)) if plan else [SMALLER]
    return (
        f"the GPU has no room for {what}: {shortage(said, free=free, total=total)}; "
        f"{', or '.join([*remedies, BUSY])}"
    )


def shortage(said: str, *, free: int, total: int) -> str:
    """Describe what the allocator lacked, by its message."""
    more = f"{size(_asked(said))} more were asked for and " if _asked(said) else ""
    return f"{more}{size(free)} of its {size(total)} are free"


def _asked(said: str) -> int:
    """Return the bytes that were asked for; 0 where the message does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", said)
    return int(float(found[1]) * {"KiB": 1024, "MiB": MIB, "GiB": GIB}[found[2]]) if found else 0


def _less_kv(plan: MemoryPlan, less: int) -> list[str]:
    """Return the setting that makes KV smaller by `less`, where a sequence still fits; what is not
    planned for grows with max_running.
    """
    settings = plan.settings
    if settings.pages or settings.kv_memory_mb:
        lever = _levers(plan)[0]
    else:
        percents = range(
            round(MIN_FRACTION * 100), math.ceil(settings.memory_fraction * 100 - 1e-9)
        )
        lever = Lever("memory_fraction", [percent / 100 for percent in percents])
    enough = bisect_left(
        lever.values,
        True,
        key=lambda value: changed(plan, {lever.setting: value}).kv > plan.kv - less,
    )
    offered = (
        [lever.values[enough - 1]]
        if enough and changed(plan, {lever.setting: lever.values[enough - 1]}).fits
        else []
    )
    return [
        *(lever.advice(plan, value) for value in offered),
        *(["lower max_running"] if settings.max_running > 1 else []),
    ]
