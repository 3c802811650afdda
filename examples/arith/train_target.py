"""Step 2: train the target, a small Qwen2, on the written solutions (data is written in parallel
while training runs) and export it in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from card import record_figures
from corpus import Batch, Batcher, Sequences, write_shards
from recipes import RECIPES
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tlt_server.demo import chat


def fresh_target(layers: int, intermediate: int) -> Qwen2ForCausalLM:
    """Return a target with random weights; matrices that write to the residual stream are small."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = parameter.shape[1] ** -0.5 * (0.25 if writes else 0.7)
            torch.nn.init.normal_(parameter, std=0.02 if "embed" in name else scale)
    return model


def export(model: Qwen2ForCausalLM, directory: Path, eos_id: int, pad_id: int) -> None:
    """Write the model in bfloat16 next to its tokenizer."""
    model.config.eos_token_id, model.config.pad_token_id = eos_id, pad_id
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[eos_id, pad_id], pad_token_id=pad_id
    )
    model.to(torch.bfloat16).save_pretrained(directory)


def learning_rate(progress: float, peak: float) -> float:
    """Warm up over 2 %, then cosine to 1 % of the peak."""
    return peak * min(progress / 0.02, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def response_loss(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the loss of the responses. Right-padded batches need no mask: attention is causal and
    positions start at 0.
    """
    logits = model(batch.tokens_BT, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch.tokens_BT[:, 1:].flatten(), reduction="none")
    mask = batch.response_mask().flatten()
    return (loss * mask).sum() / mask.sum()


def optimizer_of(model: torch.nn.Module, peak: float, fused: bool) -> torch.optim.AdamW:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), eps=1e-9, fused=fused)


class GrowingData:
    """Shards in the order in which worker processes finish them; `close` ends the workers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.paths: list[Path] = []
        self.done = self.closing = False
        tokenizer_file = options.out / "tokenizer.json"

        def write() -> None:
            for path in write_shards(
                options.data,
                tokenizer_file,
                options.recipe,
                options.documents,
                options.per_shard,
                options.workers,
            ):
                self.paths.append(path)
                if self.closing:
                    break
            self.done = True

        self.thread = threading.Thread(target=write, daemon=True)
        self.thread.start()

    def wait(self, shards: int) -> list[Path]:
        while len(self.paths) < shards and not self.done:
            time.sleep(0.2)
        return list(self.paths)

    def close(self) -> None:
        self.closing = True
        self.thread.join()


def start_target(options: argparse.Namespace) -> Qwen2ForCausalLM:
    """Return a fresh target of the options' shape, or that of `--start-from`, whose tokenizer is
    copied to `--out`.
    """
    if not options.start_from:
        return fresh_target(options.layers, options.intermediate).to(options.device)
    source = options.start_from / "target"
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, options.out / name)
    return Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32).to(options.device).train()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tlt_server/demo/pair/target"),
        help="holds the tokenizer, gets the model",
    )
    parser.add_argument("--recipe", choices=RECIPES, default="demo", help="which text to train on")
    parser.add_argument(
        "--start-from",
        type=Path,
        help="a pair whose target and tokenizer to continue from, in place of fresh weights",
    )
    parser.add_argument("--data", type=Path, default=Path("build/arith/data"))
    parser.add_argument("--documents", type=int, default=1_600_000)
    parser.add_argument("--per-shard", type=int, default=20_000)
    parser.add_argument(
        "--start-shards", type=int, default=12, help="shards to have before the first step"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument(
        "--time-limit-s", type=float, default=360.0, help="the schedule is stretched to end by then"
    )
    parser.add_argument("--tokens-per-batch", type=int, default=65_536)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    return parser


def train(model: Qwen2ForCausalLM, data: GrowingData, options: argparse.Namespace) -> dict:
    """Train for the steps or the time of the options; return the figures of the training."""
    optimizer = optimizer_of(model, options.lr, fused=options.device == "cuda")
    record = {"step": 0, "seconds": 0.0, "epoch": 0, "tokens": 0}
    parts: list[Sequences] = []
    data.wait(options.start_shards)
    started, last_print = time.monotonic(), 0.0
    while True:
        shards = data.wait(1)
        if len(parts) < len(shards):
            parts += [Sequences.load(path) for path in shards[len(parts) :]]
            batcher = Batcher(
                Sequences.concatenate(parts), options.tokens_per_batch, options.device, options.seed
            )
        record["epoch"] += 1
        for batch in batcher.epoch(record["epoch"]):
            record["seconds"] = time.monotonic() - started
            progress = max(record["step"] / options.steps, record["seconds"] / options.time_limit_s)
            if progress >= 1:
                return record
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, options.lr)
            with torch.autocast(options.device, torch.bfloat16):
                loss = response_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record["step"] += 1
            record["tokens"] += batch.tokens_BT.numel()
            if time.monotonic() - last_print > 10 or record["step"] == 3:
                last_print = time.monotonic()
                print(
                    f"{record['seconds']:6.1f}s step {record['step']} epoch {record['epoch']} "
                    f"({len(parts)} shards) tokens {record['tokens'] / 1e6:.0f}M loss "
                    f"{loss.item():.4f} width {batch.tokens_BT.shape[1]}",
                    flush=True,
                )


def main() -> None:
    options = arguments().parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model, data = start_target(options), GrowingData(options)
    if options.compile:
        torch._dynamo.config.suppress_errors = True
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    print(f"{model.num_parameters()} parameters", flush=True)
    record = train(model, data, options)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    export(model, options.out, *map(tokenizer.token_to_id, (chat.END, chat.PAD)))
    record |= {"seed": options.seed, "documents": options.documents, "lr": options.lr}
    record |= {"recipe": options.recipe, "continued": bool(options.start_from)}
    record_figures(options.out.parent / "figures.json", "target_training", record)
    print(f"exported to {options.out} after {record}", flush=True)
    data.close()


if __name__ == "__main__":
    main()
