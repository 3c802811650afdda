"""A target over two processes: the bits of one, through pushes, sleeps and preemption; one error
when a rank dies, falls silent or differs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.engine.halting import EAGLE, done
from tests.engine.pushing import Pushable, cpu_settings, perturbed
from tests.engine.test_engine import bits, requests
from tests.engine.tiny import write_eagle, write_eagle1, write_target
from tests.engine.two_ranks import give_up_soon, one, ranks_of, shared, two_ranks
from tests.waiting import until
from tlt_server.engine.cpu.link import CpuLink
from tlt_server.engine.ranks.answers import START_S
from tlt_server.engine.ranks.ranks import _ended
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.models.decoder import Decoder
from tlt_server.weights.checksums import live_sums
from tlt_server.wire.commands import ClearCache, SetPolicy, Sleep, WakeUp
from tlt_server.wire.records import Strategy

__all__ = ["one", "shared"]  # fixtures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    write_target(root / "base")
    write_eagle(root / "drafter")
    for seed, name in enumerate(("new", "newer"), 7):
        perturbed(root / "base", root / name, seed)
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return cpu_settings(root / "base", root / "drafter", weight_root=root, reduction_leaves=2)


def target_of(engine: Pushable) -> Decoder:
    target = engine.engine.pushes.transaction.versions.live.target.network
    assert isinstance(target, Decoder)
    return target


@pytest.fixture
def doomed(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pushable]:
    """An engine of two ranks for one fault, which asks idle ranks often."""
    monkeypatch.setattr("tlt_server.engine.ranks.ranks.BEAT_S", 0.3)
    with two_ranks(settings) as engine:
        yield engine


def responses(engine: Pushable, policy: SetPolicy = EAGLE) -> dict[str, tuple[object, ...]]:
    """Everything that requests of all kinds bring under this policy."""
    engine.said.clear()
    engine.engine.send(policy)
    engine.submit(*requests())
    engine.finish()
    return bits(engine.said)


def test_two_ranks_have_the_bits_of_one_rank(one: Pushable, shared: Pushable) -> None:
    assert one.info.fingerprint == shared.info.fingerprint
    assert shared.info.tensor_parallel == 2
    expected = responses(one, SetPolicy("off"))
    for policy in (SetPolicy("off"), EAGLE, SetPolicy("fixed", Strategy("history", 6, 2, 8))):
        if policy.strategy is None or policy.strategy.drafter in shared.settings.drafters:
            assert responses(shared, policy) == expected, policy


@pytest.mark.contains_faults
def test_contained_fault_stays_on_rank_0(
    one: Pushable, shared: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank never hears of it, and both go on with the same bits."""

    def broken(tokens: list[int]) -> None:
        raise KeyError("planted")

    asked = requests(4)
    plain = one.run(*asked)
    shared.said.clear()
    shared.submit(*asked)
    shared.step(3)
    failing = next(iter(shared.engine.scheduler.running))
    monkeypatch.setattr(failing, "append", broken)
    shared.finish()
    assert shared.said[failing.id][-1].finish_reason == "error"
    for id in plain.keys() - {failing.id}:
        assert (shared.tokens(id), shared.logprobs(id)) == plain[id]
    for each in asked:
        del shared.said[each.id]
    assert shared.run(*asked) == plain


def test_mixed_version_sequences_keep_their_bits_in_a_sleep(
    one: Pushable, shared: Pushable, root: Path
) -> None:
    """KV of two versions is copied out and back on every rank: no version can compute it again."""
    found = []
    for engine in (one, shared):
        engine.said.clear()
        engine.engine.send(SetPolicy("off"))
        done(engine, ClearCache("c"))
        assert engine.push(root / "new", "mixed", commit=False).result == "staged"
        engine.submit(*requests(6, "reported"))
        engine.step(6)
        assert engine.commit("mixed").result == "committed"
        done(engine, Sleep("s", ("kv_cache",)))
        done(engine, WakeUp("w", ("kv_cache",)))
        engine.finish()
        found.append(bits(engine.said))
        assert engine.roll_back("initial").result == "rolled_back"
    assert found[0] == found[1]


def test_pushes_rollback_and_sleep_change_both_ranks(
    one: Pushable, shared: Pushable, root: Path
) -> None:
    first = responses(one)
    reports = [engine.push(root / "newer", "v1") for engine in (one, shared)]
    assert [report.result for report in reports] == ["committed", "committed"]
    assert reports[0].checksums == reports[1].checksums
    assert one.checksums() == shared.checksums()
    expected = responses(one)
    assert responses(shared) == expected != first
    done(shared, Sleep("s", ("weights", "kv_cache")))
    peer = target_of(shared).peers[0]
    assert not peer.layers[0].mlp.down.weight_KX.any(), "a slice of the other rank did not sleep"
    done(shared, WakeUp("w", ("weights", "kv_cache")))
    assert responses(shared) == expected
    for engine in (one, shared):
        assert engine.roll_back().result == "rolled_back"
    assert responses(shared) == first and one.checksums() == shared.checksums()


def test_ranks_free_replaced_versions(shared: Pushable, root: Path) -> None:
    for turn in range(3):
        path = root / ("new", "newer")[turn % 2]
        assert shared.push(path, f"turn {turn}").result == "committed"
    shared.step(2)
    [process] = ranks_of(shared)._processes
    mapped = Path(f"/proc/{process.pid}/maps").read_text().count("tlt-shard")
    assert 2 <= mapped <= 3, "live, previous, and one that is about to be dropped"


@pytest.mark.parametrize(
    "rank, name",
    [
        (1, "model.layers.2.self_attn.o_proj.weight"),
        (0, "model.embed_tokens.weight"),  # rank 1 has it, too
        (1, "model.embed_tokens.weight"),
    ],
)
def test_checksums_name_the_changed_slice(shared: Pushable, rank: int, name: str) -> None:
    network, before = target_of(shared), shared.checksums()
    view = (network, *network.peers)[rank].own_parameters()[name]
    kept = float(view[0, 0])
    view[0, 0] = kept + 1
    changed = live_sums(network.parameters())
    assert {each for each in changed if changed[each] != before[each]} == {name}
    view[0, 0] = kept
    assert shared.checksums() == before


def test_differing_ranks_end_epoch_naming_step_and_rank(doomed: Pushable) -> None:
    """A norm of rank 1 alone is off, so its states are, and its next sums are."""
    responses(doomed, SetPolicy("off"))
    target_of(doomed).peers[0].final_norm_H[3] += 2**-10
    with pytest.raises(EngineFailed, match=r"ranks differ after order \d+: the states of rank 1 "):
        responses(doomed, SetPolicy("off"))


def stop_rank(engine: Pushable, patch: pytest.MonkeyPatch) -> None:
    """Stop rank 1, and give it up after a second."""
    give_up_soon(ranks_of(engine), patch)
    [process] = ranks_of(engine)._processes
    os.kill(process.pid, signal.SIGSTOP)


def test_stopped_rank_is_reported_within_its_bound(
    doomed: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    [process] = ranks_of(doomed)._processes
    doomed.submit(*requests(2))
    doomed.step(3)
    stop_rank(doomed, monkeypatch)
    with pytest.raises(EngineFailed, match=r"rank 1 left, or sent nothing for 1 s after order \d+"):
        doomed.finish()
    ranks_of(doomed).close()
    assert process.returncode == -signal.SIGKILL, "a process is left"


def steps_until(engine: Pushable, condition: Callable[[], object]) -> None:
    """Let an idle engine take turns until the condition holds."""
    until(lambda: (engine.step(), condition())[1])


def test_idle_engine_notices_a_stopped_rank(
    doomed: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(doomed)
    steps_until(doomed, lambda: ranks._beaten)
    steps_until(doomed, lambda: not ranks._beaten)  # a rank that lives answers
    stop_rank(doomed, monkeypatch)
    with pytest.raises(EngineFailed, match=r"rank 1 did not answer order \d+ \(Beat\) in 0.7 s"):
        steps_until(doomed, lambda: False)


def test_idle_engine_polls_ranks_despite_a_long_answer_bound(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuLink, "answer_s", START_S)
    monkeypatch.setattr("tlt_server.engine.ranks.ranks.BEAT_S", 0.1)
    with two_ranks(settings) as engine:
        steps_until(engine, lambda: ranks_of(engine)._beaten)


class Deaf(subprocess.Popen[bytes]):
    """A process that a signal does not end, as one that waits for a driver."""

    def kill(self) -> None: ...


def test_unkillable_rank_is_reported_without_blocking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt_server.engine.ranks.processes.END_S", 0.2)
    closed: list[str] = []
    began_s = time.monotonic()
    with Deaf(["sleep", "900"]) as deaf, subprocess.Popen(["sleep", "900"]) as ordinary:
        _ended([deaf, ordinary], [], zmq.Context(), [lambda: closed.append("memory")])
        waited_s = time.monotonic() - began_s
        deaf.terminate()
    assert ordinary.returncode == -signal.SIGKILL and closed == ["memory"]
    assert waited_s < 60, "the process was waited for"
    assert capsys.readouterr().err.startswith(f"tlt: rank 1 (process {deaf.pid}) was killed and is")


def test_rank_stopped_in_sleep_is_reported_within_its_bound(
    doomed: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_rank(doomed, monkeypatch)
    with pytest.raises(EngineFailed, match=r"rank 1 did not answer order \d+ \(FreePages\) in 1 s"):
        doomed.engine.halt.apply(Sleep("s", ("kv_cache",)))


def test_idle_engine_notices_an_ended_rank(doomed: Pushable) -> None:
    [process] = ranks_of(doomed)._processes
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        doomed.step()


def test_failed_rank_start_is_reported_as_one_error(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.engine.ranks.ranks.RANK", "tlt_server.engine.no_rank")
    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) ended with status 1"):
        Pushable(replace(settings, tensor_parallel=2))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensor_parallel": 4}, "has 2 heads, .* use 1 or 2"),
        ({"tensor_parallel": 2, "max_loras": 1}, "LoRA adapters are computed by one rank"),
        ({"tensor_parallel": 2, "weight_staging": "disk"}, "use auto, device or none"),
        ({"tensor_parallel": 2, "exchange": "nccl"}, "ranks on a CPU use gloo"),
        ({"tensor_parallel": 2, "drafter_parallel": "shared"}, "on a CPU the first rank drafts"),
    ],
)
def test_unshareable_model_is_refused_before_reading_weights(
    settings: EngineSettings, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(StartupError, match=why):
        Pushable(replace(settings, reduction_leaves=None, **changes))  # type: ignore[arg-type]


def test_drafter_reading_the_target_head_is_refused(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    drafter = write_eagle1(tmp_path / "eagle1", root / "base")
    with pytest.raises(StartupError, match="use an EAGLE-3 drafter, or tensor_parallel 1"):
        Pushable(replace(settings, drafter=str(drafter), tensor_parallel=2))
