"""`python -m benchmarks.quality [--device cuda] [--quick] [--json FILE]`: how far log-probs are
from those in float32, without quantization and with FP8 of weights, activations and KV.

Models: the demo target on problems of its task, and a few layers of Qwen2.5-7B's shapes with random
weights on random prompts. Answers are sampled at temperature 1 by the server's engine without
quantization, in bfloat16 on a GPU. The engine on a CPU computes in float32, quantised alike, so
there bfloat16 is transformers' alone. All score the same answers: `mean` and `p999` are of the
absolute difference to log-probs of transformers in float32; `divergence` estimates the KL
divergence from the policy that sampled, in nats per token, as the mean of exp(d) - 1 - d.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.nn import functional

from tlt_server.bench.engines import release
from tlt_server.bench.flags import JSON, add_flags, flag
from tlt_server.bench.padding.shapes import SHAPES, write_config
from tlt_server.bench.record import finish
from tlt_server.bench.steps import random_requests
from tlt_server.demo.workload import TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.models.loader import draw
from tlt_server.wire.commands import Submit
from tlt_server.wire.records import GenerateRequest

SHAPE = "qwen2.5-7b"
# Fewer rows of the head, because it is not quantised.
VOCABULARY = {"cpu": 32_000}
FLAGS = (
    flag("--device cpu|cuda", "what computes", "cpu"),
    flag("--layers COUNT", f"of {SHAPE}", 3),
    flag("--requests COUNT", "answers of these layers, and a quarter of the demo target's", 16),
    flag("--tokens COUNT", "of an answer", 64),
    flag("--quick", "the demo target alone, four short answers"),
    *JSON,
)
Answers = Sequence[GenerateRequest]
Logprobs = NDArray[np.float32]  # one per token, answer after answer


def run(settings: EngineSettings, requests: Answers) -> tuple[dict[str, list[int]], Logprobs]:
    """Return each request's tokens, and the log-probs of prompts, if asked for, and tokens."""
    engine, _ = assemble(settings)
    engine.send(Submit(list(requests)))
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[float]] = {request.id: [] for request in requests}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            scored = [each.logprobs[0] for each in output.prompt_logprobs or [] if each is not None]
            tokens[output.id] += output.token_ids
            logprobs[output.id] += [*scored, *output.logprobs]
    del engine
    release()
    return tokens, np.concatenate([np.array(each, np.float32) for each in logprobs.values()])


def scored(settings: EngineSettings, answers: Answers) -> Logprobs:
    """Return the engine's log-probs of the answers, which are read as prompts."""
    requests = []
    for each in answers:
        sampling = msgspec.structs.replace(each.sampling, max_tokens=1, prompt_logprobs=0)
        whole = [*each.token_ids, *each.generated]
        requests.append(
            msgspec.structs.replace(each, token_ids=whole, generated=[], sampling=sampling)
        )
    logprobs, at, found = run(settings, requests)[1], 0, []
    for each in answers:
        at += len(each.token_ids) - 1
        found.append(logprobs[at : at + len(each.generated)])
        at += len(each.generated) + 1
    return np.concatenate(found)


@torch.inference_mode()
def by_transformers(model: Path, device: str, dtype: torch.dtype, answers: Answers) -> Logprobs:
    """Return log-probs in this type, but logits in float32, as in the engine."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    loaded, found = loaded.to(device).eval(), []
    head_VH = loaded.lm_head.weight.float()
    for each in answers:
        ids = torch.tensor([[*each.token_ids, *each.generated]], device=device)
        hidden_TH = loaded.model(ids).last_hidden_state[0, len(each.token_ids) - 1 : -1]
        logs_TV = functional.linear(hidden_TH.float(), head_VH).log_softmax(-1)
        found.append(logs_TV.gather(-1, ids[0, len(each.token_ids) :, None])[:, 0].cpu().numpy())
    del loaded
    release()
    return np.concatenate(found)


def rows_of(name: str, base: EngineSettings, requests: Answers) -> Iterator[dict[str, Any]]:
    tokens, sampled = run(base, requests)
    answers = [msgspec.structs.replace(each, generated=tokens[each.id]) for each in requests]
    model, device = Path(base.model), str(base.device)
    exact = by_transformers(model, device, torch.float32, answers)
    fp8 = replace(base, quantization="fp8")
    found = {
        "bfloat16, transformers": by_transformers(model, device, torch.bfloat16, answers),
        str(base.dtype): sampled,
        "FP8": scored(fp8, answers),
        "FP8, KV in FP8": scored(replace(fp8, kv_cache_dtype="fp8_e4m3"), answers),
    }
    for computed, logprobs in found.items():
        error, d = np.abs(logprobs - exact), (logprobs - sampled).astype(np.float64)
        yield {
            "model": name,
            "computed": computed,
            "tokens": len(exact),
            "mean": round(float(error.mean()), 6),
            "p999": round(float(np.quantile(error, 0.999)), 5),
            "divergence": round(float(np.mean(np.exp(d) - 1 - d)), 8),
        }


def write_random(directory: Path, layers: int, device: str) -> None:
    """Write a few layers in bfloat16 with the random weights of `tlt bench decode --shape`."""
    shape = replace(SHAPES[SHAPE], layers=layers)
    write_config(directory, replace(shape, vocab=VOCABULARY.get(device, shape.vocab)), "bfloat16")
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device(device), torch.no_grad():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        draw(dict(model.named_parameters()))
    model.save_pretrained(directory)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser, FLAGS)
    args = parser.parse_args(arguments)
    count, length = (1, 24) if args.quick else (args.requests, args.tokens)
    on_gpu, rows = args.device == "cuda", []
    base = EngineSettings(
        model=TARGET,
        drafter="none",
        policy="off",
        device=args.device,
        dtype="bfloat16" if on_gpu else "float32",
        attention="triton" if on_gpu else "cpu",
        kv_memory_mb=1024,
        max_model_len=1024,
        graphs=False,
    )
    problems = problems_as_requests(TARGET, 4 * count, group=1, seed=0, max_tokens=length)
    rows += rows_of("demo", base, problems)
    if not args.quick:
        with TemporaryDirectory() as folder:
            write_random(Path(folder), args.layers, args.device)
            prompts = random_requests(count, 64, length, seed=0)
            settings = replace(base, model=Path(folder))
            rows += rows_of(f"{args.layers} layers of {SHAPE}", settings, prompts)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    figures = {"bench": "quality", "quick": args.quick, "device": args.device, "rows": rows}
    finish(args, figures, program="python -m benchmarks.quality")


if __name__ == "__main__":
    main(sys.argv[1:])
