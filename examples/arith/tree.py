"""Accept length of the shared-noise draft tree, replayed on recorded samples, and the calibration
table that grows the tree.

A sample is a pure function of (weights, prefix, seed), so a recorded trajectory decides every
acceptance: no target pass is needed at the nodes. Legend: M sequences, T positions, W nodes
expanded per level, K children per node, H hidden, D head size, V draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Batch
from drafter_model import DrafterModel
from noise import gumbel
from target_model import TargetModel

CHILDREN = 8
UNCERTAIN = 0.3  # nats of the target's entropy
GAP_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.5, 8.0, 10.0, 13.0)
GAP_BUCKETS = len(GAP_EDGES) + 1


@dataclass(frozen=True)
class Calibration:
    """P(child is the target's token | its parent is on the path): `survival` [phase, rank, bucket];
    phase 0 = children of the root.
    """

    survival: torch.Tensor
    gap_edges: torch.Tensor

    def lookup(self, gaps: torch.Tensor, phase: int) -> torch.Tensor:
        """Survival of children [..., K] by rank and gap; bucket = number of edges <= gap."""
        bucket = torch.bucketize(gaps.contiguous(), self.gap_edges, right=True)
        return self.survival[phase, torch.arange(gaps.shape[-1], device=gaps.device), bucket]


def export_calibration(table: Calibration, directory: Path) -> None:
    """Write `calibration.json`. It is no safetensors file, as other engines would take its tensors
    for weights.
    """
    content = {
        "gap_edges": [round(edge, 6) for edge in table.gap_edges.tolist()],
        "survival": [
            [[round(chance, 7) for chance in row] for row in phase]
            for phase in table.survival.tolist()
        ],
    }
    (directory / "calibration.json").write_text(json.dumps(content) + "\n")


def chain_table(device: torch.device | str) -> Calibration:
    """A table that keeps the best child of each node alone, so that the tree is a chain."""
    survival = torch.zeros((2, CHILDREN, GAP_BUCKETS), device=device)
    survival[:, 0] = 1.0
    return Calibration(survival, torch.tensor(GAP_EDGES, device=device))


def gaps_of(top_values: torch.Tensor) -> torch.Tensor:
    """Gap of each ranked child [..., K] to the best one; the best one's own is to the second."""
    gaps = top_values[..., :1] - top_values
    return torch.cat([gaps[..., 1:2], gaps[..., 1:]], -1)


@torch.inference_mode()
def fit_calibration(
    drafter: DrafterModel,
    target: TargetModel,
    batches: list[Batch],
    depth: int,
    *,
    noise: bool = True,
) -> tuple[Calibration, dict]:
    """Count hits by (phase, rank, gap bucket) along true paths at T=1; also P(token among the first
    k children) of each step. Without `noise` children are ranked by the drafter's probability.
    """
    device = drafter.d2t.device
    edges, vocab = torch.tensor(GAP_EDGES, device=device), target.config.vocab_size
    hits, counts = (
        torch.zeros(2 * CHILDREN * GAP_BUCKETS, dtype=torch.float64, device=device)
        for _ in range(2)
    )
    found, seen = (
        torch.zeros((depth, CHILDREN), dtype=torch.float64, device=device),
        torch.zeros(depth, dtype=torch.float64, device=device),
    )
    for batch in batches:
        tokens = batch.tokens_BT
        rows, width = tokens.shape
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = target.hidden_states(tokens)
            outputs = [
                drafter.logits(h) for h in drafter.unroll(states[0], drafter.fuse(states), depth)
            ]
        positions = torch.arange(width, device=device).repeat(rows)
        shared = gumbel(batch.seeds_B.repeat_interleave(width), positions, vocab)[
            :, drafter.kept_ids
        ].view(rows, width, -1)
        for step, logits in enumerate(outputs):
            labels = tokens[:, 2 + step :]
            keep = batch.drafted(step).bool()
            z = logits[keep].log_softmax(-1)
            if noise:
                z = z + shared[:, 2 + step :][keep]
            values, children = z.topk(CHILDREN, -1)
            gaps = gaps_of(values)
            hit = (drafter.kept_ids[children] == labels[keep][:, None]).double()
            bucket = torch.bucketize(gaps.contiguous(), edges, right=True)
            index = (
                (min(step, 1) * CHILDREN + torch.arange(CHILDREN, device=device)) * GAP_BUCKETS
                + bucket
            ).flatten()
            hits += torch.bincount(index, hit.flatten(), minlength=len(hits))
            counts += torch.bincount(index, minlength=len(counts))
            found[step] += hit.cumsum(-1).sum(0)
            seen[step] += len(hit)
    prior = torch.tensor(
        [0.9, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01], dtype=torch.float64, device=device
    ).repeat(2)
    survival = (hits.view(-1, GAP_BUCKETS) + 2 * prior[:, None]) / (
        counts.view(-1, GAP_BUCKETS) + 2
    )
    # Strictly inside (0, 1) in float32 too, so a child never ties with its parent.
    survival = survival.clamp(1e-6, 1 - 1e-6)
    table = Calibration(survival.view(2, CHILDREN, GAP_BUCKETS).float(), edges)
    among = (found / seen[:, None]).tolist()
    return table, {
        f"step_{step + 1}": {str(k): round(among[step][k - 1], 4) for k in (1, 2, 4, 8)}
        for step in range(depth)
    }


@dataclass
class Walk:
    """Counts of cycles over a set of samples."""

    cycles: int = 0
    tokens: int = 0
    accepted_at: list | None = None
    uncertain_cycles: int = 0  # those whose first token has more than `UNCERTAIN` nats of entropy
    uncertain_tokens: int = 0

    def summary(self) -> dict:
        return {
            "accept_length": round(self.tokens / max(1, self.cycles), 4),
            "cycles": self.cycles,
            "accepted_at_depth": [round(a / max(1, self.cycles), 4) for a in self.accepted_at],
            "uncertain_cycles": self.uncertain_cycles,
            "uncertain_accept_length": round(
                self.uncertain_tokens / max(1, self.uncertain_cycles), 4
            ),
        }


@dataclass(frozen=True)
class Settings:
    """One tree shape: `rows` verified (the root included), `depth` levels, `width` nodes expanded
    per level.
    """

    rows: int
    depth: int
    width: int
    temperature: float
    noise: bool = True  # the target's; without it children are ranked by the drafter's probability


@dataclass(frozen=True)
class Context:
    """Inputs of the drafter for a batch before any cycle: features g, and keys and values of every
    true slot; [sequence, position, ...].
    """

    fused: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    uncertain: torch.Tensor  # bool: the target's entropy at this position is above `UNCERTAIN`


def true_slots(drafter: DrafterModel, target: TargetModel, tokens_BT: torch.Tensor) -> Context:
    """Slot p of the caches is sequence position p; slot 0 does not exist and is masked by the
    reader.
    """
    kind, last = tokens_BT.device.type, tokens_BT.shape[1]
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        states = target.hidden_states(tokens_BT)
        fused = drafter.fuse(states).float()
        joined = drafter.midlayer.join(states[0][:, 1:].float(), fused[:, :-1])
        _, keys, values = drafter.midlayer.self_attn.project(
            joined, drafter.cos[1:last], drafter.sin[1:last]
        )
        logs = target(tokens_BT).float().log_softmax(-1)
        uncertain = -(logs.exp() * logs).sum(-1) > UNCERTAIN
    padded = (F.pad(x[:, :, 0].float(), (0, 0, 1, 0)) for x in (keys, values))
    return Context(fused, *padded, uncertain)


@torch.inference_mode()
def replay(
    drafter: DrafterModel,
    target: TargetModel,
    table: Calibration,
    batch: Batch,
    settings: Settings,
    walk: Walk,
) -> None:
    """Run draft-and-verify cycles over every response; tokens per cycle include the bonus and stop
    at the response's end.
    """
    walk.accepted_at = walk.accepted_at or [0] * settings.depth
    context = true_slots(drafter, target, batch.tokens_BT)
    sequence = torch.arange(len(batch.tokens_BT), device=batch.tokens_BT.device)
    root = batch.prompt_lengths_B.clone()
    while True:
        live = root < batch.lengths_B - 1
        sequence, root = sequence[live], root[live]
        if not len(sequence):
            return
        batch = Batch(
            batch.tokens_BT[live],
            batch.lengths_B[live],
            batch.prompt_lengths_B[live],
            batch.seeds_B[live],
        )
        accepted = accepted_drafts(drafter, target, table, batch, settings, context, sequence, root)
        emitted = torch.minimum(accepted + 1, batch.lengths_B - 1 - root)
        walk.cycles += len(root)
        walk.tokens += int(emitted.sum())
        uncertain = context.uncertain[sequence, root]
        walk.uncertain_cycles += int(uncertain.sum())
        walk.uncertain_tokens += int(emitted[uncertain].sum())
        for level in range(settings.depth):
            walk.accepted_at[level] += int((accepted > level).sum())
        root = root + emitted


def chain_figures(
    drafter: DrafterModel, target: TargetModel, batches: Iterable[Batch], depth: int
) -> dict:
    """Accept length of chains of `depth` drafts at T=1, replayed over the batches."""
    table = chain_table(drafter.d2t.device)
    walk = Walk()
    for batch in batches:
        replay(drafter, target, table, batch, Settings(depth + 1, depth, 1, 1.0), walk)
    return walk.summary()


def accepted_drafts(
    drafter: DrafterModel,
    target: TargetModel,
    table: Calibration,
    batch: Batch,
    settings: Settings,
    context: Context,
    sequence_M: torch.Tensor,
    root_M: torch.Tensor,
) -> torch.Tensor:
    """Accepted drafts [M] of one cycle from positions `root_M` of the context's `sequence_M`."""
    kept, attention = drafter.kept_ids, drafter.midlayer.self_attn
    device, count, extent = kept.device, len(root_M), int(root_M.max()) + 1
    keys_MTD, values_MTD = context.keys[sequence_M, :extent], context.values[sequence_M, :extent]
    slots = torch.arange(extent, device=device)[None, None]
    hidden = (slots > root_M[:, None, None] - 1) | (slots == 0)
    tokens_MW = batch.tokens_BT.gather(1, root_M[:, None])
    features = context.fused[sequence_M, root_M - 1][:, None]
    chance, on_path = (
        torch.ones((count, 1), device=device),
        torch.ones((count, 1), dtype=torch.bool, device=device),
    )
    own_keys, own_values = (
        torch.zeros((count, 1, 0, attention.head_dim), device=device) for _ in range(2)
    )
    all_chances, all_hits = [], []
    for level in range(settings.depth):
        position = root_M + level
        joined = drafter.midlayer.join(target.model.embed_tokens(tokens_MW), features)
        q, k, v = attention.project(
            joined, drafter.cos[position][:, None], drafter.sin[position][:, None]
        )
        own_keys, own_values = torch.cat([own_keys, k], 2), torch.cat([own_values, v], 2)
        heads = q.shape[2]
        true = (
            torch.bmm(q.flatten(1, 2), keys_MTD.transpose(1, 2))
            .masked_fill(hidden, float("-inf"))
            .unflatten(1, (-1, heads))
        )
        own = q @ own_keys.transpose(2, 3)
        weights = (torch.cat([true, own], -1) * attention.head_dim**-0.5).softmax(-1)
        attended = torch.bmm(weights[..., :extent].flatten(1, 2), values_MTD).unflatten(
            1, (-1, heads)
        )
        attended = attended + weights[..., extent:] @ own_values
        state = drafter.midlayer.finish(features, attended.flatten(2))
        z = (drafter.logits(state) / (settings.temperature or 1.0)).log_softmax(-1)
        if settings.temperature > 0 and settings.noise:
            z = z + gumbel(batch.seeds_B, position + 1, target.config.vocab_size)[:, None, kept]
        top, children = z.topk(CHILDREN, -1)
        child_chance = (chance[..., None] * table.lookup(gaps_of(top), min(level, 1))).flatten(1)
        inside = position + 1 < batch.lengths_B
        truth = batch.tokens_BT.gather(
            1, (position + 1).clamp(max=batch.tokens_BT.shape[1] - 1)[:, None]
        )
        child_tokens = kept[children]
        hit = (
            on_path[..., None] & (child_tokens == truth[..., None]) & inside[:, None, None]
        ).flatten(1)
        all_chances.append(child_chance)
        all_hits.append(hit)
        chance, chosen = child_chance.topk(min(settings.width, child_chance.shape[1]), -1)
        parent = chosen // CHILDREN
        tokens_MW, on_path = child_tokens.flatten(1).gather(1, chosen), hit.gather(1, chosen)
        features = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1]))
        path = parent[..., None, None].expand(-1, -1, *own_keys.shape[2:])
        own_keys, own_values = own_keys.gather(1, path), own_values.gather(1, path)
    selected = torch.cat(all_chances, 1).topk(settings.rows - 1, -1).indices
    return torch.cat(all_hits, 1).gather(1, selected).sum(1)
