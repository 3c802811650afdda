"""A tiny drafter with random weights and documents of random features, for tests of the trainer."""

from __future__ import annotations

import torch

from tlt_server.models.config import ModelConfig, Rope
from tlt_server.trainer.learning.network import Frozen, TrainableEagle3
from tlt_server.trainer.learning.pack import DocumentPart

HIDDEN, VOCAB, DRAFT_VOCAB = 16, 40, 12
CONFIG = ModelConfig(
    architecture="LlamaForCausalLMEagle3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    max_position=256,
    norm_eps=1e-6,
    rope=Rope(),
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(seed: int = 0) -> TrainableEagle3:
    drafter = TrainableEagle3(CONFIG, DRAFT_VOCAB)
    for number, weight in enumerate(drafter.weights.values()):
        weight.add_(random(*weight.shape, seed=100 * seed + number) * 0.3)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    drafter.target_ids_C = order[:DRAFT_VOCAB].sort().values
    return drafter


def frozen(drafter: TrainableEagle3, seed: int = 50) -> Frozen:
    return drafter.frozen(
        random(VOCAB, HIDDEN, seed=seed), random(DRAFT_VOCAB, HIDDEN, seed=seed + 1)
    )


class Documents:
    """A `DocumentSource` in memory."""

    def __init__(self, *pieces: DocumentPart) -> None:
        self.pieces = pieces

    @property
    def lengths(self) -> list[int]:
        return [len(piece.tokens_T) for piece in self.pieces]

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        return DocumentPart(*(x[start:stop] for x in self.pieces[document]))


def document(length: int, prompt: int, seed: int) -> DocumentPart:
    generator = torch.Generator().manual_seed(seed)
    return DocumentPart(
        torch.randint(0, VOCAB, (length,), generator=generator),
        torch.randn(length, 3 * HIDDEN, generator=generator),
        torch.randn(length, HIDDEN, generator=generator),
        torch.arange(length) >= prompt,
    )
