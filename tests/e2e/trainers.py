"""A trainer's side for the end-to-end tests of the dialects: checkpoints to push, and rollouts that
run all the while.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from tests.waiting import until

Spans = list[dict[str, Any]]


class Rollout(NamedTuple):
    """One request from its first part to its last, which an abort may have ended."""

    token_ids: list[int]
    spans: Spans
    aborted: bool


class Calls:
    """A client that expects every call to succeed."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: object = None) -> Any:
        response = self._http.post(path, json=body) if body is not None else self._http.post(path)
        assert response.status_code == 200, (path, response.text)
        return response.json() if response.content else None

    def get(self, path: str) -> Any:
        response = self._http.get(path)
        assert response.status_code == 200, (path, response.text)
        return response.json()

    def await_tokens(self, more: int = 60) -> None:
        """Wait until the running rollouts have `more` further tokens."""
        least = self._tokens() + more
        until(lambda: self._tokens() >= least)

    def _tokens(self) -> float:
        lines = self._http.get("/metrics").text.splitlines()
        return float(
            next(line for line in lines if line.startswith("tlt_generated_tokens_total ")).split()[
                1
            ]
        )


@contextmanager
def rolling(ask: Callable[[int], Rollout | None], workers: int = 3) -> Iterator[list[Rollout]]:
    """`ask(i)` one rollout after another in each worker; None when it was refused. At the end none
    may be missing.
    """
    done: list[Rollout] = []
    stop = threading.Event()

    def work(worker: int) -> None:
        i = worker
        while not stop.is_set():
            rollout = ask(i)
            if rollout is not None:
                done.append(rollout)
            else:
                stop.wait(0.02)
            i += workers

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, worker) for worker in range(workers)]
        try:
            yield done
        finally:
            stop.set()
        for worker in running:
            worker.result(120)


def completion(url: str, prompt: list[int], seed: int) -> Rollout | None:
    """Ask as trainers that drive vLLM do: token ids in and out; None while requests are refused."""
    sampling = {"max_tokens": 200, "seed": seed, "ignore_eos": True, "temperature": 1.0}
    body = {"token_ids": prompt, "sampling_params": sampling}
    response = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120)
    if response.status_code == 503:
        return None
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return Rollout(
        choice["token_ids"], choice["weight_versions"], choice["finish_reason"] == "abort"
    )


def check_order(rollouts: list[Rollout], versions: list[str]) -> None:
    """Every token has exactly one version, in the order in which they went live."""
    assert rollouts
    for rollout in rollouts:
        starts = [span["start"] for span in rollout.spans]
        ends = [span["end"] for span in rollout.spans]
        assert [*starts, len(rollout.token_ids)] == [0, *ends]
        places = [versions.index(span["version"]) for span in rollout.spans]
        assert places == sorted(set(places)), rollout.spans


def check(rollouts: list[Rollout], versions: list[str]) -> None:
    """Check the order, and that every version made some tokens."""
    check_order(rollouts, versions)
    assert {span["version"] for rollout in rollouts for span in rollout.spans} == set(versions)
