"""The cache of captured features: its bound, its versions, and what is trained on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.recorded_samples import VOCAB, sample
from tlt_server.frontend.link.client import readable
from tlt_server.samples.hidden_states import Captured, key_of
from tlt_server.samples.identity import Identity
from tlt_server.samples.sample import Sample, sample_set
from tlt_server.samples.segments import recorded
from tlt_server.trainer.learning.pack import Cursor, Packer
from tlt_server.trainer.recording.recorded import CapturedFeatures, RecordedDocuments
from tlt_server.trainer.recording.state_store import StateStore, recompute_of
from tlt_server.wire.commands import MAX_TEXT_BYTES, MAX_TEXTS, decode_command
from tlt_server.wire.records import encode

WIDTH, HIDDEN = 3, 2


def states(of: Sample, version: str = "v0") -> Captured:
    length = len(of.token_T) - 1
    features_TF = np.random.default_rng(of.seed).random((length, WIDTH), np.float32)
    return Captured(
        version=version,
        key=key_of(of.tokens),
        length=length,
        item=4,
        feature_width=WIDTH,
        hidden_width=HIDDEN,
        features=features_TF.tobytes(),
        hidden=bytes(4 * HIDDEN * length),
    )


def test_captured_states_of_old_versions_are_dropped() -> None:
    one = sample(0)
    for staleness, held in ((0, ["v0"]), (1, ["v0", "v1"])):
        store = StateStore(10**6, staleness)
        for version in ("v0", "v1", "v0"):  # a rollback
            store.add(states(one, version))
        assert [v for v in ("v0", "v1") if store.find(v, one.tokens)] == held
        store.add(states(one, "v2"))
        assert store.find("v2", one.tokens) and not store.find("v1", one.tokens)
        assert len(store) == 1 + staleness and store.tokens == 11 * (1 + staleness)


def test_oldest_captured_states_are_dropped_above_the_bound() -> None:
    samples = [sample(i) for i in range(4)]
    each = 4 * (WIDTH + HIDDEN) * 11
    store = StateStore(2 * each)
    for one in (*samples, samples[2]):  # the same once more is held once
        store.add(states(one))
    assert [bool(store.find("v0", one.tokens)) for one in samples] == [False, False, True, True]
    assert store.size == 2 * each
    store.add(states(sample(9, output=200)))
    assert (len(store), store.tokens, store.size) == (2, 22, 2 * each)


def test_captured_features_are_in_the_requested_order() -> None:
    samples = [sample(i, seed=i) for i in range(4)]
    responses = sample_set(samples, Identity("", ""), VOCAB).responses
    store = StateStore(10**6)
    for n in (1, 2, 3):
        store.add(states(samples[n]))
    source = CapturedFeatures(store, "v0", WIDTH)
    for part, n in zip(source.features(responses, [3, 1, 2]).split(12), (3, 1, 2), strict=True):
        assert part[:-1].numpy().tobytes() == states(samples[n]).features
        assert not part[-1].any()
    with pytest.raises(AssertionError, match="no states"):
        source.features(responses, [1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_with_captured_states_become_documents(dtype: torch.dtype) -> None:
    entries = [recorded(i, sample(i, seed=i, output=20 + i))[0] for i in range(6)]
    entries[5].sample.spans[:] = [(3, "v0")]  # another engine began it
    store, given = StateStore(10**6), {}
    store.expect(recompute_of(entries[3:4]))
    for entry in entries[1::2]:
        length = len(entry.sample.token_T) - 1
        features_TF, hidden_TH = (torch.randn(length, w).to(dtype) for w in (WIDTH, HIDDEN))
        given[entry.number] = features_TF, hidden_TH
        store.add(
            Captured(
                version="v0",
                key=key_of(entry.sample.tokens),
                length=length,
                item=dtype.itemsize,
                feature_width=WIDTH,
                hidden_width=HIDDEN,
                features=features_TF.view(torch.uint8).numpy().tobytes(),
                hidden=hidden_TH.view(torch.uint8).numpy().tobytes(),
            )
        )
    assert store.missing("v0", entries) == entries[::2]
    assert store.missing("v1", entries) == entries
    documents = RecordedDocuments.of(entries, store, "v0")
    store.renewed("v1")
    assert not len(store)
    assert documents.lengths == [25, 27, 29]
    assert documents.recomputed == [False, True, False]
    for number, entry in enumerate(entries[1::2]):
        length = documents.lengths[number]
        for start, stop in ((0, length), (3, 9), (length - 2, length), (length - 1, length)):
            part = documents.read(number, start, stop)
            assert part.tokens_T.tolist() == entry.sample.token_T[start:stop].tolist()
            first = 7 if entry is entries[5] else 4
            assert part.counted_T.tolist() == [at >= first for at in range(start, stop)]
            for found_TX, all_TX in zip(part[1:3], given[entry.number], strict=True):
                expected_TX = torch.cat([all_TX, torch.zeros(1, all_TX.shape[1], dtype=dtype)])
                assert found_TX.dtype == dtype and torch.equal(found_TX, expected_TX[start:stop])
    pack, _ = Packer(documents, 100, 3).next(Cursor())
    assert pack.feature_NF.dtype == dtype and pack.tokens == sum(documents.lengths) - 2 * 4 - 7


def test_recompute_command_holds_a_bounded_number_of_sequences() -> None:
    entries = [recorded(i, sample(i, output=8))[0] for i in range(MAX_TEXTS + 2)]
    long = recorded(99, sample(99, output=MAX_TEXT_BYTES // 4 - 20))[0]
    found = recompute_of([entries[0], long, long, *entries[1:]])
    assert found.texts == [e.sample.tokens for e in (entries[0], long)]
    assert len(recompute_of(entries).texts) == MAX_TEXTS
    assert decode_command(encode(found)) == found


def test_frontend_passes_on_readable_recomputes() -> None:
    def text(*ids: int) -> bytes:
        return np.array(ids, "<i4").tobytes()

    assert readable(text(0, 99), 100, 2)
    refused = text(0, 100), text(-1, 5), text(1, 2, 3), text(1, 2)[:-1]
    assert not any(readable(each, 100, 2) for each in refused)
