"""Writes the files that servers and their tools leave, from a tiny random pair: `python -m
tests.released.write DIRECTORY`, from the root of a checkout.

Files of a release stay as they are; a later format gets files next to them. Names are counted up
and times are fixed. The path of the model is `/models/tiny` where a format has an absolute one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from tests.engine.adapters import write_adapter
from tests.engine.pushing import Pushable, perturbed
from tests.engine.test_resumed_training import install, new_work
from tests.engine.tiny import Shape, write_alphabet, write_eagle, write_eagle1, write_target
from tests.frontend.live_server import live_server
from tests.frontend.tiny_model import write_model
from tests.released.frames import journal_of, journal_records, with_header
from tests.unit.test_goodput import PROFILED, cpu_seconds
from tlt_client import Client
from tlt_client.channels.disk import write as write_checkpoint
from tlt_server.bench.recording import recorded
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.drafter.out import new_directory
from tlt_server.engine.knowledge_file import KnowledgeFile, code
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.excerpt import SampleFiles
from tlt_server.samples.ring import make_ring
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.cost import CostModel, Measured
from tlt_server.speculation.knowledge import Knowledge, WeightsInUse
from tlt_server.speculation.recorded import DraftedTrees
from tlt_server.trainer.exporting.export import export
from tlt_server.trainer.exporting.export_layouts import EXPORTS, Card
from tlt_server.trainer.process.main import Keeper
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy
from tlt_server.wire.training import TrainerSettings

SHAPE = Shape(vocab=32, hidden=16, layers=3, head_dim=8, mlp=8, features=(2, 1, 0))
MODEL = "/models/tiny"
FAR_S = 4102444800.0  # the year 2100: no rollout is too old for a test
JOURNALED: list[dict[str, Any]] = [
    {"id": "two", "prompt": "abc", "n": 2, "seed": 9},
    {"id": "stopped", "prompt": "0123", "sampling": {"stop": ["30"], "max_tokens": 30}},
    {
        "id": "edited",
        "token_ids": [3, 4, 5],
        "seed": 2**53,
        "sampling": {
            "max_tokens": 7,
            "logit_bias": {"5": -1.5},
            "bad_words": ["ab"],
            "logprobs": 1,
            "prompt_logprobs": 0,
        },
    },
    {"id": "built", "prompt": "ab", "sampling": {"structured_outputs": {"regex": "[a-j]*"}}},
]


def request(i: int, **fields: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    prompt = [(5 * i + 3 * p) % 31 for p in range(6 + i)]
    given = {"id": f"r{i}", "token_ids": prompt, "sampling": sampling, "seed": 70 + i}
    return GenerateRequest(**given | fields)


def settings_in(root: Path, **fields: Any) -> EngineSettings:
    """Return settings of an engine over `root`, which is the working directory."""
    given: dict[str, Any] = {
        "model": "model",
        "drafter": "drafter",
        "device": "cpu",
        "policy": "off",
        "kv_memory_mb": 1,
        "weight_root": str(root),
        "state_dir": "state",
        "max_loras": 1,
    }
    return EngineSettings(**given | fields)


def write_pair(root: Path) -> None:
    write_target(root / "model", shape=SHAPE)
    write_alphabet(root / "model", SHAPE)
    write_eagle(root / "drafter", draft_vocab=20, shape=SHAPE)
    table = np.random.default_rng(1).random((2, 8, 16)).round(3)
    Calibration(table).save(root / "drafter")


def write_weights_and_samples(root: Path, made: Path, expected: dict[str, Any]) -> None:
    """Push a version of each role and an adapter, and record sequences before and after."""
    ring = made / "ring"
    make_ring(ring, 2**16)
    strategy = Strategy("eagle", 3, 1, 4).name
    settings = settings_in(
        made.parent, sample_ring=ring, policy="fixed", sd_strategy=strategy, max_running=2
    )
    engine = Pushable(settings)
    engine.run(request(0, train=True))
    target = perturbed(root / "model", made / "v2", 1)
    drafter = perturbed(root / "drafter", made / "d1", 2)
    adapter = write_adapter(
        made / "polite",
        root / "model",
        3,
        rank=2,
        targets=("q_proj",),
        base_model_name_or_path="tiny",
    )
    pushes = (
        (target, {"version": "v2"}),
        (drafter, {"version": "d1", "role": "drafter"}),
        (adapter, {"version": "a1", "role": "adapter", "adapter": "polite"}),
    )
    for path, fields in pushes:
        report = engine.push(path.resolve(), **fields)
        assert report.result == "committed", report.error
    asked = [request(1, train=True), request(2, train=True), request(3, lora="polite")]
    said = engine.run(*asked)
    expected["weights"] = {
        "checksums": engine.checksums(),
        "tokens": {id: tokens for id, (tokens, _) in said.items()},
        "logprobs": {id: logprobs for id, (_, logprobs) in said.items()},
    }
    own, other = root / "state" / "samples", made / "other"
    samples = recorded_samples(ring, own)
    engine.run(request(4, train=True))
    expected["samples"] = samples + recorded_samples(ring, other)
    sent = SampleFiles(other, root / "model").read(0, 1).data
    files = SampleFiles(own, root / "model")
    files.inbox.put(sent, files.header())
    current = root / "state" / "weights" / "current.json"
    current.write_text(current.read_text().replace(str((root / "model").resolve()), MODEL))


def recorded_samples(ring: Path, directory: Path) -> list[dict[str, Any]]:
    """Keep the sequences in a ring as a trainer process does, and return their content."""
    keeper = Keeper(TrainerSettings(str(ring), "model", str(directory), 10**4, 10**6, 0))
    keeper.take()
    return [
        {"seed": s.seed, "tokens": s.token_T.tolist(), "spans": s.spans, "accepted": [*s.accepted]}
        for s in (entry.sample for entry in keeper.buffer)
    ]


def write_checkpoint_of_trainer(root: Path, made: Path, expected: dict[str, Any]) -> None:
    """Train nothing: the numbers of a state are what a checkpoint has to keep."""
    (made / "work").mkdir()
    work = new_work(settings_in(root, state_dir=""), made / "work")
    handed = install(work, Pushable(settings_in(root, state_dir="")), made / "work" / "handed-1")
    trainer = work._build(handed)
    trainer.state.step = 5
    trainer.state.mean_P.copy_(torch.arange(len(trainer.state.mean_P)) / 1024)
    trainer.state.square_P.fill_(0.25)
    expected["checkpoint"] = {
        "step": 5,
        "weights": hashlib.sha256(trainer.state.weight_P.detach().numpy().tobytes()).hexdigest(),
    }
    work.release()
    kept = shutil.copytree(made / "checkpoints", root / "state" / "checkpoints")
    next(kept.glob("*/step-0000000000.*")).unlink()  # the one before it is as large
    (candidate := root / "trained").mkdir()
    trainer.network.save(candidate)
    for name in ("config.json", "calibration.json"):
        shutil.copyfile(root / "drafter" / name, candidate / name)


def write_knowledge(root: Path, expected: dict[str, Any]) -> None:
    knowledge = Knowledge(("eagle",))
    table = Calibration.load(root / "drafter")
    knowledge.weights, knowledge.tables = WeightsInUse("t", "d"), {"eagle": table}
    knowledge.cost.profile(Measured(load, cpu_seconds(load)) for load in PROFILED)
    accepted_N = (np.arange(8) < 6).astype(np.int8)
    table.observe(np.full(8, 3, np.int32), np.full(8, -1, np.int32), accepted_N)
    made_by = code() | {"processor": "a processor", "model": "two layers"}
    KnowledgeFile(root / "state", made_by).save(knowledge)
    expected["knowledge"] = {
        "made_by": made_by,
        "loads": PROFILED,
        "seconds": [knowledge.cost.predict(load) for load in PROFILED],
        "survival": float(table.acceptance_K[3]),
    }


def write_exports(root: Path, made: Path, expected: dict[str, Any]) -> None:
    """Export a drafter in every layout, and note what it drafts."""
    eagle1 = write_eagle1(made / "eagle1", root / "model", bias=False, shape=SHAPE)
    expected["drafts"] = {}
    for layout in EXPORTS:
        source = eagle1 if layout == "eagle1" else root / "drafter"
        with new_directory(root / "state" / "exports" / layout) as directory:
            card = Card("v7", "a test")
            export(source, root / "model", layout, directory, base="org/tiny", card=card)
        note_drafts(root, source, layout, expected)
    note_drafts(root, root / "trained", "trained", expected)


def note_drafts(root: Path, drafter: Path, name: str, expected: dict[str, Any]) -> None:
    """Note how many tokens an engine drafts and accepts with this drafter."""
    strategy = Strategy("eagle", 3, 1, 4).name
    engine = Pushable(
        settings_in(root, state_dir="", drafter=drafter, policy="fixed", sd_strategy=strategy)
    )
    said = engine.run(*(request(i) for i in range(3)))
    expected["tokens"] = {id: tokens for id, (tokens, _) in said.items()}
    outputs = [output for id in said for output in engine.said[id]]
    expected["drafts"][name] = [
        sum(output.drafted for output in outputs),
        sum(output.accepted for output in outputs),
    ]


def write_rollout(root: Path, expected: dict[str, Any]) -> None:
    """Record a rollout with times that are computed, not measured."""
    record = recorded(
        settings_in(root, model=Path("model"), state_dir="", max_loras=0, max_running=3),
        [request(i, group_id=f"g{i // 2}", sampling=Sampling(max_tokens=12)) for i in range(3)],
        [parse_policy("off"), parse_policy("fixed:eagle:3x1x4")],
        [DraftedTrees("eagle", 3, 1), DraftedTrees("eagle", 2, 2)],
    )
    cost = CostModel()
    cost.profile(Measured(load, cpu_seconds(load)) for load in PROFILED)
    seconds_C = record.cycles.rows_C.astype(np.float32) / 1024
    runs = tuple(
        msgspec.structs.replace(run, seconds=1.0, known=None) for run in record.header.runs
    )
    header = msgspec.structs.replace(record.header, runs=runs, cost=cost.record(), machine="a CPU")
    cycles = dataclasses.replace(record.cycles, seconds_C=seconds_C)
    dataclasses.replace(record, header=header, cycles=cycles).save(root / "rollout.safetensors")
    expected["rollout"] = {
        "tokens": [record.responses.tokens(n).tolist() for n in range(len(record.responses))],
        "accepted": int(record.verified.accepted_V.sum()),
    }


def write_pushed(root: Path, made: Path, expected: dict[str, Any]) -> None:
    """Write a version as the channel `disk` of a client does, in several files."""
    target = perturbed(root / "model", made / "v9", 9)
    (root / "pushed").mkdir()
    tensors = load_file(target / "model.safetensors")
    expected["pushed"] = write_checkpoint(tensors.items(), root / "pushed", 8192)


def write_rollouts(root: Path, made: Path, expected: dict[str, Any]) -> None:
    """Run two rollouts. The journal of the second loses its end, as a killed server leaves it."""
    engine = {"step_s": 0.001, "per_step": 2}
    state, upload = root / "state", b"half of a file"
    with (
        live_server(
            write_model(made / "bytes"), engine=engine, state_dir=state, weight_channels="http"
        ) as server,
        Client(server.url) as client,
    ):
        client.put_weights("v3", "model.safetensors", upload, start=0, total=2 * len(upload))
        for key in ("done", "cut"):
            rollout = client.generate(
                JOURNALED, sampling={"max_tokens": 9}, detach=True, idempotency_key=key
            )
            reply = msgspec.to_builtins(rollout.result(60))
            path = state / "rollouts" / f"{rollout.id}.journal"
            fixed = {"created_s": FAR_S, "deadline_s": FAR_S + 600, "boot": "", "boot_s": 0.0}
            records = [*journal_records(with_header(path.read_bytes(), model=MODEL, **fixed))]
            records[-1] |= {"at_s": FAR_S, "boot": "", "boot_s": 0.0}
            path.write_bytes(
                journal_of(*records) if key == "done" else journal_of(*records[:3]) + b"\x40\0\0"
            )
            expected[f"rollout {key}"] = {"id": rollout.id, "results": reply["results"]}
        shutil.copytree(state / "uploads", root / "uploads")
    shutil.rmtree(state / "uploads")
    (root / "uploads").rename(state / "uploads")
    (state / "rollouts" / "lock").unlink()


def main(root: Path) -> None:
    numbers, expected = itertools.count(1), dict[str, Any]()
    root.mkdir(parents=True, exist_ok=True)
    root = root.resolve()
    with (
        TemporaryDirectory(dir=root.parent) as name,
        mock.patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"),
    ):
        os.chdir(root)
        (root / "state").mkdir()
        made = Path(name)
        write_pair(root)
        write_weights_and_samples(root, made, expected)
        write_checkpoint_of_trainer(root, made, expected)
        write_knowledge(root, expected)
        write_exports(root, made, expected)
        write_rollout(root, expected)
        write_pushed(root, made, expected)
        write_rollouts(root, made, expected)
    (root / "expected.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(expected), indent=1) + b"\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
