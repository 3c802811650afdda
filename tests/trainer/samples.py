"""Worked solutions of the demo's task as documents, and the target that was trained on such."""

from __future__ import annotations

from random import Random

import numpy as np
from tokenizers import Tokenizer

from tlt_server.demo import chat, task
from tlt_server.demo.workload import TARGET
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.target.recompute import Document

LAYERS = (2, 4, 5)


def demo_target() -> Decoder:
    return load_target(TARGET, numerics=Numerics("strict"), feature_layers=LAYERS)


def solutions(first: int, count: int, longest: int) -> list[Document]:
    """Documents of problems `first`, `first + 1`, ..., each cut off after `longest` tokens."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    found = []
    for seed in range(first, first + count):
        problem = task.problem(seed)
        prompt = tokenizer.encode(chat.render_prompt(problem.prompt_text)).ids
        response = tokenizer.encode(task.solution(problem, Random(seed))).ids
        ids = np.array((prompt + response)[:longest], np.int32)
        found.append(Document(ids, np.arange(len(ids)) >= len(prompt)))
    return found
