"""Exchange of partial sums between ranks: the bits of one rank that has them all, at every number
of ranks, and an end of every wait. Here ranks take turns in one process, or are two processes that
share memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, assert_same_rows, gpu
from tlt_kernels import reference
from tlt_kernels.gpu import exchange
from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.children import candidate_words, children, children_shared
from tlt_kernels.gpu.exchange import (
    PeerWindows,
    Way,
    WindowSizes,
    landing_floats,
    peer_windows,
    way_of,
    window_bytes,
)
from tlt_kernels.gpu.exchange_kernels import HEAD_BYTES, PROGRAMS, PUSH_FLAGS
from tlt_kernels.gpu.gemm import partials
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_kernels.gpu.quantise import Matrix, Quantised, empty_rows, quantise_rows
from tlt_kernels.gpu.sampling import BLOCK, block_words, blocks_of_rank, sample, sample_shared
from tlt_kernels.gpu.signals import EXCHANGE, FLAG_BYTES
from tlt_kernels.gpu.tensors import BatchSlots, RowTable

ROWS, HIDDEN, EPS = 3, 384, 1e-6
AHEAD = 1 << 20  # the number of an exchange that no test reaches
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def window(size: int) -> Tensor:
    whole = torch.zeros(size + 1024, dtype=torch.uint8, device=DEVICE)
    return whole[-whole.data_ptr() % 1024 :][:size]


def group(
    ranks: int, parts: int = 1, *, floats: int = 0, signal: int = AHEAD, timeout_s: float = 5
) -> list[PeerWindows]:
    """Return the ranks of a group. To each it looks as if its peers had come to exchange
    `signal`.
    """
    landing = -(-(ranks + 1) * ROWS * HIDDEN // 256) * 256
    floats = floats or parts * ROWS * HIDDEN
    windows = [window(window_bytes(WindowSizes(floats, landing))) for _ in range(ranks)]
    addresses = [each.data_ptr() for each in windows]
    peers = [
        peer_windows(r, addresses, windows[r], landing=landing, timeout_s=timeout_s)
        for r in range(ranks)
    ]
    for each in peers:
        flags(each).fill_(signal)
    return peers


def flags(peers: PeerWindows) -> Tensor:
    return peers.own.view(torch.int64)[:: FLAG_BYTES.value // 8][: peers.ranks]


def push_flags(peers: PeerWindows) -> Tensor:
    return peers.own[PUSH_FLAGS.value : HEAD_BYTES].view(torch.int64)


def put(peers: Sequence[PeerWindows], part_TPRH: Tensor, turn: int = 0) -> list[Tensor]:
    """Write each rank's partial sums into its room, and return them there."""
    rooms = []
    for each, part_PRH in zip(peers, part_TPRH, strict=True):
        room = each.room(turn)[: part_PRH.numel()].view(part_PRH.shape)
        rooms.append(room.copy_(part_PRH))
    return rooms


@pytest.mark.parametrize("ranks, parts", [(2, 1), (2, 2), (4, 2), (8, 1)])
def test_every_rank_gets_the_bits_of_a_rank_with_all_parts(ranks: int, parts: int) -> None:
    part_TPRH = draw(ranks, parts, ROWS, HIDDEN)
    residual, weight = draw(ROWS, HIDDEN, seed=1), draw(HIDDEN, seed=2, dtype=DTYPE)
    bias = draw(HIDDEN, seed=3, dtype=DTYPE)
    whole_residual, twin_residual = residual.clone(), residual.double()
    whole = add_rms_norm(part_TPRH.flatten(0, 1), whole_residual, weight, EPS, bias_H=bias)
    twin = reference.exchange_add_rms_norm(
        part_TPRH.double(), twin_residual, weight.double(), EPS, bias.double()
    )
    assert_close("normed", whole, twin, 1e-6 if DTYPE == torch.float32 else 3e-3)
    peers = group(ranks, parts)
    for turn in (0, 1):
        for each, mine in zip(peers, put(peers, part_TPRH, turn), strict=True):
            found, out = residual.clone(), torch.full_like(whole, float("nan"))
            each.add_rms_norm(mine, found, weight, EPS, bias_H=bias, out_RH=out, way=Way.PULL)
            assert_same_bits(f"normed, rank {each.rank}", out, whole)
            assert_same_bits(f"residual, rank {each.rank}", found, whole_residual)
            told = [flags(other)[each.rank].item() for other in peers]
            assert told == [AHEAD if other is each else turn + 1 for other in peers]
            flags(each).fill_(AHEAD)
            for other in peers:
                flags(other)[each.rank] = AHEAD
    assert [each.failure() for each in peers] == [""] * ranks


@pytest.mark.parametrize("programs", [PROGRAMS.value, 2])
@pytest.mark.parametrize(
    "way, ranks, parts",
    [(Way.PUSH, 2, 1), (Way.PUSH, 4, 2), (Way.TWO_STEPS, 2, 2), (Way.TWO_STEPS, 4, 1)],
)
def test_every_exchange_method_gives_the_bits_of_a_single_rank(
    way: Way, ranks: int, parts: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers of each seem to have signalled, so what they store lands a turn late."""
    monkeypatch.setattr(exchange, "PROGRAMS", tl.constexpr(programs))  # one of 2 has two rows
    part_TPRH, weight = draw(ranks, parts, ROWS, HIDDEN), draw(HIDDEN, seed=2, dtype=DTYPE)
    bias, residual = draw(HIDDEN, seed=3, dtype=DTYPE), draw(ROWS, HIDDEN, seed=1)
    whole_residual, peers = residual.clone(), group(ranks, parts)
    whole = add_rms_norm(part_TPRH.flatten(0, 1), whole_residual, weight, EPS, bias_H=bias)
    for turn in range(2):
        rooms = put(peers, part_TPRH, turn)
        for late in (3, 2, 1):  # partial sums, totals, all
            for each, mine in zip(peers, rooms, strict=True):
                each.state.zero_()
                push_flags(each).fill_(1)
                found, out = residual.clone(), torch.full_like(whole, float("nan"))
                rows = empty_rows(ROWS, HIDDEN, out.device) if turn else out
                each.add_rms_norm(mine, found, weight, EPS, bias_H=bias, out_RH=rows, way=way)
                if late == 1:
                    if isinstance(rows, Quantised):
                        assert_same_rows(rows, quantise_rows(whole))
                    else:
                        assert_same_bits(f"normed, rank {each.rank}", out, whole)
                    assert_same_bits(f"residual, rank {each.rank}", found, whole_residual)
        for each in peers:
            each.own[HEAD_BYTES + each._rooms.nbytes :].zero_()
    assert [each.failure() for each in peers] == [""] * ranks


def test_earlier_pushes_do_not_count_as_the_current_signal() -> None:
    """Nor does a peer that never pushed, for any number that a server reaches in years."""
    part_TPRH, residual = draw(2, 1, ROWS, HIDDEN), draw(ROWS, HIDDEN, seed=1)
    peers = group(2, timeout_s=0.3)
    mine, out = put(peers, part_TPRH)[0], torch.empty(ROWS, HIDDEN, device=DEVICE, dtype=DTYPE)
    for number in (1, 2**31, 2**32 - 1, 2**32, 2**40):
        for flag in (0, number - 1, number, number + 1):
            push_flags(peers[0]).fill_(flag)
            peers[0].state.zero_()
            peers[0].state.view(torch.int64)[0] = (number - 1) * EXCHANGE.value
            peers[0].add_rms_norm(mine, residual, None, 0.0, out_RH=out, way=Way.PUSH)
            missed = peers[0].failure().startswith("rank 0 waited 0.3 s for rank 1 in exchange")
            assert missed == (flag < number)


def test_exchange_method_for_a_row_count_fits_its_buffer() -> None:
    assert [way_of(2, rows) for rows in (256, 257)] == [Way.PUSH, Way.TWO_STEPS]
    assert PROGRAMS.value == 256, "each pushes one row"
    for ranks in (2, 4, 8):
        for rows in (1, 16, 17, 64, 65, 256, 257, 512, 513, 2048):
            landing = landing_floats(ranks, rows, 3584)
            assert landing % 256 == 0
            for fewer in (1, 17, 65, 256, 512, rows):
                if fewer <= rows:
                    assert way_of(ranks, fewer).landed(ranks) * fewer * 3584 <= landing


def test_exchange_without_a_norm_weight_rounds_the_sums() -> None:
    part_TPRH, residual = draw(2, 1, ROWS, HIDDEN), draw(ROWS, HIDDEN, seed=1)
    peers = group(2)
    out = torch.empty(ROWS, HIDDEN, device=DEVICE, dtype=DTYPE)
    expected = residual + (part_TPRH[0, 0] + part_TPRH[1, 0])
    peers[0].add_rms_norm(put(peers, part_TPRH)[0], residual, None, 0.0, out_RH=out, way=Way.PULL)
    assert_same_bits("sum", out, expected.to(DTYPE))


def test_leaves_assigned_to_wrong_ranks_change_the_bits() -> None:
    """Rank 0 owns leaves 0 and 2, rank 1 owns 1 and 3."""
    part_LRH, weight = draw(4, ROWS, HIDDEN), draw(HIDDEN, seed=2, dtype=DTYPE)
    expected, found = (torch.zeros(ROWS, HIDDEN, device=DEVICE) for _ in range(2))
    out = torch.empty(ROWS, HIDDEN, device=DEVICE, dtype=DTYPE)
    add_rms_norm(part_LRH, expected, weight, EPS)
    peers = group(2, 2)
    mine = put(peers, torch.stack([part_LRH[0::2], part_LRH[1::2]]))[0]
    peers[0].add_rms_norm(mine, found, weight, EPS, out_RH=out, way=Way.PULL)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits("residual", found, expected)


def test_rank_matmuls_are_exchanged_from_their_buffers() -> None:
    x, weight_HK = draw(ROWS, 512, dtype=DTYPE), draw(HIDDEN, 512, seed=1, dtype=DTYPE)
    norm = draw(HIDDEN, seed=2, dtype=DTYPE)
    expected = torch.zeros(ROWS, HIDDEN, device=DEVICE)
    whole = add_rms_norm(partials(x, Matrix(weight_HK), leaves=4), expected, norm, EPS)
    peers = group(2, 2)
    shards = zip(x.chunk(2, 1), weight_HK.chunk(2, 1), strict=True)
    rooms = [
        partials(each.contiguous(), Matrix(shard.contiguous()), leaves=2, room=peers[rank].room(0))
        for rank, (each, shard) in enumerate(shards)
    ]
    for each, mine in zip(peers, rooms, strict=True):
        assert mine.shape == (2, ROWS, HIDDEN) and mine.data_ptr() == each.room(0).data_ptr()
        found, out = torch.zeros_like(expected), torch.empty_like(whole)
        each.add_rms_norm(mine, found, norm, EPS, out_RH=out, way=Way.PULL)
        assert_same_bits("normed", out, whole)
        assert_same_bits("residual", found, expected)


@pytest.mark.parametrize("words", [5, 1500])
def test_words_are_gathered_in_rank_order(words: int) -> None:
    peers, rooms = group(4, 4), []
    for each in peers:
        rooms.append(each.room(1).view(torch.int32)[:words])
        rooms[-1].copy_(torch.arange(words) + 10_000 * each.rank)
    out = torch.full((4, words), -1, dtype=torch.int32, device=DEVICE)
    assert peers[2].gather(rooms[2], out) is out
    assert torch.equal(out, torch.stack(rooms))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_sample_their_blocks_like_one_rank_with_all_blocks(ranks: int) -> None:
    """Three rows and a dead one; the last rank has fewer blocks."""
    check_samples((2 + ranks) * BLOCK + 500, ranks)
    assert blocks_of_rank(BLOCK, 2) == blocks_of_rank(9 * BLOCK, 8) == 0, "a rank has no block"


# The vocabularies of Qwen2.5 and Qwen3, Llama 3, Llama 2, and one that is aligned to nothing.
@gpu
@pytest.mark.parametrize("vocabulary", [152064, 151936, 128256, 32000, 50257])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_sample_real_vocabularies_like_one_gpu(vocabulary: int, ranks: int) -> None:
    check_samples(vocabulary, ranks, rows=399)


def check_samples(vocabulary: int, ranks: int, rows: int = 3) -> None:
    row_S = torch.tensor([0, 2, -1, 1, *range(3, rows)], dtype=torch.int32).to(DEVICE)
    logits = 3 * draw(len(row_S), vocabulary)
    table = RowTable.allocate(rows, 1, device=DEVICE)
    slots = BatchSlots.allocate(4, 32, hidden=1, device=DEVICE)
    table.position_R.copy_(torch.arange(4, 4 + rows))
    table.batch_slot_R.copy_(torch.arange(rows) % 3)
    slots.seed_Q.copy_(torch.tensor([11, 12, 13, 14]))
    slots.temperature_Q.copy_(torch.tensor([1.0, 0.0, 0.7, 1.0]))
    expected = sample(logits, row_S, table, slots, filtered=False)
    own = BLOCK * blocks_of_rank(vocabulary, ranks)
    peers = group(ranks, floats=block_words(len(row_S), own // BLOCK))
    for turn in range(2):  # in the first one, later ranks have no results yet
        for each in peers:
            mine = logits[:, own * each.rank :][:, :own].contiguous()
            found = sample_shared(each, mine, vocabulary, row_S, table, slots)
            if turn:
                assert torch.equal(found.token_S, expected.token_S)
                assert_same_bits(f"rank {each.rank}", found.logprob_S, expected.logprob_S)


@pytest.mark.parametrize("ranks, count", [(2, 3), pytest.param(4, 33, marks=pytest.mark.long)])
def test_ranks_order_children_like_a_single_rank(ranks: int, count: int) -> None:
    """A dead row, tied tokens on both sides of a border, and ranks of which one has fewer blocks.
    More rows have wider blocks.
    """
    tokens, width = 700, 3
    logits, target_ids = draw(count, tokens), torch.arange(0, 2 * tokens, 2, dtype=torch.int32)
    borders = [tokens * rank // ranks // 16 * 16 for rank in range(ranks + 1)]
    borders[-1] = tokens
    logits[0, borders[1] - 1 : borders[1] + 1] = 9.0
    rows = RowTable.allocate(count, 1, device=DEVICE)
    slots = BatchSlots.allocate(2, 32, hidden=1, device=DEVICE)
    rows.position_R.copy_(torch.arange(count))
    rows.position_R[-1] = -1
    rows.batch_slot_R.copy_(torch.arange(count) % 2)
    slots.temperature_Q.copy_(torch.tensor([0.0, 0.7]))
    ids = target_ids.to(DEVICE)
    token, z = children(logits, ids, rows, slots, width=width)
    assert token[0, :2].tolist() == [2 * borders[1] - 2, 2 * borders[1]]
    assert (token[-1] == -1).all() and (token[:-1] >= 0).all()
    most = max(end - start for start, end in pairwise(borders))
    floats = ROWS * HIDDEN + candidate_words(count, most, width) + SUM_FLOATS
    peers = group(ranks, floats=floats)
    kept = [each.room(1)[: ROWS * HIDDEN].fill_(3.0) for each in peers]
    for turn in range(2):  # in the first one, later ranks have no results yet
        for each in peers:
            part = slice(*borders[each.rank : each.rank + 2])
            mine = logits[:, part].contiguous()
            found = children_shared(each, mine, ids[part], most, rows, slots, width=width, turn=1)
            if turn:
                assert torch.equal(found[0], token)
                assert_same_bits(f"rank {each.rank}", found[1], z)
    assert all((room == 3.0).all() for room in kept), "partial sums were written over"


@pytest.mark.parametrize("signal", [0, 2], ids=["missing", "stale"])
def test_missing_signal_ends_the_wait_at_its_timeout(signal: int) -> None:
    """The peer's newest exchange stays the one before this rank's."""
    peers = group(2, signal=signal, timeout_s=0.3)
    for _ in range(signal):
        peers[0].meet()
        assert not peers[0].failure()
    started = time.monotonic()
    peers[0].meet()
    reason = f"rank 0 waited 0.3 s for rank 1 in exchange {signal + 1}"
    assert peers[0].failure() == reason
    waited_s = time.monotonic() - started
    assert waited_s >= 0.3
    peers[0].meet(times=100)  # would be 30 s
    assert peers[0].failure() == reason and time.monotonic() - started < 20
    peers[0].reset()
    flags(peers[0]).fill_(1)
    peers[0].meet()
    assert not peers[0].failure()


def test_exchange_numbers_do_not_wrap() -> None:
    peers = group(2, signal=2**32, timeout_s=0.3)
    peers[0].state.view(torch.int64)[0] = (2**32 - 2) * EXCHANGE.value
    peers[0].meet(times=2)
    assert not peers[0].failure()
    assert [flags(peers[1])[0].item(), push_flags(peers[1]).max().item()] == [2**32, 0]
    peers[0].meet()
    assert "exchange 1" in peers[0].failure()


def test_windows_that_cannot_be_exchanged_are_refused() -> None:
    own = window(window_bytes(WindowSizes(64)))
    address = own.data_ptr()
    with pytest.raises(ValueError, match="a group of 2, 4 or 8"):
        peer_windows(0, [address] * 3, own)
    with pytest.raises(ValueError, match="begin at multiples of 1024"):
        peer_windows(0, [address, address + 512], own)
    with pytest.raises(ValueError, match="is its own"):
        peer_windows(1, [address, address + 1024], own)
    with pytest.raises(ValueError, match="has no equal rooms"):
        peer_windows(0, [address, address], own[:-512])


def started(folder: Path, device: str, exchanges: int, rank: int) -> subprocess.Popen[str]:
    module = "tests.kernels.exchange_rank"
    command = [sys.executable, "-m", module, device, str(exchanges), str(folder), str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(ranks: list[subprocess.Popen[str]], timeout_s: float) -> list[list[str]]:
    """Return each rank's last line."""
    try:
        return [rank.communicate(timeout=timeout_s)[0].splitlines()[-1:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_two_processes_exchange_through_shared_memory(tmp_path: Path) -> None:
    """The interpreter runs one program at a time, in order."""
    from tests.kernels import exchange_rank

    other = started(tmp_path, "cpu", 16, 1)
    try:
        assert exchange_rank.main("cpu", 16, tmp_path, 0) == 0
    finally:
        assert ended([other], timeout_s=60) == [["16 exchanges, 0 differ"]]


@gpu
def test_two_gpus_exchange_a_million_times_in_a_graph(tmp_path: Path) -> None:
    """Ranks that share a GPU take turns of milliseconds, so they exchange less."""
    exchanges = 1_000_000 if torch.cuda.device_count() > 1 else 800
    ranks = [started(tmp_path, "cuda", exchanges, rank) for rank in range(2)]
    assert ended(ranks, timeout_s=400) == [[f"{exchanges} exchanges, 0 differ"]] * 2


@pytest.fixture(scope="module")
def for_hopper() -> dict[str, dict[str, str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.for_hopper"]
    said = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    found: dict[str, dict[str, str]] = json.loads(said.stdout)
    return found


def test_kernels_for_hopper_signal_without_multicast(for_hopper: dict[str, dict[str, str]]) -> None:
    """The order in which a row's squares are added is that of the layout of the reduction."""
    texts = for_hopper
    pull = "pull_add_rms_norm pull"
    push = "push_add_rms_norm push"
    both = "push_add_rms_norm two steps"
    for name, signals in ((pull, 1), (push, 1), (both, 2), ("gather pull", 1)):
        ptx = texts[f"{name} 3584"]["ptx"]
        assert "multimem" not in ptx
        assert ptx.count("st.release.sys") == signals and ptx.count("ld.acquire.sys") == 2 * signals
        assert ptx.index("griddepcontrol.wait") < ptx.index("st.release.sys"), "signalled early"
        assert "ld.global.v4.b32" in ptx[ptx.index("ld.acquire.sys") :], "peers' vectors"
    for name in (push, both):
        ptx, signalled = texts[f"{name} 3584"]["ptx"], 0
        while (signalled := ptx.find("st.release.sys", signalled + 1)) > 0:
            stored = ptx.rindex("st.global.v4.b32", 0, signalled)
            assert stored < ptx.index("bar.sync", stored) < signalled, "signalled early"
    for hidden in (3584, 5120, 8192):
        for name in (push, both):
            limits = r"\.reqntid (\d+)\n\.maxnreg (\d+)"
            [(threads, registers)] = re.findall(limits, texts[f"{name} {hidden}"]["ptx"])
            assert 2 * int(threads) * int(registers) <= 65536, "two fit on a multiprocessor"
        named = [f"{name} {hidden}" for name in (pull, push, both, "_add_rms_norm pull")]
        named += [f"{name} quantised" for name in named]
        found = [reductions(texts[name]["layouts"]) for name in named]
        assert found[0] and found == len(found) * found[:1]
    quads = "sizePerThread = [1, 4], threadsPerWarp = [32, 1]"  # 16 bytes next to one another
    assert all(quads in texts[f"{name} 3584"]["layouts"] for name in (pull, push, both))


def test_rank_kernels_keep_a_single_gpus_register_layout(
    for_hopper: dict[str, dict[str, str]],
) -> None:
    """Triton's interpreter has no registers, so it cannot show in which order they are added."""
    for kernel in ("_sample_blocks", "_merge_blocks", "_rope_store"):
        variants = [text for name, text in for_hopper.items() if name.startswith(kernel)]
        found = [reductions(variant["layouts"]) for variant in variants]
        assert len(found) > 2 and found == len(found) * found[:1], kernel
    mixed = reductions(REORDERED)
    assert mixed == ["#ttg.pairs"], "a reshape that may reorder keeps the registers before it"


def test_scaled_matmul_for_hopper_multiplies_e4m3(for_hopper: dict[str, dict[str, str]]) -> None:
    for kind in ("folded", "gated"):
        ptx = for_hopper[f"_stream {kind}"]["ptx"]
        assert "wgmma.mma_async.sync.aligned.m64" in ptx and ".f32.e4m3.e4m3" in ptx


REORDERED = """
#pairs = #ttg.pairs
#one = #ttg.one
    %1 = tt.reshape %0 allow_reorder : tensor<256xf32, #pairs> -> tensor<256xf32, #one> loc(#l)
    %2 = "tt.reduce"(%1) <{axis = 0 : i32}> ({
      %3 = arith.addf %a, %b : f32 loc(#l)
      tt.reduce.return %3 : f32 loc(#l)
    }) : (tensor<256xf32, #one>) -> f32 loc(#l)
"""


def reductions(text: str) -> list[str]:
    """Return the layout of each tensor of floats that is added up, before a reshape that may put
    its elements in any order.
    """
    reordered = r"^ *(%\w+) = tt\.reshape %\w+ allow_reorder : tensor<[^>]*(#\w+)> ->"
    layout_of = dict(re.findall(reordered, text, re.MULTILINE))
    reduced = r'"tt\.reduce"\((%\w+)\)[^(]*\(\{(.*?)\}\) : \(tensor<[^>]*xf32, (#\w+)>'
    used = [
        layout_of.get(value, layout)
        for value, combined, layout in re.findall(reduced, text, re.DOTALL)
        if "arith.addf" in combined
    ]
    defined = [re.search(rf"^{name} = (.*)$", text, re.MULTILINE) for name in used]
    assert all(defined)
    return [found[1] for found in defined if found]
