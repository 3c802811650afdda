"""Step 3: sample responses of the target with the engine, judge them, and write them as a record,
which `tlt drafter` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from corpus import encode_prompt
from tokenizers import Tokenizer

from tlt_server.bench.recording import recorded
from tlt_server.demo import task
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Sampling


def sampled(
    target: Path, seeds: Sequence[int], temperature: float, options: argparse.Namespace
) -> RolloutRecord:
    """Return a response to each of these problems; its noise has the problem's seed."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    requests = [
        GenerateRequest(
            id=str(seed),
            token_ids=encode_prompt(tokenizer, task.problem(seed).prompt_text),
            sampling=Sampling(max_tokens=options.cap, temperature=temperature),
            seed=seed,
            group_id=str(seed),
        )
        for seed in seeds
    ]
    settings = EngineSettings(
        model=target,
        device=options.device,
        policy="off",
        max_running=min(options.running, len(requests)),
        max_model_len=options.cap + max(len(request.token_ids) for request in requests),
    )
    return recorded(settings, requests, [SetPolicy("off")], [])


def rewards(record: RolloutRecord, target: Path) -> np.ndarray:
    """Return the task's reward of each response, [N]."""
    tokenizer, responses = Tokenizer.from_file(str(target / "tokenizer.json")), record.responses
    return np.array(
        [
            task.reward(
                task.problem(int(responses.seed_N[n])),
                tokenizer.decode(responses.tokens(n)[responses.prompt_len_N[n] :].tolist()),
            )
            for n in range(len(responses))
        ]
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cap", type=int, default=task.RESPONSE_TOKEN_CAP)
    parser.add_argument("--running", type=int, default=1024, help="sequences sampled at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=Path("tlt_server/demo/pair/target"))
    parser.add_argument("--out", type=Path, default=Path("build/arith/samples.safetensors"))
    parser.add_argument("--samples", type=int, default=27_000)
    parser.add_argument(
        "--first-seed",
        type=int,
        default=500_000_000,
        help="problem and noise seeds count up from here",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    add_sampling(parser)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.samples)
    record = sampled(options.target, seeds, options.temperature, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record.save(options.out)
    lengths = record.responses.output_len_N
    quantiles = np.quantile(lengths, (0.5, 0.9, 0.99)).tolist()
    solved, capped = rewards(record, options.target).mean(), (lengths >= options.cap).mean()
    print(
        f"{options.out}: {len(lengths)} samples, solved {solved:.3f}, p50/p90/p99 {quantiles}, "
        f"max {lengths.max()}, at cap {capped:.4f}"
    )


if __name__ == "__main__":
    main()
