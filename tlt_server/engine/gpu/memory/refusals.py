"""The messages for too little GPU memory: a budget whose rows exceed the memory, with the settings
that shrink a row, or a width that gives each GPU a smaller part.

A setting's value is offered only if that change alone makes the plan fit. Called by the device
before it allocates and when the allocator fails, and by `tlt doctor`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tlt_server.engine.devices.sizing import MIB
from tlt_server.engine.gpu.memory.budget import EXCHANGES, GIB, RESERVE, MemoryPlan, Wider, size
from tlt_server.engine.gpu.steps.buckets import MAX_VERIFIED
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.models.training_memory import CONTEXT as TRAINER
from tlt_server.models.training_memory import LEAST_SLOTS

MAX_PERCENT = 98  # the largest memory_fraction that is advised
MIN_LENGTH = 256  # a limit on sequences below it is no help
CONTEXT = GIB // 2  # bytes that are not free even on a GPU that nothing else uses
BUSY = "end what else uses this GPU (nvidia-smi lists it)"
SMALLER = "serve a smaller model or use a GPU with more memory"
OFF = "leave drafter_training off"
LOWER, RAISE, SET = "lower {} to {}", "raise {} to {}", "set {} to {}"
NAMES = {BUSY: "other programs", OFF: "drafter_training"}  # rows without a setting


class Row(NamedTuple):
    what: str
    bytes: int
    setting: str = ""  # or a field of the plan
    values: Sequence[Any] = ()  # from the one that frees most to the mildest
    remedy: str = LOWER


def budget(plan: MemoryPlan) -> list[Row]:
    """Return the rows of the GPU's memory budget; they add up to the GPU's memory plus the
    shortage. The saving of smaller exchanges is not counted.
    """
    settings, needs, page = plan.settings, plan.needs, plan.settings.page_size
    pages, kv_mb = settings.pages or 0, 0 if settings.pages else settings.kv_memory_mb or 0
    one = f"one sequence of max_model_len {plan.max_model_len}"
    one_mb = -(-plan.least * needs.per_page // MIB)
    lengths = range(-(-MIN_LENGTH // page) * page, 0 if pages else plan.max_model_len, page)
    percents = range(MAX_PERCENT, int(settings.memory_fraction * 100 + 1e-9), -1)
    fractions = [] if plan.named else [percent / 100 for percent in percents]
    used, idle = plan.total - needs.loaded - plan.free, plan.total - needs.loaded - CONTEXT
    beyond = f"beyond memory_fraction {settings.memory_fraction:g}"
    staged = ["host"] if plan.staging and settings.tensor_parallel == 1 else []
    shape = plan.needs.training
    trained_mb = -(-shape.device_bytes(LEAST_SLOTS) // MIB) if shape else 0
    training_mb = (plan.training - TRAINER) // MIB if shape else 0
    kv = f"for {f'{plan.wanted} KV pages' if plan.named else one}"
    return [
        Row("of weights", needs.weights),
        Row(EXCHANGES, needs.exchange),
        Row("in other programs", used, "free", [idle] if plan.free < idle else [], BUSY),
        Row(kv, plan.wanted * needs.per_page, "max_model_len", lengths),
        Row("", 0, "pages", range(plan.least, pages)),
        Row("", 0, "kv_memory_mb", range(one_mb, kv_mb)),
        Row("", 0, "kv_memory_mb", [one_mb] if plan.too_few else [], RAISE),
        Row(beyond, plan.unused, "memory_fraction", fractions, RAISE),
        Row("for pushed weights", plan.staging, "weight_staging", staged, SET),
        Row(
            "to train the drafter",
            plan.training,
            "drafter_training_mb",
            [trained_mb] if plan.trains_nothing else range(trained_mb, training_mb),
            SET,
        ),
        Row("", 0, "needs", [needs._replace(training=None, per_state=0)] if shape else [], OFF),
        Row("for steps", plan.working, "max_rows", range(MAX_VERIFIED, settings.max_rows)),
        Row("", 0, "max_running", range(1, settings.max_running)),
        Row("for graphs", RESERVE),
    ]


def check_plan(plan: MemoryPlan, wider: Callable[[], Sequence[Wider]] = tuple) -> None:
    """Raise `StartupError` if one full sequence, or the requested KV, would not fit. `wider`:
    called in that case, for larger widths.
    """
    if plan.fits:
        return
    rows = budget(plan)
    taken = ", ".join(f"{size(row.bytes)} {row.what}" for row in rows if row.bytes > 0)
    found = f"the GPU's {size(plan.total)} are {size(plan.short)} short of {taken}"
    if plan.too_few:
        found = (
            f"kv_memory_mb {plan.settings.kv_memory_mb} holds {plan.held} pages, one sequence of "
            f"max_model_len {plan.max_model_len} needs {plan.least}"
        )
    if plan.trains_nothing:
        found = (
            f"drafter_training_mb {plan.settings.drafter_training_mb} is too little to train this "
            "drafter"
        )
    raise StartupError(f"{found}; {', or '.join(_remedies(plan, rows, wider()))}")


def _remedies(plan: MemoryPlan, rows: Sequence[Row], wider: Sequence[Wider]) -> list[str]:
    """Return the mildest value of each row with which everything fits, and the smallest such width;
    else a combination that makes room.
    """
    found, names = list[str](), list[str]()
    for row in (row for row in rows if row.values):

        def lacks(value: Any, setting: str = row.setting) -> bool:
            return not plan.changed(setting, value).fits

        if fitting := bisect_left(row.values, True, key=lacks):
            found.append(row.remedy.format(row.setting, row.values[fitting - 1]))
        names.append(NAMES.get(row.remedy, row.setting))
    widened, offered = [plan.widened(each) for each in wider], dict[str, str]()
    for each in widened:
        if each.fits:
            offered.setdefault(_changed(plan, each), widen(plan.settings, each.settings))
    fit = [*offered.values()]
    if plan.settings.dtype == "float32" and plan.halved.fits:
        fit.append("set dtype to bfloat16 (halves the weights)")
    names += dict.fromkeys(_changed(plan, each) for each in widened)
    makes_room = any(_smallest(each).fits for each in (plan, *widened))
    several = [f"change several of {', '.join(names)}"] if makes_room else []
    return [*found, *fit] or [*several, SMALLER]


def _changed(now: MemoryPlan, wider: MemoryPlan) -> str:
    same = wider.settings.quantization == now.settings.quantization
    return "tensor_parallel" if same else "quantization"


def _smallest(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with the value of each row that frees most."""
    for row in budget(plan):
        plan = plan.changed(row.setting, row.values[0]) if row.values else plan
    return plan


def widen(now: DecidedSettings, wider: DecidedSettings) -> str:
    """Name a larger width, or FP8. A width changes the reduction segments only if there would be
    fewer segments than ranks.
    """
    if wider.quantization != now.quantization:
        return "set quantization to fp8 (halves the target's linear maps)"
    leaves = " and reduction_leaves" if now.reduction_leaves != wider.reduction_leaves else ""
    ranks = wider.tensor_parallel
    return f"set tensor_parallel{leaves} to {ranks}, on {ranks} GPUs"


def exhausted(
    plan: MemoryPlan | None, what: str, message: str, *, free: int, total: int, wider: str = ""
) -> str:
    """Describe an allocation failure in spite of a sufficient plan. `plan`: of the KV, once made.
    `message`: the allocator's. `wider`: the next width as `widen` names it, if there is one.
    """
    remedies = [SMALLER]
    if plan:
        asked = {name: getattr(plan.settings, name) for name in ("pages", "kv_memory_mb")}
        size_of_kv = next((name for name, value in asked.items() if value), "memory_fraction")
        used = {name: getattr(plan.settings, name) for name in (size_of_kv, "max_running")}
        remedies = [f"lower {name} ({value})" for name, value in used.items() if value != 1]
    return (
        f"the GPU has no room for {what}: {shortage(message, free=free, total=total)}; "
        f"{', or '.join([*remedies, *([wider] if wider else []), BUSY])}"
    )


def shortage(message: str, *, free: int, total: int) -> str:
    """Describe the shortage by the allocator's message."""
    asked = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", message)
    more = f"{asked[1]} more were asked for and " if asked else ""
    return f"{more}{size(free)} of its {size(total)} are free"
