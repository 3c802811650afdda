"""`tlt drafter export`: a drafter in the layout of another engine, read back before it is there."""

from __future__ import annotations

import argparse

from tlt_server.drafter.out import new_directory
from tlt_server.trainer.export import export
from tlt_server.trainer.model_card import Card


def run(arguments: argparse.Namespace) -> int:
    card = Card(arguments.version, arguments.data)
    base = arguments.base or arguments.target.resolve().name
    with new_directory(arguments.out) as directory:
        done = export(
            arguments.drafter, arguments.target, arguments.layout, directory, base=base, card=card
        )
    print(
        f"{arguments.out}: {done.tensors} tensors, {done.bytes} bytes, layout {done.layout}; read "
        f"back, {done.compared} hidden values and logits have the same bits"
    )
    return 0
