"""`tlt bench training`: the cost of training the drafter, at a 7B model's drafter shapes or at the
shipped pair's.

Weights and features are random, lengths long-tailed (median 72 tokens, one in ten above 270). Per
objective, on an EAGLE-3 network and `eagle1` on one of EAGLE-1, whose head is the target's whole
one: the time of a step, trained tokens per second with packs read from the host meanwhile, the time
of reading one, the longest segment between two parking points, and memory. `recomputed`: EAGLE-3
with the time in which a target of random weights computes the states of each pack's documents.
Packing against batches padded to their longest document (drafted from where roots are, or
everywhere), in documents per second. A checkpoint's stall against a
plain save of the same state.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_server.bench.padding.shapes import SHAPES as LARGE
from tlt_server.bench.padding.shapes import Shape
from tlt_server.bench.record import finish
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_networks import ARCHITECTURES, EAGLE3, layers_within
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.learning import checkpoint
from tlt_server.trainer.learning.network import trainable_class
from tlt_server.trainer.learning.objectives import OBJECTIVES, make_objective
from tlt_server.trainer.learning.pack import (
    Cursor,
    DocumentPart,
    Pack,
    Packer,
    PacksAhead,
    Placed,
    Window,
    assemble,
    fit,
    windows,
)
from tlt_server.trainer.learning.step import Trainer
from tlt_server.trainer.target.gpu_prefill import GpuPrefill
from tlt_server.trainer.target.prefill import CpuPrefill, Prefill

SHAPES = {
    "7b": LARGE["qwen2.5-7b"],
    "demo": Shape("qwen2", 256, 768, 4, 2, 1, 512, 256, 4096),
    "tiny": Shape("qwen2", 64, 96, 3, 2, 1, 256, 128, 4096, head_dim=32),
}
PROMPT, LONGEST, BATCH = 40, 2000, 8
RUNS = {
    **{name: (name, EAGLE3) for name in OBJECTIVES},
    **{row.name: (row.objective, kind) for kind, row in ARCHITECTURES.items() if kind != EAGLE3},
}
WARMING, REPEATS = 2, 5
POSITIONS = {"max_position_embeddings": 4096}


class RandomDocuments:
    """A source of random tokens and features; every document reads the same ones."""

    def __init__(self, lengths: Sequence[int], config: ModelConfig, layers: int) -> None:
        """`layers`: the ones that a drafter reads."""
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        longest, hidden = max(lengths), config.hidden_size
        self._part = DocumentPart(
            torch.randint(0, config.vocab_size, (longest,), generator=generator),
            torch.randn(longest, layers * hidden, generator=generator).to(torch.bfloat16),
            torch.randn(longest, hidden, generator=generator).to(torch.bfloat16),
            torch.arange(longest) >= PROMPT,
        )

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        return DocumentPart(*(x[start:stop] for x in self._part))


class TrainingBench:
    def __init__(self, args: argparse.Namespace) -> None:
        shape = SHAPES[args.shape]
        self.shape = {"name": args.shape, "layers": shape.layers, "hidden": shape.hidden}
        self.device, self.budget = torch.device(args.device), args.budget
        self.draft_vocab = shape.draft_vocab
        self.target = ModelConfig.parse({**shape.config("bfloat16"), **POSITIONS}, "training")
        self.config = replace(self.target, architecture=EAGLE3, layers=1)
        random = np.random.default_rng(0)
        drawn = PROMPT + np.exp(random.normal(np.log(72), 1.03, args.documents)).astype(int)
        lengths = np.clip(drawn, PROMPT + 3, LONGEST).tolist()
        self.sources = {
            name: RandomDocuments(lengths, self.config, len(kind.features({}, self.target, "")))
            for name, kind in ARCHITECTURES.items()
        }

    def trainer(self, objective: str, architecture: str = EAGLE3) -> Trainer:
        on_gpu, vocab = self.device.type == "cuda", self.config.vocab_size
        network = trainable_class(architecture)(
            replace(self.config, architecture=architecture),
            self.draft_vocab if ARCHITECTURES[architecture].own_head else vocab,
            compute=torch.bfloat16 if on_gpu else torch.float32,
            device=self.device,
        )
        generator = torch.Generator(self.device).manual_seed(0)
        for weight in network.weights.values():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        hidden = self.config.hidden_size
        frozen = network.frozen(
            torch.randn(vocab, hidden, dtype=torch.bfloat16),
            torch.randn(network.draft_vocab_size, hidden, dtype=torch.bfloat16) * 0.02,
        )
        return Trainer(network, frozen, make_objective(objective))

    def packed(self, trainer: Trainer) -> tuple[list[Placed], Pack]:
        """Return the places of the first pack's documents, and the pack."""
        placed = fit(self.pieces(trainer.objective.steps), self.budget)[0]
        return placed, self.pack(trainer, placed, self.budget)

    def pieces(self, steps: int) -> list[Window]:
        return [
            window
            for document, length in enumerate(self.sources[EAGLE3].lengths)
            for window in windows(document, length, self.budget, steps)
        ]

    def pack(self, trainer: Trainer, placed: Sequence[Placed], slots: int) -> Pack:
        made = assemble(self.source(trainer), placed, slots)
        return made.to(self.device, trainer.network.compute)

    def source(self, trainer: Trainer) -> RandomDocuments:
        return self.sources[trainer.network.config.architecture]

    def seconds(self, work: Callable[[], object]) -> float:
        """Time work that must finish on the device."""
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def median_s(self, work: Callable[[], object]) -> float:
        for _ in range(WARMING):
            work()
        return statistics.median(self.seconds(work) for _ in range(REPEATS))

    def objective(self, name: str, architecture: str) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = self.trainer(name, architecture)
        placed, pack = self.packed(trainer)
        step_s = self.median_s(lambda: trainer.step([pack]))
        read_s = self.median_s(lambda: self.pack(trainer, placed, self.budget))
        parts = self.parts(trainer, pack)
        found = {
            "step_ms": round(step_s * 1e3, 3),
            "tokens_per_s": round(self.budget / self.with_reading_s(trainer)),
            "read_ms": round(1e3 * read_s, 3),
            "segments": sum(map(len, parts.values())),
            "longest_segment_ms": round(max(map(max, parts.values())) * 1e3, 3),
            "parts_ms": _in_ms(parts),
        }
        if self.device.type == "cuda":
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return found

    def with_reading_s(self, trainer: Trainer) -> float:
        """Return the seconds of a step while packs are read as a server's trainer does."""
        packer = Packer(self.source(trainer), self.budget, trainer.objective.steps)
        cursor = Cursor()
        with PacksAhead(packer, self.device, trainer.network.compute) as packs:

            def step() -> None:
                nonlocal cursor
                pack, cursor = packs.next(cursor)
                trainer.step([pack])

            return self.median_s(step)

    def parts(self, trainer: Trainer, pack: Pack) -> dict[str, list[float]]:
        """Return the seconds of a step's segments, by name, each waited for."""
        segments = trainer.segments([pack])
        found: dict[str, list[float]] = {}
        self._wait()
        while True:
            began = time.perf_counter()
            name = next(segments, None)
            if name is None:
                return found
            self._wait()
            found.setdefault(name, []).append(time.perf_counter() - began)

    def recomputed(self) -> dict[str, Any]:
        """Time steps of EAGLE-3 whose states are computed right before, on the same device."""
        target = random_target(self.target, layers_within(self.target.layers), self.device)
        trainer = self.trainer("eagle3")
        placed, pack = self.packed(trainer)
        source = self.source(trainer)
        tokens = [source.read(window.document, 0, window.stop).tokens_T for window, _ in placed]
        texts = [each.numpy().astype(np.int32) for each in tokens]
        before_N = feature_rows(placed, self.budget).to(self.device)

        def prefilled() -> Pack:
            hidden_TH, features_TF = (x.to(trainer.network.compute) for x in target.states(texts))
            return replace(
                pack, feature_NF=features_TF[before_N], teacher_NH=hidden_TH[before_N + 1]
            )

        prefill_s = self.median_s(prefilled)
        both_s = self.median_s(lambda: trainer.step([prefilled()]))
        return {
            "tokens": sum(map(len, texts)),
            "prefill_ms": round(prefill_s * 1e3, 3),
            "step_ms": round(both_s * 1e3, 3),
            "tokens_per_s": round(self.budget / both_s),
        }

    def layouts(self) -> dict[str, Any]:
        """Return documents per second of a pass over all documents: packed, in padded batches, and
        in such whose padding is drafted from, too, with losses, as other trainers do.
        """
        trainer = self.trainer("eagle3")
        pieces = self.pieces(trainer.objective.steps)
        batches = [pieces[at : at + BATCH] for at in range(0, len(pieces), BATCH)]
        laid = {
            "packed": [(placed, self.budget) for placed in fit(pieces, self.budget)],
            "padded": [
                ([Placed(window, width) for window in batch], width * len(batch))
                for batch in batches
                for width in [max(window.slots for window in batch)]
            ],
        }
        laid["padded_losses"] = laid["padded"]
        found = {}
        for name, all_placed in laid.items():
            seconds, parts = 0.0, dict[str, list[float]]()
            for at, (placed, slots) in enumerate(all_placed):
                pack = self.pack(trainer, placed, slots)
                if name == "padded_losses":
                    pack = replace(pack, roots=((0, slots),))
                if at == 0:
                    trainer.step([pack])
                seconds += self.seconds(lambda pack=pack: trainer.step([pack]))  # type: ignore[misc]
                for part, lengths in self.parts(trainer, pack).items():
                    parts.setdefault(part, []).extend(lengths)
            slots = sum(slots for _, slots in all_placed)
            found[name] = {
                "documents_per_s": round(len(pieces) / seconds, 2),
                "filled": round(sum(window.slots for window in pieces) / slots, 3),
                "parts_ms": _in_ms(parts),
            }
        packed = found["packed"]["documents_per_s"]
        for figures in found.values():
            figures["packed_is_faster"] = round(packed / figures["documents_per_s"], 3)
        return found

    def checkpoints(self) -> dict[str, Any]:
        trainer = self.trainer("eagle")
        _, pack = self.packed(trainer)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            copy = trainer.state.host_copy()

            def plain() -> None:
                copy.copy_from(trainer.state)
                self._wait()
                checkpoint.write(directory, copy, {})

            plain_s = min(self.seconds(plain) for _ in range(2))
            writer = checkpoint.Checkpoints(directory, trainer, {})
            step_s = min(self.seconds(lambda: trainer.step([pack])) for _ in range(REPEATS))
            with_s = []
            for _ in range(3):
                writer.begin()
                with_s.append(self.seconds(lambda: trainer.step([pack])))
                writer.close()
            size = sum(tensor.numel() * 4 for tensor in trainer.state.tensors())
        return {
            "bytes": size,
            "plain_ms": round(plain_s * 1e3, 2),
            "stall_ms": round(writer.stall_s * 1e3, 3),
            "step_ms": round(step_s * 1e3, 2),
            "step_with_checkpoint_ms": round(min(with_s) * 1e3, 2),
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _in_ms(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(1e3 * sum(seconds), 3) for name, seconds in parts.items()}


def feature_rows(placed: Sequence[Placed], slots: int) -> Tensor:
    """Return for each slot of a pack the row of its feature among the states of its documents'
    first `stop` tokens, document after document; [slots], 0 where a slot is empty.
    """
    before_N = torch.zeros(slots, dtype=torch.int64)
    at = first = 0
    for window, width in placed:
        before_N[at : at + window.slots] = torch.arange(window.start, window.stop - 1) + first
        at, first = at + width, first + window.stop
    return before_N


def random_target(
    config: ModelConfig, feature_layers: tuple[int, ...], device: torch.device
) -> Prefill:
    """Return a target with random weights, in bfloat16 on a GPU and float32 on a CPU."""
    if device.type == "cuda":
        target = GpuPrefill.empty(config, feature_layers, device)
        randomise(target.model.own_parameters())
        return target
    model = Decoder(config, numerics=Numerics("strict"), feature_layers=feature_layers)
    randomise(model.own_parameters())
    return CpuPrefill(model)


def randomise(weights: Mapping[str, Any]) -> None:
    """Fill matrices with values that keep the scale of states; norms are 1, biases 0."""
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5)


def run(args: argparse.Namespace) -> int:
    bench = TrainingBench(args)
    objectives = {}
    for name, asked in RUNS.items():
        objectives[name] = bench.objective(*asked)
        print(f"{name:>8}: {objectives[name]}", flush=True)
    found: dict[str, Any] = {"objectives": objectives}
    for part, work in (
        ("recomputed", lambda: {"eagle3": bench.recomputed()}),
        ("layouts", bench.layouts),
        ("checkpoint", bench.checkpoints),
    ):
        found[part] = work()
        print(f"{part}: {found[part]}", flush=True)
    record = {"bench": "training", "shape": bench.shape, "budget": args.budget, **found}
    record["checkpoint_stall_ms"] = found["checkpoint"]["stall_ms"]
    finish(args, record)
    return 0
