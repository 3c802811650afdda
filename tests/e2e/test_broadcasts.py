"""The orders of calls that trainers document which broadcast their weights, over real gloo groups
whose rank 0 is another process, to a server of one rank and of two.

After every round what is live is, tensor by tensor, what the trainer has broadcast. Rollouts run
all the while; the orders stand in `gloo_trainer`.
"""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest

from tests.e2e.gloo_trainer import ORDERS, train
from tests.e2e.trainers import check_order, completion, rolling
from tests.mostly_long import mostly_long
from tlt_client import Client
from tlt_server.demo.server import ServerProcess

pytestmark = pytest.mark.fleet

PROMPT = list(b"Compute 3*4+5.")


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    """Start trainers from a process that has imported torch, a new one for each trainer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.gloo_trainer"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        yield pool


QUICK = ("slime", "trl")  # one trainer calls SGLang's routes, one vLLM's


@pytest.mark.parametrize("order", mostly_long(sorted(ORDERS), *QUICK))
def test_active_weights_equal_the_broadcast_weights(
    order: str, pushable: ServerProcess, processes: Pool
) -> None:
    first = 10 * sorted(ORDERS).index(order) + 1
    with Client(pushable.url, timeout_s=60) as client:
        before, live = dict(client.weight_checksums()), client.weights()["target"]
        with rolling(lambda i: completion(pushable.url, PROMPT, i)) as rollouts:
            said = processes.apply_async(train, (order, pushable.url, [first, first + 1])).get(300)
        assert len(said) == 2 and said[0]["version"] != said[1]["version"]
        for round in said:
            assert round["live"] == round["mine"] and len(round["mine"]) > 8
        assert all(
            said[0]["mine"][name] not in (before[name], said[1]["mine"][name])
            for name in said[0]["mine"]
        )
        assert client.weights()["open"] == {} and client.weights()["target"] == said[1]["version"]
    check_order(rollouts, [live, *(round["version"] for round in said)])
