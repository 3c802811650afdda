"""Step 3: sample responses from the target at T=1 with keyed noise, and judge them.

The pool of sequences runs in stages of growing cache length; between stages finished sequences
leave, so a long tail costs little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from corpus import Sequences, encode_prompt
from noise import gumbel
from target_model import TargetModel, load_target
from tokenizers import Tokenizer

from tlt_server.demo import chat, task

STAGES = (96, 160, 256, 384, 640, 1024, 1600, 2200, 2816)


@torch.inference_mode()
def generate(
    model: TargetModel,
    prompts: list[list[int]],
    seeds: list[int],
    end_id: int,
    temperature: float = 1.0,
    cap: int = task.RESPONSE_TOKEN_CAP,
) -> list[list[int]]:
    """One response per prompt (with the end token unless it ran into the cap), token by token as
    plain decoding gives it.
    """
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = model.config
    longest = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), longest + cap + 1), dtype=torch.int16, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for row, prompt in enumerate(prompts):
        prompts[row] = prompt + [0] * (longest - len(prompt))
    tokens[:, :longest] = torch.tensor(prompts, dtype=torch.int16)
    keys = torch.zeros(
        (config.num_hidden_layers, len(prompts), STAGES[0], config.head_dim),
        dtype=dtype,
        device=device,
    )
    values = torch.zeros_like(keys)
    seed_B = torch.tensor(seeds, device=device)
    with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
        for rows in torch.arange(len(prompts), device=device).split(8192):
            cache: list = []
            model.hidden_states(tokens[rows, :longest].long(), cache)
            for layer, (k, v) in enumerate(cache):
                keys[layer, rows, :longest], values[layer, rows, :longest] = (
                    k[:, 0].to(dtype),
                    v[:, 0].to(dtype),
                )
    if longest >= STAGES[0]:
        raise ValueError(f"a prompt has {longest} tokens, the limit is {STAGES[0] - 1}")
    active = torch.arange(len(prompts), device=device)
    # The last prompt token is decoded again as the first row, so prefill needs no sampling of its
    # own.
    position = lengths - 1
    starts = lengths.clone()
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for stage, width in enumerate(STAGES):
        if stage:
            keep = (~done).nonzero()[:, 0]
            active, position, done = active[keep], position[keep], done[keep]
            if not len(active):
                break
            grown = (0, 0, 0, width - keys.shape[2])
            keys, values = (torch.nn.functional.pad(x[:, keep], grown) for x in (keys, values))
        first = int(position.min())
        for step in range(width - 1 - first):
            if step % 32 == 0 and bool(done.all()):
                break
            live = ~done & (position < width - 1)
            with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
                logits = model.decode(
                    tokens[active, position].long(), position, list(keys), list(values)
                )
            if temperature > 0:
                logits = logits / temperature + gumbel(
                    seed_B[active], position + 1, config.vocab_size
                )
            chosen = logits.argmax(-1)
            tokens[active, position + 1] = torch.where(
                live, chosen.to(torch.int16), tokens[active, position + 1]
            )
            position = position + live
            lengths[active] = torch.where(live, position + 1, lengths[active])
            done = done | (live & (chosen == end_id)) | (position + 1 - starts[active] >= cap)
    return [
        row[start:end].tolist()
        for row, start, end in zip(tokens.cpu(), starts.tolist(), lengths.tolist(), strict=True)
    ]


def sample_problems(
    model: TargetModel,
    tokenizer: Tokenizer,
    seeds: list[int],
    temperature: float,
    cap: int = task.RESPONSE_TOKEN_CAP,
):
    """(Sequences, rewards) for these problem seeds; the noise seed is the problem seed."""
    problems = [task.problem(seed) for seed in seeds]
    prompts = [encode_prompt(tokenizer, p.prompt_text) for p in problems]
    prompt_lengths = [len(p) for p in prompts]
    heads = [list(p) for p in prompts]
    responses = generate(model, prompts, seeds, tokenizer.token_to_id(chat.END), temperature, cap)
    texts = tokenizer.decode_batch(responses, skip_special_tokens=True)
    rewards = torch.tensor([task.reward(p, text) for p, text in zip(problems, texts, strict=True)])
    return Sequences.from_lists(
        [h + r for h, r in zip(heads, responses, strict=True)], prompt_lengths, seeds
    ), rewards


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=Path("tlt_server/demo/pair/target"))
    parser.add_argument("--out", type=Path, default=Path("build/arith/samples.safetensors"))
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--pool", type=int, default=30_000, help="sequences sampled at a time")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=500_000_000,
        help="problem and noise seeds count up from here",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--cap", type=int, default=task.RESPONSE_TOKEN_CAP)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, tokenizer = (
        load_target(options.target, options.device),
        Tokenizer.from_file(str(options.target / "tokenizer.json")),
    )
    parts, started = [], time.monotonic()
    for first in range(0, options.samples, options.pool):
        seeds = list(
            range(
                options.first_seed + first,
                options.first_seed + min(first + options.pool, options.samples),
            )
        )
        sequences, rewards = sample_problems(
            model, tokenizer, seeds, options.temperature, options.cap
        )
        parts.append(sequences)
        lengths = sequences.offsets.diff() - sequences.prompt_lengths
        quantiles = torch.quantile(lengths.float(), torch.tensor([0.5, 0.9, 0.99])).tolist()
        print(
            f"{time.monotonic() - started:6.1f}s {first + len(seeds)} samples, solved "
            f"{rewards.mean():.3f}, p50/p90/p99 {quantiles}, max {lengths.max()}, at cap "
            f"{(lengths >= options.cap).float().mean():.4f}",
            flush=True,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    Sequences.concatenate(parts).save(options.out)


if __name__ == "__main__":
    main()
