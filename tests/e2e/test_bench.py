"""The benchmark commands as a user runs them: exact is green, rollout reports passes that
speculation saves, overload ends every request once.
"""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from benchmarks import quality
from tests.hostile.__main__ import main as hostile
from tests.processes import completed
from tests.waiting import until
from tlt_server.__main__ import main
from tlt_server.bench import weights
from tlt_server.demo.server import ServerProcess


def bench(name: str, file: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tlt_server", "bench", name, "--quick", *flags]
    command += ["--json", str(file)]
    done = completed(command, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    entry = json.loads(file.read_text())
    assert entry["figures"] == last, "the file and the last line differ"
    assert entry["command"] == shlex.join(
        ["tlt", "bench", name, "--quick", *flags, "--json", f".../{file.name}"]
    )
    assert entry["commit"] and "cores of" in entry["machine"]
    assert entry["date"].startswith("20") and {"python", "torch"} <= set(entry["versions"])
    return dict(last)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_an_ended_bench_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tlt_server", "bench", "exact"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
    ) as running:
        try:
            until(lambda: any(tmp_path.glob("tlt-bench-*/tlt-exact-*/*")), 60)
            running.send_signal(number)
            assert running.wait(60) == -number
        finally:
            running.kill()
    assert not [*tmp_path.iterdir()]


def test_a_bench_under_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, found = (signal.SIGTERM, signal.SIGHUP), list[object]()
    before = [signal.getsignal(number) for number in numbers]
    module = ModuleType("a bench")
    module.run = lambda args: found.extend(map(signal.getsignal, numbers))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tlt_server.bench.rollout", module)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["bench", "rollout"]) == 0
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert found == [signal.default_int_handler, signal.SIG_IGN]


@pytest.mark.soak
def test_exact_bench_finds_no_differing_token_or_logprob(tmp_path: Path) -> None:
    said = bench("exact", tmp_path / "exact.json")
    assert said["configurations"] >= 18 and said["requests"] > 500 and said["preemptions"] > 0
    assert (said["differing_tokens"], said["differing_logprob_bits"]) == (0, 0)
    assert said["scarce_without_preemption"] == 0


@pytest.mark.long
def test_exact_bench_of_a_fleet_moves_requests_and_finds_nothing(tmp_path: Path) -> None:
    said = bench("exact", tmp_path / "fleet-exact.json", "--replicas", "2")
    assert (said["tokens_differing"], said["logprobs_differing"]) == (0, 0)
    assert said["moves"] > 0 and said["drains"] > 0 and said["kills"] > 0
    assert said["pushes"] == {"disk": 1, "http": 1} and said["requests"] == 24
    assert said["never_moved_at_most"] < 24


@pytest.mark.long
def test_rollouts_over_http_give_the_same_responses(tmp_path: Path) -> None:
    flags = ("--policy", "goodput", "--policy", "off", "--policy", "fixed:eagle:7x1x8")
    said = bench("rollout", tmp_path / "rollout-http.json", *flags, "--tensor-parallel", "2")
    assert said["responses_differing"] == 0 and said["tensor_parallel"] == 2
    rows = {row["arm"]: row for row in said["rows"]}
    assert rows.keys() == {"goodput", "off", "fixed:eagle:7x1x8"}
    assert {row["tokens"] for row in rows.values()} == {rows["off"]["tokens"]}
    assert rows["off"]["tokens"] > 500 and rows["off"]["accepted_share"] is None
    assert 0.1 < rows["fixed:eagle:7x1x8"]["accepted_share"] <= 1
    assert 0.05 < rows["off"]["nats_per_token"] < 0.5
    assert rows["goodput"]["best_fixed"] == "fixed:eagle:7x1x8"
    assert said["first_over_later"] == pytest.approx(said["first_s"] / said["later_s"], abs=0.02)
    assert len(rows["goodput"]["runs_s"]) == 2 and rows["off"]["against_off"] == 1
    assert all(row["step_s"] and row["seconds"] > 0 for row in rows.values())


@pytest.mark.long
def test_rollout_bench_of_a_fleet_gives_one_servers_tokens(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--kill", "--policy", "off")
    said = bench("rollout", tmp_path / "fleet-rollout.json", *flags)
    assert (said["tokens_differing"], said["logprobs_differing"]) == (0, 0)
    assert [row["workload"] for row in said["rows"]] == ["full 4", "16"]
    assert all(row["fleet_tokens_per_s"] > 0 for row in said["rows"])
    assert said["streams_lost"] > 0 and said["resumed_s"] > said["beyond_reading_s"] > 0
    assert said["noticed_s"] > 0 and said["gateway_again_s"] > 0
    assert said["rows"][1]["over_simulated"] > 0


@pytest.mark.long
def test_load_bench_clients_get_the_texts_of_one_batch(tmp_path: Path) -> None:
    said = bench("load", tmp_path / "load.json", "--policy", "off", "--policy", "fixed:eagle:4x1x5")
    assert said["texts_differing"] == 0
    rows = {(row["policy"], row["way"]): row for row in said["rows"]}
    assert len(rows) == 6 and all(row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["off", "batch"]["of_batch"] == 1 and rows["off", "batch"]["clients"] == 1
    assert rows["off", "streamed"]["clients"] == said["clients"] == 16


@pytest.mark.long
def test_rollout_record_is_judged_without_the_model(tmp_path: Path) -> None:
    record, plots = tmp_path / "rollout.safetensors", tmp_path / "plots"
    few = ("--requests", "4", "--max-tokens", "24", "--policy", "off", "--policy", "goodput")
    said = last_line("record", "--out", str(record), *few)
    assert said["tokens"] > 40 and said["bytes"] == record.stat().st_size
    drawn = ("--plots", str(plots)) if find_spec("matplotlib") else ()
    judged = last_line("replay", str(record), *drawn)
    assert judged["tokens"] == said["tokens"]
    assert [row["policy"] for row in judged["rows"]] == [
        "off",
        "goodput",
        "beg",
        "best in hindsight",
    ]
    assert all(0 <= row["regret"] < 1 for row in judged["rows"])
    assert not drawn or (plots / "rollout-goodput.png").is_file()


def last_line(*arguments: str) -> dict[str, Any]:
    """Run a bench; return the line of figures that it ends with."""
    command = [sys.executable, "-m", "tlt_server", "bench", *arguments]
    done = completed(command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.long
def test_decode_bench_compares_fp8_with_the_same_engine_without(tmp_path: Path) -> None:
    flags = ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3", "--against", "none")
    said = bench("decode", tmp_path / "decode.json", *flags)
    assert [row["quantization"] for row in said["rows"]] == ["fp8", "fp8", "none", "none"]
    kinds = [row["fingerprint"]["dtype"] for row in said["rows"]]
    assert len(set(kinds)) == 2 and kinds[0] == kinds[1] and kinds[2] == kinds[3]
    assert [row["against"] for row in said["price"]] == ["none"] * 4
    assert (said["quantization"], said["kv_cache_dtype"]) == ("fp8", "fp8_e4m3")


@pytest.mark.long
def test_quality_of_fp8_is_measured_against_float32(tmp_path: Path) -> None:
    quality.main(["--quick", "--json", str(tmp_path / "quality.json")])
    rows = json.loads((tmp_path / "quality.json").read_text())["figures"]["rows"]
    means = {row["computed"]: row["mean"] for row in rows}
    assert means["float32"] < 1e-5 < means["FP8"] < 0.05 and means["FP8, KV in FP8"] < 0.05


@pytest.mark.long
def test_decode_and_cycle_benches_time_whole_batches(tmp_path: Path) -> None:
    plain = bench("decode", tmp_path / "decode.json", "--prefill")
    drafted = bench("cycle", tmp_path / "cycle.json")
    for row in plain["rows"] + drafted["rows"]:
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["step_ms"] <= high and row["steps"] > 20 and row["tokens_per_s"] > 0
    assert [row["batch"] for row in plain["rows"]] == [1, 8]
    assert {row["accept_length"] for row in plain["rows"]} == {1.0}
    assert [(row["prompts"], row["length"]) for row in plain["prefill"]] == [(1, 512), (4, 256)]
    assert all(row["tokens_per_s"] > 0 for row in plain["prefill"])
    assert [(row["batch"], row["strategy"], row["prompt"]) for row in drafted["rows"]] == [
        (1, "eagle:7x4x32", 128),
        (1, "eagle:7x1x8", 128),
        (8, "eagle:7x1x8", 128),
        (1, "eagle:7x4x32", "problem"),
        (1, "eagle:7x1x8", "problem"),
    ]
    assert all(row["accept_length"] > 3 for row in drafted["rows"] if row["prompt"] == "problem")


@pytest.mark.long
def test_every_channel_pushes_while_requests_decode(tmp_path: Path) -> None:
    rows = list(weights.measure(weights.TARGET, tmp_path, rounds=2))
    assert [row["channel"] for row in rows] == ["disk", "http", "gloo", "ipc"]
    for row in rows:
        assert row["push_s"] > sum(row["phases_s"].values()) > 0
        assert row["push_while_decoding_s"] > 0
        assert 0 < row["longest_pause_ms"] < 20_000


@pytest.mark.long
def test_weights_bench_decodes_until_the_bench_ends() -> None:
    flags = (
        "--max-model-len",
        str(weights.LENGTH),
        "--max-running",
        str(weights.REQUESTS),
        "--kv-memory-mb",
        "64",
    )
    with ServerProcess("--model", str(weights.TARGET), *flags) as server:
        with weights.decoding(server.url):
            open_s, seen = time.monotonic() + 3, list[float]()  # several of their lengths
            while time.monotonic() < open_s:
                seen.append(httpx.get(f"{server.url}/load").json()["server_load"])
        assert statistics.mean(seen) > weights.REQUESTS / 2 and seen[-1] <= weights.REQUESTS
        until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 0)


@pytest.mark.long
def test_weights_bench_of_a_fleet_has_a_replica_catch_up() -> None:
    said = last_line("weights", "--replicas", "2", "--gib", "0", "--rounds", "1")
    assert said["one"][0]["push_s"] > 0 and said["fleet"][0]["push_s"] > 0
    assert said["bytes"] > 0 and said["catch_up_s"] > 0


@pytest.mark.long
def test_graphs_bench_reports_the_phases_of_a_start(tmp_path: Path) -> None:
    said = bench("graphs", tmp_path / "graphs.json")
    assert said["graphs"] == said["graph_bytes"] == 0, "a CPU captures nothing"
    assert 0 < sum(said["phases_s"].values()) <= said["ready_s"] < 400


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a bench in this process, which saves its imports; return what it says as it refuses."""
    try:
        status = main(["bench", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr().err
    assert status == 2, said
    return said


def test_impossible_measurements_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, remedy in (
        (["decode", "--against", "fast"], "--device cuda"),
        (["cycle", "--drafter", "history"], "name its directory"),
        (["decode", "--context", "16000"], "max_model_len 16400 exceeds the model's 4096"),
        (["rollout", "--numerics", "fast"], "leave the flag out"),
        (["rollout", "--against", "fast", "--tensor-parallel", "2"], "leave --against out"),
        (["weights", "--tensor-parallel", "2"], "leave it out"),
    ):
        assert remedy in refusal(capsys, *flags)


@pytest.mark.soak
def test_hostile_bench_measures_every_row_of_its_table(tmp_path: Path) -> None:
    file = tmp_path / "hostile.json"
    assert hostile(["--quick", "--json", str(file)]) == 0
    said = json.loads(file.read_text())["figures"]
    assert len(said["bodies"]["cases"]) > 15 and said["bodies"]["longest_hold_ms"] > 0
    assert all(case["status"] in range(200, 500) for case in said["bodies"]["cases"].values())
    assert said["parsing"]["cpu_s"] > 0 and said["neighbours"]["ratio"] > 0
    assert said["streams"]["ratio"] > 0 and 0 < said["tenants"]["small_share"] <= 1
    assert said["connections"]["restarted"] == said["connections"]["answered"] == 1


@pytest.mark.parametrize(
    "name", ["exact", "rollout", "decode", "cycle", "graphs", "overload", "load"]
)
def test_a_missing_model_is_one_line_with_the_remedy(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, name, "--quick", "--model", str(tmp_path / "nowhere"))
    assert "nowhere" in said and len(said.strip().splitlines()) == 1


@pytest.mark.long
def test_overload_bench_ends_every_request_once(tmp_path: Path) -> None:
    said = bench("overload", tmp_path / "overload.json")
    assert said["exactly_one_end"]
    assert said["sent"] == sum(said["ended"].values()) + sum(said["refused"].values())
    assert (said["open_sequences"], said["pages_held"], said["untyped_sheds"]) == (0, 0, 0)
    peak, over = said["peak"], said["3x"]
    assert set(over["ends"]) <= {"completed", "late", "overloaded", "queue_full"}
    assert set(peak["ends"]) == {"completed"}
    assert over["ends"]["overloaded"] > 0 and over["ends"]["completed"] > 0 and peak["goodput"] > 0
    assert over["frontend_mib"][-1] - peak["frontend_mib"][0] < 64
    assert over["engine_mib"][-1] - over["engine_mib"][0] < 64
