"""The demo's last act: new target weights arrive while a batch runs, and every token names the
version that computed it.

The pushed weights are a slightly perturbed copy of the served target, like the next step of a
training run. No torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlt_client import Client, ItemResult
from tlt_client.channels.files import opened
from tlt_client.wire import Choice, Token
from tlt_server.demo.rounds import DemoSize, batch
from tlt_server.demo.task import Exercise

VERSION = "step-1"
AFTER_TOKENS = 24  # per response, on average, before the push
# Each response has as many tokens, also past its end, so that the push lands while all run.
TOKENS = 400
SHOWN = 4  # responses whose spans are printed
SCALE = 0.01  # relative standard deviation of the change
KINDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class PushOutcome(NamedTuple):
    before: str  # version
    push_s: float  # from the request to its reply
    pause_ms: float  # for which no step ran
    phases_s: dict[str, float]
    tensors: int
    spans: dict[str, list[tuple[str, int, int]]]  # "problem/response" -> (version, start, end)
    lengths: dict[str, int]
    others: list[str]  # versions of a request made after the push

    @property
    def crossing(self) -> int:
        """Responses that began under one version and ended under the other."""
        return sum(len(spans) == 2 for spans in self.spans.values())

    @property
    def sound(self) -> bool:
        """Return True if spans are in order and cover each response exactly, and everything after
        the push is of the new version.
        """
        for name, spans in self.spans.items():
            edges = [0, *(end for _, _, end in spans)]
            if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != self.lengths[name]:
                return False
            if [version for version, _, _ in spans] not in (
                [self.before],
                [VERSION],
                [self.before, VERSION],
            ):
                return False
        return self.crossing > 0 and self.others == [VERSION]


def perturbed_copy(model: Path, directory: Path, seed: int = 0) -> Path:
    """Write the safetensors files of `model` with every float a little off, and copy the other
    files that a push needs.
    """
    directory.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    for file in model.glob("*.safetensors"):
        with opened(file) as whole:
            data, start, tensors = bytearray(whole.data), whole.start, whole.tensors
        for entry in tensors.values():
            if entry.dtype in KINDS:
                first, last = (start + offset for offset in entry.data_offsets)
                data[first:last] = _perturbed(bytes(data[first:last]), entry.dtype, draw)
        (directory / file.name).write_bytes(data)
    for name in ("config.json", "model.safetensors.index.json"):
        if (model / name).exists():
            shutil.copy(model / name, directory)
    return directory


def _perturbed(data: bytes, kind: str, draw: np.random.Generator) -> bytes:
    if kind == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        return (_jitter(values, draw).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return _jitter(np.frombuffer(data, KINDS[kind]), draw).tobytes()


def _jitter(values: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return (values * (1 + SCALE * draw.standard_normal(values.shape, np.float32))).astype(
        values.dtype
    )


def push_in_flight(
    client: Client,
    url: str,
    weights: Path,
    problems: Sequence[Exercise],
    size: DemoSize,
    seed: int,
    say: Callable[[str], None],
) -> PushOutcome:
    """Start the batch again, push `weights` when it is well on its way, and collect the spans."""
    before = client.weights()["target"]
    items = batch(problems, size, seed, "push")
    choices: dict[str, Choice] = {}
    tokens, due = 0, AFTER_TOKENS * size.problems * size.responses
    pushed: Future[tuple[float, dict[str, Any]]] | None = None
    with ThreadPoolExecutor(1) as pool, Client(url, timeout_s=600) as trainer:
        for event in client.stream(items, sampling={"max_tokens": TOKENS, "ignore_eos": True}):
            if isinstance(event, Token):
                tokens += len(event.token_ids)
            elif isinstance(event, ItemResult):
                choices |= {f"{event.id}/{choice.index}": choice for choice in event.choices}
            if pushed is None and tokens >= due:
                say(f"push: {VERSION} after {tokens} tokens of a second batch")
                pushed = pool.submit(_push, trainer, weights)
        push_s, reply = (pushed or pool.submit(_push, trainer, weights)).result()
    (later,) = client.generate(items[:1], sampling={"max_tokens": 8}).results
    return PushOutcome(
        before=before,
        push_s=push_s,
        pause_ms=reply["pause_ms"],
        phases_s=reply["phases_s"],
        tensors=len(reply["checksums"]),
        spans={
            name: [(s.version, s.start, s.end) for s in choice.weight_versions]
            for name, choice in sorted(choices.items())
        },
        lengths={name: len(choice.token_ids) for name, choice in choices.items()},
        others=sorted(
            {span.version for choice in later.choices for span in choice.weight_versions}
        ),
    )


def _push(trainer: Client, weights: Path) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    reply = trainer.update_weights(weights, VERSION, in_flight="continue")
    return time.perf_counter() - started, dict(reply)


def push_lines(outcome: PushOutcome) -> list[str]:
    """Return the lines that the demo shows of the push."""
    longest = sorted(outcome.spans, key=lambda name: -outcome.lengths[name])
    crossing = [name for name in longest if len(outcome.spans[name]) == 2]
    lines = [
        f"New weights in the middle of a batch: {outcome.tensors} tensors live "
        f"{outcome.push_s * 1e3:.0f} ms after the request; "
        f"the loop paused for {outcome.pause_ms:.2f} ms.",
        f"{outcome.crossing} of {len(outcome.spans)} responses were under way and went on; "
        "every token says which version made it:",
    ]
    for name in crossing[:SHOWN]:
        spans = "  ".join(
            f"{version} [{start}, {end})" for version, start, end in outcome.spans[name]
        )
        lines.append(f"  response {name}: {spans}")
    if not outcome.sound:
        lines.append(
            "  NO: spans do not cover the responses, "
            "or a request after the push was not of the new version alone"
        )
    return lines


def push_figures(outcome: PushOutcome) -> dict[str, Any]:
    return {
        "push_s": round(outcome.push_s, 4),
        "pause_ms": round(outcome.pause_ms, 3),
        "tensors": outcome.tensors,
        "sound": outcome.sound,
        "phases_s": {phase: round(seconds, 5) for phase, seconds in outcome.phases_s.items()},
        "responses": len(outcome.spans),
        "crossing": outcome.crossing,
    }
