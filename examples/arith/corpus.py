"""Token data of the pair: flat arrays of sequences, written in parallel, read back and served as
batches of similar length.

A sequence is ChatML prompt + response + `<|im_end|>`. Batches are right-padded to a length bucket
and hold about the same number of tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy
import torch
from recipes import RECIPES
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tlt_server.demo import chat, task

BUCKETS = (
    *(64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2816),
)


@dataclass(frozen=True)
class Sequences:
    """Token sequences. `tokens`: flat int16; sequence i is tokens[offsets[i]:offsets[i+1]], and its
    first prompt_lengths[i] tokens are the prompt.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    prompt_lengths: torch.Tensor

    @staticmethod
    def from_lists(sequences: list[list[int]], prompt_lengths: list[int]) -> Sequences:
        lengths = torch.tensor([0, *map(len, sequences)])
        flat = numpy.fromiter((t for s in sequences for t in s), dtype=numpy.int16)
        return Sequences(torch.from_numpy(flat), lengths.cumsum(0), torch.tensor(prompt_lengths))

    @staticmethod
    def concatenate(parts: list[Sequences]) -> Sequences:
        starts = torch.tensor([0, *(len(p.tokens) for p in parts)]).cumsum(0)
        offsets = torch.cat(
            [p.offsets[:-1] + start for p, start in zip(parts, starts[:-1], strict=True)]
            + [starts[-1:]]
        )
        return Sequences(
            torch.cat([p.tokens for p in parts]),
            offsets,
            torch.cat([p.prompt_lengths for p in parts]),
        )

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".part")
        save_file({name: value.cpu().numpy() for name, value in vars(self).items()}, temporary)
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> Sequences:
        return Sequences(
            **{name: torch.from_numpy(value) for name, value in load_file(path).items()}
        )


@dataclass(frozen=True)
class Batch:
    """A batch of sequences. `tokens_BT` is padded with 0; `lengths_B` and `prompt_lengths_B` count
    tokens.
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor

    def response_mask(self) -> torch.Tensor:
        """Return [B, T-1]: position t is True if token t+1 belongs to the response."""
        position = torch.arange(1, self.tokens_BT.shape[1], device=self.tokens_BT.device)[None]
        return (position >= self.prompt_lengths_B[:, None]) & (position < self.lengths_B[:, None])


class Batcher:
    """Serves a data set on a device in random batches of one length bucket; `epoch(n)` is the same
    for the same seed.
    """

    def __init__(self, data: Sequences, tokens_per_batch: int, device: str, seed: int = 0) -> None:
        self.tokens_per_batch, self.seed = tokens_per_batch, seed
        self.flat, self.offsets, self.prompt_lengths = (x.to(device) for x in vars(data).values())
        self.lengths = data.offsets.diff()

    def gather(self, rows: torch.Tensor, width: int) -> Batch:
        rows = rows.to(self.flat.device)
        start, length = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        column = torch.arange(width, device=self.flat.device)[None]
        index = (start[:, None] + column).clamp(max=len(self.flat) - 1)
        tokens = torch.where(column < length[:, None], self.flat[index].long(), 0)
        return Batch(tokens, length, self.prompt_lengths[rows])

    def epoch(self, number: int):
        """Yield every sequence once, batches in random order; skip those past the last bucket."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        bucket_of = torch.bucketize(self.lengths, torch.tensor(BUCKETS))
        plans = []
        for bucket, width in enumerate(BUCKETS):
            rows = (bucket_of == bucket).nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            plans += [
                (chunk, width)
                for chunk in rows.split(max(1, self.tokens_per_batch // width))
                if len(chunk)
            ]
        for index in torch.randperm(len(plans), generator=generator).tolist():
            yield self.gather(*plans[index])


def encode_prompt(tokenizer: Tokenizer, prompt_text: str) -> list[int]:
    return tokenizer.encode(chat.render_prompt(prompt_text)).ids


def _write_shard(job: tuple[Path, Path, str, range]) -> Path:
    directory, tokenizer_file, recipe, seeds = job
    path = directory / f"shard-{seeds.start}.safetensors"
    if path.exists():
        return path
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(chat.END)
    solution = RECIPES[recipe]
    sequences, prompt_lengths = [], []
    for seed in seeds:
        problem = task.problem(seed)
        prompt = encode_prompt(tokenizer, problem.prompt_text)
        response = tokenizer.encode(solution(problem, Random(f"solution-{seed}"))).ids
        sequences.append(
            prompt
            + response[: task.RESPONSE_TOKEN_CAP]
            + [end] * (len(response) < task.RESPONSE_TOKEN_CAP)
        )
        prompt_lengths.append(len(prompt))
    Sequences.from_lists(sequences, prompt_lengths).save(path)
    return path


def write_shards(
    directory: Path, tokenizer_file: Path, recipe: str, documents: int, per_shard: int, workers: int
):
    """Write `documents` train documents of a recipe in shards, in parallel; yield each shard's path
    when it is done.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    directory.mkdir(parents=True, exist_ok=True)
    first = task.TRAIN_SEEDS.start
    starts = range(first, first + documents, per_shard)
    jobs = [
        (directory, tokenizer_file, recipe, range(s, min(s + per_shard, first + documents)))
        for s in starts
    ]
    with get_context("spawn").Pool(workers, initializer=os.nice, initargs=(5,)) as pool:
        yield from pool.imap_unordered(_write_shard, jobs)
