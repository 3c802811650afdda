"""`tlt bench padded`: the effect of padding and bfloat16 on a pair's target, as the difference of
its logits from the small target's in float32.

The bench reads a pair that `tlt bench pad` wrote, has the small target write greedy answers to
problems of its task, and compares logits at every position: those of the small target in bfloat16,
and of the padded one, both computed by transformers, an implementation that shares nothing with
ours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tlt_server.bench.micro import measure, require_gpu
from tlt_server.demo.workload import TARGET, problems_as_requests

ANSWERS, LENGTH = (2, 3, 5, 8), 200  # problems, tokens of each answer


def model(target: Path, dtype: torch.dtype) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    return loaded.to("cuda").eval()


def answers(small: Any) -> list[Tensor]:
    """Return prompts with the small target's greedy answers, each [1, prompt + LENGTH]."""
    found, how = [], {"do_sample": False, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
    for number in ANSWERS:
        (request,) = problems_as_requests(TARGET, 1, group=1, seed=number)
        prompt = torch.tensor([request.token_ids], device="cuda")
        found.append(small.generate(prompt, attention_mask=torch.ones_like(prompt), **how))
    return found


def logits(of: Any, texts: list[Tensor], vocab: int) -> Tensor:
    """Return logits [positions, vocab], float32, of the answers' tokens."""
    return torch.cat([of(text).logits[0, -LENGTH - 1 : -1].float()[:, :vocab] for text in texts])


def compared(found_PV: Tensor, expected_PV: Tensor) -> dict[str, float]:
    error_PV = (found_PV - expected_PV).abs()
    same = (found_PV.argmax(-1) == expected_PV.argmax(-1)).float().mean()
    return {
        "mean": round(error_PV.mean().item(), 4),
        "max": round(error_PV.max().item(), 4),
        "greedy_agreement": round(same.item(), 4),
    }


def run(args: argparse.Namespace) -> int:
    require_gpu()
    with torch.inference_mode():
        small = model(TARGET, torch.float32)
        texts, vocab = answers(small), small.config.vocab_size
        expected_PV = logits(small, texts, vocab)
        rows = [
            {
                "target": name,
                **compared(logits(model(target, torch.bfloat16), texts, vocab), expected_PV),
            }
            for name, target in (("small", TARGET), ("padded", args.pair / "target"))
        ]
    large = transformers.AutoConfig.from_pretrained(args.pair / "target")
    about = {
        "shape": {"layers": large.num_hidden_layers, "hidden": large.hidden_size},
        "dtype": "bfloat16",
        "positions": len(expected_PV),
        "largest_logit": round(expected_PV.abs().max().item(), 1),
    }
    return measure(args, "padded", rows, **about)
