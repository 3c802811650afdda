"""The orders of calls that slime and AReaL document, on a real server of one rank and of two, with
rollouts running meanwhile.
"""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Served
from tests.e2e.trainers import Calls, Rollout, check, rolling
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

pytestmark = pytest.mark.fleet

PROMPT = list(b"Compute 3*4+5.")


@pytest.fixture(scope="module", autouse=True)
def iterations(weight_root: Path) -> None:
    for step in range(1, 5):
        perturbed_copy(TARGET, weight_root / f"iter_{step}", step)


def generate(url: str, token_ids: list[int], seed: int, tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": token_ids,
        "return_logprob": True,
        "stream": False,
        "rid": f"s{seed}-{len(token_ids)}",
        "sampling_params": {
            "max_new_tokens": tokens,
            "sampling_seed": seed,
            "ignore_eos": True,
            "temperature": 1.0,
            "top_k": -1,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    assert [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]] == reply[
        "output_ids"
    ]
    return reply


def resumed(url: str, seed: int, tokens: int = 300) -> Rollout:
    """Ask as these trainers do: send an aborted request again with its tokens until it is whole."""
    output: list[int] = []
    spans: list[dict[str, Any]] = []
    aborted = False
    while True:
        reply = generate(url, PROMPT + output, seed, tokens - len(output))
        for span in reply["meta_info"]["weight_versions"]:
            moved = {
                "version": span["version"],
                "start": span["start"] + len(output),
                "end": span["end"] + len(output),
            }
            if spans and spans[-1]["version"] == moved["version"]:
                moved["start"] = spans.pop()["start"]
            spans.append(moved)
        output += reply["output_ids"]
        kind = reply["meta_info"]["finish_reason"]["type"]
        if kind != "abort":
            assert kind == "length" and len(output) == tokens
            return Rollout(output, spans, aborted)
        aborted = True


def test_slime_call_order_works(pushable: ServerProcess, served: Served) -> None:
    """Pause, flush, update under a name, continue. What was aborted goes on where it was."""
    calls = Calls(pushable.url)
    info = calls.get("/server_info")
    assert (info["tp_size"], info["dp_size"], info["weight_version"]) == (*served, "initial")
    assert calls.get("/health_generate") == {"status": "ok"}
    with rolling(lambda i: resumed(pushable.url, i)) as rollouts:
        calls.await_tokens()
        calls.post("/pause_generation", {"mode": "abort"})
        time.sleep(0.2)
        calls.post("/continue_generation", {})
        calls.await_tokens()
        for step in (1, 2):
            mode = "in_place" if step == 1 else "retract"
            calls.post("/pause_generation", {"mode": mode})
            flushed = httpx.get(f"{pushable.url}/flush_cache", timeout=30).status_code
            assert flushed == (200 if mode == "retract" else 400), (
                "only what is paused in place holds KV"
            )
            pushed = calls.post(
                "/update_weights_from_disk",
                {"model_path": f"iter_{step}", "weight_version": str(step)},
            )
            assert pushed["success"] and pushed["num_paused_requests"] > 0
            calls.post("/continue_generation", {})
            assert calls.get("/get_weight_version") == {"weight_version": str(step)}
            calls.await_tokens()
    check(rollouts, ["initial", "1", "2"])
    assert any(rollout.aborted for rollout in rollouts)
    assert calls.get("/flush_cache")["status"] == "ok"


@pytest.mark.long
def test_resent_request_gets_the_same_output(pushable: ServerProcess) -> None:
    calls = Calls(pushable.url)
    whole = resumed(pushable.url, 77)
    assert not whole.aborted
    aborted: list[Rollout] = []
    for _ in range(20):
        with rolling(lambda i: resumed(pushable.url, 77), workers=1) as rollouts:
            time.sleep(0.1)
            calls.post("/pause_generation", {})
            calls.post("/continue_generation", {})
        assert all(rollout.token_ids == whole.token_ids for rollout in rollouts)
        aborted += [rollout for rollout in rollouts if rollout.aborted]
        if aborted:
            return
    pytest.fail("no request was aborted")


def test_areal_call_order_works(pushable: ServerProcess) -> None:
    """Pause, update from disk with what runs aborted, continue; then the same in a session, named
    at its end.
    """
    calls = Calls(pushable.url)
    versions = [calls.get("/get_model_info")["weight_version"]]
    with rolling(lambda i: resumed(pushable.url, 1000 + i)) as rollouts:
        calls.await_tokens()
        calls.post("/pause_generation", {})
        versions.append(
            calls.post(
                "/update_weights_from_disk", {"model_path": "iter_3", "abort_all_requests": True}
            )["new_version"]
        )
        calls.post("/continue_generation", {})
        calls.await_tokens()
        calls.post("/begin_weight_update", {"selector": "target"})
        calls.post("/update_weights_from_disk", {"model_path": "iter_4", "flush_cache": True})
        calls.post("/update_weight_version", {"new_version": "four"})
        assert calls.get("/get_weight_version")["weight_version"] == versions[-1], (
            "not before the end of the session"
        )
        assert calls.post("/end_weight_update")["new_version"] == "four"
        calls.await_tokens()
    check(rollouts, [*versions, "four"])


def test_memory_is_released_and_resumed_in_sglangs_form(pushable: ServerProcess) -> None:
    calls = Calls(pushable.url)
    before = resumed(pushable.url, 3)
    sums = calls.post("/weights_checker", {"action": "snapshot"})["checksums"]
    calls.post("/release_memory_occupation", {})
    assert httpx.post(f"{pushable.url}/generate", json={"text": "a"}, timeout=30).status_code == 503
    calls.post("/resume_memory_occupation", {"tags": ["weights"]})
    calls.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert calls.post("/weights_checker", {"action": "compare"})["success"]
    assert any(name.startswith("draft.") for name in sums)
    assert resumed(pushable.url, 3).token_ids == before.token_ids
