"""Sequences of a GPU's engine, replayed by its kernels from the states that it captured: the counts
of every cycle are the server's own. On Triton's interpreter, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.capturing import Capturing
from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, drafting, request
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.record import traces
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.config import ModelConfig
from tlt_server.samples.hidden_states import Captured, key_of
from tlt_server.samples.identity import Identity
from tlt_server.samples.ring import RingConsumer
from tlt_server.samples.sample import Sample, decode_sample, sample_set
from tlt_server.samples.tables import read_tables, table_file
from tlt_server.speculation.branches import Proposing
from tlt_server.speculation.drafters import find_loader
from tlt_server.trainer.recording.recorded import CapturedFeatures
from tlt_server.trainer.recording.state_store import StateStore
from tlt_server.trainer.replaying import replay
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, evaluate
from tlt_server.trainer.replaying.handed import gpu_frame
from tlt_server.trainer.replaying.plans import PinnedPlan
from tlt_server.trainer.replaying.replay import ReplayedDrafter, Roots, StagedResponses
from tlt_server.trainer.replaying.self_check import SelfCheck, self_check
from tlt_server.wire.records import GenerateRequest, Strategy

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Recorded:
    """Sequences of an engine, with the states that a trainer gets of them."""

    def __init__(self, settings: EngineSettings, directory: Path, *asked: GenerateRequest) -> None:
        engine = Capturing(settings, directory, ring=2**28)
        engine.run(*(msgspec.structs.replace(each, train=True) for each in asked))
        self.tables = read_tables(table_file(directory / "samples"))
        ring = RingConsumer(directory / "samples")
        self.samples: list[Sample] = [decode_sample(c) for c in iter(ring.take, None)]
        self.states: dict[bytes, Captured] = engine.taken()
        texts = {key_of(text): text for s in self.samples for text in [_text(s)]}
        lacking = [text for key, text in texts.items() if key not in self.states]
        for at in range(0, len(lacking), 16):
            self.states |= engine.recomputed(lacking[at : at + 16])
        held = [s for s in self.samples if key_of(_text(s)) in self.states]
        assert len(held) > 0.9 * len(self.samples)
        self.samples = held
        self.vocab_size, self.leaves = engine.info.vocab_size, engine.info.fingerprint.leaves
        self.device = "cuda" if settings.device == "cuda" else "cpu"
        self.target, self.drafter = Path(settings.model), Path(settings.drafter)

    def replayed(self) -> ReplayedDrafter:
        """Return the drafter in force, as a trainer on this device loads it."""
        tensors = load_file(self.target / "model.safetensors")
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        embedding_VH = tensors["model.embed_tokens.weight"].to(self.device, dtype)
        frame = gpu_frame(self.target, self.drafter, embedding_VH, embedding_VH, self.leaves)
        return ReplayedDrafter.load(self.drafter, frame, device="cuda")

    def source(self) -> CapturedFeatures:
        store = StateStore(2**33, 0)
        for captured in self.states.values():
            store.add(captured)
        config = ModelConfig.read(self.target)
        layers = find_loader(self.drafter, "cpu").feature_layers(self.drafter, config)
        return CapturedFeatures(store, "initial", len(layers) * config.hidden_size)

    def stage(self) -> ReplayStage:
        return ReplayStage(self.source())

    def checked(self, drafter: ReplayedDrafter) -> SelfCheck:
        found = sample_set(self.samples, Identity("", ""), self.vocab_size)
        return self_check(
            found,
            drafter,
            self.stage(),
            version="initial",
            tables=self.tables,
            drafter_version="initial",
        )


def _text(sample: Sample) -> bytes:
    return np.asarray(sample.token_T, "<i4").tobytes()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Trees, by a table that learns and of which another one is in force every few steps."""
    root = tmp_path_factory.mktemp("replay")
    with patched_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "TURN", 8)
        settings = drafting(checkpoints(root / "smallest"), "eagle", 4, 2, 5)
        asked = [request(i, 6 + 5 * i, max_tokens=14) for i in range(2)]
        yield Recorded(settings, root / "rings", *asked)


def test_replay_by_gpu_kernels_accepts_the_same_drafts(interpreted: Recorded) -> None:
    drafter = interpreted.replayed()
    found = interpreted.checked(drafter)
    assert found.compared and not found.different
    assert found.compared > 10 and not found.unknown and len(interpreted.tables) > 1
    assert sum(sum(s.own_accepted) for s in interpreted.samples) > 0


def test_replay_detects_a_different_drafter(interpreted: Recorded) -> None:
    drafter = interpreted.replayed()
    drafter.weights.network.target_ids_C.copy_(drafter.weights.network.target_ids_C.roll(1))
    assert interpreted.checked(drafter).different > 0


@pytest.mark.long
def test_replay_drafts_roots_in_parts_that_fit_in_memory(
    interpreted: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No padding to a usual number of requests goes beyond the room for draft rows."""
    plan = PinnedPlan(Strategy("eagle", 3, 2, 6))
    samples = sample_set(interpreted.samples, Identity("", ""), interpreted.vocab_size)
    found = []
    for roots, rows in ((replay.MAX_ROOTS, replay.DRAFT_ROWS), (8, 3 * 2 * 2)):
        monkeypatch.setattr(replay, "MAX_ROOTS", roots)
        monkeypatch.setattr(replay, "DRAFT_ROWS", rows)
        drafter = interpreted.replayed()
        stage, chosen = interpreted.stage(), range(len(samples))
        (walked,) = evaluate(samples.responses, chosen, [Task(drafter, plan)], stage)
        for part, (replayed,) in stage.parts(samples.responses, chosen, [drafter]):
            n_B = np.repeat(np.arange(len(part)), 4)
            position_B = np.tile(np.arange(1, 5), len(part))
            replayed.calibrate(Roots(n_B, position_B, np.full(len(n_B), 6, np.int32)), 3, 2)
        found.append((walked.accepted_C.tolist(), drafter.weights.calibration.trials_K.sum()))
    assert found[0] == found[1] and found[0][1] > 12


@pytest.mark.long
def test_reused_buffers_give_the_counts_of_new_ones(
    interpreted: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long responses come before short ones, so that what is left of them would be seen."""
    made: list[int] = []

    def counting(drafter: ReplayedDrafter, staged: StagedResponses) -> Proposing:
        made.append(staged.cache.pages)
        return on_gpu(drafter, staged)

    on_gpu = replay.TREES["cuda"]
    monkeypatch.setitem(replay.TREES, "cuda", counting)
    samples = sample_set(interpreted.samples, Identity("", ""), interpreted.vocab_size)
    responses, drafter = samples.responses, interpreted.replayed()
    lengths = responses.prompt_len_N + responses.output_len_N
    task = Task(drafter, PinnedPlan(Strategy("eagle", 2, 1, 3)))

    def counts(stage: ReplayStage, chosen: list[int]) -> list[int]:
        (walked,) = evaluate(responses, chosen, [task], stage)
        return [*walked.root_C.tolist(), *walked.accepted_C.tolist()]

    longest, *_, shortest = sorted(range(len(samples)), key=lambda n: -int(lengths[n]))
    calls = [[longest], [shortest], [longest, shortest]]
    fresh = [counts(interpreted.stage(), chosen) for chosen in calls]
    assert len(made) == len(calls)
    kept, grown = interpreted.stage(), interpreted.stage()
    kept.reserve(lengths[calls[-1]])
    made.clear()
    assert [counts(kept, chosen) for chosen in calls] == fresh
    assert len(made) == 1
    assert [counts(grown, chosen) for chosen in calls] == fresh
    assert len(made) == 3 and made[0] == made[2] > made[1], "once, and once more for both together"


@pytest.mark.parametrize(
    ("responses", "cycles"),
    [
        pytest.param(256, 3_000, marks=gpu),
        pytest.param(8_192, 100_000, marks=[*gpu, pytest.mark.soak, pytest.mark.timeout(580)]),
    ],
)
def test_replay_on_a_gpu_repeats_every_cycle(responses: int, cycles: int, tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(TARGET),
        drafter=str(DRAFTER),
        policy="fixed",
        sd_strategy="eagle:7x1x8",
        device="cuda",
        dtype="bfloat16",
        attention="triton",
        max_model_len=512,
        max_running=64,
        max_rows=512,
    )
    asked = problems_as_requests(TARGET, responses, group=4, seed=3, max_tokens=256)
    recorded = Recorded(settings, tmp_path / "rings", *asked)
    drafter = recorded.replayed()
    found = recorded.checked(drafter)
    assert found.compared and not found.different
    print(f"{found.compared} cycles compared, {found.different} differ")
    assert found.compared > cycles
    plan = PinnedPlan(Strategy("eagle", 7, 4, 16))
    samples = sample_set(recorded.samples, Identity("", ""), recorded.vocab_size)
    (walked,) = evaluate(
        samples.responses, range(len(samples)), [Task(drafter, plan)], recorded.stage()
    )
    tokens = int(samples.responses.output_len_N.sum())
    assert tokens / len(walked) > 5.5, "the shipped drafter's trees accept 6 and more"
