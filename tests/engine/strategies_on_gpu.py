"""Run by itself: starts an engine with a policy, then sets ten others while requests run, and tells
as JSON what each took, and which kernels were loaded and graphs recorded within steps: `python -m
tests.engine.strategies_on_gpu off cuda [--ranks 2]`. In a process of its own, since kernels stay
loaded. One rank serves a LoRA adapter, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec

from tests.engine.adapters import write_adapter
from tests.engine.pushing import Pushable
from tlt_kernels.gpu.variants import Variant, loaded
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import DraftLimits, GenerateRequest, Strategy, parse_strategy

NAMES = (
    *("eagle:7x4x16", "eagle:5x3x12", "eagle:1x1x64", "eagle:12x8x33", "eagle:9x1x10"),
    *("history:8x2x9", "history:7x1x8", "history:12x3x64"),
)
CHOOSING = "beg", "goodput"
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"repetition_penalty": 1.05},
    {"logprobs": 3, "prompt_logprobs": 1},
)
# In batches of their own, since one of a kind decides how a whole step is computed.
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"min_p": 0.1},
    {"bad_words": ((5, 6), (7,))},
    {"structured_outputs": {"kind": "regex", "text": "([0-9]|[a-z ]){1,60}"}},
)
LIMITS = DraftLimits(max_depth=2, max_rows=3)
POLICIES = *(SetPolicy("fixed", parse_strategy(name)) for name in NAMES), *map(SetPolicy, CHOOSING)
RUNNING, TOKENS = 24, 48


class Watched:
    """An engine that notes which kernels its steps load, and which graphs they record."""

    def __init__(self, policy: str, device: str, ranks: int, root: Path) -> None:
        self.adapter = "a" if ranks == 1 else ""  # several ranks serve none
        self.engine = Pushable(
            EngineSettings(
                model=str(TARGET),
                drafter=str(DRAFTER),
                policy=policy,
                device=device,
                dtype="bfloat16" if device == "cuda" else "float32",
                kv_memory_mb=1024,
                max_model_len=512,
                max_running=RUNNING,
                tensor_parallel=ranks,
                max_loras=int(ranks == 1),
                max_lora_rank=8,
                weight_root=str(root),
            )
        )
        if self.adapter:
            path = write_adapter(root / "adapter", TARGET, 1)
            pushed = self.engine.push(path, role="adapter", adapter=self.adapter)
            assert pushed.result == "committed", pushed
        self.steps, self.loaded = 0, dict[Variant, str]()
        self.recorded: list[Hashable] = []
        runner = self.engine.engine.runner
        assert isinstance(runner, GpuRunner)
        self.graphs, self.shapes, self.launch = runner.graphs, runner.shapes, runner.launch
        runner.launch = self.watch  # type: ignore[method-assign]

    def watch(self, batch: Batch, strategy: Strategy) -> None:
        self.steps += 1
        before = {*self.graphs.bytes}
        with loaded() as found:
            self.launch(batch, strategy)
        self.loaded |= found
        self.recorded += self.graphs.bytes.keys() - before

    def set(self, policy: SetPolicy) -> dict[str, Any]:
        """Set a policy while requests run; tell what that took."""
        inner, steps = self.engine.engine, self.steps
        began_s = last_s = time.perf_counter()
        slowest_s = 0.0
        inner.send(msgspec.structs.replace(policy, id=policy.name))
        while not (reports := inner.control_reports()):
            if inner.scheduler.idle:
                self.engine.submit(*requests(f"{policy.name}-{self.steps}"))
            self.engine.step()
            now_s = time.perf_counter()
            slowest_s, last_s = max(slowest_s, now_s - last_s), now_s
        [report] = reports
        assert report.error is None, report.error
        return {
            "seconds": round(time.perf_counter() - began_s, 2),
            "steps": self.steps - steps,
            "slowest_ms": round(1e3 * slowest_s, 1),
            "said": report.detail,
        }

    def run(self) -> list[Any]:
        """Return the tokens and log-probs of batches, whose sizes go down to one request."""
        self.engine.finish()
        found = []
        batches = [requests("r"), *(requests(f"o{i}", (each,)) for i, each in enumerate(OTHERS))]
        if self.adapter:
            batches.append(requests("a", lora=self.adapter))
        for batch in batches:
            self.engine.said.clear()
            said = self.engine.run(*batch)
            found += [said[id] for id in sorted(said)]
        return found

    def recorded_late(self) -> list[str]:
        """Take the graphs that steps have recorded, of those that the policy reaches."""
        reached = {*self.shapes.captured(self.engine.engine.choice.policy.strategies)}
        recorded = self.recorded
        self.recorded = []
        return [str(key) for key in recorded if key in reached]


def requests(
    name: str, kinds: tuple[dict[str, Any], ...] = KINDS, lora: str = ""
) -> list[GenerateRequest]:
    """Return a batch of these kinds in turn. Every seventh request limits its drafts. `lora`: the
    adapter of every third.
    """
    asked = problems_as_requests(TARGET, RUNNING, group=4, seed=0, max_tokens=TOKENS)
    return [
        msgspec.structs.replace(
            each,
            id=f"{name}-{i:02}",
            lora=lora if i % 3 == 0 else "",
            sd=LIMITS if i % 7 == 3 else True,
            sampling=msgspec.convert(
                {
                    **msgspec.structs.asdict(each.sampling),
                    **kinds[i % len(kinds)],
                    "max_tokens": TOKENS - i,
                },
                type(each.sampling),
            ),
        )
        for i, each in enumerate(asked)
    ]


def main(policy: str, device: str, ranks: int, root: Path) -> None:
    watched = Watched(policy, device, ranks, root)
    plain, told = watched.run(), dict[str, Any]()
    for each in POLICIES:
        took, before = watched.set(each), len(watched.loaded)
        watched.recorded_late()
        same = watched.run() == plain
        in_steps, name = [variant.kernel for variant in [*watched.loaded][before:]], each.name
        recorded = watched.recorded_late()
        told[name] = {**took, "same": same, "loaded_in_steps": in_steps, "recorded": recorded}
        print(name, told[name], file=sys.stderr)
    start = [each.kernel for each in watched.loaded]
    print(json.dumps({"strategies": told, "loaded_in_steps": start}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    parser.add_argument("device")
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        main(asked.policy, asked.device, asked.ranks, Path(root))
