"""`tlt drafter init`: an untrained drafter that `tlt serve --drafter` loads."""

from __future__ import annotations

import argparse

import numpy as np

from tlt_server.drafter.data import TargetLimits, read_documents
from tlt_server.drafter.out import new_directory
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_networks import NETWORKS
from tlt_server.trainer.exporting.initial import write_drafter


def run(arguments: argparse.Namespace) -> int:
    config = ModelConfig.read(arguments.target)
    count_V = np.zeros(config.vocab_size, np.int64)
    if arguments.data:
        limits = TargetLimits(config.vocab_size, config.max_position)
        for token_T, counted_T in read_documents(arguments.data, limits, arguments.target):
            np.add.at(count_V, token_T[counted_T], 1)
    with new_directory(arguments.out) as directory:
        network = write_drafter(
            directory,
            arguments.target,
            NETWORKS[arguments.network],
            count_V=count_V,
            draft_vocab_size=arguments.draft_vocab,
            intermediate_size=arguments.intermediate,
            start_from=arguments.start_from,
            seed=arguments.seed,
        )
    drafted = network.target_ids_C.numpy()
    covered = f"{count_V[drafted].sum() / count_V.sum():.2%}" if count_V.any() else "not known"
    values = sum(weight.numel() for weight in network.weights.values())
    print(
        f"{arguments.out}: {values} weights, {len(drafted)} of {config.vocab_size} tokens in the "
        f"draft vocabulary, coverage of the data {covered}"
    )
    return 0
