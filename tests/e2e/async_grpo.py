"""CPU stand-ins for the parts of `AsyncGRPOTrainer` that need a GPU and vLLM: its attention over
packed rows, and a rollout worker that calls TLT Server.

The trainer takes the worker as an argument. Its constructor registers attention by name with
transformers and asks CUDA for the device's name; `on_cpu` replaces both.
"""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

Tensor = torch.Tensor
Completions = list[tuple[list[int], list[int], list[float]]]  # prompt, completion, log-probs


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    tree_kv_index: Tensor | None = None,
    tree_cu_seqlens_q: Any = None,
    tree_cu_seqlens_k: Any = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from each segment of the row to its path: keys `tree_kv_index[c:d]`, of which the last
    are its own. Without a tree attend over one causal row.
    """
    if tree_kv_index is None:
        tree_kv_index = torch.arange(key.shape[2])
        tree_cu_seqlens_q = (0, key.shape[2])
        tree_cu_seqlens_k = (0, key.shape[2])
    parts = []
    for a, b, c, d in zip(
        tree_cu_seqlens_q[:-1],
        tree_cu_seqlens_q[1:],
        tree_cu_seqlens_k[:-1],
        tree_cu_seqlens_k[1:],
        strict=True,
    ):
        path = tree_kv_index[c:d]
        seen = torch.ones(int(b - a), len(path), dtype=torch.bool).tril(len(path) - int(b - a))
        parts.append(
            scaled_dot_product_attention(
                query[:, :, a:b],
                key[:, :, path],
                value[:, :, path],
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


@contextmanager
def on_cpu() -> Iterator[Callable[[], None]]:
    """Let a trainer be made without a GPU; then call the yielded function."""
    with patch.object(torch.cuda, "get_device_name", lambda device: str(device)):
        yield lambda: AttentionInterface.register(TREE_ATTENTION, attention)


class LockstepWorker:
    """Worker that sends a batch for each new version, and one more at first, because the trainer
    fetches the next batch before it learns from this one.

    Its requests are those of TRL's own worker.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: list[int],
        n: int,
        max_tokens: int,
        on_batch: Callable[[Completions], None],
    ) -> None:
        self.rollout_buffer = queue.Queue[RolloutSample]()
        self.metrics_queue = queue.Queue[dict[str, float]]()
        self._url = url
        self._model = model
        self._prompt = prompt
        self._n = n
        self._max_tokens = max_tokens
        self._on_batch = on_batch
        self.versions: list[int] = []
        self.batches = 0

    def start(self) -> None:
        self._roll(self.versions[-1])

    def update_model_version(self, version: int) -> None:
        self.versions.append(version)
        self._roll(version)

    def _roll(self, version: int) -> None:
        self.batches += 1
        with ThreadPoolExecutor(self._n) as pool:
            said = list(
                pool.map(self._ask, range(1000 * self.batches, 1000 * self.batches + self._n))
            )
        self._on_batch(said)
        for i, (prompt, completion, logprobs) in enumerate(said):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(prompt + completion),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(completion)),
                    old_log_probs=np.array([0.0] * len(prompt) + logprobs, dtype=np.float32),
                    advantage=(-1.0) ** i,
                    model_version=version,
                    group_id=self.batches,
                    metrics={"reward": 0.0},
                )
            )

    def _ask(self, seed: int) -> tuple[list[int], list[int], list[float]]:
        response = httpx.post(
            f"{self._url}/v1/completions",
            timeout=60,
            json={
                "model": self._model,
                "prompt": self._prompt,
                "max_tokens": self._max_tokens,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "repetition_penalty": 1.0,
                "n": 1,
                "return_token_ids": True,
                "logprobs": 0,
                "seed": seed,
            },
        )
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        return self._prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def check_health(self, stale_after_s: float) -> None:
        """Fail: the trainer calls this only while it waits, and every batch comes before that."""
        raise AssertionError("the trainer waits for a batch that will not come")

    def stop(self) -> None:
        """Do nothing: no thread runs."""
