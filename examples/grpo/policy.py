"""The policy's GRPO update in plain PyTorch: advantages normalised in each group, a clipped
ratio to the server's own log-probs, or to the policy's with a correction for the server's.

Deterministic on a CPU: one order of sums, for one number of threads. Legend: B responses of a
group, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from examples.grpo.rollouts import Group
from tlt_client.wire import Choice

EPSILON = 1e-4  # added to a group's standard deviation
MAX_NORM = 1.0  # gradients are clipped to it
ROWS = 4  # responses in one pass, of similar length
TRUNCATION = 2.0  # largest importance weight of a token
# The clipped ratio is to the log-probs that the server sampled with, or to those that the policy
# itself has before the update: with truncated importance weights, or as if the server had the same.
CORRECTIONS = ("ratio", "truncated", "none")


@dataclass
class Update:
    """Sums over a step's response tokens, and the norms of its gradients."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0  # nats
    clipped: int = 0  # tokens whose ratio was outside the clip range
    # Before the first update, of tokens whose log-probs are compared with the server's:
    compared: int = 0
    difference: float = 0.0  # largest |log-prob here - the server's|
    differences: float = 0.0  # sum of them
    divergence: float = 0.0  # sum of the server's log-probs - those here
    norms: list[float] | None = None


def optimizer_of(policy: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        foreach=False,
    )


def advantages(rewards: Sequence[float]) -> torch.Tensor:
    """Return (r - mean) / (std + EPSILON) [B] of one group."""
    rewards_B = torch.tensor(rewards)
    return (rewards_B - rewards_B.mean()) / (rewards_B.std(correction=0) + EPSILON)


class Batch(NamedTuple):
    """Responses of one group that take one pass."""

    prompt: list[int]
    choices: list[Choice]
    advantage_B: torch.Tensor

    def logprobs(self, policy: Qwen2ForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the policy's log-probs of the responses' tokens [B, T] and of all [B, T, V]."""
        ids_BT = padded([self.prompt + choice.token_ids for choice in self.choices])
        first = len(self.prompt)
        logs_BTV = policy(ids_BT, use_cache=False).logits[:, first - 1 : -1].log_softmax(-1)
        return logs_BTV.gather(-1, ids_BT[:, first:, None])[..., 0], logs_BTV


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return rows of values, filled up with zeros: [B, T]."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def batches(group: Group) -> list[Batch]:
    """Return a group's responses in passes, sorted by length."""
    advantage_B, choices = advantages(group.rewards), group.choices
    by_length = sorted(range(len(choices)), key=lambda i: len(choices[i].token_ids))
    parts = [by_length[first : first + ROWS] for first in range(0, len(by_length), ROWS)]
    prompt = group.prompt.token_ids
    return [Batch(prompt, [choices[i] for i in rows], advantage_B[rows]) for rows in parts]


def update(
    policy: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    minibatches: int,
    clip: float,
    correction: str = "ratio",
) -> Update:
    """Make one optimizer step for each of `minibatches` parts of the groups."""
    done = Update(norms=[])
    parts = [
        [batch for group in groups[part::minibatches] for batch in batches(group)]
        for part in range(minibatches)
    ]
    with torch.no_grad():  # before any step
        own = [
            [None if correction == "ratio" else batch.logprobs(policy)[0] for batch in part]
            for part in parts
        ]
    for part, own_of_part in zip(parts, own, strict=True):
        tokens = sum(len(choice.token_ids) for batch in part for choice in batch.choices)
        for batch, own_BT in zip(part, own_of_part, strict=True):
            loss = _loss(policy, batch, own_BT, clip, correction, done)
            if loss.requires_grad:
                (loss / tokens).backward()
            done.loss += loss.item() / tokens
        norm = nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM, foreach=False)
        done.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return done


def _loss(
    policy: Qwen2ForCausalLM,
    batch: Batch,
    own_BT: torch.Tensor | None,
    clip: float,
    correction: str,
    done: Update,
) -> torch.Tensor:
    """Return the loss summed over response tokens, and count them in `done`. Responses without
    advantages have no gradient, and are only measured.
    """
    server_BT = padded([choice.logprobs for choice in batch.choices])
    mask_BT = padded([[1.0] * len(choice.logprobs) for choice in batch.choices])
    advantage_BT = batch.advantage_B[:, None].expand_as(mask_BT)
    old_BT = server_BT if own_BT is None else own_BT
    if correction == "truncated":
        advantage_BT = advantage_BT * (old_BT - server_BT).exp().clamp_max(TRUNCATION)
    with torch.set_grad_enabled(bool(batch.advantage_B.any())):
        new_BT, logs_BTV = batch.logprobs(policy)
        ratio_BT = ((new_BT - old_BT) * mask_BT).exp()
        bounded_BT = ratio_BT.clamp(1 - clip, 1 + clip)
        gain_BT = torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
        loss = -(gain_BT * mask_BT).sum()
    with torch.no_grad():
        entropy_BT = -(logs_BTV.exp() * logs_BTV).sum(-1)
        done.entropy += float((entropy_BT * mask_BT).sum())
        done.tokens += int(mask_BT.sum())
        done.clipped += int((ratio_BT != bounded_BT).sum())
        if not done.norms:  # the policy is still the one that the server sampled from
            difference_BT = (server_BT - new_BT) * mask_BT
            done.compared += int(mask_BT.sum())
            done.difference = max(done.difference, float(difference_BT.abs().max()))
            done.differences += float(difference_BT.abs().sum())
            done.divergence += float(difference_BT.sum())
    return loss
