"""The demo's batches: problems of the task as token ids, several seeded responses to each. No
torch.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tlt_server.demo.chat import render_prompt
from tlt_server.demo.task import EVAL_SEEDS, problem
from tlt_server.errors import StartupError
from tlt_server.wire.records import GenerateRequest, Sampling

PAIR = Path(__file__).parent / "pair"
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"


def problems_as_requests(
    model: str | Path,
    count: int,
    *,
    group: int,
    seed: int,
    max_tokens: int = 256,
    temperature: float = 1.0,
) -> list[GenerateRequest]:
    """`count` requests: evaluation problems from number `seed` on, `group` responses to each, every
    one with its own seed.

    `StartupError` unless `model` is a directory with a `tokenizer.json`.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise StartupError(
            f"{file} is missing, but the task's problems are text; name a model directory with "
            "its tokenizer (--model)"
        )
    tokenizer = Tokenizer.from_file(str(file))
    requests = []
    for i in range(count):
        number = EVAL_SEEDS[(seed + i // group) % len(EVAL_SEEDS)]
        ids = tokenizer.encode(
            render_prompt(problem(number).prompt_text), add_special_tokens=False
        ).ids
        requests.append(
            GenerateRequest(
                id=f"{number}-{i % group}",
                token_ids=ids,
                sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
                seed=seed * 1_000_003 + i,
                group_id=str(number),
            )
        )
    return requests
