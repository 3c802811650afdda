"""`tlt drafter export`: a drafter in the layout of another engine, verified before it appears."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from tlt_server.drafter.evaluate import loaded
from tlt_server.drafter.out import new_directory
from tlt_server.drafter.records import load_record
from tlt_server.errors import StartupError
from tlt_server.trainer.exporting.export import export
from tlt_server.trainer.exporting.export_layouts import Card
from tlt_server.trainer.judging.figures import accept_length
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, evaluate
from tlt_server.trainer.replaying.plans import PinnedPlan, usual_tree


def run(arguments: argparse.Namespace) -> int:
    replay = partial(_replay, arguments) if arguments.record else lambda drafter, directory: ""
    with new_directory(arguments.out) as directory:
        done = export(
            arguments.drafter,
            arguments.target,
            arguments.layout,
            directory,
            base=arguments.base or arguments.target.resolve().name,
            card=Card(arguments.version, arguments.data),
            replay=replay,
        )
    print(
        f"{arguments.out}: {done.tensors} tensors, {done.bytes} bytes, layout {done.layout}; read "
        f"back, {done.compared} hidden values and logits have the same bits"
    )
    return 0


def _replay(arguments: argparse.Namespace, drafter: Path, directory: Path) -> str:
    """Return the accept length, after a check that both drafters have it cycle by cycle.
    `StartupError` if they differ.
    """
    record = load_record(arguments.record, arguments.target)
    record.expect_one_version()
    responses = record.samples.responses
    source, drafters = loaded(arguments, record, [drafter, directory], "cpu")
    tree = usual_tree(drafters[0].kind)
    mine, written = evaluate(
        responses,
        range(len(responses)),
        [Task(each, PinnedPlan(tree)) for each in drafters],
        ReplayStage(source),
    )
    for name, found_C in vars(mine).items():
        if not np.array_equal(found_C, getattr(written, name)):
            raise StartupError(
                f"replayed over {arguments.record}, the export differs from {drafter} in {name}; "
                "nothing was exported: report this as a fault of the export"
            )
    return (
        f"{accept_length(mine):.3f} tokens per cycle over {len(responses)} recorded "
        f"responses, replayed under {tree.name}; the export and its source accept the same in "
        f"each of {len(mine)} cycles."
    )
