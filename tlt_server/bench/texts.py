"""Longer help of some benches: what they do, and examples."""

from __future__ import annotations

from typing import NamedTuple


class HelpText(NamedTuple):
    description: str
    examples: str


ROLLOUT = HelpText(
    """\
Time rollouts of the demo task, with speculation off and on.

Servers of its own are sent whole rollouts over HTTP, and responses are compared. Without --http,
every arm is compared with our server without speculation, in strict and in fast numerics. With
--http, each policy runs every workload with every seed.
""",
    """\
examples:
  tlt bench rollout --quick
  tlt bench rollout --http --device cuda --model DIR --drafter DIR --json rollout-http.json
  tlt bench rollout --http --workload 512 --workload "full 64" --policy goodput --policy off
""",
)
RECORDS = """\
examples:
  tlt bench record --out /tmp/rollout.safetensors
  tlt bench record --device cuda --model DIR --drafter DIR --out gpu.safetensors
  tlt bench replay /tmp/rollout.safetensors --policy goodput --policy fixed:eagle:7x1x8
  tlt bench replay gpu.safetensors --rounds 2 --plots plots --json replay.json
"""
RECORD = HelpText(
    """\
Run a rollout of the demo task and store it, so that `tlt bench replay` can judge any policy on it.

The rollout runs once under each --policy, which times its cycles, and once more per --width to
draft at every position. Responses do not depend on what drafted them, so one record tells what any
strategy would have gained.
""",
    RECORDS,
)
REPLAY = HelpText(
    """\
Replay a recorded rollout under policies, without a model: seconds, tokens per second, switches, and
regret against the best choice of every step in hindsight.

Tokens and accepted drafts are those of the record, seconds those of a cost model fitted to its
cycles, so a replay takes seconds and needs no GPU.
""",
    RECORDS,
)
PAD = HelpText(
    """\
Embed a small trained pair (target and EAGLE-3 drafter) in the shapes of a large model.

The result has the large model's tensor names, shapes and dtypes, so a step costs what the large
model's step costs. It says what the small pair says, so acceptance is that of a trained drafter on
real answers; it may be higher than a large model's on harder text. The extra weights are random,
not zero. Use it to measure speculative decoding where no large weights are at hand, with this
server or any other engine that loads Hugging Face and EAGLE-3 checkpoints.
""",
    """\
examples:
  tlt bench pad --shape mid --out /tmp/mid                  small enough for a laptop's CPU
  tlt bench pad --shape qwen2.5-7b --out /data/padded-7b    15.2 GB target, 0.8 GB drafter
  tlt serve --model /tmp/mid/target --drafter /tmp/mid/drafter

what fits: a Qwen2 or Llama target whose head width is the shape's. A Llama shape gets attention
biases if the small model has some (the shipped pair does). Qwen3 shapes are impossible: their query
and key norms cannot be undone. Prompts are the small pair's: the shipped pair does written-out
arithmetic, see tlt_server/demo/pair/README.md.
""",
)
