"""Flags of `tlt cache`. `tlt --help` imports this module, so it imports little."""

from __future__ import annotations

import argparse
from pathlib import Path

STATE_DIR = "state directory of the server (its --state-dir), whose measured step times"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    export = verbs.add_parser(
        "export",
        help="write the kernels that servers started with here into one file",
        allow_abbrev=False,
        description=(
            "Write one archive of the kernels that servers have started with on this machine, as "
            "it is now. Start each server once that others are to start like: tlt serve with the "
            "same model shape and flags. The file fits machines with the same GPU and versions."
        ),
    )
    export.add_argument("file", type=Path, metavar="FILE", help="the archive to write, a tar file")
    take = verbs.add_parser(
        "import",
        help="take the kernels of an exported file",
        allow_abbrev=False,
        description=(
            "Take the kernels of an archive into Triton's cache (TRITON_CACHE_DIR), so that the "
            "first start of a server here compiles nothing. Refused where GPU, torch, Triton or "
            "the kernels' sources differ: the server then compiles its own. Kernels are programs: "
            "import only files that you trust. Exit status 2: nothing was changed."
        ),
    )
    take.add_argument("file", type=Path, metavar="FILE", help="an archive of tlt cache export")
    show = verbs.add_parser(
        "show",
        help="say what the cache holds, and what it was made with",
        allow_abbrev=False,
        description="Say which kernels the cache holds for which starts, and what made them.",
    )
    export.add_argument("--state-dir", type=Path, metavar="DIR", help=f"{STATE_DIR} go along")
    take.add_argument(
        "--state-dir", type=Path, metavar="DIR", help=f"{STATE_DIR} are taken where it has none"
    )
    show.add_argument("--state-dir", type=Path, metavar="DIR", help=f"{STATE_DIR} are shown")
