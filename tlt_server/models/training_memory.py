"""The memory for training a drafter, from its shapes: for the engine's memory plan, `tlt doctor`,
and the trainer's own bound. No tensors.

Trained values are float32 with a gradient and AdamW's two moments, and in half precision a copy for
matmuls. Every unrolled step keeps the values that its gradient needs for each slot of a pack.
Logits exist for one chunk of slots at a time, gradients within the MLP for one step.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_networks import ARCHITECTURES

CPU_SLOTS, GPU_SLOTS, LEAST_SLOTS = 512, 2048, 128  # slots per pack
SMALL, SMALL_SLOTS = 1024, 8192  # hidden size at most whose steps a GPU spends on launching kernels
CHUNK_LOGITS = 1 << 25  # logits of a chunk: 128 MiB in float32, of which about six copies exist
COPIES = 6
GRADIENTS = 5  # float32, of the MLP's inner width, at once
CONTEXT = 512 * 2**20  # a GPU process has this outside torch's allocator
LIBRARIES = 2**30  # a process with torch has this on the host


class TrainingShape(NamedTuple):
    """Sizes of a drafter's training, in values unless named otherwise."""

    trained: int
    frozen: int  # the target's embedding, and the head's rows of the draft vocabulary
    steps: int  # unrolled
    draft_vocab: int
    item: int  # bytes of a number of the matmuls
    inner: int  # width of the MLP
    slot_bytes: int  # kept by one slot of one unrolled step, for its gradient
    most_slots: int  # worth having in a pack

    @classmethod
    def of(cls, drafter: ModelConfig, draft_vocab: int, *, on_gpu: bool) -> TrainingShape:
        hidden, inner, item = drafter.hidden_size, drafter.intermediate_size, 2 if on_gpu else 4
        query, kv = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim
        network = ARCHITECTURES[drafter.architecture]
        # float32 residuals and norms, and heads before and after rotation
        kept = 4 * (7 * hidden + 4 * (query + kv))
        kept += item * (4 * hidden + 3 * inner + 2 * query)  # as the matmuls read them
        return cls(
            trained=sum(map(prod, network.matrices(drafter, draft_vocab).values())),
            frozen=hidden * (drafter.vocab_size + draft_vocab),
            steps=network.unrolled,
            draft_vocab=draft_vocab,
            item=item,
            inner=inner,
            slot_bytes=kept,
            most_slots=CPU_SLOTS if not on_gpu else SMALL_SLOTS if hidden <= SMALL else GPU_SLOTS,
        )

    def device_bytes(self, slots: int) -> int:
        """Return the peak of a step over a pack, plus an eighth for the allocator."""
        state = 16 * self.trained + self.item * self.frozen
        copy = self.item * self.trained if self.item < 4 else 0
        kept = slots * (self.steps * self.slot_bytes + 4 * GRADIENTS * self.inner)
        logits = 4 * COPIES * min(CHUNK_LOGITS, slots * self.steps * self.draft_vocab)
        return (state + copy + kept + logits) * 9 // 8

    @property
    def host_bytes(self) -> int:
        """Return the process's host memory in addition to `device_bytes`: three copies of the
        optimizer's state, two replayed drafters, the target's embedding and head, and libraries.
        """
        return (3 * 12 + 2 * 4) * self.trained + 6 * self.frozen + LIBRARIES

    @property
    def most_bytes(self) -> int:
        """Return the peak of a step over the largest pack that is worthwhile."""
        return self.device_bytes(self.most_slots)

    def slots_in(self, budget: int) -> int:
        """Return the slots of the largest pack that fits in `budget` bytes; 0 if none does."""
        slots = self.most_slots
        while slots >= LEAST_SLOTS and self.device_bytes(slots) > budget:
            slots //= 2
        return slots if slots >= LEAST_SLOTS else 0
