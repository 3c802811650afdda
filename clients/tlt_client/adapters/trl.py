"""TRL: `RolloutFunc` for `GRPOTrainer(rollout_func=...)`, `WeightTransfer` for
`AsyncGRPOTrainer(weight_transfer=...)`.

Both push the policy by any channel, given as a function from a client to the sender: `HttpSender`,
`BroadcastSender`, `lambda client: DiskSender(client, root)`. They read only public attributes of
the trainer, and import nothing from TRL.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any

from tlt_client.adapters.errors import choices_of
from tlt_client.channels import Sender, Tensors
from tlt_client.channels.http import HttpSender
from tlt_client.client import Client
from tlt_client.errors import TltClientError
from tlt_client.wire import Choice, ItemResult

OpenSender = Callable[[Client], Sender]
SEED_BITS = 63


class OffPolicy(TltClientError):
    """A choice has tokens of weights other than the pushed policy, or was aborted."""


class WeightTransfer:
    """Pushes of versions RUN-1, RUN-2, ..., numbered like AsyncGRPOTrainer's `model_version`."""

    def __init__(
        self,
        client: Client,
        sender: OpenSender = HttpSender,
        *,
        run: str = "",
        in_flight: str = "continue",
    ) -> None:
        """`run`: a name that is new to the server; empty: a random one. `in_flight`: the fate of
        running requests.
        """
        self._client, self._open, self._run, self._in_flight = (
            client,
            sender,
            run or f"trl-{secrets.token_hex(4)}",
            in_flight,
        )
        self._sender: Sender | None = None
        self._count = 0

    @property
    def version(self) -> str:
        """The version that was pushed last."""
        return f"{self._run}-{self._count}"

    def init_weight_transfer(self) -> None:
        """Create the sender; by broadcast, this also forms the group with the server."""
        if self._sender is None:
            self._sender = self._open(self._client)

    def pause(self) -> None:
        """Do nothing: the server stages weights while it generates, and commits between steps."""

    def send_weights(self, iterator: Tensors) -> None:
        """Push, and return once the weights are live. Any failure raises; if the server stages
        pushes, the previous weights then stay live.
        """
        self.init_weight_transfer()
        assert self._sender is not None
        self._count += 1
        self._sender.push(iterator, self.version, in_flight=self._in_flight)

    def resume(self) -> None:
        """Do nothing: `pause` does nothing."""

    def destroy(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None


class RolloutFunc:
    """Rollout function for a trainer, which calls it with this process's prompts, each repeated
    once per completion.
    """

    def __init__(
        self,
        client: Client,
        sender: OpenSender = HttpSender,
        *,
        run: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: deadline of one batch; None: the server's default."""
        self._client, self._timeout_s = client, timeout_s
        self._transfer = WeightTransfer(client, sender, run=run)
        self._pushed: tuple[Any, int] | None = None  # the trainer, and its step at the last push
        self._version = ""
        self._calls = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Return token ids and their sampling log-probs, one completion for each prompt (a text, or
        messages).

        Raise `OffPolicy` if a token is not from the last pushed weights, `ServerError` if an item
        failed.
        """
        prompt_ids: list[list[int]] = _token_ids(prompts, trainer)
        self.sync(trainer)
        self._calls += 1
        seeds = Random(
            f"{trainer.args.seed} {trainer.state.global_step} {trainer.accelerator.process_index} "
            f"{self._calls}"
        )
        items = [
            {"token_ids": ids, "n": n, "seed": seeds.getrandbits(SEED_BITS)}
            for ids, n in _repeated(prompt_ids, trainer.num_generations)
        ]
        reply = self._client.generate(items, sampling=_sampling(trainer), timeout_s=self._timeout_s)
        choices = [choice for result in reply.results for choice in self._on_policy(result)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice.token_ids for choice in choices],
            "logprobs": [choice.logprobs for choice in choices],
        }

    def sync(self, trainer: Any) -> None:
        """Push the policy if this trainer has taken a step since the last push. Every process calls
        it; the main one pushes.

        The trainer calls it before it generates; call it after `train()` to leave the server with
        the last step's weights.
        """
        now = (trainer, trainer.state.global_step)
        if now == self._pushed:
            return
        tensors = _policy(trainer)
        if trainer.accelerator.is_main_process:
            self._transfer.send_weights(tensors)
        trainer.accelerator.wait_for_everyone()
        self._version = (
            self._transfer.version
            if trainer.accelerator.is_main_process
            else self._client.weights()["target"]
        )
        self._pushed = now

    def _on_policy(self, result: ItemResult) -> list[Choice]:
        choices = choices_of(result, f"item {result.id}: ")
        for choice in choices:
            versions = [span.version for span in choice.weight_versions]
            if versions != [self._version] or choice.finish_reason == "abort":
                raise OffPolicy(
                    f"choice {choice.index} of item {result.id} ended with "
                    f"{choice.finish_reason!r} and has tokens of the versions {versions}, but the "
                    f"policy was pushed as {self._version!r}; let no other program push, roll back "
                    "or abort on this server while the trainer generates"
                )
        return choices

    def close(self) -> None:
        self._transfer.destroy()


def _policy(trainer: Any) -> Tensors:
    """Return whole parameters under their checkpoint's names, tied ones once. For sharded
    parameters this is a collective operation.
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    names = [
        name
        for name, _ in trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters()
    ]
    return ((name, state[name]) for name in names)


def _token_ids(prompts: Sequence[Any], trainer: Any) -> Any:
    """Tokenize prompts as the trainer does: text unchanged, messages by its chat template."""
    if trainer.tools:
        raise ValueError(
            f"the trainer has {len(trainer.tools)} tools, and after a tool's answer TRL itself "
            "generates, without log-probs; train without tools, or write a rollout_func that runs "
            "them"
        )
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=list(prompts))["input_ids"]
    contents = [message["content"] for prompt in prompts for message in prompt]
    others = {
        part.get("type") for content in contents if isinstance(content, list) for part in content
    } - {"text"}
    if others:
        raise ValueError(
            f"a prompt has parts of the types {sorted(map(str, others))}, but the server takes "
            "text only; leave other parts out"
        )
    return trainer.processing_class.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]


def _repeated(prompts: Sequence[list[int]], max_count: int) -> Iterator[tuple[list[int], int]]:
    """Yield each run of equal prompts as (prompt, count), split at `max_count`: choices of one item
    share the prompt's KV.
    """
    for prompt, same in groupby(prompts):
        left = len(list(same))
        while left:
            yield prompt, min(left, max_count)
            left -= min(left, max_count)


def _sampling(trainer: Any) -> dict[str, Any]:
    """Return the trainer's sampling fields; the server refuses unknown `generation_kwargs`."""
    args = trainer.args
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        "stop_token_ids": list(trainer.eos_token_ids),
        **(args.generation_kwargs or {}),
    }
