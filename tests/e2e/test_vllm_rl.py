"""The orders of calls that TRL's asynchronous trainer and prime-rl document, on a real server of
one rank and of two, with rollouts running meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import DRAFTING
from tests.e2e.trainers import Calls, Rollout, check, rolling
from tlt_client import Client
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

pytestmark = pytest.mark.long

PROMPT = list(b"Compute 3*4+5.")


@pytest.fixture(scope="module")
def pushable(
    of_width: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, Path]]:
    root = tmp_path_factory.mktemp("weights")
    for step in range(1, 7):
        perturbed_copy(TARGET, root / f"step_{step}", step)
        if step < 6:
            (root / f"step_{step}" / "STABLE").touch()
    flags = (
        *("--weight-root", str(root), "--weight-marker", "STABLE", "--policy", "fixed"),
        *("--sd-strategy", "eagle:4x2x8"),
    )
    with ServerProcess(*DRAFTING, *of_width, *flags) as server:
        yield server, root


def completion(url: str, i: int) -> Rollout | None:
    """Ask as TRL and prime-rl do: token ids in and out; None while new requests are refused."""
    body = {
        "request_id": f"r{i}",
        "token_ids": PROMPT,
        "cache_salt": "x",
        "sampling_params": {
            "max_tokens": 300,
            "seed": i,
            "logprobs": 0,
            "ignore_eos": True,
            "temperature": 1.0,
        },
    }
    response = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120)
    if response.status_code == 503:
        return None
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    return Rollout(
        choice["token_ids"], choice["weight_versions"], choice["finish_reason"] == "abort"
    )


def sums(url: str) -> dict[str, str]:
    with Client(url, timeout_s=60) as client:
        return dict(client.weight_checksums())


def test_the_order_of_an_asynchronous_trainer(pushable: tuple[ServerProcess, Path]) -> None:
    """TRL: look, then for each step pause, begin, update, finish, resume. Frozen requests go on
    under the new version.
    """
    server, _ = pushable
    calls = Calls(server.url)
    info = calls.get("/server_info?config_format=json")
    assert info["vllm_config"]["weight_transfer_config"]
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert calls.get("/get_world_size") == {"world_size": 1}
    seen = [sums(server.url)]
    with rolling(lambda i: completion(server.url, i)) as rollouts:
        calls.await_tokens()
        for step in (1, 2):
            calls.post("/pause?mode=keep")
            calls.post("/start_weight_update", {"is_checkpoint_format": True})
            assert (
                calls.post("/update_weights", {"weight_dir": f"step_{step}"})["state"] == "staged"
            )
            assert calls.get("/weight_info")["weight_version"] != str(step), (
                "not before the end of the session"
            )
            finished = calls.post("/finish_weight_update", {"weight_version": str(step)})
            assert finished == calls.post("/finish_weight_update", {"weight_version": str(step)}), (
                "a retried finish"
            )
            assert finished["state"] == "committed" and finished["version"] == str(step)
            calls.post("/resume")
            seen.append(sums(server.url))
            calls.await_tokens()
    assert len({tuple(sorted(one.items())) for one in seen}) == 3, "every push changes the weights"
    check(rollouts, ["initial", "1", "2"])
    assert not any(rollout.aborted for rollout in rollouts)
    assert any(len(rollout.spans) > 1 for rollout in rollouts)


def test_the_order_of_prime_rl(pushable: tuple[ServerProcess, Path]) -> None:
    """Pause (which ends what runs), update from a directory with its marker, resume; a directory
    that is still written is refused.
    """
    server, root = pushable
    calls = Calls(server.url)
    live = calls.get("/weight_info")["weight_version"]
    versions = [live]
    with rolling(lambda i: completion(server.url, 10_000 + i)) as rollouts:
        calls.await_tokens()
        for step in (3, 4):
            calls.post("/pause")
            assert httpx.get(f"{server.url}/health").status_code == 200
            pushed = calls.post(
                "/update_weights", {"weight_dir": str(root / f"step_{step}"), "lora_name": None}
            )
            assert pushed["state"] == "committed"
            versions.append(pushed["weight_version"])
            assert (
                calls.post("/update_weights", {"weight_dir": str(root / f"step_{step}")})["state"]
                == "unchanged"
            ), "a retried push"
            calls.post("/resume")
            calls.await_tokens()
        refused = httpx.post(
            f"{server.url}/update_weights", json={"weight_dir": str(root / "step_6")}, timeout=30
        )
        assert refused.status_code == 422 and "STABLE" in refused.text
    check(rollouts, versions)
    assert any(rollout.aborted for rollout in rollouts)
    assert all(len(rollout.spans) <= 1 for rollout in rollouts)


def test_trainer_on_the_same_device_uses_memory_between_steps(
    pushable: tuple[ServerProcess, Path],
) -> None:
    """Sleep with a request running, wake the weights, push, wake the KV: the request goes on, the
    drafter is back.
    """
    server, _ = pushable
    calls = Calls(server.url)
    live = calls.get("/weight_info")["weight_version"]
    with rolling(lambda i: completion(server.url, 20_000 + i)) as rollouts:
        calls.await_tokens()
        before = sums(server.url)
        calls.post("/sleep?level=2&mode=keep")
        assert calls.get("/is_sleeping")["is_sleeping"] and completion(server.url, 99_999) is None
        asleep = httpx.post(
            f"{server.url}/update_weights", json={"weight_dir": "step_5"}, timeout=30
        )
        assert asleep.status_code == 409 and "/engine/wake" in asleep.text
        calls.post("/wake_up?tags=weights")
        assert sums(server.url) == before
        assert (
            calls.post("/update_weights", {"weight_dir": "step_5", "weight_version": "five"})[
                "state"
            ]
            == "committed"
        )
        calls.post("/wake_up?tags=kv_cache")
        assert not calls.get("/is_sleeping")["is_sleeping"]
        calls.await_tokens()
    check(rollouts, [live, "five"])
    said = calls.post(
        "/generate",
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}},
    )
    assert said["meta_info"]["spec_verify_ct"] > 0
    assert said["meta_info"]["spec_accept_token_num"] > 0
