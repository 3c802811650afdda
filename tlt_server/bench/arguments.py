"""The benches of `tlt bench` and their flags, in one table. It stands apart from the benches,
because `tlt --help` imports it, and some flags decide how the libraries of a bench are loaded. The
help of a bench is the docstring of its module, which is read without importing it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from tlt_server.bench.flags import (
    ENGINE,
    JSON,
    SPLIT,
    STORED,
    Flag,
    add_flags,
    batch,
    batches,
    flag,
    policies,
    ranks,
)
from tlt_server.bench.padding.shapes import SHAPES

# Requests at once in a full run, and in a quick one.
Batches = tuple[str, str]
CONTEXT = flag("--context TOKENS", "also one request after a prompt of this many tokens")
MAX_RUNNING = flag("--max-running N", "of the server", 256)
REPLICAS = flag("--replicas COUNT", "of a fleet, which is compared with one server", 1)


class Bench(NamedTuple):
    """One subcommand; the module of the same name, or `module`, has `run(args)` and the help."""

    sentence: str
    flags: tuple[Flag, ...]
    loads_engine: bool = False  # in this process, so the environment of its libraries is set first
    module: str = ""  # where the name of the bench is taken
    batches: Batches = ("", "")  # requests at once, where `--batch` does not name them
    of_fleet: bool = False  # with --replicas, its module is the one in fleets/

    def place(self, name: str, args: argparse.Namespace) -> str:
        """Return the module to run."""
        folder = "fleets." if self.of_fleet and args.replicas > 1 else ""
        return f"tlt_server.bench.{folder}{self.module or name}"

    def add(self, name: str, parser: argparse.ArgumentParser) -> None:
        flags = self.flags
        source = Path(__file__).with_name(f"{self.module or name}.py").read_text()
        parser.description = source.split('"""', 2)[1]
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        if self.batches[0]:
            flags += (batch(*self.batches),)
            parser.set_defaults(batches=tuple(map(batches, self.batches)))
        add_flags(parser, flags)


BENCHES = {
    "exact": Bench(
        "compare tokens and log-probs with plain decoding, bit by bit",
        (
            *ENGINE,
            *ranks("ranks of every run but the reference, which has one"),
            flag(
                "--batch 1|7|64",
                "requests at once in all compared runs: fewer engines to load [default each in "
                "turn]",
            ),
            flag("--plant-fault", "move logits by one ulp, to see the check turn red"),
            REPLICAS,
        ),
        True,
        of_fleet=True,
    ),
    "decode": Bench(
        "time plain decoding steps, and the price of strict numerics",
        (
            *ENGINE,
            *ranks(),
            flag(
                "--shape NAME", "sizes of a target with random weights and no files", choices=SHAPES
            ),
            CONTEXT,
            flag("--prompt TOKENS", "of the other requests", 128),
            flag(
                "--against NAME",
                "the same, and prefill, with fast numerics (the price of strict) or without any "
                "quantization; may be repeated [fast | none]",
                [],
                action="append",
                choices=("fast", "none"),
            ),
            flag("--prefill", "also read prompts alone, as --against does"),
            flag(
                "--max-rows ROWS", "prompt rows of one step [default 4096 on a GPU, 512 on a CPU]"
            ),
        ),
        True,
        batches=("1,8,32,64,256", "1,8"),
    ),
    "cycle": Bench(
        "time cycles of drafting and verifying; accept length, idle GPU",
        (
            *ENGINE,
            *ranks(),
            CONTEXT,
            flag("--capture", "the same again while states are captured for a trainer"),
        ),
        True,
        batches=("1,8,32", "1,8"),
    ),
    "graphs": Bench(
        "start an engine; time and memory of its CUDA graphs, time of each phase",
        (
            *ENGINE,
            flag("--max-running N", "sequences that decode at once [default the device's]", 0),
        ),
        True,
    ),
    "rollout": Bench(
        "time rollouts with a long tail over HTTP, speculation off and on",
        (
            *ENGINE,
            *ranks(),
            flag(
                "--against NAME",
                "also a server without speculation in these numerics: the price of strict",
                choices=("fast",),
            ),
            flag(
                "--workload SIZE",
                'requests of a rollout, such as 64, or "full 64": that many kept running [default '
                '64 on a CPU; 64, 256, 512, "full 64" and "full 256" on a GPU]',
                action="append",
            ),
            policies(
                "run under this policy, e.g. goodput, fixed:eagle:7x1x8; responses are compared "
                "with the first one's [default goodput, off, beg and a few fixed strategies]"
            ),
            flag(
                "--seeds SEED,...",
                "one run of every policy and workload per seed [default 21,22,23,24,25]",
            ),
            MAX_RUNNING,
            flag("--max-tokens N", "per response", 2000),
            flag("--pair NAME", "of the models, in the figures", "demo"),
            flag("--penalties", "give every request a repetition and a presence penalty"),
            REPLICAS,
            flag("--kill", "with --replicas: also kill one and stop one, and kill a gateway"),
        ),
        of_fleet=True,
    ),
    "record": Bench(
        "store a rollout, so that `tlt bench replay` can judge policies on it",
        (
            *ENGINE,
            flag("--out FILE", "the record", required=True),
            flag("--requests COUNT", "responses in all [default 64 on a CPU, 512 on a GPU]"),
            flag("--group COUNT", "responses to a problem", 8),
            flag("--running COUNT", "requests at once [default 64 on a CPU, 256 on a GPU]"),
            flag("--max-tokens COUNT", "of a response [default 2000]"),
            flag(
                "--width WIDTH,...",
                "children per node of the trees that are drafted at every position; a replay has "
                "strategies of these widths [default all that policies choose]",
            ),
            policies(
                "run and time the rollout under this policy, e.g. off, goodput, "
                "fixed:eagle:7x1x8; more of them show the cost model more shapes [default off, "
                "chains of 2, 4 and 7, beg, goodput]"
            ),
        ),
        True,
        module="recording",
    ),
    "replay": Bench(
        "judge policies on a stored rollout: seconds, regret, plots; needs no GPU",
        (
            Flag("file", {"type": Path, "metavar": "FILE", "help": "of `tlt bench record`"}),
            policies("replay under this policy [default off, goodput, beg]"),
            flag(
                "--rounds COUNT",
                "replays in a row, of which the last counts; a policy keeps its knowledge of "
                "steps and drafts",
                1,
            ),
            flag(
                "--plots DIR",
                "write a plot (PNG) of the rollout's course under each policy; needs matplotlib",
            ),
            *JSON,
        ),
    ),
    "overload": Bench(
        "ask a server for three times its capacity; goodput, refusals and memory", ENGINE
    ),
    "fleet": Bench(
        "simulate a fleet: makespan by ways of placing, and faults; needs no GPU",
        (
            flag("--replicas COUNT", "of the fleet", 8),
            flag("--requests N", "of a rollout", 512),
            flag(
                "--seeds SEED,...",
                "one rollout each of every policy [default 101,102,103,104,105]",
                (101, 102, 103, 104, 105),
            ),
            flag("--longest TOKENS", "largest output of the long-tailed distribution", 32_768),
            flag(
                "--record INPUT",
                "take the outputs' lengths from this file of `tlt bench record` [default: drawn]",
            ),
            flag(
                "--faults N", "instead run this many schedules of faults and check their history", 0
            ),
            *JSON,
        ),
    ),
    "serve": Bench(
        "load a running server; TTFT, TPOT, ITL, E2E percentiles, goodput",
        (
            flag("--url URL", "server with the OpenAI API", "http://127.0.0.1:8000"),
            flag("--api-key-file INPUT", "file whose first key is sent [default: none]"),
            flag("--num-prompts N", "requests in all", 200),
            flag("--input-len N", "tokens of a prompt", 512),
            flag("--output-len N", "tokens of an output", 128),
            flag("--vocab N", "prompts are random token ids below this", 1000),
            flag(
                "--request-rate RATE",
                "requests per second on average, at random moments [default inf: all at once]",
                0.0,
            ),
            flag(
                "--goodput NAME:MS,...",
                "count requests within these times: ttft, tpot, e2el; e.g. ttft:500,tpot:40",
                {},
            ),
            flag("--seed SEED", "of prompts and moments", 0),
            *JSON,
        ),
    ),
    "load": Bench(
        "time many clients at once, whole and streamed, against one batch",
        (
            *ENGINE,
            *ranks(),
            flag("--clients N", "sent at once", 256),
            flag("--max-tokens N", "per reply", 256),
            flag("--rounds N", "of every way", 3),
            MAX_RUNNING,
            policies("run under this policy, e.g. goodput [default off and a fixed chain]"),
        ),
        module="clients",
    ),
    "frontend": Bench(
        "count tokens that the frontend delivers per second of processor time; no model",
        (flag("--rounds N", "of every figure; the median counts", 3), REPLICAS, *JSON),
        of_fleet=True,
    ),
    "structures": Bench(
        "time requests with a JSON schema against ones without",
        (*ENGINE, CONTEXT),
        True,
        batches=("1,8,64", "1,8"),
    ),
    "lora": Bench(
        "time requests with LoRA adapters against ones without",
        (
            *ENGINE,
            CONTEXT,
            flag(
                "--rank RANK,...", "ranks of the adapters, at most 128 [default 16,128]", (16, 128)
            ),
        ),
        True,
        batches=("1,64", "1,8"),
    ),
    "weights": Bench(
        "time weight pushes by every channel while requests decode",
        (
            flag("--gib GIB", "size of the random checkpoint, on a CPU; 0: none", 1.0),
            flag("--device cpu|cuda", "on a CPU every channel of it", "cpu"),
            flag(
                "--channel ipc|nccl",
                "with --device cuda: ipc on one GPU, nccl from the first GPU to the second",
            ),
            flag("--model DIR", "with --device cuda: the model that is served and pushed"),
            flag("--rounds N", "pushes per channel; the median and the longest pause count", 3),
            flag(
                "--state-dir DIR",
                "with --device cuda: every push is also spooled there, and synced [default: "
                "nothing is spooled; on a CPU everything is]",
            ),
            *STORED,
            *ranks("with --device cuda: ranks of the server"),
            REPLICAS,
            *JSON,
        ),
        of_fleet=True,
    ),
    "prefill": Bench("time prefill against cuBLAS and torch's attention, on a GPU", JSON),
    "gemm": Bench(
        "time the matmuls of a step, and cuBLAS, on a GPU",
        (
            flag("--shape NAME", "of the model", "qwen2.5-7b", choices=SHAPES),
            flag(
                f"--tensor-parallel {SPLIT}",
                "ranks, of which one is timed, without its exchanges",
                1,
            ),
            flag("--rows ROWS,...", "rows of a step", "1,2,8,16,32,64,128,256,512,2048,8192"),
            flag(
                "--leaves LEAVES,...",
                "leaves of K in o and down projections, over all ranks, of 1, 2, 4 and 8, in "
                "turns [default 2, or one for each rank]",
            ),
            flag("--quantization none|fp8", "also time weights in this form, in turns", "none"),
            *JSON,
        ),
    ),
    "exchange": Bench("time exchanges of partial sums between two GPUs", JSON),
    "padded": Bench(
        "compare a padded pair's logits with the small pair's, on a GPU",
        (
            flag("--pair DIR", "the directory that `tlt bench pad --out` wrote", required=True),
            *JSON,
        ),
    ),
    "training": Bench(
        "time the drafter's training, packed and padded",
        (
            flag("--shape 7b|demo|tiny", "of the drafter; tiny says whether the bench runs", "7b"),
            flag("--device cpu|cuda", "device that trains", "cuda"),
            flag("--budget N", "tokens of a pack", 2048),
            flag("--documents N", "to lay out", 256),
            *JSON,
        ),
    ),
    "interrupt": Bench(
        "time requests that interrupt the drafter's training, and decoding while it is parked",
        ENGINE,
    ),
    "pad": Bench(
        "write a small trained pair in the shapes of a large model",
        (
            flag("--shape NAME", "sizes of the large model", choices=SHAPES, required=True),
            flag("--out DIR", "gets DIR/target and DIR/drafter, new or empty", required=True),
            flag(
                "--dtype bfloat16|float32",
                "dtype of all weights; bfloat16 rounds norm weights once more, float32 gives "
                "logits within 1e-4",
                "bfloat16",
            ),
            flag(
                "--layers INT",
                "layers of the target instead of the shape's; at least the small target's",
            ),
            flag("--seed INT", "seed of the extra weights", 0),
            flag(
                "--device NAME", "where random numbers are made, e.g. cuda, which is faster", "cpu"
            ),
            flag("--target DIR", "small target [default the shipped pair's]"),
            flag("--drafter DIR", "its EAGLE-3 drafter [default the shipped pair's]"),
        ),
    ),
}
