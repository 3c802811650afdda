"""The benches of `tlt bench` and their flags. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tlt_server.bench.gemm_arguments import add_gemm
from tlt_server.bench.numbers import count, seed, whole
from tlt_server.bench.pad_arguments import add_pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.bench.replaying.arguments import add_record, add_replay, policy
from tlt_server.bench.rollout_arguments import add_rollout
from tlt_server.bench.serve_arguments import add_serve
from tlt_server.shared_settings import SPLITS

MAX_BATCH = 4096  # requests at once


class Bench(NamedTuple):
    """One subcommand; the module of the same name, or `module`, has `run(args)`."""

    sentence: str
    add: Callable[[argparse.ArgumentParser], None]
    loads_engine: bool = False  # in this process, so the environment of its libraries is set first
    module: str = ""  # where the name of the bench is taken


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=writable_file,
        metavar="FILE",
        help="also write the figures, with machine, versions and commit, as JSON",
    )
    parser.add_argument(
        "--commit", metavar="NAME", help="commit of the code that runs [default: what git says]"
    )


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter responses")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="target model [directory; default the shipped pair's]",
    )
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        help="drafter [directory | history | none; default the shipped pair's]",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what computes [default cpu]"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and KV [default float32 on a CPU, bfloat16 on a GPU]",
    )
    parser.add_argument(
        "--numerics",
        choices=("strict", "fast"),
        default="strict",
        help="how matmuls add; exact then reports the rate of differing tokens [default strict]",
    )
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="compute threads [default: processors this process may use]",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the first response [default 0]"
    )
    add_json(parser)


def _exact(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _ranks(parser, "ranks of every run but the reference, which has one [default 1]")
    parser.add_argument(
        "--batch",
        type=int,
        choices=(1, 7, 64),
        help="requests at once in all compared runs: fewer engines to load [default each in turn]",
    )
    parser.add_argument(
        "--plant-fault",
        action="store_true",
        help="move logits by one ulp, to see the check turn red",
    )


def _ranks(
    parser: argparse.ArgumentParser, tells: str = "ranks that share the target [default 1]"
) -> None:
    parser.add_argument("--tensor-parallel", type=int, choices=SPLITS, default=1, help=tells)
    parser.add_argument(
        "--reduction-leaves",
        type=int,
        choices=SPLITS,
        help="slices of each long sum [default the device's, for those ranks]",
    )
    parser.add_argument(
        "--exchange",
        choices=("auto", "nvlink", "nccl"),
        default="auto",
        help="how GPUs exchange sums [default nvlink where they can]",
    )
    parser.add_argument(
        "--drafter-parallel",
        choices=("auto", "shared", "replicated"),
        default="auto",
        help="whether GPUs share the drafter [default where that is faster]",
    )


def _load(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _ranks(parser)
    parser.add_argument(
        "--clients", type=count, default=256, metavar="N", help="sent at once [default 256]"
    )
    parser.add_argument(
        "--max-tokens", type=count, default=256, metavar="N", help="per reply [default 256]"
    )
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="of every way [default 3]"
    )
    parser.add_argument(
        "--max-running", type=count, default=256, metavar="N", help="of the server [default 256]"
    )
    parser.add_argument(
        "--policy",
        type=policy,
        action="append",
        metavar="NAME",
        help="run under this policy, e.g. goodput [default off and a fixed chain]",
    )


HOSTILE = ("bodies", "parsing", "neighbours", "streams", "tenants", "connections")


def _hostile(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    parser.add_argument(
        "--only",
        type=_scenarios,
        metavar="NAME,...",
        help=f"scenarios to run [default all: {', '.join(HOSTILE)}]",
    )


def _scenarios(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in HOSTILE:
            raise argparse.ArgumentTypeError(f"{name!r} is no scenario of {', '.join(HOSTILE)}")
    return names


def _decode(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _ranks(parser)
    parser.add_argument(
        "--shape", choices=SHAPES, help="sizes of a target with random weights and no files"
    )
    _batches(parser, "1,8,32,64,256", "1,8")
    parser.add_argument(
        "--against",
        choices=("fast",),
        help="the same with these numerics, and prefill with both: the price of strict",
    )
    parser.add_argument(
        "--prefill", action="store_true", help="also read prompts alone, as --against does"
    )
    parser.add_argument(
        "--max-rows",
        type=count,
        metavar="N",
        help="prompt rows of one step [default 4096 on a GPU, 512 on a CPU]",
    )


def _structures(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _batches(parser, "1,8,64", "1,8")


def _lora(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _batches(parser, "1,64", "1,8")
    parser.add_argument(
        "--rank",
        type=_sizes,
        metavar="N,N,...",
        default=(16, 128),
        help="ranks of the adapters, at most 128 [default 16,128]",
    )


def _cycle(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _ranks(parser)
    _batches(parser, "1,8,32", "1,8")
    parser.add_argument(
        "--capture",
        action="store_true",
        help="the same again while states are captured for a trainer",
    )


def _graphs(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    parser.add_argument(
        "--max-running",
        type=count,
        default=0,
        metavar="N",
        help="sequences that decode at once [default the device's]",
    )
    parser.add_argument("--keys", action="store_true", help="also one line per graph")
    parser.add_argument(
        "--cold", action="store_true", help="with an empty Triton cache, in a directory of its own"
    )


def _batches(parser: argparse.ArgumentParser, full: str, quick: str) -> None:
    parser.add_argument(
        "--batch",
        type=_sizes,
        metavar="N,N,...",
        help=f"requests at once [default {full}; with --quick {quick}]",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="TOKENS",
        help="also one request after a prompt of this many tokens",
    )
    parser.set_defaults(batches=(_sizes(full), _sizes(quick)))


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=("7b", "demo", "tiny"),
        default="7b",
        help="of the drafter; tiny says whether the bench runs [default 7b]",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="[default cuda]")
    parser.add_argument(
        "--budget", type=count, default=2048, metavar="N", help="tokens of a pack [default 2048]"
    )
    parser.add_argument(
        "--documents", type=count, default=256, metavar="N", help="to lay out [default 256]"
    )
    add_json(parser)


def _attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", nargs="*", help="cases by name [default all]")
    parser.add_argument(
        "--tile",
        type=count,
        default=64,
        metavar="ROWS",
        help="tile of tree and prompt rows [default 64]",
    )
    add_json(parser)


def _padded(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pair",
        type=Path,
        required=True,
        metavar="DIR",
        help="the directory that `tlt bench pad --out` wrote",
    )
    add_json(parser)


def _weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gib",
        type=float,
        default=1.0,
        metavar="N",
        help="size of the random checkpoint, on a CPU [default 1; 0: none]",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="[default cpu: every channel of a CPU]",
    )
    parser.add_argument(
        "--channel",
        choices=("ipc", "nccl"),
        help="with --device cuda: ipc on one GPU, nccl from the first GPU to the second",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="with --device cuda: what is served and pushed"
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=3,
        metavar="N",
        help="pushes per channel; the median and the longest pause count [default 3]",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="with --device cuda: every push is also spooled there, and synced "
        "[default: nothing is spooled; on a CPU everything is]",
    )
    _ranks(parser, "with --device cuda: ranks of the server [default 1]")
    add_json(parser)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(whole(part, 1, MAX_BATCH) for part in text.split(","))


def writable_file(text: str) -> Path:
    """Refuse an unwritable path before anything is measured, so that no figures are lost."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; name a file in a directory that exists"
        )
    return path


BENCHES = {
    "exact": Bench("compare tokens and log-probs with plain decoding, bit by bit", _exact, True),
    "decode": Bench("time plain decoding steps, and what strict numerics cost", _decode, True),
    "cycle": Bench("time cycles of drafting and verifying; accept length, idle GPU", _cycle, True),
    "graphs": Bench("start an engine; what its CUDA graphs take, and each phase", _graphs, True),
    "rollout": Bench(
        "time rollouts with a long tail, speculation off and on, also over HTTP",
        lambda parser: add_rollout(parser, _engine, _ranks),
    ),
    "record": Bench(
        "store a rollout, so that `tlt bench replay` can judge policies on it",
        lambda parser: add_record(parser, _engine, writable_file),
        True,
        module="recording",
    ),
    "replay": Bench(
        "judge policies on a stored rollout: seconds, regret, plots; needs no GPU",
        lambda parser: add_replay(parser, add_json),
    ),
    "overload": Bench(
        "ask a server for three times what it can do; goodput, refusals and memory", _engine
    ),
    "serve": Bench(
        "load a running server; TTFT, TPOT, ITL, E2E percentiles, goodput",
        lambda parser: add_serve(parser, add_json),
    ),
    "load": Bench(
        "time many clients at once, whole and streamed, against one batch", _load, module="clients"
    ),
    "hostile": Bench("attack a server as hostile clients; what others feel of it", _hostile),
    "structures": Bench("time requests with a JSON schema against ones without", _structures, True),
    "lora": Bench("time requests with LoRA adapters against ones without", _lora, True),
    "weights": Bench("time weight pushes by every channel while requests decode", _weights),
    "prefill": Bench("time prefill against cuBLAS and torch's attention, on a GPU", add_json),
    "gemm": Bench(
        "time the matmuls of a step, and cuBLAS, on a GPU",
        lambda parser: add_gemm(parser, add_json),
    ),
    "exchange": Bench("time exchanges of partial sums between two GPUs", add_json),
    "norms": Bench("time the norms between matmuls, on a GPU", add_json),
    "attention": Bench("time rotary embedding, KV writes and attention, on a GPU", _attention),
    "sampling": Bench("time sampling, edits, reports and choosing children, on a GPU", add_json),
    "trees": Bench("time trees, rows, walks and KV copies of a cycle, on a GPU", add_json),
    "padded": Bench("compare a padded pair's logits with the small pair's, on a GPU", _padded),
    "training": Bench("time the drafter's training, packed and padded", _training),
    "interrupt": Bench(
        "time requests that interrupt the drafter's training, and decoding while it is parked",
        _engine,
    ),
    "pad": Bench("write a small trained pair in the shapes of a large model", add_pad),
}
