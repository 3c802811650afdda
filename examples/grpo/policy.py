"""The policy's GRPO update in plain PyTorch: advantages normalised in each group, a clipped
ratio to the server's own log-probs.

Deterministic on a CPU: one order of sums, for one number of threads. Legend: B responses of a
group, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from examples.grpo.rollouts import Group
from tlt_client.wire import Choice

EPSILON = 1e-4  # added to a group's standard deviation
MAX_NORM = 1.0  # gradients are clipped to it
ROWS = 4  # responses in one pass, of similar length


@dataclass
class Update:
    """Sums over a step's response tokens, and the norms of its gradients."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0  # nats
    clipped: int = 0  # tokens whose ratio was outside the clip range
    difference: float = 0.0  # largest |log-prob here - the server's| before the first update
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


def update(
    policy: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    minibatches: int,
    clip: float,
) -> Update:
    """Make one optimizer step for each of `minibatches` parts of the groups."""
    done = Update(norms=[])
    for part in range(minibatches):
        chosen = groups[part::minibatches]
        tokens = sum(len(choice.token_ids) for group in chosen for choice in group.choices)
        for group in chosen:
            advantage_B = advantages(group.rewards)
            by_length = sorted(
                range(len(group.choices)), key=lambda i: len(group.choices[i].token_ids)
            )
            for first in range(0, len(by_length), ROWS):
                rows = by_length[first : first + ROWS]
                choices = [group.choices[i] for i in rows]
                loss = _loss(policy, group.prompt.token_ids, choices, advantage_B[rows], clip, done)
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
    prompt: list[int],
    choices: Sequence[Choice],
    advantage_B: torch.Tensor,
    clip: float,
    done: Update,
) -> torch.Tensor:
    """Return the loss summed over response tokens, and count them in `done`. Responses without
    advantages have no gradient, and are only measured.
    """
    sequences = [torch.tensor(prompt + choice.token_ids) for choice in choices]
    ids_BT = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    chosen_BT1 = ids_BT[:, len(prompt) :, None]
    logprobs = [torch.tensor(choice.logprobs) for choice in choices]
    old_BT = nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
    mask_BT = nn.utils.rnn.pad_sequence(list(map(torch.ones_like, logprobs)), batch_first=True)
    with torch.set_grad_enabled(bool(advantage_B.any())):
        logs_BTV = policy(ids_BT, use_cache=False).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        new_BT = logs_BTV.gather(-1, chosen_BT1)[..., 0]
        difference_BT = (new_BT - old_BT) * mask_BT
        ratio_BT = difference_BT.exp()
        bounded_BT = ratio_BT.clamp(1 - clip, 1 + clip)
        gain_BT = torch.minimum(ratio_BT * advantage_B[:, None], bounded_BT * advantage_B[:, None])
        loss = -(gain_BT * mask_BT).sum()
    with torch.no_grad():
        entropy_BT = -(logs_BTV.exp() * logs_BTV).sum(-1)
        done.entropy += float((entropy_BT * mask_BT).sum())
        done.tokens += int(mask_BT.sum())
        done.clipped += int((ratio_BT != bounded_BT).sum())
        if not done.norms:  # the policy is still the one that the server sampled from
            done.difference = max(done.difference, float(difference_BT.abs().max()))
    return loss
