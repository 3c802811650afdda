"""The scripts that run our prompts in other engines: what they ask of an engine, with a module in
its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers.__main__ import ENGINES, Rollouts, main
from tlt_server.demo.workload import TARGET, problems_as_requests

RUNS = [[3, 4, 5], [6]]  # tokens of each response, by seed


class Asked(ModuleType):
    """An engine's module; it keeps the arguments that it gets, and answers with RUNS."""

    __version__ = "1.2"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.settings: dict[str, Any] = {}
        self.sampling: dict[str, Any] = {}
        self.prompts: list[list[list[int]]] = []
        self.emptied = 0

    def LLM(self, **settings: Any) -> SimpleNamespace:  # noqa: N802
        self.settings = settings
        return SimpleNamespace(generate=self.vllm, reset_prefix_cache=self.empty)

    def Engine(self, **settings: Any) -> SimpleNamespace:  # noqa: N802
        self.settings = settings
        return SimpleNamespace(generate=self.sglang, flush_cache=self.empty)

    def SamplingParams(self, **sampling: Any) -> dict[str, Any]:  # noqa: N802
        return sampling

    def empty(self) -> None:
        self.emptied += 1

    def answer(self, asked: list[list[int]], sampling: dict[str, Any]) -> list[int]:
        self.prompts.append(asked)
        self.sampling = sampling
        return next(run for run in RUNS if len(run) == len(asked))

    def vllm(
        self, inputs: list[dict[str, Any]], sampling: dict[str, Any], *, use_tqdm: bool
    ) -> Any:
        lengths = self.answer([given["prompt_token_ids"] for given in inputs], sampling)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)]) for length in lengths
        ]

    def sglang(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> Any:
        lengths = self.answer(input_ids, sampling_params)
        return [{"meta_info": {"completion_tokens": length}} for length in lengths]


PROMPTS = {"21": [[1, 2], [3], [4, 5, 6]], "22": [[7]]}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"max_tokens": 40, "prompts": PROMPTS}))
    return ["--target", "t", "--drafter", "d", "--prompts", str(file), "--max-running", "9"]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("drafts", [0, 2, 3, 7])
def test_peer_engine_gets_our_prompts_and_gives_one_result_line(
    name: str,
    drafts: int,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Asked(name)
    monkeypatch.setitem(sys.modules, name, engine)
    assert main([name, *arguments, "--drafts", str(drafts)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert engine.prompts == [PROMPTS["21"], PROMPTS["21"], PROMPTS["22"]]  # the first one warms up
    assert engine.emptied == 3
    assert figures["engine"] == f"{name} 1.2" and figures["drafts"] == drafts
    assert [(run["seed"], run["tokens"]) for run in figures["runs"]] == [(21, 12), (22, 6)]
    assert figures["tokens"] == 9
    assert engine.sampling["temperature"] == 1.0
    if name == "vllm":
        assert engine.sampling["max_tokens"] == 40
        assert engine.settings["model"] == "t" and engine.settings["max_num_seqs"] == 9
        assert engine.settings["max_model_len"] >= 3 + 40 + 7
        wanted = {"method": "eagle3", "model": "d", "num_speculative_tokens": drafts}
        assert engine.settings["speculative_config"] == (wanted if drafts else None)
    else:
        assert engine.sampling["max_new_tokens"] == 40
        assert engine.settings["model_path"] == "t" and engine.settings["max_running_requests"] == 9
        speculation = {
            key.removeprefix("speculative_"): value
            for key, value in engine.settings.items()
            if key.startswith("speculative_")
        }
        wanted = {
            "algorithm": "EAGLE3",
            "draft_model_path": "d",
            "num_steps": drafts,
            "eagle_topk": 1,
            "num_draft_tokens": drafts + 1,
        }
        assert speculation == (wanted if drafts else {})


@pytest.mark.parametrize("name", ENGINES)
def test_missing_peer_engine_is_named(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=f"{name} cannot be imported here.*environment"):
        main([name, *arguments])


@pytest.mark.parametrize("content", ["", "[]", '{"prompts": {}}', None])
def test_a_file_without_prompts_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match="holds no prompts"):
        Rollouts.read(file)


def test_peer_prompts_equal_those_of_the_rollout_bench(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    assert (
        main(["prompts", str(file), "--model", str(TARGET), "--requests", "16", "--seeds", "3,5"])
        == 0
    )
    found = Rollouts.read(file)
    assert found.max_tokens == 2000
    for seed in (3, 5):
        expected = problems_as_requests(TARGET, 16, group=8, seed=seed)
        assert found.prompts[str(seed)] == [list(request.token_ids) for request in expected]
