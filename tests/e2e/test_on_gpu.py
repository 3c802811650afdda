"""`tlt serve --device cuda` with the shipped pair, over HTTP: exact, pushed into, scraped, stopped,
short of memory, hit by an error.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import PAIR
from tests.e2e.test_crashes import outlive_a_gpus_error
from tests.e2e.test_exactness import batch, generate, said
from tests.e2e.test_lifecycle import starting_fails
from tlt_client import Client
from tlt_client.wire import Choice, ItemResult, Token
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FEW = ("--max-running", "16", "--kv-memory-mb", "256")  # so that it starts soon
READY_S = 180.0


@pytest.fixture(scope="module")
def pushable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights a little off, in a root of their own."""
    return perturbed_copy(TARGET, tmp_path_factory.mktemp("root") / "v1")


@pytest.fixture(scope="module")
def gpu_server(pushable: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--device", "cuda", *PAIR, *FEW, "--weight-root", str(pushable.parent)
    ) as running:
        yield running
        assert running.stop() == 0, "SIGTERM ends it in good order"


@pytest.fixture
def client(gpu_server: ServerProcess) -> Iterator[Client]:
    with Client(gpu_server.url, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def plain(gpu_server: ServerProcess) -> list[Any]:
    """Sixteen prompts of every kind of sampling, without speculation."""
    with Client(gpu_server.url, timeout_s=120) as client:
        client.set_strategy("off")
        return generate(client, batch(16, n=1))


def samples(client: Client, name: str) -> dict[str, float]:
    """Labels -> value."""
    lines = [
        re.fullmatch(rf"{name}(\{{.*\}})? (\S+)", line) for line in client.metrics().splitlines()
    ]
    return {found[1] or "": float(found[2]) for found in lines if found}


def test_server_info_names_the_gpu(client: Client) -> None:
    info = client.server_info()
    engine = info["engine"]
    assert info["num_gpus"] == info["tp_size"] == 1
    assert engine["device"] == "cuda" and engine["drafter"] == "eagle+history"
    assert engine["numerics"].startswith("strict")
    assert (engine["graphs"], engine["dtype"], bool(engine["gpu"])) == (True, "bfloat16", True)


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [("fixed", "eagle:7x4x16"), ("fixed", "history:8x2x9"), ("beg", None), ("goodput", None)],
)
def test_speculation_changes_neither_a_token_nor_a_logprob(
    client: Client, plain: list[Any], policy: str, strategy: str | None
) -> None:
    client.set_strategy(policy, strategy)
    reply = client.generate(batch(16, n=1), sampling={"max_tokens": 150})
    assert [said(result.choices) for result in reply.results] == plain
    if policy == "fixed":
        assert sum(result.choices[0].sd.accepted for result in reply.results) > 0


def test_alternatives_change_no_bit_and_allow_speculation(client: Client, plain: list[Any]) -> None:
    client.set_strategy("fixed", "eagle:7x4x16")
    reply = client.generate(
        batch(16, n=1), sampling={"max_tokens": 150, "logprobs": 2, "raw_logprobs": True}
    )
    assert sum(result.choices[0].sd.accepted for result in reply.results) > 0
    for result, [before] in zip(reply.results, plain, strict=True):
        [choice] = result.choices
        assert (choice.token_ids, choice.logprobs) == before[1:3]
        assert choice.raw_logprobs is not None and choice.top_logprobs is not None
        assert len(choice.raw_logprobs) == len(choice.top_logprobs) == len(choice.token_ids)


def test_a_stream_on_the_gpu_equals_the_whole_reply(client: Client, plain: list[Any]) -> None:
    client.set_strategy("fixed", "eagle:7x4x16")
    parts: list[list[int]] = []
    choices: list[Choice] = []
    for event in client.stream(batch(1, n=1), sampling={"max_tokens": 150}):
        if isinstance(event, Token):
            parts.append(event.token_ids)
        elif isinstance(event, ItemResult):
            choices = event.choices
    assert said(choices) == plain[0] and sum(parts, []) == choices[0].token_ids and len(parts) > 1


def test_push_changes_every_reply_and_rollback_restores_the_bits(
    client: Client, plain: list[Any]
) -> None:
    client.set_strategy("fixed", "eagle:7x4x16")
    sums = client.weight_checksums()
    assert client.update_weights("v1", "v1")["state"] == "committed"
    assert client.weights()["target"] == "v1"
    assert client.weight_checksums().keys() == sums.keys() != set()
    assert samples(client, "tlt_weight_version_info") == {'{version="v1"}': 1.0}
    reply = client.generate(batch(16, n=1), sampling={"max_tokens": 150})
    for result, [old] in zip(reply.results, plain, strict=True):
        [new] = result.choices
        assert [(span.version, span.start, span.end) for span in new.weight_versions] == [
            ("v1", 0, len(new.token_ids))
        ]
        assert new.logprobs[0] != old[2][0]
    client.roll_back_weights(to="initial")
    assert client.weight_checksums() == sums
    assert generate(client, batch(16, n=1)) == plain


def test_metrics_show_the_gpu_and_its_tokens(client: Client, plain: list[Any]) -> None:
    client.set_strategy("fixed", "eagle:7x4x16")
    generate(client, batch(16, n=1))
    [build] = samples(client, "tlt_build_info")
    assert 'device="cuda"' in build
    assert samples(client, "tlt_generated_tokens_total")[""] >= 2 * sum(
        len(choice[1]) for [choice] in plain
    )
    assert samples(client, "tlt_sd_accepted_tokens_total")['{strategy="eagle:7x4"}'] > 0
    assert samples(client, "tlt_engine_figure")['{name="calibration_drift"}'] > 0
    assert samples(client, "tlt_engine_up")[""] == 1
    assert samples(client, "tlt_running_sequences")[""] == 0


def test_remedy_named_for_too_little_gpu_memory_works() -> None:
    """The least fraction there is, all of which another program holds, is too little for one
    sequence.
    """
    held = torch.empty(torch.cuda.mem_get_info()[1] // 20, dtype=torch.uint8, device="cuda")
    try:
        flags = ("--device", "cuda", *PAIR, "--max-running", "1")
        message = starting_fails(*flags, "--memory-fraction", "0.05")
        says = (
            r"the GPU's .* are \d+ MiB short of .* one sequence of max_model_len 4096, .* beyond "
            r"memory_fraction 0\.05, .*; .*raise memory_fraction to ([\d.]+)"
        )
        offered = re.search(says, message)
        assert offered is not None and "nvidia-smi" in message, message
        with (
            ServerProcess(*flags, "--memory-fraction", offered[1]) as server,
            Client(server.url, timeout_s=60) as client,
        ):
            assert client.server_info()["engine"]["pages"] * 16 >= 4096
    finally:
        del held
        torch.cuda.empty_cache()


def test_too_many_pages_are_refused_with_a_fitting_number() -> None:
    message = starting_fails("--device", "cuda", *PAIR, "--pages", "2000000000")
    assert re.search(
        r"the GPU's .* are [\d.]+ GiB short of .*, [\d.]+ GiB for 2000000000 KV pages, .*; "
        r".*lower pages to \d+",
        message,
    ), message


def test_cuda_error_ends_requests_typed_and_engine_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outlive_a_gpus_error(
        monkeypatch,
        "--device",
        "cuda",
        "--model",
        str(TARGET),
        "--drafter",
        "none",
        *FEW,
        ready_s=READY_S,
    )
