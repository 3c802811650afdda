"""Calls that the adapter for TRL makes for a trainer's arguments. Real trainers are in
`tests/e2e/test_trl.py`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_client.adapters.trl import OffPolicy, RolloutFunc, WeightTransfer
from tlt_client.errors import EngineFailed
from tlt_client.wire import Choice, ItemResult, Reply, SdReport, Usage, VersionSpan, WireError

SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
    "max_tokens": 16,
    "stop_token_ids": [9],
}


class Server:
    """Client and sender in one: replies with the pushed version, and one token per choice."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, list[str], dict[str, Any]]] = []
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.closed = 0
        self.finish, self.error = "stop", None

    def push(self, tensors: Any, version: str, **fields: Any) -> dict[str, Any]:
        self.pushed.append((version, [name for name, _ in tensors], fields))
        return {"state": "committed"}

    def close(self) -> None:
        self.closed += 1

    def weights(self) -> dict[str, Any]:
        return {"target": self.pushed[-1][0]}

    def generate(
        self, items: list[dict[str, Any]], *, sampling: dict[str, Any], timeout_s: float | None
    ) -> Reply:
        self.asked.append((items, sampling))
        return Reply(
            [
                ItemResult(
                    str(i),
                    [self.choice(k, item["token_ids"]) for k in range(item["n"])],
                    self.error,
                )
                for i, item in enumerate(items)
            ],
            Usage(),
            "strict",
        )

    def choice(self, index: int, prompt: list[int]) -> Choice:
        return Choice(
            index=index,
            token_ids=[*prompt, index],
            text=None,
            logprobs=[-0.5] * (len(prompt) + 1),
            finish_reason=self.finish,
            stop_reason=None,
            weight_versions=[VersionSpan(self.pushed[-1][0], 0, len(prompt) + 1)],
            seed=1,
            sd=SdReport(),
        )


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def trainer(**changed: Any) -> Any:
    model = Tied()
    accelerator = SimpleNamespace(
        is_main_process=True,
        process_index=0,
        unwrap_model=lambda wrapped: wrapped,
        wait_for_everyone=lambda: None,
        get_state_dict=lambda wrapped: wrapped.state_dict(),
    )
    args = SimpleNamespace(
        seed=42,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=None,
        repetition_penalty=1.1,
        max_completion_length=16,
        generation_kwargs=None,
    )
    return SimpleNamespace(
        **{
            "args": args,
            "state": SimpleNamespace(global_step=0),
            "accelerator": accelerator,
            "model_wrapped": model,
            "num_generations": 3,
            "tools": [],
            "chat_template": None,
            "chat_template_kwargs": {},
            "eos_token_ids": [9],
            "processing_class": lambda text: {"input_ids": [[len(one)] for one in text]},
        }
        | changed
    )


def func(server: Server) -> RolloutFunc:
    return RolloutFunc(server, lambda client: server, run="r")  # type: ignore[arg-type, return-value]


def test_repeated_prompts_become_choices_and_return_in_order() -> None:
    server = Server()
    said = func(server)(["a"] * 5 + ["bb"] * 3 + ["a"], trainer())
    [(items, sampling)] = server.asked
    assert [(item["token_ids"], item["n"]) for item in items] == [
        ([1], 3),
        ([1], 2),
        ([2], 3),
        ([1], 1),
    ]
    assert said["prompt_ids"] == [[1]] * 5 + [[2]] * 3 + [[1]]
    assert said["completion_ids"] == [
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 0],
        [1, 1],
        [2, 0],
        [2, 1],
        [2, 2],
        [1, 0],
    ]
    assert said["logprobs"] == [[-0.5, -0.5]] * 9
    assert sampling == SAMPLING


def test_extra_sampling_fields_of_the_trainer_are_sent() -> None:
    server, training = Server(), trainer()
    training.args.generation_kwargs = {"stop": ["\n"], "temperature": 0.1}
    func(server)(["a"], training)
    assert server.asked[0][1] == SAMPLING | {"stop": ["\n"], "temperature": 0.1}


def test_messages_go_through_the_trainers_template() -> None:
    said: dict[str, Any] = {}

    class Tokenizer:
        def apply_chat_template(self, **fields: Any) -> dict[str, Any]:
            said.update(fields)
            return {"input_ids": [[7, 8]]}

    server = Server()
    prompts = [[{"role": "user", "content": [{"type": "text", "text": "2+2"}]}]]
    func(server)(
        prompts,
        trainer(
            processing_class=Tokenizer(), chat_template="T", chat_template_kwargs={"think": True}
        ),
    )
    assert said == {
        "conversation": prompts,
        "chat_template": "T",
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": True,
        "think": True,
    }
    assert server.asked[0][0][0]["token_ids"] == [7, 8]


def test_seeds_derive_from_the_trainers_seed_and_never_repeat() -> None:
    def seeds(calls: int, **changed: Any) -> list[int]:
        server, training = Server(), trainer(**changed)
        rollouts = func(server)
        for training.state.global_step in range(calls):
            rollouts(["a", "bb"], training)
        return [item["seed"] for items, _ in server.asked for item in items]

    first = seeds(3)
    assert len(set(first)) == 6 and first == seeds(3)
    other = trainer().accelerator
    other.process_index = 1
    assert not set(first) & set(seeds(3, accelerator=other))


def test_policy_is_pushed_once_per_step_and_tied_weights_once() -> None:
    server, training = Server(), trainer()
    rollouts = func(server)
    rollouts(["a"], training)
    rollouts(["a"], training)
    assert server.pushed == [("r-1", ["embedding.weight"], {"in_flight": "continue"})]
    training.state.global_step = 1
    rollouts.sync(training)
    rollouts(["a"], training)
    assert [version for version, _, _ in server.pushed] == ["r-1", "r-2"]
    rollouts(["a"], trainer(state=SimpleNamespace(global_step=1)))
    assert [version for version, _, _ in server.pushed] == ["r-1", "r-2", "r-3"]
    rollouts.close()
    assert server.closed == 1


def test_other_processes_wait_for_the_main_processs_push() -> None:
    server, training = Server(), trainer()
    training.accelerator.is_main_process = False
    training.accelerator.wait_for_everyone = lambda: server.push([], "mains-1")
    func(server)(["a"], training)
    assert [version for version, _, _ in server.pushed] == ["mains-1"]


def test_failed_item_and_aborted_choice_are_errors() -> None:
    server = Server()
    server.finish = "abort"
    with pytest.raises(OffPolicy, match="choice 0 of item 0 ended with 'abort'"):
        func(server)(["a"], trainer())
    server.error = WireError("engine_failed", "the engine died", True)
    with pytest.raises(EngineFailed, match="item 0: the engine died"):
        func(server)(["a"], trainer())


@pytest.mark.parametrize(
    ("prompt", "changed", "message"),
    [
        ("a", {"tools": [print]}, "the trainer has 1 tools"),
        (
            [{"role": "user", "content": [{"type": "image", "image": 0}]}],
            {},
            r"parts of the types \['image'\]",
        ),
    ],
)
def test_tools_and_images_of_a_trainer_are_refused(
    prompt: Any, changed: dict[str, Any], message: str
) -> None:
    server = Server()
    with pytest.raises(ValueError, match=message):
        func(server)([prompt], trainer(**changed))
    assert server.asked == server.pushed == []


def test_two_weight_syncs_to_one_server_name_distinct_versions() -> None:
    server = Server()
    for _ in range(2):
        transfer = WeightTransfer(server, lambda client: server)  # type: ignore[arg-type, return-value]
        transfer.init_weight_transfer()
        transfer.pause()
        transfer.send_weights(iter([("a", torch.zeros(1))]))
        transfer.resume()
        transfer.destroy()
        transfer.destroy()
    assert len({version for version, _, _ in server.pushed}) == 2 and server.closed == 2
