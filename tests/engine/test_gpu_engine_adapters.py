"""LoRA adapters on the interpreter: the tokens of the CPU engine, the same bits under every
strategy and in any company, and changes of adapters next to steps in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.engine.adapters import write_adapter
from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    assert_agree,
    assert_reports_agree,
    bits,
    checkpoints,
    choose,
    drafting,
    on_cpu,
    request,
)
from tests.engine.pushing import Pushable
from tests.engine.tiny import SMALLEST, write_alphabet
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import GenerateRequest, Grammar, Strategy

GRAMMAR = Grammar(kind="regex", text="(ab|cd){2,4}[0-9]*")
TREE = Strategy("eagle", 3, 2, 6)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    root = tmp_path_factory.mktemp("smallest")
    with patched_once():
        served = replace(checkpoints(root), max_rows=12, max_loras=2, max_lora_rank=8)
        write_alphabet(root / "base", SMALLEST)
        for seed, name in enumerate(("a", "a2")):
            write_adapter(root / name, root / "base", seed)
        write_adapter(root / "b", root / "base", 5, rank=3, targets=("k_proj", "up_proj"))
        yield served


def adapted(i: int, lora: str, *args: int, **sampling: object) -> GenerateRequest:
    return msgspec.structs.replace(request(i, *args, **sampling), lora=lora)


def asked() -> list[GenerateRequest]:
    return [
        adapted(0, "a", 6, max_tokens=5),
        adapted(1, "", 4, max_tokens=4),
        adapted(2, "b", 5, max_tokens=5, temperature=0.0, presence_penalty=0.4),
        adapted(3, "a", 15, max_tokens=4, logprobs=2, raw_logprobs=True),
        adapted(4, "b", 5, max_tokens=4, structured_outputs=GRAMMAR, ignore_eos=False),
    ]


IDS = [r.id for r in asked()]


def load(engine: Pushable, root: Path, name: str, path: str, **fields: object) -> None:
    report = engine.push(root / path, role="adapter", adapter=name, **fields)
    assert report.result == "committed", report.error


def loaded(settings: EngineSettings) -> Pushable:
    engine = Pushable(settings)
    for name in ("a", "b"):
        load(engine, Path(settings.weight_root), name, name)
    return engine


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    cpu = loaded(on_cpu(settings))
    cpu.run(*asked())
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return loaded(drafting(settings, "eagle", 3, 2, 6))


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> dict[str, tuple[object, ...]]:
    choose(engine, None)
    engine.run(*asked())
    return bits(engine, IDS)


def test_the_tokens_are_those_of_the_cpu_engine(
    engine: Pushable, plain: dict[str, tuple[object, ...]], twin: Pushable
) -> None:
    assert_agree(engine, twin, IDS)
    assert_reports_agree(engine, twin, "r3")


def test_speculation_changes_no_bit(engine: Pushable, plain: dict[str, tuple[object, ...]]) -> None:
    choose(engine, TREE)
    engine.run(*asked())
    assert bits(engine, IDS) == plain
    assert sum(output.drafted for id in IDS for output in engine.said[id]) > 0


@pytest.mark.long
def test_bits_depend_on_no_company(
    engine: Pushable, settings: EngineSettings, plain: dict[str, tuple[object, ...]]
) -> None:
    choose(engine, None)
    without = Pushable(replace(settings, max_loras=0))
    for one in asked():
        alone = engine if one.lora else without
        alone.run(one)
        assert bits(alone, [one.id]) == {one.id: plain[one.id]}


@pytest.mark.long
def test_a_new_version_takes_the_slot_after_the_steps_in_flight(
    engine: Pushable, twin: Pushable, settings: EngineSettings
) -> None:
    choose(engine, None)
    root, one = Path(settings.weight_root), adapted(0, "a", 6, max_tokens=12)
    for each in (engine, twin):
        each.said.clear()
        each.submit(one)
        each.step(5)
        load(each, root, "a", "a2")
        each.finish()
    spans = engine.spans("r0")
    assert len(spans) == 2 and 0 < spans[1][1] < 12
    twin.said.clear()
    for each in (engine, twin):
        each.run(one)
    assert_agree(engine, twin, ["r0"])
    for each in (engine, twin):
        load(each, root, "a", "a")
