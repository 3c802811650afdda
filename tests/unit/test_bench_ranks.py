"""The flags of ranks that benches of a server hand on to it."""

from __future__ import annotations

import argparse

import pytest

from tlt_server.__main__ import main
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.settings import rank_flags

ASKED = {
    "--tensor-parallel": "2",
    "--reduction-leaves": "4",
    "--exchange": "nccl",
    "--drafter-parallel": "replicated",
}
WORDS = [word for pair in ASKED.items() for word in pair]


@pytest.mark.parametrize("bench", ["rollout", "weights"])
def test_a_server_is_started_with_the_flags_of_ranks(bench: str) -> None:
    parser = argparse.ArgumentParser()
    BENCHES[bench].add(parser)
    assert rank_flags(parser.parse_args([])) == []
    assert rank_flags(parser.parse_args(WORDS)) == WORDS


@pytest.mark.parametrize("flag", ASKED)
def test_pushes_on_a_cpu_take_no_flag_of_ranks(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "weights", flag, ASKED[flag]]) == 2
    assert f"{flag} is for --device cuda: leave it out" in capsys.readouterr().err
