"""Train the demo's target with TRL's GRPOTrainer. The shipped pair serves, each step pushes its
weights, and a line shows the progress of each step.

    python -m examples.trl.train --steps 20

Needs `tlt-client[trl]`. On two CPU cores a step takes a few seconds. `--url` names a running server
of the demo's target that has http among its `--weight-channels`. With `--adaptive` the server's
drafter follows the policy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tlt_client import Client
from tlt_client.adapters.trl import RolloutFunc
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.task import TRAIN_SEEDS, problem, reward
from tlt_server.demo.workload import DRAFTER, TARGET


def solved(completions: list[Any], number: list[int], **_: Any) -> list[float]:
    """Return 1 for a right answer, plus 0.1 for any answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        reward(problem(i), text) + 0.1 * ("answer:" in text)
        for i, text in zip(number, texts, strict=True)
    ]


class Progress(TrainerCallback):
    """Prints a line for each step."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "reward" in logs:
            print(
                f"step {state.global_step:3} of {state.max_steps}  reward {logs['reward']:.3f}  "
                f"{logs['completions/mean_length']:6.1f} tokens  {logs['step_time']:5.1f} s  "
                f"sampled from {self._client.weights()['target']}{self._drafter()}",
                flush=True,
            )

    def _drafter(self) -> str:
        """Return the server trainer's state of the drafter, if there is one."""
        drafter = self._client.drafter()
        if drafter["trainer"] is None:
            return ""
        rounds, adopted = drafter["trainer"]["rounds"], drafter["trainer"]["adopted"]
        accepted = drafter["drafters"][0]["accept_length"]
        length = f", accept length {accepted:.2f}" if accepted is not None else ""
        return f"{length}, drafter trained in {rounds} rounds, adopted {adopted} times"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--completions", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens per completion")
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="the server that the script starts trains its drafter while the policy is updated",
    )
    parser.add_argument("--url", help="a server's address; without it the script starts one")
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        flags = ["--model", str(TARGET), "--drafter", str(DRAFTER), "--weight-channels", "http"]
        flags += ["--state-dir", f"{place}/state"]
        if asked.adaptive:
            flags += ["--drafter-training", "idle", "--drafter-feature-mb", "1024"]
        url = asked.url or stack.enter_context(ServerProcess(*flags)).url
        client = stack.enter_context(Client(url))
        numbers = TRAIN_SEEDS[: asked.steps * asked.prompts]
        prompts = [[{"role": "user", "content": problem(i).prompt_text}] for i in numbers]
        args = GRPOConfig(
            f"{place}/out",
            max_steps=asked.steps,
            per_device_train_batch_size=asked.prompts * asked.completions,
            num_generations=asked.completions,
            max_completion_length=asked.max_tokens,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        rollouts = RolloutFunc(client)
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32),
            solved,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(numbers)}),
            processing_class=AutoTokenizer.from_pretrained(TARGET),
            callbacks=[Progress(client)],
            rollout_func=rollouts,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        rollouts.sync(trainer)
        rollouts.close()
        print(
            f"the server has {client.weights()['target']}, the weights after step "
            f"{trainer.state.global_step}"
        )


if __name__ == "__main__":
    main()
