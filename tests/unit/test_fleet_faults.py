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
from tlt_server.bench.fleets.wire import Wire
from tlt_server.frontend.link import catching_up, fan_out, merging
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.link.sequences import OpenSequences
from tlt_server.frontend.link.submission import Route
from tlt_server.frontend.link.suspects import Suspects
from tlt_server.frontend.rpc.link import Attachments
from tlt_server.wire.commands import AbortWeights
from tlt_server.wire.events import Outputs
from tlt_server.wire.link import decode_link_events
from tlt_server.wire.records import encode

pytestmark = pytest.mark.slow  # hundreds of schedules

PARTS, EACH = 6, 50  # tests, and the schedules of each


def finds(said: str, most: int = 1000) -> bool:
    """Return True once a schedule's check says this."""
    return any(said in each for judged in schedules(range(most)) for each in judged.wrong)


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules_of_faults_break_no_rule(part: int) -> None:
    covered = Counter[str]()
    for judged in schedules(range(part * EACH, (part + 1) * EACH)):
        assert judged.wrong == [], judged.seed
        assert 3 <= judged.size <= 64 and judged.faults.total() >= 5
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
    monkeypatch.setattr(Attachments, "_check", lambda self, attach: None)
    assert finds("order of epoch")


def test_late_output_of_the_replica_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "sent_as", property(lambda route: route.request.id))
    assert finds("ended with")


def test_joiner_that_is_routed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up = FanOut.catch_up

    async def skipped(self: FanOut, replica: Any) -> None:
        if not self._file.record.roles:
            await catch_up(self, replica)

    monkeypatch.setattr(FanOut, "catch_up", skipped)
    assert finds("tokens of v")


def test_skipped_digest_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = fan_out._lacks

    def without_content(answer: Any, record: Any) -> str:
        why = lacks(answer, record)
        return "" if "other content" in why else why

    monkeypatch.setattr(merging, "_difference", lambda *reports: "")
    monkeypatch.setattr(fan_out, "_lacks", without_content)
    assert finds(" has ")


def test_repeated_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write, sent = Wire._write, Counter[str]()

    async def twice(self: Wire, message: bytes) -> None:
        await write(self, message)
        events = [each for each in decode_link_events(message) if isinstance(each, Outputs)]
        sent["outputs"] += bool(events)
        if events and sent["outputs"] % 50 == 0:
            await write(self, encode(events))

    monkeypatch.setattr(Wire, "_write", twice)
    assert finds("other tokens")


def test_request_that_is_refused_without_cause_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = Suspects.crashed

    def at_once(self: Suspects, *how: Any) -> None:
        crashed(self, *how)
        for suspect in self._suspects.values():
            suspect.refused = True

    monkeypatch.setattr(Suspects, "crashed", at_once)
    assert finds("ended with poisoned")


def test_chosen_move_of_older_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetOperations, "may_move", lambda self, route: True)
    assert finds("moved with tokens of")


def test_output_in_the_turn_of_a_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of one turn arrive together, also those that follow what made the gateway cut."""
    let_go = OpenSequences._let_go

    def as_before(self: OpenSequences, replica: Any, error: Any) -> int:
        hops = {id: route.hops for id, route in self.routes.items()}
        left = let_go(self, replica, error)
        for id, route in self.routes.items():
            route.hops = hops.get(id, route.hops)
        return left

    monkeypatch.setattr(OpenSequences, "_let_go", as_before)
    assert finds("")


def test_replica_that_stays_asleep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleeps_on(self: Fleet) -> None:
        """Wake none."""

    monkeypatch.setattr(Fleet, "wake", sleeps_on)
    assert finds("while it sleeps")


def test_replica_that_is_stopped_while_it_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: FleetOperations, member: Any) -> None:
        """Wait for nothing."""

    monkeypatch.setattr(FleetOperations, "_emptied", at_once)
    assert finds("while it ran requests")


def test_push_that_stays_staged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    owed = catching_up.owed

    def without_aborts(*how: Any) -> list[Any]:
        return [step for step in owed(*how) if not isinstance(step, AbortWeights)]

    monkeypatch.setattr(catching_up, "owed", without_aborts)
    assert finds("still has a push")


def test_lost_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of what is left open at the end can fail, too."""
    monkeypatch.setattr(FaultSchedule, "_open", lambda self: iter(["something"]))
    assert finds("something", 1)
