"""The optimizer's step over packs, in segments between which a trainer may park.

All trained tensors lie in one flat float32 buffer, and so do gradients and AdamW's two moments: a
chunk of the optimizer is a slice, a checkpoint is three tensors. A step whose loss or gradient is
not finite changes nothing, to the bit; the second in a row restores the last good state and halves
the learning rate.

Legend: P trained values, S unrolled steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tlt_server.trainer.learning.network import Frozen, TrainableDrafter
from tlt_server.trainer.learning.objectives import Objective
from tlt_server.trainer.learning.pack import Pack
from tlt_server.trainer.learning.unroll import Sums, accumulate, weights_of

PAPERS_RATE, PAPERS_HIDDEN = 5e-5, 3584  # arXiv 2511.16665, warm-up of a 7B model's drafter
CHUNK = 1 << 25  # values of an optimizer chunk: 0.6 GB of memory traffic


def default_rate(hidden_size: int) -> float:
    """Return the paper's learning rate for its hidden size. For other sizes it is inversely
    proportional, since a matrix's updates add up over its inputs.
    """
    return PAPERS_RATE * PAPERS_HIDDEN / hidden_size


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise torch's out-of-memory errors as `MemoryError`; only a GPU's have a class of their
    own.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError(str(error).splitlines()[0]) from None
        raise


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW (arXiv 1711.05101) with the paper's values for online training of a drafter."""

    lr: float = 1e-6  # learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-2  # matrices only
    clip: float = 1.0  # largest norm of the gradient
    warmup_steps: int = 0  # over which the rate rises from 0
    total_steps: int = 0  # over which it falls to a tenth along a cosine; 0: it stays

    def rate(self, step: int) -> float:
        """Return the learning rate of step number `step`, from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if not self.total_steps:
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


@dataclass
class State:
    """Everything that a step changes. `cursor`: the caller's position in its data."""

    weight_P: Tensor
    mean_P: Tensor  # AdamW's mean of gradients
    square_P: Tensor  # AdamW's mean of their squares
    step: int = 0
    rate_scale: float = 1.0
    cursor: tuple[int, ...] = ()

    def copy_from(self, other: State) -> None:
        """Copy all values; tensors are written in place."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs, non_blocking=mine.is_pinned())
        self.step, self.rate_scale, self.cursor = other.step, other.rate_scale, other.cursor

    def host_copy(self) -> State:
        """Return a buffer for a copy in host memory, pinned if the state is on a GPU."""
        pinned = self.weight_P.is_cuda
        weight_P, mean_P, square_P = (
            torch.empty(len(x), pin_memory=pinned, device="cpu") for x in self.tensors()
        )
        return State(weight_P, mean_P, square_P)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight_P, self.mean_P, self.square_P


class StepOutcome(NamedTuple):
    """Result of a step. Losses are means over slots."""

    applied: bool
    loss: float
    loss_S: list[float]
    agreement_S: list[float]  # how often draft and target have the same most likely token
    gradient_norm: float
    tokens: int  # slots of the packs, those without weight included


class Trainer:
    def __init__(
        self,
        network: TrainableDrafter,
        frozen: Frozen,
        objective: Objective,
        settings: AdamWSettings = AdamWSettings(),
    ) -> None:
        """The network's weights move into the trainer's flat buffer."""
        self.network, self.frozen, self.objective = network, frozen, objective
        self.settings, self.undone, self.restored = settings, 0, 0
        # Called before the weights change: a checkpoint's copy must be through.
        self.before_update: Callable[[], None] = lambda: None
        names = list(network.weights)
        values = [network.weights[name] for name in names]
        flat_P = torch.cat([value.detach().reshape(-1) for value in values])
        self._gradient_P = torch.zeros_like(flat_P)
        self._decayed = sum(value.numel() for value in values if value.dim() > 1)
        at = 0
        for name, value in zip(names, values, strict=True):
            own = slice(at, at := at + value.numel())
            view = flat_P[own].view(value.shape).requires_grad_()
            view.grad = self._gradient_P[own].view(value.shape)
            network.weights[name] = view
        self.state = State(flat_P, torch.zeros_like(flat_P), torch.zeros_like(flat_P))
        self.good = self.state.host_copy()  # the last state known to be good
        self.good.copy_from(self.state)
        self._failures = 0  # in a row
        decay_S = torch.tensor(
            [objective.decay**step for step in range(objective.steps)], dtype=torch.float64
        )
        self._decay_S = (decay_S / decay_S.sum()).to(network.device)

    def step(self, packs: Sequence[Pack], pause: Callable[[], None] = lambda: None) -> StepOutcome:
        """Run one step over packs of this device, with `pause` called between segments."""
        segments = self.segments(packs)
        while True:
            try:
                next(segments)
            except StopIteration as end:
                return cast(StepOutcome, end.value)
            pause()

    def segments(self, packs: Sequence[Pack]) -> Generator[str, None, StepOutcome]:
        """Run one step, yielding each segment's name after it; the generator's value is the
        `StepOutcome`. Only one step may run at a time; an unfinished one must be `abandon`ed.
        """
        steps, device = self.objective.steps, self.network.device
        sums = Sums.zero(steps, device)
        weight_S = torch.zeros(steps, dtype=torch.float64, device=device)
        for pack in packs:
            weight_S += weights_of(self.frozen, pack, steps).sum(1, dtype=torch.float64)
        factor_S = (self._decay_S / weight_S.clamp(min=1e-6)).float()
        with self.network.cast_once():
            for pack in packs:
                yield from accumulate(
                    self.network, self.frozen, self.objective, pack, factor_S, sums
                )
        loss_S, agreed_S = (
            (x / sums.weight_S.clamp(min=1e-6)).tolist() for x in (sums.loss_S, sums.agreed_S)
        )
        loss = float((sums.loss_S * factor_S).sum())
        norm = float(torch.linalg.vector_norm(self._gradient_P))
        weighs = float(sums.weight_S.sum()) > 0
        applied = weighs and math.isfinite(loss) and math.isfinite(norm)
        if applied:
            self.before_update()
            yield from self._update(norm)
        self._settle(weighs, applied)
        tokens = sum(map(len, packs))
        return StepOutcome(applied, loss, loss_S, agreed_S, norm, tokens)

    def abandon(self) -> None:
        """Drop an unfinished step. It must not have reached its optimizer; after that, call
        `restore`.
        """
        self._gradient_P.zero_()

    def restore(self, state: State) -> None:
        """Continue from a copy of an earlier state."""
        self.abandon()
        self.state.copy_from(state)

    def resume(self, state: State) -> None:
        """Continue from the state of a checkpoint, which is known to be good."""
        self.restore(state)
        self.good.copy_from(state)

    def _update(self, norm: float) -> Iterator[str]:
        settings, state = self.settings, self.state
        rate = settings.rate(state.step) * state.rate_scale
        scale = min(1.0, settings.clip / (norm + 1e-6))
        step = torch.tensor(float(state.step), device=self.network.device)
        edges = [*range(0, self._decayed, CHUNK), self._decayed]
        edges += [*range(self._decayed + CHUNK, len(state.weight_P), CHUNK), len(state.weight_P)]
        for start, stop in zip(edges, edges[1:], strict=False):
            own = slice(start, stop)
            adamw(
                [state.weight_P[own]],
                [self._gradient_P[own].mul_(scale)],
                [state.mean_P[own]],
                [state.square_P[own]],
                [],
                [step.clone()],
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=rate,
                weight_decay=settings.weight_decay if stop <= self._decayed else 0.0,
                eps=settings.eps,
                maximize=False,
            )
            yield "optimizer"
        state.step += 1

    def _settle(self, weighs: bool, applied: bool) -> None:
        """Count failures; packs without weight are not failures."""
        self._gradient_P.zero_()
        if applied:
            self._failures = 0
        elif weighs:
            self.undone += 1
            self._failures += 1
        if self._failures == 2:
            self._failures, self.restored = 0, self.restored + 1
            rate_scale, cursor = self.state.rate_scale / 2, self.state.cursor
            self.state.copy_from(self.good)
            self.state.rate_scale, self.state.cursor = rate_scale, cursor
