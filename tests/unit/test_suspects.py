"""Requests that are refused after crashes, and those that are not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tlt_server.frontend.link import suspects as module
from tlt_server.frontend.link.suspects import Suspects
from tlt_server.wire.kept import StartedFile, read_started
from tlt_server.wire.records import GenerateRequest, Grammar, Sampling


def request(prompt: int = 1, id: str = "a", **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        id=id,
        token_ids=[prompt, 2, 3],
        sampling=msgspec.structs.replace(Sampling(), **sampling),
        seed=hash(id) % 1000,
    )


def crash(suspects: Suspects, running: list[tuple[GenerateRequest, int]], now_s: float) -> None:
    """The last one is on trial."""
    suspects.crashed(running, running[-1][0], now_s)


def refused(suspects: Suspects, requests: list[GenerateRequest], now_s: float) -> list[str]:
    kinds = suspects.sort(requests, now_s)
    assert sorted(r.id for kind in kinds for r in kind) == sorted(r.id for r in requests)
    return [r.id for r in kinds.refused]


def test_two_crashes_refuse_every_copy_of_a_request() -> None:
    suspects = Suspects()
    crash(suspects, [(request(), 5), (request(2), 5)], 0.0)
    assert not refused(suspects, [request(), request(2)], 0.0)
    crash(suspects, [(request(id="again"), 5)], 1.0)
    asked = [request(id="x"), request(2, "y"), request(id="z", max_tokens=9), request(3, "w")]
    assert refused(suspects, asked, 1.0) == ["x"], (
        "another prompt or other sampling is another request"
    )


def test_suspect_structures_are_matched_by_form_and_key() -> None:
    def structured(text: str, prompt: int = 1, kind: str = "regex") -> GenerateRequest:
        grammar = msgspec.convert({"kind": kind, "text": text}, Grammar)
        return request(prompt, structured_outputs=grammar)

    suspects = Suspects()
    killer = structured("(a?){5000}a{5000}")
    for now_s in (0.0, 1.0):
        crash(suspects, [(killer, 5)], now_s)
    again = [structured("(b?){4001} b{4001}", 7), killer]
    other = [
        structured("(a?){5000}"),
        structured("(a?){5000}a{5000}", kind="lark"),
        request(),
        msgspec.structs.replace(killer, owner="another"),
    ]
    found = suspects.sort([*again, *other], 1.0)
    assert found.refused == again and found.free == other


def test_request_crashing_at_a_different_token_stays_allowed() -> None:
    suspects = Suspects()
    for time_s, tokens in enumerate((0, 3, 100, 101, 101 - module.UNHEARD - 1, 90)):
        crash(suspects, [(request(), tokens)], float(time_s))
        assert not refused(suspects, [request()], float(time_s))
    crash(suspects, [(request(), 90 - module.UNHEARD)], 6.0)
    assert refused(suspects, [request()], 6.0)


def test_choices_of_one_prompt_count_at_their_furthest_token() -> None:
    suspects = Suspects()
    crash(suspects, [(request(id="1"), 3), (request(id="2"), 8)], 0.0)
    assert not refused(suspects, [request()], 0.0), "one crash, however many choices"
    crash(suspects, [(request(id="1"), 9), (request(id="2"), 1)], 1.0)
    assert not refused(suspects, [request()], 1.0)


def test_refused_request_stays_refused_for_a_bounded_time() -> None:
    suspects = Suspects()
    for time_s in range(2):
        crash(suspects, [(request(), 0)], float(time_s))
    crash(suspects, [(request(), 100)], 2.0)  # it was running already when it was found out
    assert refused(suspects, [request()], 2.0 + module.KEPT_S - 1) == ["a"]
    assert not refused(suspects, [request()], 2.0 + module.KEPT_S)
    crash(suspects, [(request(), 0)], 2.0 + module.KEPT_S)
    assert not refused(suspects, [request()], 2.0 + module.KEPT_S), (
        "what was forgotten counts as a first crash"
    )


def test_request_that_completes_is_cleared_of_suspicion() -> None:
    suspects = Suspects()
    crash(suspects, [(request(), 5)], 0.0)
    assert [r.id for r in suspects.sort([request(), request(2, "b")], 0.0).suspect] == ["a"]
    suspects.completed(request(id="other seed"))
    assert suspects.sort([request()], 0.0).free
    crash(suspects, [(request(), 5)], 1.0)
    assert not refused(suspects, [request()], 1.0)


def test_number_of_remembered_suspects_is_bounded() -> None:
    suspects = Suspects()
    crash(suspects, [(request(0), 0)], 0.0)
    crash(suspects, [(request(i), 0) for i in range(1, module.KEPT + 1)], 1.0)
    crash(suspects, [(request(0), 0), (request(module.KEPT), 0)], 2.0)
    assert len(suspects._suspects) == module.KEPT
    assert refused(suspects, [request(0, "0"), request(module.KEPT, "last")], 2.0) == ["last"], (
        "the oldest was forgotten"
    )


def test_started_requests_are_read_from_the_last_note(tmp_path: Path) -> None:
    assert read_started(tmp_path) == set()
    started = StartedFile(tmp_path)
    assert read_started(tmp_path) == set()
    started.note([f"{i}-0.0" for i in range(500)])
    started.note(["7-0.0", "8-1.3"])
    assert read_started(tmp_path) == {"7-0.0", "8-1.3"}
    assert read_started(tmp_path) == {"7-0.0", "8-1.3"}
    assert not (tmp_path / "started").stat().st_mode & 0o077
    StartedFile(tmp_path)
    assert read_started(tmp_path) == set(), "a new epoch has started nothing"


def test_requests_next_to_a_crashing_one_stay_allowed() -> None:
    suspects = Suspects()
    killer = request(1, "killer")
    others = [request(i, str(i)) for i in range(2, 6)]
    everyone = [(r, 7) for r in (*others, killer)]
    for time_s in range(3):
        suspects.crashed(everyone, None, float(time_s))  # all at once, at the same place each time
        assert not refused(suspects, [*others, killer], float(time_s))
    assert suspects.trial(killer) == 7 and suspects.trial(request(9)) == 0
    suspects.crashed(everyone, killer, 3.0)
    assert refused(suspects, [*others, killer], 3.0) == ["killer"]


def test_first_trial_of_a_suspect_is_one_step() -> None:
    suspects = Suspects()
    suspects.crashed([(request(), 500)], None, 0.0)
    assert suspects.trial(request()) == 0
