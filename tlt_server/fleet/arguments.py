"""Flags of `tlt fleet`, without those of a server. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tlt_server.bench.flags import add_flags, flag, whole
from tlt_server.fleet.launchers import LAUNCHERS
from tlt_server.frontend.link.launching import MAX_REPLICAS
from tlt_server.push.arguments import add_server

SERVE = """\
Start replicas, each an ordinary `tlt serve`, and a gateway that looks like one server: one address,
every dialect, one push that is live on all or none. A request's tokens are those of a single
server, also when its replica is lost.

Flags after -- are those of `tlt serve` for every replica; they count for the gateway too. Flags
before -- are the gateway's: the fleet's own, then those of a server (--port, --host, --state-dir,
keys, TLS, limits).

  tlt fleet serve --replicas 2 -- --model DIR --drafter DIR
  tlt fleet serve --replicas 2 --state-dir DIR -- --model DIR --tensor-parallel 2
  tlt fleet serve --launcher ray --replicas 8 -- --model DIR --tensor-parallel 2
  tlt fleet serve --launcher static --addresses dns:tlt-pods:8002 -- --model DIR
"""
VERBS = {
    "status": "show the replicas: state, address, load, versions, last fault",
    "drain": "move a replica's requests to the others and route no further ones to it",
    "resume": "route requests to a drained replica again",
    "restart": "drain a replica, and start its server again",
    "scale": "change the number of replicas; excess ones are drained first",
}


def _replicas(text: str) -> int:
    return whole(text, 1, MAX_REPLICAS)


def _labels(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, with commas between")
    return {name: value for name, _, value in pairs}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to a million")
    return value


FLAGS = (
    flag("--replicas N", "how many to start; not with --launcher static", type=_replicas),
    flag(
        f"--launcher {'|'.join(LAUNCHERS)}",
        "what starts them: local: this machine, its visible GPUs divided among them; ray: the "
        "nodes of the cluster at RAY_ADDRESS; static: others did, at --addresses",
        "local",
    ),
    flag(
        "--addresses ADDRESSES",
        "links of static replicas: HOST:PORT, with commas between; file:PATH, with one per line; "
        "dns:NAME:PORT, all addresses of that name. File and name are looked at every 2 s",
    ),
    flag(
        "--ray-labels NAME=VALUE,...",
        "labels of the Ray nodes that may get a replica",
        type=_labels,
    ),
    flag("--replica-cpus COUNT", "processors of a replica on Ray [default: 3, and one per rank]"),
    flag(
        "--link-key-file KEYS",
        "file whose first key is sent to static replicas; it needs the scope link there. The other "
        "launchers make a key",
        type=Path,
    ),
    flag("--link-ca PEM", "certificates that sign the replicas'; the links then use TLS"),
    flag("--link-cert PEM", "certificate of the gateway, for replicas with --tls-client-ca"),
    flag("--link-cert-key PEM", "private key of --link-cert"),
    flag(
        "--consolidate SHARE",
        "in a long tail, pack requests onto the fewest replicas that this slows by no more than "
        "this share, such as 0.02; the others train their drafter, or sleep [default 0: off]",
        0.0,
        type=_number,
    ),
    flag(
        "--sleep-idle S",
        "give a replica's GPU memory back after this time without a request [default 0: never]",
        0.0,
        type=_number,
    ),
    flag("--rebalance", "move running requests to replicas with room, where that pays"),
    flag("--take-over", "take replicas from the living gateway of another fleet"),
)


def add_arguments(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    add_settings: Callable[[argparse.ArgumentParser], None],
) -> None:
    """`add_settings`: adds the flags of `tlt serve`."""
    serve = verbs.add_parser(
        "serve",
        help="start replicas and a gateway that looks like one server",
        description=SERVE,
        usage="tlt fleet serve [FLAGS OF THE GATEWAY] -- FLAGS OF tlt serve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(serve, FLAGS)
    add_settings(serve)
    serve.set_defaults(verb="serve", after=())
    for verb, help in VERBS.items():
        parser = verbs.add_parser(verb, help=help, allow_abbrev=False)
        if verb == "scale":
            parser.add_argument("replicas", type=_replicas, metavar="N", help="replicas to have")
        elif verb != "status":
            parser.add_argument("name", metavar="NAME", help="of a replica, as status lists it")
        add_server(parser)
        parser.set_defaults(verb=verb)
