"""Packings: every stored element lies where device/bodies/matvec.cuh reads it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import Target
from gpurt.buffer import DTYPES, DType, bf16, f16, f32, q4_1, q8_0
from gpurt.errors import GraphError, PlanError
from gpurt.executors.contents import PackedContents
from gpurt.graph import Graph
from gpurt.graphs.ops import packing
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.matvec_cuda import packing_cuda, row_tiles, tile_cuda
from gpurt.plan import PlanBuffer

TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)


def unpack(
    packed: NDArray[np.uint8], n: int, k: int, group: int, tile_rows: int
) -> NDArray[np.uint16]:
    """The definition in packing.py, element by element."""
    words = packed.view(np.uint16)
    out = np.full((n, k), 0xDEAD, np.uint16)
    at = 0
    for begin, end in packing.mma16_tiles(n, tile_rows):
        for chunk in range(-(-k // 64)):
            for row_tile in range(-(-(end - begin) // 16)):
                for high, j, half, g, c, e in np.ndindex(2, 4, 2, 8, 4, 2):
                    row = begin + row_tile * 16 + g + 8 * high
                    q = 4 * j + 2 * half + e
                    column = chunk * 64 + 4 * group * (q // group) + group * c + q % group
                    if row < n and column < k:
                        out[row, column] = words[at]
                    else:
                        assert words[at] == 0
                    at += 1
    assert at == words.size
    return out


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(("n", "k", "r"), [(48, 64, 1), (112, 144, 4), (176, 80, 8), (32, 16, 16)])
def test_every_element_of_a_weight_is_packed_where_the_body_reads_it(
    n: int, k: int, r: int, group: int
) -> None:
    w = np.random.default_rng(n).integers(0, 0xFFFF, (n, k)).astype(np.uint16)
    name = packing.mma16_name(group, r)
    packed = packing.pack(name, w, (n, k), bf16)
    assert packed.nbytes == packing.packed_bytes(name, (n, k), bf16)
    np.testing.assert_array_equal(unpack(packed, n, k, group, r * 16), w)


@pytest.mark.parametrize("dtype", [f32, f16, q8_0, q4_1], ids=str)
def test_stored_dtypes_are_packed_as_their_rounded_values(dtype: DType) -> None:
    n, k = 32, 64
    rng = np.random.default_rng(1)
    if dtype.block > 1:
        stored = rng.integers(0, 60, (n, dtype.row_bytes(k))).astype(np.uint8)
    else:
        stored = rng.standard_normal((n, k)).astype(dtype.storage)
    want = packing.pack("mma16g4x2", to_bf16(to_float32(stored, dtype)), (n, k), DTYPES["bf16"])
    np.testing.assert_array_equal(packing.pack("mma16g4x2", stored, (n, k), dtype), want)


@pytest.mark.parametrize(
    ("n", "k"), [(576, 576), (960, 576), (49152, 576), (3072, 576), (112, 1536)]
)
def test_tiles_stream_the_whole_packed_weight_once_and_in_order(n: int, k: int) -> None:
    graph = Graph(rows=16)
    w = graph.weight("w", [n, k], "bf16", lambda: None)
    x = graph.activation("x", [16, k], "f32")
    op = matvec(graph, x, w, graph.activation("y", [16, n], "f32"))
    tiles = tile_cuda(op, TARGET)
    at, row = 0, 0
    for tile in tiles:
        begin, end, *_ = tile.coords
        count = (end - begin + 15) // 16
        assert count & (count - 1) == 0, "a task computes a power of two of row tiles"
        assert tile.stream is not None
        assert (tile.stream.offset_bytes, begin) == (at, row)
        at, row = at + tile.stream.size_bytes, end
    assert row == n
    assert at == packing.packed_bytes(packing_cuda(op, "w", TARGET), (n, k), bf16)


def test_tiles_do_not_depend_on_the_worker_count() -> None:
    assert [row_tiles(n, k) for n, k in ((4096, 4096), (3072, 576), (49152, 576))] == [2, 2, 8]


@pytest.mark.parametrize(
    ("n", "k", "rows", "text"),
    [(36, 64, 1, r"W is \[36, 64\]"), (64, 40, 1, r"W is \[64, 40\]"), (64, 64, 17, "17 rows")],
)
def test_shapes_that_the_body_cannot_compute_are_refused_with_the_numbers(
    n: int, k: int, rows: int, text: str
) -> None:
    graph = Graph(rows=rows)
    w = graph.weight("w", [n, k], "bf16", lambda: None)
    op = matvec(
        graph, graph.activation("x", [rows, k], "f32"), w, graph.activation("y", [rows, n], "f32")
    )
    with pytest.raises(GraphError, match=f"^{text}"):
        tile_cuda(op, TARGET)


def test_an_unknown_packing_names_those_that_exist() -> None:
    with pytest.raises(PlanError, match=r"^unknown packing 'mma17x1'.*mma16g4x1"):
        packing.packed_bytes("mma17x1", (16, 64), bf16)


def test_buffers_of_one_source_and_packing_are_read_and_packed_once() -> None:
    reads: list[str] = []

    def source(name: str) -> np.ndarray:
        reads.append(name)
        return np.arange(64 * 64, dtype=np.float32).reshape(64, 64)

    def shared() -> np.ndarray:
        return source("shared")

    graph = Graph("weights")
    for name, content in (("a", shared), ("b", lambda: source("b")), ("c", shared), ("d", shared)):
        graph.weight(name, [64, 64], "f32", content)
    graph.state("empty", [4], "f32")
    sources = {buffer.name: buffer for buffer in graph.buffers}
    packings = {"a": "", "b": "", "c": "mma16g4x1", "d": "", "empty": ""}
    planned = [
        PlanBuffer(
            *(name, sources[name].shape, "f32", "weight", packing),
            *(64 * 64 * (2 if packing else 4), "weight", 0),
        )
        for name, packing in packings.items()
    ]
    contents = PackedContents(planned, sources)
    taken = [contents.take(p) for p in planned]
    assert reads == ["shared", "b", "shared"], "once for each packing"
    assert taken[0] is taken[3]
    assert taken[4] is None
    assert [t.nbytes for t in taken if t is not None] == [16384, 16384, 8192, 16384]
