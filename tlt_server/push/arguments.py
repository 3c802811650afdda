"""Flags of `tlt weights`. `tlt --help` imports this module, so it imports little."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    push = _add_push(verbs)
    status = verbs.add_parser(
        "status", help="show live, previous and open versions", allow_abbrev=False
    )
    rollback = verbs.add_parser(
        "rollback", help="undo the last commit, of each model in it", allow_abbrev=False
    )
    rollback.add_argument(
        "--to",
        default="",
        metavar="NAME",
        help="the previous version that is to be live again; makes a repeated call safe",
    )
    rollback.add_argument(
        "--role", choices=["target", "drafter"], help="the one model to roll back [default: both]"
    )
    abort = verbs.add_parser(
        "abort", help="end a push that is not live, and drop its parts", allow_abbrev=False
    )
    abort.add_argument("version", metavar="VERSION", help="the push's version")
    for verb in (push, status, rollback, abort):
        add_server(verb)


def _add_push(verbs: Any) -> argparse.ArgumentParser:
    push: argparse.ArgumentParser = verbs.add_parser(
        "push",
        help="push a checkpoint",
        allow_abbrev=False,
        description=(
            "Push a directory of safetensors files, or one file, to a running server. Exit status: "
            "0 if the weights are live (with --stage: staged); 1 if the push was refused, broke "
            "off, or stays staged because a weight update is open on the server (the weights "
            "before are then still live); 2 if the arguments or files cannot be used."
        ),
    )
    push.add_argument(
        "path",
        type=Path,
        metavar="DIR|FILE",
        help="a directory in the Hugging Face layout, or one .safetensors file",
    )
    push.add_argument(
        "--version",
        required=True,
        metavar="NAME",
        help="name of these weights; replies give it with every token that they make [required]",
    )
    push.add_argument(
        "--channel",
        choices=("disk", "http"),
        default="disk",
        help="disk: the server reads the directory itself; http: the files are sent [default disk]",
    )
    push.add_argument(
        "--role",
        choices=("target", "drafter"),
        default="target",
        help="the model whose weights these are [default target]",
    )
    push.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="directory of a drafter that goes live in the same commit as the target",
    )
    push.add_argument(
        "--in-flight",
        choices=("continue", "recompute", "abort", "drain"),
        default="continue",
        help="running requests: continue with their KV; recompute it; abort them; drain: let them "
        "end first [default continue]",
    )
    push.add_argument(
        "--stage",
        action="store_true",
        help="stage without a commit; POST /weights/{version}/commit makes the version live",
    )
    return push


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a running server, its key and its TLS."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the server's address [default http://127.0.0.1:8000]",
    )
    add_access(parser)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the key and the TLS of running servers."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file whose first key is sent as the API key; the server's own key file has the "
        "right format",
    )
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM certificates that sign the server's [default: those that this machine trusts]",
    )
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM certificate of this client, for a server that asks for one",
    )
    parser.add_argument(
        "--tls-key",
        type=Path,
        metavar="FILE",
        help="PEM private key of --tls-cert, without a passphrase",
    )
