"""Matmuls against float64 at odd shapes. On a GPU, every tile that ships and the bits of a row in
every tile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_kernels.gpu import gemm, gemm_portable
from tlt_kernels.gpu.gemm import gated, in_use, linear, partials
from tlt_kernels.gpu.gemm_tiles import (
    _STREAM,
    LEAF_UNIT,
    LEAVES,
    PARTS,
    Kind,
    Tile,
    leaf_size,
    portable_tile,
    split_last_round,
    stream_tile,
)
from tlt_kernels.gpu.quantise import Matrix
from tlt_kernels.reference import tree

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=gpu)]
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 4e-3,
}  # sums of K products in float32; one rounding of the result
SHARED_BYTES = 227 * 1024  # a block may have on a GPU of compute capability 9.0
SHAPES = [(1, 40, 32), (3, 96, 160), (17, 33, 264), (130, 72, 136)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_linear_matches_its_twin(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = draw(m, k, dtype=dtype)
    weight = draw(n, k, dtype=dtype, seed=1)
    bias = draw(n, dtype=dtype, seed=2)
    expected = x.double() @ weight.double().T
    matrix = Matrix(weight)
    assert linear(x, matrix).dtype == dtype
    assert_close("product", linear(x, matrix), expected, TOLERANCE[dtype])
    exact = linear(x, matrix, bias, out_dtype=torch.float32)
    assert_close("with bias", exact, expected + bias.double(), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves", [1, 2, 4])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_partial_sums_add_up_to_the_matmul(
    m: int, n: int, k: int, leaves: int, dtype: torch.dtype
) -> None:
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
    parts = partials(x, Matrix(weight), leaves=leaves)
    assert parts.dtype == torch.float32 and len(parts) <= leaves
    assert_close("sum of parts", parts.sum(0), x.double() @ weight.double().T, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_gated_matmul_matches_its_twin(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = draw(m, k, dtype=dtype), draw(2 * n, k, dtype=dtype, seed=1) * 0.2
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close("gated", gated(x, Matrix(weight)), expected, TOLERANCE[dtype])


def test_matmul_of_no_rows_launches_no_kernel() -> None:
    x, weight = draw(0, 32), Matrix(draw(8, 32))
    assert linear(x, weight).shape == (0, 8)
    assert gated(x, weight).shape == (0, 4)
    assert partials(x, weight, leaves=2).shape[1:] == (0, 8)


class TestWhichKernel:
    GPU = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A GPU and a Triton that have all that the streaming kernel needs."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setitem(sys.modules, "tlt_kernels.gpu.gemm_stream", ModuleType("gemm_stream"))
        hindrance = gemm._hindrance
        hindrance.cache_clear()
        yield
        hindrance.cache_clear()

    def test_streaming_kernel_is_reported_where_supported(self) -> None:
        assert in_use(torch.bfloat16, self.GPU, 18944) == "streaming"

    def test_portable_kernel_is_reported_with_its_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for dtype, device, width, why in (
            (torch.float16, self.GPU, 64, "the type is float16, and the streaming kernel is for b"),
            (torch.bfloat16, torch.device("cpu"), 64, "the device is cpu, and the streaming kerne"),
            (torch.bfloat16, self.GPU, 100, "the intermediate size 100 is no multiple of 8"),
        ):
            assert in_use(dtype, device, width).startswith(f"portable: {why}")
        gemm._hindrance.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
        why = "compute capability 10.3, and the streaming kernel is for 9.x"
        assert why in in_use(torch.bfloat16, self.GPU, 64)

    def test_triton_without_the_needed_features_uses_portable_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tlt_kernels.gpu.gemm_stream", None)
        assert in_use(torch.bfloat16, self.GPU, 64).startswith("portable: Triton 3.")

    @pytest.mark.parametrize(
        ("kind", "width", "streams"),
        [(Kind.LINEAR, 33, True), (Kind.GATED, 40, True), (Kind.GATED, 36, False)],
    )
    def test_reported_matmul_kernel_is_the_one_that_runs(
        self, kind: Kind, width: int, streams: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []
        stream: Any = sys.modules["tlt_kernels.gpu.gemm_stream"]
        stream.multiply = lambda *_: ran.append("streaming")
        stream.multiprocessors = lambda device: 132
        monkeypatch.setattr("tlt_kernels.gpu.gemm_stream", stream, raising=False)
        monkeypatch.setattr(gemm_portable, "multiply", lambda *_: ran.append("portable"))
        monkeypatch.setattr(gemm, "_hindrance", lambda dtype, device: "")
        x, weight = torch.zeros(2, 16), torch.zeros(2 * width, 16)
        gemm._multiply(kind, x, Matrix(weight), None, torch.zeros(2, width))
        assert ran == ["streaming" if streams else "portable"]


TILES = list(
    dict.fromkeys((kind, tile) for kind in Kind for _, each in _STREAM[kind] for tile in each)
)


def shared_bytes(tile: Tile, itemsize: int = 2) -> int:
    """Return an upper bound of the shared memory of `gemm_stream`: the ring, with a scale per row
    for operands of one byte, two barriers of 8 bytes a stage, and the room in which sums change
    their layout before they are stored (64 bytes a thread in float32, 16 in bfloat16).
    """
    ring = (tile.rows + tile.columns) * tile.depth * itemsize * tile.stages
    if itemsize == 1:
        ring += 4 * max(tile.rows, 32) * tile.stages
    return ring + 16 * tile.stages + 64 * 32 * tile.warps + 128


@pytest.mark.parametrize("tile", list(dict.fromkeys(tile for _, tile in TILES)), ids=str)
def test_streaming_tiles_fit_shared_memory_and_leaves(tile: Tile) -> None:
    assert LEAF_UNIT % tile.depth == 0 and tile.depth % 64 == 0
    assert tile.rows % tile.pieces == 0 and tile.piece >= 8
    assert shared_bytes(tile) <= SHARED_BYTES


@pytest.mark.parametrize("rows", [1, 32, 64, 128, 256, 384, 512, 4096])
def test_portable_tiles_fit_shared_memory_and_leaves(rows: int) -> None:
    tile = portable_tile(rows, torch.bfloat16)
    assert LEAF_UNIT % tile.depth == 0
    assert (tile.rows + 2 * tile.columns) * tile.depth * 2 * tile.stages <= 216 * 1024


@pytest.mark.parametrize(
    "tiles, pieces, expected",
    [
        (132, 4, (132, 132)),  # no tile is left over
        (264 + 32, 4, (264 + 128, 264)),  # one round of pieces
        (72, 2, (72, 72)),  # two rounds of half tiles take longer than one of tiles
        (20, 4, (80, 0)),
        (264 + 32, 1, (296, 296)),
    ],
)
def test_last_round_is_split_where_that_ends_sooner(
    tiles: int, pieces: int, expected: tuple[int, int]
) -> None:
    assert split_last_round(tiles, 132, pieces) == expected


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "leaves", "width"),
    [
        (Kind.GATED, 64, 27648, 1, 128),  # 216 wide tiles: two rounds, 82 % full
        (Kind.GATED, 64, 14336, 1, 128),  # 112 tiles: one round, 85 %
        (Kind.GATED, 64, 37888, 1, 64),  # 296 tiles: three rounds, 75 %
        (Kind.GATED, 128, 27648, 1, 256),
        (Kind.GATED, 128, 37888, 1, 128),
        (Kind.FOLDED, 128, 8192, 4, 128),  # two sums: 128 tiles
        (Kind.FOLDED, 128, 5120, 4, 64),  # two sums: 80 tiles
        (Kind.FOLDED, 128, 3584, 8, 128),  # a program adds no more than two, so four: 112 tiles
        (Kind.GATED, 32, 27648, 1, 128),
        (Kind.GATED, 32, 37888, 1, 64),
        (Kind.GATED, 16, 27648, 1, 64),  # fewer rows have no wide tiles
    ],
)
def test_wide_tiles_run_where_they_fill_their_rounds(
    kind: Kind, rows: int, columns: int, leaves: int, width: int
) -> None:
    parts = min(PARTS, leaves)
    assert stream_tile(kind, rows, columns, 132, leaves, parts).columns == width


@pytest.mark.parametrize(
    ("columns", "expected"), [(3584, (112, 112)), (5120, (132 + 2 * 28, 132)), (1536, (96, 0))]
)
def test_last_round_of_64_rows_leaves_no_program_idle(
    columns: int, expected: tuple[int, int]
) -> None:
    tile = stream_tile(Kind.PARTIALS, 64, columns, 132, 2, PARTS)
    assert split_last_round(PARTS * columns // tile.columns, 132, tile.pieces) == expected


def test_tiles_for_equal_rows_keep_height_and_get_no_wider() -> None:
    """Then rows fill the tiles of every matmul, or of none."""
    for kind in Kind:
        for most, tiles in _STREAM[kind]:
            assert len({tile.rows for tile in tiles}) == 1, (kind, most)
            assert len(set(tiles)) == len(tiles), (kind, most)
            widths = [tile.columns for tile in tiles]
            assert widths == sorted(widths, reverse=True), (kind, most)


def gated_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `gated` before it is rounded to the type of x."""
    out = torch.full((len(x), len(weight) // 2), float("nan"), device=DEVICE)
    gemm._multiply(Kind.GATED, x, Matrix(weight), None, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 130])
def test_gated_matmul_is_rounded_once(rows: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, 160, dtype=dtype), draw(80, 160, dtype=dtype, seed=1) * 0.2
    assert_same_bits("gated", gated(x, Matrix(weight)), gated_sums(x, weight).to(dtype))


@gpu
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    "n, k",
    [
        (4608, 3584),
        (3584, 3584),
        (3584, 18944),
        (37888, 3584),
        (18944, 1024),
        (152064, 3584),
        (1008, 18944),
        (200, 168),
    ],
)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(n: int, k: int, outliers: bool) -> None:
    x, weight = draw(4096, k, dtype=torch.bfloat16), draw(n, k, dtype=torch.bfloat16, seed=1) * 0.02
    if outliers:
        x[:, :: k // 7] *= 100
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    kernels = {
        "linear": lambda rows: linear(rows, Matrix(weight), out_dtype=torch.float32),
        "partials": lambda rows: tree(partials(rows, Matrix(weight), leaves=LEAVES)),
        "gated": lambda rows: gated_sums(rows, weight),
    }
    for name, kernel in kernels.items():
        whole = kernel(x)
        assert_same_bits(f"{name}, permuted", kernel(x[order]), whole[order])
        for rows in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 400, 500, 512, 700, 2048):
            assert_same_bits(f"{name}, {rows} of 4096 rows", kernel(x[:rows]), whole[:rows])


@gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 200, 300])
def test_streaming_and_portable_kernels_give_the_same_bits(rows: int) -> None:
    x = draw(rows, 3584, dtype=torch.bfloat16)
    weight = draw(1200, 3584, dtype=torch.bfloat16, seed=1) * 0.02
    tile = portable_tile(rows, torch.bfloat16)
    exact = linear(x, Matrix(weight), out_dtype=torch.float32)
    for name, found, is_gated in (("linear", exact, False), ("gated", gated_sums(x, weight), True)):
        other = torch.full_like(found, float("nan"))
        gemm_portable.multiply(tile, x, Matrix(weight), None, other, 3584, 1, is_gated)
        assert_same_bits(f"{name} of {rows} rows", found, other)


class LastLaunched:
    """A kernel that remembers what its last launch ran."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.compiled = self.kernel[grid](*args, **options)

        return launch


@gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "tile"), TILES, ids=str)
def test_streaming_tile_stores_the_bits_of_the_portable_kernel(
    kind: Kind, tile: Tile, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run more than one round of tiles; where a tile has pieces, the last round is cut. `ragged`:
    outputs are stored one by one, because the compiler cannot tell that a row starts at a multiple
    of 16 bytes (and except for gated ones it does not).
    """
    is_gated = kind is Kind.GATED
    m = 2 * tile.rows + 5
    n = (3000 if ragged else 3008) if is_gated else (6001 if ragged else 6016)
    k = 552
    kernel = in_use(torch.bfloat16, torch.device(DEVICE), n if is_gated else 0)
    if kernel != "streaming":
        pytest.skip(kernel)
    from tlt_kernels.gpu import gemm_stream

    parts, fold = {Kind.PARTIALS: (2, 1), Kind.FOLDED: (2, 2)}.get(kind, (1, 1))
    leaf = leaf_size(k, parts * fold) if parts > 1 else k
    x = draw(m, k, dtype=torch.bfloat16)
    weight = draw(2 * n if is_gated else n, k, dtype=torch.bfloat16, seed=1) * 0.2
    bias = draw(n, dtype=torch.bfloat16, seed=2) if kind is Kind.LINEAR else None
    dtype = torch.bfloat16 if kind in (Kind.LINEAR, Kind.GATED) else torch.float32
    found = torch.full((parts * m + 1, n), float("nan"), dtype=dtype, device=DEVICE)
    expected, given = found.clone(), (x, Matrix(weight), bias)
    outs = [out[:-1].view(parts, m, n) for out in (found, expected)]
    stream = LastLaunched(gemm_stream._stream)
    monkeypatch.setattr(gemm_stream, "_stream", stream)
    gemm_stream.multiply(tile, *given, outs[0], leaf, fold, is_gated)
    gemm_portable.multiply(portable_tile(m, x.dtype), *given, outs[1], leaf, fold, is_gated)
    assert_same_bits(f"{kind.value}, {tile}", found[:-1], expected[:-1])
    assert found[-1].isnan().all(), "written past the last row"
    assert stream.compiled.metadata.shared <= shared_bytes(tile)
