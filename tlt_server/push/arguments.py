"""Flags of `tlt weights`; light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    push = verbs.add_parser(
        "push",
        help="push a checkpoint",
        allow_abbrev=False,
        description=(
            "Push a directory of safetensors, or one file. Exit status 0: live (with --stage: staged); 1: refused, broken off, or staged "
            "because somebody has begun a weight update, and what was live before is live still; 2: the arguments or files cannot be used."
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
        help="what every token made by these weights will carry [required]",
    )
    push.add_argument(
        "--channel",
        choices=("disk", "http"),
        default="disk",
        help="disk: the server reads the directory itself; http: it is sent [default disk]",
    )
    push.add_argument(
        "--role",
        choices=("target", "drafter"),
        default="target",
        help="whose weights PATH holds [default target]",
    )
    push.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="a drafter's directory, to go live in the same moment as the target",
    )
    push.add_argument(
        "--in-flight",
        choices=("continue", "recompute", "abort", "drain"),
        default="continue",
        help="what becomes of running requests [default continue]",
    )
    push.add_argument(
        "--stage",
        action="store_true",
        help="stop before the commit; POST /weights/{version}/commit makes it live",
    )
    status = verbs.add_parser(
        "status", help="which versions are live, kept and on their way", allow_abbrev=False
    )
    rollback = verbs.add_parser(
        "rollback", help="undo the last commit, of whichever models it brought", allow_abbrev=False
    )
    rollback.add_argument(
        "--to",
        default="",
        metavar="NAME",
        help="the version before, of target or drafter, to be live afterwards; makes a repeated call safe",
    )
    abort = verbs.add_parser(
        "abort", help="end a push that is not live, and forget its parts", allow_abbrev=False
    )
    abort.add_argument("version", metavar="VERSION", help="that the push named")
    for verb in (push, status, rollback, abort):
        verb.add_argument(
            "--url",
            default="http://127.0.0.1:8000",
            help="of the server [default http://127.0.0.1:8000]",
        )
        verb.add_argument(
            "--api-key-file",
            type=Path,
            metavar="FILE",
            help="its first key is sent as the API key; a file of the server's own format will do",
        )
        verb.add_argument(
            "--tls-ca",
            type=Path,
            metavar="FILE",
            help="PEM certificates that the server's is checked with [default what this machine trusts]",
        )
        verb.add_argument(
            "--tls-cert",
            type=Path,
            metavar="FILE",
            help="PEM certificate to show a server that asks for one",
        )
        verb.add_argument(
            "--tls-key", type=Path, metavar="FILE", help="its private key, without a passphrase"
        )
