"""Logits in training against those of the serving network over the same tokens, trunk and branch,
and negative controls: each kind of disagreement that training could have is seen by the comparison.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.tiny import VOCAB, write_eagle, write_eagle1, write_target
from tests.rows_of_one import certain_rows
from tlt_server.attention.rows import Rows
from tlt_server.errors import InvalidRequest, ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.eagle import Eagle1, Eagle3
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.learning.attend import Blocks
from tlt_server.trainer.learning.network import TrainableEagle3, load_trainable
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer, assemble, fit, windows
from tlt_server.trainer.learning.step import AdamWSettings, Trainer
from tlt_server.trainer.learning.unroll import forward
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import Document, Recomputed

LENGTHS, STEPS, PAGE = (23, 9, 40), 4, 16


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("pair")
    return write_target(path / "target"), write_eagle(path / "drafter")


@pytest.fixture(scope="module")
def target(directories):
    config = ModelConfig.read(directories[0])
    layers = feature_layers(directories[1], config)
    return load_target(directories[0], numerics=Numerics("strict"), feature_layers=layers)


@pytest.fixture
def trainable(directories, target):
    return load_trainable(directories[1], target.config)


@pytest.fixture(scope="module")
def source(target):
    random = np.random.default_rng(3)
    return Recomputed(
        CpuPrefill(target),
        [
            Document(random.integers(0, VOCAB, n).astype(np.int32), np.arange(n) > 4)
            for n in LENGTHS
        ],
    )


def served(drafter, source, document, root, steps):
    """Logits [steps, C] that the server drafts with at a root, along the document's own tokens."""
    piece = source.read(document, 0, source.lengths[document])
    pages = 6
    table_P = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cache = drafter.make_cache(pages, PAGE, STEPS)
    g_RH = drafter.fuse(piece.features_TF[:root])
    rows = certain_rows(piece.tokens_T[1 : root + 1], 1, table_P, PAGE)
    h_RH = drafter.forward(rows, g_RH, cache)[-1:]
    found = [drafter.logits(h_RH)]
    for step in range(1, steps):
        path = torch.full((1, STEPS), -1, dtype=torch.int32)
        path[0, :step] = cache.scratch_start + torch.arange(step, dtype=torch.int32)
        row = Rows(
            piece.tokens_T[root + step : root + step + 1],
            torch.tensor([root + step]),
            torch.tensor([cache.scratch_start + step - 1]),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([root + 1], dtype=torch.int32),
            table_P[None],
            path,
        )
        h_RH = drafter.forward(row, h_RH, cache)
        found.append(drafter.logits(h_RH))
    return torch.cat(found)


def trained(trainable, target, source, bounds=None):
    """Logits [steps, N, C] of a pack in training, and the first slot of each document."""
    pieces = [w for d, n in enumerate(LENGTHS) for w in windows(d, n, 80, STEPS)]
    placed = sorted(fit(pieces, 80)[0])
    pack = assemble(source, placed, 80)
    frozen = trainable.frozen(
        target.embedding_VH, CpuPrefill(target).head_rows(trainable.target_ids_C)
    )
    steps = []
    with torch.no_grad():
        for _ in range(STEPS):
            steps.append(forward(trainable, frozen, pack, Blocks(bounds or pack.bounds), steps))
        return torch.stack([trainable.logits(step.h_RH, frozen) for step in steps]), pack.bounds


def difference(directories, target, source, trainable, network=Eagle3, **kwargs):
    drafter = network.load(directories[1], target)
    found, starts = trained(trainable, target, source, **kwargs)
    worst = 0.0
    for document, root in ((0, 1), (0, 9), (1, 4), (2, 17), (2, 35)):
        steps = min(STEPS, LENGTHS[document] - root)
        expected = served(drafter, source, document, root, steps)
        ours = found[:steps, starts[document] + root - 1]
        worst = max(worst, float(((ours - expected).abs() / expected.abs().max()).max()))
    return worst


def test_training_logits_equal_the_serving_networks_logits(directories, target, source, trainable):
    assert difference(directories, target, source, trainable) < 1e-5  # float32


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_trains_as_it_serves_and_saves_unchanged(directories, source, tmp_path, bias):
    directory = write_eagle1(tmp_path / "first", directories[0], bias=bias)
    config = ModelConfig.read(directories[0])
    target = load_target(
        directories[0],
        numerics=Numerics("strict"),
        feature_layers=feature_layers(directory, config),
    )
    trainable = load_trainable(directory, config)
    text = Recomputed(CpuPrefill(target), source._documents)
    pair = directories[0], directory
    assert difference(pair, target, text, trainable, network=Eagle1) < 1e-5
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.json").write_text((directory / "config.json").read_text())
    trainable.save(again, torch.float32)
    first, second = (load_file(path / "model.safetensors") for path in (directory, again))
    assert first.keys() == second.keys() == trainable.weights.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    head_CH = CpuPrefill(target).head_rows(trainable.target_ids_C)
    trainer = Trainer(
        trainable,
        trainable.frozen(target.embedding_VH, head_CH),
        make_objective("eagle"),
        AdamWSettings(lr=1e-3),
    )
    packer, losses = Packer(text, 80, 1), []
    for _ in range(8):
        losses.append(trainer.step([packer.next(Cursor())[0]]).loss)
    assert losses[-1] < losses[0]


def test_comparison_detects_a_missing_norm(directories, target, source, trainable, monkeypatch):
    norm = TrainableEagle3._norm

    def without(self, name, x_NH):
        return x_NH if name == "midlayer.hidden_norm" else norm(self, name, x_NH)

    monkeypatch.setattr(TrainableEagle3, "_norm", without)
    assert difference(directories, target, source, trainable) > 1e-3


def test_comparison_detects_a_leaking_mask(directories, target, source, trainable):
    assert difference(directories, target, source, trainable, bounds=(0, 80)) > 1e-3


def test_comparison_detects_a_pairing_shifted_by_one(
    directories, target, source, trainable, monkeypatch
):
    from tlt_server.trainer.learning import pack

    pair = pack.pair

    def shifted(tokens_T, features_TF, hidden_TH, counted_T):
        return pair(tokens_T, features_TF.roll(-1, 0), hidden_TH, counted_T)

    monkeypatch.setattr(pack, "pair", shifted)
    assert difference(directories, target, source, trainable) > 1e-3


def test_comparison_detects_shifted_positions(directories, target, source, trainable, monkeypatch):
    from tlt_server.trainer.learning import network

    monkeypatch.setattr(network.TrainableEagle3, "draft", _late(network.TrainableEagle3.draft))
    assert difference(directories, target, source, trainable) > 1e-3


def _late(draft):
    """Rotate the trunk as it should be and a branch as if it began one position later."""
    calls = []

    def changed(self, embedded_NH, g_NH, position_N, *others):
        calls.append(1)
        return draft(self, embedded_NH, g_NH, position_N + (len(calls) % STEPS == 2), *others)

    return changed


def test_training_tensors_equal_the_serving_networks_tensors(
    directories, target, trainable, tmp_path
):
    drafter = Eagle3.load(directories[1], target)
    ours, theirs = trainable.parameters(), drafter.parameters()
    assert {name: tuple(x.shape) for name, x in ours.items()} == {
        name: tuple(x.shape) for name, x in theirs.items()
    }
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(trainable.target_ids_C, drafter.target_ids)
    # Written and read again, by the server's own loader.
    (tmp_path / "config.json").write_text((directories[1] / "config.json").read_text())
    trainable.save(tmp_path, torch.float32)
    again = Eagle3.load(tmp_path, target)
    assert all(torch.equal(x, again.parameters()[name]) for name, x in theirs.items())


def test_drafter_with_its_own_embedding_keeps_that_embedding(directories, target, tmp_path):
    directory = write_eagle(tmp_path / "own", own_embedding=True)
    own = load_trainable(directory, target.config)
    frozen = own.frozen(target.embedding_VH, CpuPrefill(target).head_rows(own.target_ids_C))
    assert torch.equal(frozen.embedding_VH, own.parameters()["embed_tokens.weight"])
    assert "embed_tokens.weight" not in own.weights  # it is not trained


def test_drafter_of_a_different_target_is_refused(directories, target, tmp_path):
    other = write_eagle(tmp_path / "other")
    config = (other / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    (other / "config.json").write_text(config)
    with pytest.raises(ModelError, match="'hidden_size' is 32, the target's is 64"):
        load_trainable(other, target.config)


def test_recomputed_features_have_the_bits_of_one_pass(target, source):
    """Chunks and kept copies change no bit."""
    documents = source._documents
    once = source.read(2, 0, LENGTHS[2])
    from tlt_server.trainer.target import prefill

    before, prefill.CHUNK = prefill.CHUNK, 7
    try:
        chunked = Recomputed(CpuPrefill(target), documents, kept_bytes=0).read(2, 0, LENGTHS[2])
    finally:
        prefill.CHUNK = before
    assert torch.equal(once.features_TF, chunked.features_TF)
    assert torch.equal(once.hidden_TH, chunked.hidden_TH)
    part = source.read(2, 11, 20)
    assert torch.equal(part.features_TF, once.features_TF[11:20]) and len(part.tokens_T) == 9


def test_a_document_beyond_the_targets_positions_is_refused(target):
    long = Document(np.zeros(2000, np.int32), np.ones(2000, np.bool_))
    with pytest.raises(InvalidRequest, match="2000 tokens, the target's limit is 1024"):
        Recomputed(CpuPrefill(target), [long])
