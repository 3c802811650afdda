"""The sections of the page, one per bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.markdown import Figures, in_the_file
from benchmarks.sections import engine, fleets, rollouts, service, training, weights

SECTIONS: dict[str, tuple[str, Callable[[Figures], Iterator[str]]]] = {
    "decode": ("Plain decoding", engine.decode),
    "prefill": ("Prefill against the libraries", engine.prefill),
    "cycle": ("Cycles of speculation", engine.cycle),
    "capture": ("Capturing states for a trainer", training.capture),
    "padded": ("What padding and rounding change", engine.padded),
    "graphs": ("Graphs and start-up", engine.graphs),
    "starts": ("Starts of a server", engine.starts),
    "exact": ("Exactness", engine.exact),
    "quality": ("Quality of FP8", engine.quality),
    "corrections": ("Quality of FP8", training.corrections),
    "structures": ("Structured outputs", engine.structures),
    "schemas": ("Structured outputs", engine.schemas),
    "lora": ("LoRA adapters", engine.lora),
    "rollout": ("Rollouts with a long tail", rollouts.rollout),
    "rollout-http": ("Rollouts over HTTP", rollouts.rollout_http),
    "fleet": ("Simulated fleets", fleets.simulated),
    "fleet-faults": ("Simulated fleets", fleets.faults),
    "fleet-rollout": ("A fleet against one server", fleets.rollout),
    "fleet-frontend": ("The gateway's own time", fleets.frontend),
    "fleet-exact": ("Exactness of a fleet", fleets.exact),
    "fleet-weights": ("Weight pushes to a fleet", fleets.weights),
    "replay": ("Regret of the policies", rollouts.replay),
    "grpo": ("Steps of an RL loop", training.grpo),
    "training": ("Training the drafter", training.training),
    "objectives": ("Objectives of the drafter's training", training.objectives),
    "interrupt": ("Interrupting the drafter's training", training.interrupt),
    "load": ("Many clients at once", service.load),
    "frontend": ("The frontend's own time", service.frontend),
    "overload": ("Overload", service.overload),
    "hostile": ("Hostile clients", service.hostile),
    "faults": ("Ranks that die or stop", service.faults),
    "test": ("Tests", service.soak),
    "long": ("Further cases of tests", service.soak),
    "soak": ("Long tests", service.soak),
    "weights": ("Weight pushes on a CPU", weights.weights),
    "weights-gpu": ("Weight pushes from GPU to GPU", weights.weights_gpu),
    "products": ("Matmuls alone", engine.matmuls),
    "exchange": ("Exchanges between GPUs", in_the_file),
    "test-gpu": ("Tests on a GPU", service.tests),
}
