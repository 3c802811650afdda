"""The bench of the frontend's own time, on a few sequences."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tlt_server.bench import frontend
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.fleets import frontend as fleet_frontend
from tlt_server.wire.events import Outputs, decode_event


def test_frontend_bench_measures_every_way_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "SEQUENCES", 3)
    monkeypatch.setattr(frontend, "TOKENS", 128)
    parser, file = argparse.ArgumentParser(), tmp_path / "figures.json"
    BENCHES["frontend"].add("frontend", parser)
    assert frontend.run(parser.parse_args(["--rounds", "1", "--json", str(file)])) == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    sizes = [(way, size) for way, sizes in frontend.PLAN.items() for size in sizes]
    assert [(row["way"], row["tokens"]) for row in rows] == sizes
    assert all(row["tokens_per_cpu_s"] > 0 for row in rows)
    assert [row["over_single"] for row in rows if row["tokens"] == 1] == [1.0] * len(frontend.PLAN)


def test_gateway_bench_takes_tokens_from_servers_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_frontend, "RUNNING", 4)
    monkeypatch.setattr(fleet_frontend, "TOKENS", 64)
    parser, file = argparse.ArgumentParser(), tmp_path / "figures.json"
    BENCHES["frontend"].add("frontend", parser)
    asked = ["--replicas", "2", "--rounds", "1", "--json", str(file)]
    assert fleet_frontend.run(parser.parse_args(asked)) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["tokens_per_s"] > 0 and figures["full_rate"] == 56_000
    expected = 100 * figures["full_rate"] / figures["tokens_per_cpu_s"]
    assert figures["full_rate_percent"] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("size", [1, 64])
def test_measured_events_hold_every_token_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "SEQUENCES", 300)  # more than one event takes
    monkeypatch.setattr(frontend, "TOKENS", 128)
    held = dict.fromkeys(range(300), 0)
    for event, tokens in frontend._events(size):
        message = decode_event(event)
        assert isinstance(message, Outputs)
        for output in message.outputs:
            number = int(output.id.removeprefix("b-").removesuffix(".0"))
            held[number] += len(output.token_ids)
            assert output.finish_reason == ("length" if held[number] == 128 else None)
        assert max(held.values()) == tokens
    assert set(held.values()) == {128}
