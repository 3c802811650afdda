"""Schedules of faults over a simulated fleet break no rule, and each planted fault is found."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import pytest

from tlt_server.bench import fleet
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.fleets.faults import KINDS, PHASES, FaultSchedule, schedules
from tlt_server.bench.fleets.machine import Machine, Wire
from tlt_server.frontend.link import fan_out, merging
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.submission import Route
from tlt_server.wire.events import Outputs

pytestmark = pytest.mark.slow  # hundreds of schedules

PARTS, EACH = 6, 50  # tests, and the schedules of each


def first_wrong(most: int = 1000) -> FaultSchedule | None:
    return next((judged for judged in schedules(range(most)) if judged.wrong), None)


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules_of_faults_break_no_rule(part: int) -> None:
    covered = Counter[str]()
    for judged in schedules(range(part * EACH, (part + 1) * EACH)):
        assert judged.wrong == [], judged.seed
        assert 3 <= len(judged.machines) <= 64 and judged.faults.total() >= 5
        covered.update(kind for kind, _ in judged.faults.elements())
    assert covered.keys() == KINDS.keys()


def test_schedules_are_functions_of_their_seeds() -> None:
    once, again = ([*schedules(range(3))] for _ in range(2))
    assert [each.faults for each in once] == [each.faults for each in again]


def test_phases_of_a_push_are_all_reached() -> None:
    phases = Counter[str]()
    for judged in schedules(range(2000, 2040)):
        phases.update(phase for _, phase in judged.faults.elements())
    assert phases.keys() == {*PHASES}


def test_bench_counts_faults_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    BENCHES["fleet"].add("fleet", parser)
    assert fleet.run(parser.parse_args(["--faults", "2"])) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["schedules"] == 2 and figures["violations"] == 0
    assert sum(row[phase] for row in figures["rows"] for phase in PHASES) == 10


# negative controls


def test_stale_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "_is_over", lambda self, attach: False)
    found = first_wrong()
    assert found is not None and any("order of epoch" in each for each in found.wrong)


def test_late_output_of_the_replica_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "sent_as", property(lambda route: route.request.id))
    found = first_wrong()
    assert found is not None and any("ended with" in each for each in found.wrong)


def test_joiner_that_is_routed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up = FanOut.catch_up

    async def skipped(self: FanOut, replica: Any) -> None:
        if not self._file.record.roles:
            await catch_up(self, replica)

    monkeypatch.setattr(FanOut, "catch_up", skipped)
    found = first_wrong()
    assert found is not None and any("tokens of v" in each for each in found.wrong)


def test_skipped_digest_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = fan_out._lacks

    def without_content(answer: Any, record: Any) -> str:
        why = lacks(answer, record)
        return "" if "other content" in why else why

    monkeypatch.setattr(merging, "_difference", lambda *reports: "")
    monkeypatch.setattr(fan_out, "_lacks", without_content)
    assert first_wrong() is not None


def test_repeated_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = Wire.send, Counter[str]()

    def twice(self: Wire, event: Any) -> None:
        send(self, event)
        if isinstance(event, Outputs):
            sent["outputs"] += 1
            if sent["outputs"] % 50 == 0:
                send(self, event)

    monkeypatch.setattr(Wire, "send", twice)
    found = first_wrong()
    assert found is not None and any("other tokens" in each for each in found.wrong)


def test_lost_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of what is left open at the end can fail, too."""
    monkeypatch.setattr(FaultSchedule, "_open", lambda self: iter(["something"]))
    found = first_wrong(1)
    assert found is not None and "something" in found.wrong[0]
