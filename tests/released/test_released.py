"""Files of released servers and tools: each opens with its content, and a later version of it is
refused with a remedy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable
from tests.engine.test_resumed_training import install, new_work
from tests.frontend.fake_engine import INFO
from tests.frontend.live_server import live_server
from tests.frontend.tiny_model import write_model
from tests.released.frames import journal_of, journal_records, with_header, with_segment_header
from tlt_client import Client, ServerError
from tlt_server.drafter.data import TargetLimits, read_documents
from tlt_server.drafter.records import load_record
from tlt_server.engine.knowledge_file import KnowledgeFile
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.samples.ring import make_ring
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.cost import StepLoad
from tlt_server.speculation.knowledge import Knowledge, WeightsInUse
from tlt_server.trainer.process.main import Keeper
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy
from tlt_server.wire.training import TrainerSettings

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
MODEL = "/models/tiny"  # the path of the model in the files
CHAIN = Strategy("eagle", 3, 1, 4).name


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all files in the working directory, with the path of the model in them."""
    root = shutil.copytree(HERE, tmp_path / "released", ignore=shutil.ignore_patterns("*.py"))
    monkeypatch.chdir(root)
    model = str((root / "model").resolve())
    current = root / "state" / "weights" / "current.json"
    current.write_text(current.read_text().replace(MODEL, model))
    fingerprint = msgspec.to_builtins(INFO.fingerprint)  # the fake engine's, as it is today
    served = str(write_model(root / "bytes").resolve())
    for path in (root / "state" / "rollouts").glob("*.journal"):
        path.write_bytes(with_header(path.read_bytes(), model=served, fingerprint=fingerprint))
    return root


def settings(root: Path, **fields: Any) -> EngineSettings:
    given: dict[str, Any] = {
        "model": "model",
        "drafter": "drafter",
        "device": "cpu",
        "policy": "off",
        "kv_memory_mb": 1,
        "weight_root": str(root),
        "max_loras": 1,
    }
    return EngineSettings(**given | fields)


def request(i: int, **fields: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    prompt = [(5 * i + 3 * p) % 31 for p in range(6 + i)]
    given = {"id": f"r{i}", "token_ids": prompt, "sampling": sampling, "seed": 70 + i}
    return GenerateRequest(**given | fields)


# -- weights ---------------------------------------------------------------------------------------


def test_committed_weights_are_served_after_a_restart(left: Path) -> None:
    expected = EXPECTED["weights"]
    engine = Pushable(settings(left, state_dir="state"))
    assert not engine.info.lost and engine.info.adapters == {"polite": "a1"}
    assert (engine.info.weight_version, engine.info.drafter_version) == ("v2", "d1")
    assert engine.checksums() == expected["checksums"]
    said = engine.run(request(1), request(2), request(3, lora="polite"))
    assert {id: tokens for id, (tokens, _) in said.items()} == expected["tokens"]
    for id, (_, logprobs) in said.items():  # bits depend on the processor
        np.testing.assert_allclose(logprobs, expected["logprobs"][id], rtol=1e-4)


def test_unknown_record_of_weights_is_refused_at_start(left: Path) -> None:
    current = left / "state" / "weights" / "current.json"
    current.write_text(json.dumps(json.loads(current.read_text()) | {"format": 2}))
    with pytest.raises(StartupError, match=r"current\.json is damaged .*`format`.*restore the fil"):
        Pushable(settings(left, state_dir="state"))


def test_released_client_checkpoint_is_committed(left: Path) -> None:
    engine = Pushable(settings(left))
    report = engine.push(left / "pushed", "v9", tensors=EXPECTED["pushed"])
    assert report.result == "committed", report.error
    before = left / "state" / "weights" / "push-0000000000000001" / "target"
    shutil.copyfile(before / "00000.safetensors", left / "pushed" / "model-00001.safetensors")
    report = engine.push(left / "pushed", "v10", tensors=EXPECTED["pushed"])
    assert report.result == "weights_refused", "the checksums are compared"


# -- drafters --------------------------------------------------------------------------------------


def drafter_at(root: Path, name: str) -> Path:
    return root / "trained" if name == "trained" else root / "state" / "exports" / name


def serving(root: Path, drafter: Path) -> Pushable:
    return Pushable(settings(root, drafter=str(drafter), policy="fixed", sd_strategy=CHAIN))


@pytest.mark.parametrize("name", EXPECTED["drafts"])
def test_released_drafters_draft_the_same_tokens(left: Path, name: str) -> None:
    engine = serving(left, drafter_at(left, name))
    said = engine.run(*(request(i) for i in range(3)))
    assert {id: tokens for id, (tokens, _) in said.items()} == EXPECTED["tokens"]
    outputs = [output for id in said for output in engine.said[id]]
    drafts = [sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)]
    assert drafts == EXPECTED["drafts"][name]


def _rename_architecture(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"architectures": ["Eagle9"]}))


def _extend_calibration(drafter: Path) -> None:
    table = json.loads((drafter / "calibration.json").read_text())
    (drafter / "calibration.json").write_text(json.dumps(table | {"format": 2}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_rename_architecture, "Eagle9"),
        (_extend_calibration, "calibration.json: not a calibration table .*`format`.*export the d"),
    ],
)
def test_unknown_drafters_are_refused(
    left: Path, change: Callable[[Path], None], says: str
) -> None:
    drafter = drafter_at(left, "sglang")
    change(drafter)
    with pytest.raises(StartupError, match=says):
        serving(left, drafter)


# -- recorded sequences ----------------------------------------------------------------------------


def keeper_of(root: Path) -> Keeper:
    """Open the samples as a trainer process does at its start."""
    make_ring(root / "ring", 2**12)
    return Keeper(TrainerSettings(str(root / "ring"), "model", "state/samples", 10**4, 10**6, 0))


def test_recorded_sequences_are_read(left: Path) -> None:
    samples = load_record(left / "state" / "samples", left / "model").samples
    responses, verified = samples.responses, samples.verified
    versions = samples.legend.versions
    found: list[dict[str, Any]] = [
        {
            "seed": int(responses.seed_N[n]),
            "tokens": responses.tokens(n).tolist(),
            "spans": [
                [int(start), versions[version]]
                for request, start, version in zip(
                    responses.span_request_S,
                    responses.span_start_S,
                    responses.span_version_S,
                    strict=True,
                )
                if request == n
            ],
            "accepted": verified.accepted_V[verified.request_V == n].tolist(),
        }
        for n in range(len(samples))
    ]
    assert sorted(found, key=lambda each: each["seed"]) == EXPECTED["samples"]
    keeper = keeper_of(left)
    assert len(keeper.buffer) == 3, "without the one that another server sent"
    keeper.take()
    report = keeper.report()
    assert report is not None and (report.sequences, report.refused) == (4, 0)
    assert report.tokens_by_version == {"initial": 12, "v2": 36}


def test_segments_of_a_later_format_are_named_and_skipped(left: Path) -> None:
    files = [*(left / "state" / "samples").rglob("*.segment")]
    for path in files:
        with_segment_header(path, format=2, compressed=True)
    says = r"has segment format 2, this version reads 1; .*with the version that wrote it"
    with pytest.raises(StartupError, match=says):
        load_record(files[0], left / "model")
    report = keeper_of(left).report()
    assert report is not None and report.sequences == 0 and "format 2" in report.refusals[0]
    assert all(path.exists() for path in files)


def test_recorded_rollout_is_read(left: Path) -> None:
    samples = load_record(left / "rollout.safetensors", left / "model").samples
    expected = EXPECTED["rollout"]
    assert [samples.responses.tokens(n).tolist() for n in range(3)] == expected["tokens"]
    assert int(samples.verified.accepted_V.sum()) == expected["accepted"] > 0


def test_rollout_of_a_different_target_fails_in_every_reader(left: Path) -> None:
    path, config = left / "rollout.safetensors", left / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": ', '"num_hidden_layers": 1'))
    limits = TargetLimits(vocab_size=2**20, max_position=2**20)
    with pytest.raises(StartupError, match="name the target that was recorded"):
        load_record(path, left / "model")
    with pytest.raises(StartupError, match="name the target that was recorded"):
        read_documents([path], limits, left / "model")


def test_rollout_record_of_a_later_format_is_refused(left: Path) -> None:
    path = left / "rollout.safetensors"
    path.write_bytes(path.read_bytes().replace(b"tlt rollout record 4", b"tlt rollout record 5"))
    with pytest.raises(StartupError, match=r"record 5', this reads '.* record 4'; record the roll"):
        load_record(path, left / "model")


# -- a trainer's checkpoints -----------------------------------------------------------------------


def test_training_resumes_from_a_released_checkpoint(left: Path) -> None:
    expected = EXPECTED["checkpoint"]
    place = left / "state" / "work"
    place.mkdir()
    work = new_work(settings(left), place)
    state = work._build(install(work, Pushable(settings(left)), place / "handed")).state
    assert state.step == expected["step"] and bool((state.square_P == 0.25).all())
    assert torch.equal(state.mean_P, torch.arange(len(state.mean_P)) / 1024)
    weights = state.weight_P.detach().numpy().tobytes()
    assert hashlib.sha256(weights).hexdigest() == expected["weights"]
    work.release()


def test_unknown_checkpoint_is_named_and_training_starts_again(left: Path) -> None:
    [path] = (left / "state" / "checkpoints").glob("*/*.safetensors")
    with safe_open(path, framework="pt") as file:
        layout = json.loads(file.metadata()["layout"]) | {"format": 2}
    save_file(load_file(path), path, metadata={"layout": json.dumps(layout)})
    place = left / "state" / "work"
    place.mkdir()
    work = new_work(settings(left), place)
    trainer = work._build(install(work, Pushable(settings(left)), place / "handed"))
    assert trainer.state.step == 0
    assert f"{path.name}: not a whole checkpoint" in work._facts.checkpoint_error
    assert "unknown field `format`" in work._facts.checkpoint_error
    work.release()


# -- knowledge of steps ----------------------------------------------------------------------------


def knowledge_in(root: Path, **made_by: str) -> tuple[str, Knowledge]:
    """Load the file as an engine of the same origin, except for the parts given."""
    knowledge, file = Knowledge(("eagle",)), root / "state"
    knowledge.weights = WeightsInUse("t", "d")
    knowledge.tables = {"eagle": Calibration.load(root / "drafter")}
    made = EXPECTED["knowledge"]["made_by"] | made_by
    return KnowledgeFile(file, made).load(knowledge), knowledge


def test_released_step_times_are_read(left: Path) -> None:
    expected = EXPECTED["knowledge"]
    found, knowledge = knowledge_in(left)
    assert found == str(left / "state" / "knowledge.json")
    predicted = [knowledge.cost.predict(StepLoad(*load)) for load in expected["loads"]]
    assert predicted == pytest.approx(expected["seconds"], rel=1e-9)
    table = knowledge.tables["eagle"]
    assert isinstance(table, Calibration)
    assert table.acceptance_K[3] == pytest.approx(expected["survival"], rel=1e-6)


def test_step_times_of_another_release_are_named_and_unused(
    left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = left / "state" / "knowledge.json"
    content = json.loads(path.read_text())
    made_by = content["made_by"] | {"version": "99.0"}
    path.write_text(json.dumps({"made_by": made_by, "knowledge": {"compressed": ""}}))
    found, knowledge = knowledge_in(left)
    here = content["made_by"]["version"]
    says = f"is not used, and made again: it was made with version '99.0', now '{here}'"
    assert found == "" and not knowledge.cost.trained and says in capsys.readouterr().err


# -- rollouts and uploads --------------------------------------------------------------------------


def check_choices(results: Any, key: str) -> None:
    fields = (
        "token_ids",
        "text",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "seed",
        "finish_reason",
        "stop_reason",
        "weight_versions",
    )
    expected = EXPECTED[f"rollout {key}"]["results"]
    assert [result["id"] for result in results] == [result["id"] for result in expected]
    for mine, theirs in zip(results, expected, strict=True):
        assert [[choice.get(name) for name in fields] for choice in mine["choices"]] == [
            [choice.get(name) for name in fields] for choice in theirs["choices"]
        ]


def test_released_rollouts_are_fetched_or_resumed_on_restart(left: Path) -> None:
    done, cut = (EXPECTED[f"rollout {key}"]["id"] for key in ("done", "cut"))
    journal = (left / "state" / "rollouts" / f"{cut}.journal").read_bytes()
    written: dict[str, list[int]] = {}
    for record in journal_records(journal):
        for output in record.get("outputs", ()):
            written.setdefault(output["id"], []).extend(output["token_ids"])
    options: dict[str, Any] = {"state_dir": left / "state", "weight_channels": "http"}
    with (
        live_server(left / "bytes", engine={"per_step": 2}, **options) as server,
        Client(server.url) as client,
    ):
        for key, id in (("done", done), ("cut", cut)):
            reply = client.rollout(id).result(60)
            check_choices(json.loads(msgspec.json.encode(reply.results)), key)
        submitted = {request.id: request for request in server.engine.submitted}
        assert submitted and all(submitted[id].generated == written.get(id, []) for id in submitted)
        edited = [r.sampling for r in submitted.values() if r.sampling.bad_words]
        assert len(edited) == 1 and [*edited[0].logit_bias.values()] == [-1.5]
        assert sum(r.sampling.structured_outputs is not None for r in submitted.values()) == 1
        assert not client.weights()["uploads"] and not [*(left / "state/uploads").iterdir()]


def test_journal_records_of_a_later_format_fail_when_fetched(left: Path) -> None:
    id = EXPECTED["rollout done"]["id"]
    path = left / "state" / "rollouts" / f"{id}.journal"
    first, *others = journal_records(path.read_bytes())
    path.write_bytes(journal_of(first, {"type": "later"}, *others))
    with (
        live_server(left / "bytes", state_dir=left / "state") as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match=r"another version of this server .*send its request agai"),
    ):
        client.rollout(id).fetch()
