r"""`python -m benchmarks.peers prompts|vllm|sglang`: rollouts of our prompts in another engine.

`prompts` writes the prompts of `tlt bench rollout` into a file, so that another engine's
environment needs none of ours. The engines' verbs time every rollout in the engine's offline API
and print one line of JSON. A process measures one setting, as an engine leaves the GPU's memory for
certain only when its process ends. The first rollout runs twice; its first time warms the engine up
and is left out. Responses are sampled at temperature 1 with the engine's own random numbers, so
their lengths differ from ours; compare tokens per second.

A pair, its prompts (with this project installed), then one run per setting (with the engine):

    tlt bench pad --shape qwen2.5-7b --out PAIR
    python -m benchmarks.peers prompts --model PAIR/target prompts.json
    for drafts in 0 2 3 7; do
        python -m benchmarks.peers vllm --target PAIR/target --drafter PAIR/drafter \
            --prompts prompts.json --drafts $drafts
    done
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

Prompts = list[list[int]]
Generate = Callable[[Prompts], int]  # prompts that run together -> tokens generated


class Rollouts(NamedTuple):
    """Prompts by seed; the prompts of one seed run together: problems of the demo task, eight
    responses to each.
    """

    max_tokens: int
    prompts: dict[str, Prompts]

    @classmethod
    def read(cls, file: Path) -> Rollouts:
        """`SystemExit` where the file cannot be used."""
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise SystemExit(
                f"{file} holds no prompts ({error}); write it by python -m benchmarks.peers prompts"
            ) from None

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt."""
        return max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)


def write(options: argparse.Namespace) -> int:
    from tlt_server.demo.workload import problems_as_requests

    prompts = {
        str(seed): [
            list(request.token_ids)
            for request in problems_as_requests(options.model, options.requests, group=8, seed=seed)
        ]
        for seed in options.seeds
    }
    options.file.write_text(json.dumps(Rollouts(options.max_tokens, prompts)._asdict()) + "\n")
    return 0


def start_vllm(vllm: ModuleType, options: argparse.Namespace, rollouts: Rollouts) -> Generate:
    speculation = {
        "method": "eagle3",
        "model": str(options.drafter),
        "num_speculative_tokens": options.drafts,
    }
    engine = vllm.LLM(
        model=str(options.target),
        dtype="bfloat16",
        max_num_seqs=options.max_running,
        max_model_len=rollouts.longest + rollouts.max_tokens + 16,
        speculative_config=speculation if options.drafts else None,
    )
    sampling = vllm.SamplingParams(
        temperature=1.0, max_tokens=rollouts.max_tokens, detokenize=False
    )

    def generate(prompts: Prompts) -> int:
        engine.reset_prefix_cache()
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def start_sglang(sglang: ModuleType, options: argparse.Namespace, rollouts: Rollouts) -> Generate:
    speculation = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(options.drafter),
        "speculative_num_steps": options.drafts,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": options.drafts + 1,
    }
    engine = sglang.Engine(
        model_path=str(options.target),
        dtype="bfloat16",
        max_running_requests=options.max_running,
        cuda_graph_max_bs=options.max_running,
        skip_tokenizer_init=True,
        **(speculation if options.drafts else {}),
    )
    sampling = {"temperature": 1.0, "max_new_tokens": rollouts.max_tokens}

    def generate(prompts: Prompts) -> int:
        engine.flush_cache()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    return generate


ENGINES = {"vllm": start_vllm, "sglang": start_sglang}


def run(options: argparse.Namespace) -> int:
    """Start the engine, time every rollout and print settings, medians and every run."""
    rollouts, name = Rollouts.read(options.prompts), options.verb
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"{name} cannot be imported here ({error}); run this with the python of an environment "
            f"that has {name}"
        ) from None
    generate = ENGINES[name](module, options, rollouts)
    generate(next(iter(rollouts.prompts.values())))
    runs = []
    for seed, prompts in rollouts.prompts.items():
        started = time.perf_counter()
        tokens = generate(prompts)
        seconds = time.perf_counter() - started
        runs.append({"seed": int(seed), "makespan_s": seconds, "tokens": tokens})
    said = {
        "engine": f"{name} {module.__version__}",
        "drafts": options.drafts,
        "requests": len(next(iter(rollouts.prompts.values()))),
        "max_tokens": rollouts.max_tokens,
        "max_running": options.max_running,
        "makespan_s": statistics.median(run["makespan_s"] for run in runs),
        "tokens": statistics.median(run["tokens"] for run in runs),
        "tokens_per_s": round(statistics.median(r["tokens"] / r["makespan_s"] for r in runs), 1),
        "runs": runs,
    }
    print(json.dumps(said))
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = found.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("prompts", allow_abbrev=False).add_argument
    add("file", type=Path, help="the file to write")
    add("--model", type=Path, required=True, help="the target, whose tokenizer is used")
    add("--requests", type=int, default=512, help="of a rollout [default 512]")
    add(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[21, 22, 23, 24, 25],
        help="one rollout each [default 21,22,23,24,25]",
    )
    add("--max-tokens", type=int, default=2000, help="of a response [default 2000]")
    for name in ENGINES:
        add = verbs.add_parser(name, allow_abbrev=False).add_argument
        add("--target", type=Path, required=True, help="directory of the target")
        add("--drafter", type=Path, required=True, help="directory of the drafter")
        add("--prompts", type=Path, required=True, help="the file that `prompts` wrote")
        add("--drafts", type=int, default=0, help="length of the EAGLE-3 chain [default 0: off]")
        add("--max-running", type=int, default=256, help="requests at once [default 256]")
    return found


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    return write(options) if options.verb == "prompts" else run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
