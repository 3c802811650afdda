"""Comparison of a trainer's model with the server's weights and log-probs, after each push."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tlt_client import Client
from tlt_client.channels.checksums import mix64

if TYPE_CHECKING:  # its imports take four seconds
    from tests.e2e.async_grpo import Completions

TOLERANCE = 1e-4  # log-prob: two float32 forward passes that add in different orders


class Seen(NamedTuple):
    """Both sides after a push, and the completions that were made after it."""

    mine: dict[str, str]  # checksums of the trainer's model
    live: dict[str, str]  # checksums of the server's model
    largest: float  # difference of a log-prob
    mean: float


class Looks:
    """Compares both sides after each push."""

    def __init__(self, client: Client) -> None:
        self.client, self.before, self.seen = client, client.weight_checksums(), list[Seen]()

    def look(self, model: Any, said: Completions) -> None:
        apart = torch.cat(
            [
                (forward(model, prompt, completion) - torch.tensor(logprobs)).abs()
                for prompt, completion, logprobs in said
            ]
        )
        mine = {name: mix64(tensor) for name, tensor in model.named_parameters()}
        live = self.client.weight_checksums()
        self.seen.append(
            Seen(mine, {name: live[name] for name in mine}, apart.max().item(), apart.mean().item())
        )

    def wrong(self) -> list[str]:
        said = []
        for push, (now, before) in enumerate(
            zip(self.seen, [self.before, *(seen.live for seen in self.seen)], strict=False)
        ):
            said += [f"push {push}: the server's weights are not the trainer's"] * (
                now.mine != now.live
            )
            said += [f"push {push}: log-probs differ"] * (now.largest > TOLERANCE)
            said += [f"push {push}: a tensor has not changed"] * any(
                before[name] == sum for name, sum in now.live.items()
            )
        return said


@torch.no_grad()
def forward(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probs of a completion at temperature 1."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def lost(pushes: range) -> list[str]:
    """Return what `wrong` says when these pushes are lost."""
    return [
        f"push {push}: {what}"
        for push in pushes
        for what in (
            "the server's weights are not the trainer's",
            "log-probs differ",
            "a tensor has not changed",
        )
    ]
