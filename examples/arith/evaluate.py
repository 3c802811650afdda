"""Step 5: measure the pair on held-out problems, fit the drafter's calibration, and write
`figures.json` and the model card.

Accept lengths are those of `tlt drafter evaluate`: the last of the samples fit the calibration, the
first are replayed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from card import CHAINS, model_card, record_figures
from sample import add_sampling, rewards, sampled

from tlt_server.demo import task
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.samples.samples import Responses
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.trainer.judging import figures
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, evaluate, fit_calibration
from tlt_server.trainer.replaying.plans import PinnedPlan
from tlt_server.trainer.replaying.replay import ReplayedDrafter
from tlt_server.trainer.target.prefill import Prefill, load_prefill
from tlt_server.trainer.target.recompute import RecomputedFeatures
from tlt_server.wire.records import Strategy

TOGETHER = 64  # responses whose entropy is computed at a time


def length_figures(responses: Responses, reward_N: np.ndarray) -> dict:
    length_N = responses.output_len_N
    kind_N = np.array([task.problem(int(seed)).kind for seed in responses.seed_N])
    return {
        "samples": len(responses),
        "solved": round(float(reward_N.mean()), 4),
        "solved_by_kind": {
            str(kind): {
                "share": round(float((kind_N == kind).mean()), 4),
                "solved": round(float(reward_N[kind_N == kind].mean()), 4),
            }
            for kind in np.unique(kind_N)
        },
        "solved_by_length_decile": [
            {
                "tokens_up_to": int(length_N[part].max()),
                "solved": round(float(reward_N[part].mean()), 4),
            }
            for part in np.array_split(np.argsort(length_N, kind="stable"), 10)
            if len(part)
        ],
        "tokens": {
            **{f"p{p}": round(float(np.quantile(length_N, p / 100)), 1) for p in (50, 90, 99)},
            "max": int(length_N.max()),
            "mean": round(float(length_N.mean()), 1),
        },
        "share_at_least_2000_tokens": round(float((length_N >= 2000).mean()), 5),
        "share_at_cap": round(float((length_N >= task.RESPONSE_TOKEN_CAP).mean()), 5),
    }


@torch.inference_mode()
def entropy_per_token(target: Prefill, responses: Responses) -> float:
    head_VH = target.head_rows(torch.arange(target.model.vocab_size)).float()
    total = 0.0
    for first in range(0, len(responses), TOGETHER):
        numbers = range(first, min(first + TOGETHER, len(responses)))
        texts = [responses.tokens(n) for n in numbers]
        hidden_TH = target.states(texts).hidden_RH.float()
        for n, own_TH in zip(numbers, hidden_TH.split([len(text) for text in texts]), strict=True):
            logs = (own_TH[responses.prompt_len_N[n] - 1 : -1] @ head_VH.t()).log_softmax(-1)
            total -= float((logs.exp() * logs).sum())
    return total / int(responses.output_len_N.sum())


class Measured:
    """The pair's drafter, with a calibration fitted to some responses and written."""

    def __init__(
        self, options: argparse.Namespace, responses: Responses, fitted: Sequence[int]
    ) -> None:
        pair, config = options.pair, ModelConfig.read(options.pair / "target")
        layers = feature_layers(pair / "drafter", config)
        self.target = load_prefill(pair / "target", options.device, layers, config)
        self.drafter = ReplayedDrafter.load(
            pair / "drafter", self.target.model, device=options.device
        )
        self._stage = ReplayStage(RecomputedFeatures(self.target))
        self._options = options
        shape = self._strategies([options.trees[-1]])[0]
        fit_calibration(self.drafter, responses, fitted, self._stage, shape)
        self.drafter.weights.calibration.save(pair / "drafter")

    def accepted(self, responses: Responses, count: int) -> dict:
        """Return accept lengths of trees and chains over the first responses."""
        trees = self._strategies(self._options.trees)
        chains = [Strategy(self.drafter.kind, depth, 1, depth + 1) for depth in CHAINS]
        plans = [PinnedPlan(tree) for tree in trees]
        plans += [PinnedPlan(chain, floored=False) for chain in chains]
        walks = evaluate(
            responses, range(count), [Task(self.drafter, plan) for plan in plans], self._stage
        )
        found = [
            {
                "accept_length": round(figures.accept_length(walked), 4),
                "cycles": len(walked),
                "accepted_at_depth": [
                    round(share, 4) for share in figures.by_depth(walked, strategy.depth)
                ],
            }
            for walked, strategy in zip(walks, [*trees, *chains], strict=True)
        ]
        return {
            "accept": {str(tree.rows): each for tree, each in zip(trees, found, strict=False)},
            "accept_chain": dict(zip(map(str, CHAINS), found[len(trees) :], strict=True)),
        }

    def _strategies(self, rows: Sequence[int]) -> list[Strategy]:
        depth, width = self._options.depth, self._options.width
        return [Strategy(self.drafter.kind, depth, width, each) for each in rows]


def measure_drafter(options: argparse.Namespace) -> dict:
    """Measure another drafter of the same target on recorded responses; the target's figures
    stay.
    """
    responses = RolloutRecord.load(options.recorded).responses
    count = len(responses)
    held = range(count - options.calibration_samples, count)
    accepted = Measured(options, responses, held).accepted(responses, options.replayed)
    evaluation = json.loads((options.pair / "figures.json").read_text())["evaluation"]
    evaluation.pop("among_children", None)
    return {
        **evaluation,
        "calibration_samples": len(held),
        "drafter_measured": {"machine": options.machine, "samples": options.replayed},
        "T=1": {**evaluation["T=1"], **accepted},
    }


def measure_pair(options: argparse.Namespace) -> dict:
    target = options.pair / "target"
    hot = sampled(target, task.EVAL_SEEDS[: options.samples], 1.0, options)
    responses = hot.responses
    held = range(options.samples - options.calibration_samples, options.samples)
    measured = Measured(options, responses, held)
    found = {
        "T=1": {
            **length_figures(responses, rewards(hot, target)),
            "entropy_per_token": round(entropy_per_token(measured.target, responses), 4),
            **measured.accepted(responses, options.replayed),
        },
        "T=0": None,
    }
    if options.greedy_samples:
        cold = sampled(target, task.EVAL_SEEDS[: options.greedy_samples], 0.0, options)
        count = min(options.replayed, len(cold.responses)) // 2
        found["T=0"] = {
            **length_figures(cold.responses, rewards(cold, target)),
            "accept": measured.accepted(cold.responses, count)["accept"],
        }
    parts = {"target": measured.target.model, "drafter": measured.drafter.weights.network}
    sizes = {
        f"{name}_parameters": sum(value.numel() for value in part.parameters().values())
        for name, part in parts.items()
    }
    return {
        "machine": options.machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}",
        "depth": options.depth,
        "width": options.width,
        "calibration_samples": options.calibration_samples,
        **sizes,
        "target_layers": measured.target.model.config.layers,
        "draft_vocab": len(measured.drafter.vocabulary()),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument("--samples", type=int, default=20_000, help="eval problems at T=1")
    parser.add_argument(
        "--greedy-samples", type=int, default=4_000, help="eval problems at T=0; 0: none"
    )
    parser.add_argument(
        "--calibration-samples",
        type=int,
        default=8_000,
        help="the last of --samples, kept out of the accept lengths",
    )
    parser.add_argument(
        "--replayed",
        type=int,
        default=3_000,
        help="samples replayed per accept length, from the first",
    )
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=8, help="nodes expanded per level")
    parser.add_argument(
        "--trees", type=int, nargs="+", default=[8, 16, 32], help="rows of the trees replayed"
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        help="measure the drafter on these responses of the target; its own figures stay",
    )
    parser.add_argument(
        "--card-only",
        action="store_true",
        help="write the model card from figures.json and measure nothing",
    )
    parser.add_argument(
        "--machine",
        default=f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "a CPU",
    )
    add_sampling(parser)
    options = parser.parse_args()
    path = options.pair / "figures.json"
    if not options.card_only:
        measure = measure_drafter if options.recorded else measure_pair
        record_figures(path, "evaluation", measure(options))
    (options.pair / "README.md").write_text(model_card(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
