"""Sequences that the engine records for training: the same tokens, and what its cycles say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable, perturbed
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.identity import Identity
from tlt_server.samples.ring import RingConsumer, make_ring
from tlt_server.samples.sample import Sample, decode_sample, sample_set
from tlt_server.wire.commands import Abort
from tlt_server.wire.records import DraftLimits, GenerateRequest

NOBODY = Identity("", "")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    settings = on_cpu(checkpoints(tmp_path_factory.mktemp("smallest")))
    return replace(drafting(settings, "eagle", 4, 2, 7), max_running=3)


class Recording(Pushable):
    def __init__(self, settings: EngineSettings, ring: Path, capacity: int = 2**16) -> None:
        make_ring(ring, capacity)
        super().__init__(replace(settings, sample_ring=ring))
        self._ring = RingConsumer(ring)

    def taken(self) -> dict[int, Sample]:
        """Return the recorded sequences, by seed."""
        contents = iter(self._ring.take, None)
        samples = [decode_sample(content) for content in contents]
        for sample in samples:
            sample.check(self.info.vocab_size)
        return {sample.seed: sample for sample in samples}


def asked(turn: int, **fields: object) -> list[GenerateRequest]:
    """Five requests, more than run at once; the last one takes no drafts."""
    requests = [request(i, 6, max_tokens=24 + i, ignore_eos=i != 1) for i in range(5)]
    limits = [True, True, DraftLimits(max_depth=2), True, False]
    return [
        msgspec.structs.replace(r, id=f"{r.id}/{turn}", **{"train": True, "sd": sd, **fields})
        for r, sd in zip(requests, limits, strict=True)
    ]


def check_cycles(sample: Sample, asked: GenerateRequest, engine: Pushable) -> None:
    """Check that the record of a sequence's cycles gives what the engine said, step by step. The
    first token follows the prompt; each cycle gives what it accepted and one more.
    """
    said = [output for output in engine.said[asked.id] if output.token_ids]
    assert sample.token_T.tolist() == [*asked.token_ids, *engine.tokens(asked.id)]
    assert sample.prompt_len == len(asked.token_ids)
    accepted_C, own_C = (
        np.frombuffer(column, np.uint8) for column in (sample.accepted, sample.own_accepted)
    )
    gave = [len(output.token_ids) for output in said]
    assert sample.cycles == len(gave) - 1 and gave[0] == 1
    assert sample.root_C.tolist() == (5 + np.cumsum(gave[:-1])).tolist()
    assert (accepted_C[:-1] + 1).tolist() == gave[1:-1]
    assert gave[-1] <= accepted_C[-1] + 1 and (own_C <= accepted_C).all()
    rows_C = np.frombuffer(sample.rows, "<u2")
    assert (rows_C - 1).tolist() == [output.drafted for output in said[1:]]


def test_recording_changes_no_bit_and_describes_cycles(
    settings: EngineSettings, tmp_path: Path
) -> None:
    plain, engine = Pushable(settings), Recording(settings, tmp_path / "ring")
    for turn in range(2):  # the second time history knows the responses
        plain.run(*asked(turn))
        engine.run(*asked(turn))
        ids = [r.id for r in asked(turn)]
        assert bits(engine, ids) == bits(plain, ids)
        samples = engine.taken()
        assert sorted(samples) == sorted(r.seed for r in asked(turn))
        branches = 0
        for r in asked(turn):
            sample = samples[r.seed]
            check_cycles(sample, r, engine)
            assert sample.end == engine.said[r.id][-1].finish_reason
            deepest = max((each.strategy.depth for each in sample.drafted), default=0)
            assert deepest == {True: 4, False: 0}.get(r.sd, 2)  # type: ignore[call-overload]
            branches += sum(sample.accepted) - sum(sample.own_accepted)
            per_cycle = sample.rows + sample.branches + sample.accepted
            per_cycle += sample.own_accepted + sample.how
            assert len(per_cycle) == 6 * sample.cycles <= 8 * len(sample.token_T)
        assert (branches > 0) == bool(turn)
    found = sample_set([*samples.values()], NOBODY, engine.info.vocab_size)
    found.check()
    assert found.responses.token_T.size == sum(len(s.token_T) for s in samples.values())
    assert engine.engine.gauges()["samples_offered"] == 10


def test_record_of_a_preempted_sequence_has_a_gap(settings: EngineSettings, tmp_path: Path) -> None:
    small = replace(settings, pages=8, page_size=8, max_model_len=48)
    engine = Recording(small, tmp_path / "ring")
    work = asked(0)
    engine.run(*work)
    samples = engine.taken()
    assert [*samples[work[0].seed].token_T] == [*work[0].token_ids, *engine.tokens(work[0].id)]
    extra = [extra for sample in samples.values() for _, extra in sample.gaps]
    # The step that reads its text again gives it one token.
    assert extra and set(extra) == {1}
    assert len(extra) <= engine.engine.gauges()["preemptions"]


def test_weight_version_of_every_token_is_recorded(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine = Recording(replace(settings, weight_root=tmp_path), tmp_path / "ring")
    other = perturbed(Path(settings.model), tmp_path / "other", seed=5)
    work = asked(0)
    engine.push(other, "second", commit=False)
    engine.submit(*work)
    engine.until(lambda: len(engine.said.get(work[0].id, [])) > 3, "tokens")
    engine.commit("second")
    engine.finish()
    samples = engine.taken()
    seen = [engine.spans(r.id) for r in work]
    assert [samples[r.seed].spans for r in work] == [
        [(start, version) for version, start, _ in spans] for spans in seen
    ]
    assert any(len(spans) == 2 for spans in seen)


def test_continued_sequence_is_recorded_from_its_first_new_token(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine, whole = Recording(settings, tmp_path / "ring"), asked(0)[0]
    engine.run(whole)
    engine.taken()
    tokens, k = engine.tokens(whole.id), 9
    rest = msgspec.structs.replace(whole, id="rest", generated=tokens[:k])
    engine.run(rest)
    sample, prompt = engine.taken()[whole.seed], whole.token_ids
    assert sample.token_T.tolist() == [*prompt, *tokens] and sample.prompt_len == len(prompt)
    assert sample.spans == [(k, engine.info.weight_version)]
    assert sample.recorded_from == sample.first_root == len(prompt) + k
    gave = [len(output.token_ids) for output in engine.said["rest"] if output.token_ids]
    assert sample.root_C.tolist() == (len(prompt) + k - 1 + np.cumsum(gave[:-1])).tolist()


def test_only_permitted_sequences_are_recorded(settings: EngineSettings, tmp_path: Path) -> None:
    engine = Recording(settings, tmp_path / "ring")
    work = asked(0)
    kept_out = msgspec.structs.replace(work[0], train=False)
    without_tokens = msgspec.structs.replace(work[1], generated=[1, 2])
    prompt_only = msgspec.structs.replace(
        work[2], sampling=msgspec.structs.replace(work[2].sampling, max_tokens=0)
    )
    engine.submit(without_tokens)
    engine.engine.send(Abort([without_tokens.id]))
    engine.finish()
    engine.run(kept_out, prompt_only, work[3])
    assert [*engine.taken()] == [work[3].seed]
    assert engine.engine.gauges()["samples_offered"] == 1


def test_full_ring_drops_sequences_and_changes_no_bit(
    settings: EngineSettings, tmp_path: Path
) -> None:
    plain, engine = Pushable(settings), Recording(settings, tmp_path / "ring", 512)
    plain.run(*asked(0))
    engine.run(*asked(0))
    ids = [r.id for r in asked(0)]
    assert bits(engine, ids) == bits(plain, ids)
    kept = len(engine.taken())
    gauges = engine.engine.gauges()
    assert (gauges["samples_offered"], gauges["samples_dropped"]) == (5, 5 - kept)
    assert kept < 5


@pytest.fixture(scope="module")
def on_interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        settings = replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_running=2)
        yield drafting(settings, "eagle", 4, 1, 7)


@pytest.mark.long
def test_gpu_cycles_distinguish_own_drafts_from_branches(
    on_interpreter: EngineSettings, tmp_path: Path
) -> None:
    """Each cycle is recorded one step late."""
    engine, branches = Recording(on_interpreter, tmp_path / "ring"), []
    for turn in range(2):
        requests = [
            msgspec.structs.replace(request(i, 6, max_tokens=12), id=f"r{i}/{turn}", train=True)
            for i in range(2)
        ]
        engine.run(*requests)
        samples, found = engine.taken(), 0
        assert sorted(samples) == [r.seed for r in requests]
        for r in requests:
            sample = samples[r.seed]
            check_cycles(sample, r, engine)
            accepted_C, branches_C, own_C = (
                np.frombuffer(column, np.uint8)
                for column in (sample.accepted, sample.branches, sample.own_accepted)
            )
            # A chain of 4 is all that the drafter itself has; branches take the rows left over.
            assert (np.frombuffer(sample.rows, "<u2") - 1 - branches_C <= 4).all()
            assert (accepted_C - own_C <= branches_C).all()
            found += int(branches_C.sum())
        accepted = sum(sum(s.accepted) - sum(s.own_accepted) for s in samples.values())
        branches.append((found, accepted))
    assert branches[0] < branches[1] and branches[1][1] > 0, branches
