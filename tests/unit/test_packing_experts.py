"""Packings of expert weights: every element lies where device/bodies/expert_units.cuh reads it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import Target
from gpurt.buffer import bf16, f32, nvfp4
from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops import packing, packing_experts
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.ops.expert_matvec import EXPERT_MATVEC, expert_matvec, layout_of
from gpurt.graphs.ops.expert_matvec_cuda import expert_row_tiles, tile_experts
from gpurt.planner import plan

TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
# [E, N, K]: K inside a chunk and over two; row tiles that end in smaller powers of two
SHAPES = [(2, 48, 64, 1), (3, 112, 144, 4), (1, 176, 16, 8), (2, 32, 80, 16)]


def value_of(word: int, scale: int, i: int) -> tuple[float, float]:
    """Elements 2 i and 2 i + 1 of a word of codes, times 2^8: Nvfp4Unit::pair, instruction by
    instruction, with the product of two bf16 in float64.
    """
    rotated = word >> 3 * i | word << (32 - 3 * i)
    turned = ((word & 0x001B001B) * 4228 if i == 3 else rotated) & 0x81C081C0
    by = (scale * 16 + 0x7600) & 0xFFFF
    halves = np.array([turned & 0xFFFF, turned >> 16, by], np.uint32) << 16
    low, high, factor = halves.view(np.float32).astype(np.float64)
    return low * factor * 256, high * factor * 256


def unpack_nvfp4(
    packed: NDArray[np.uint8], shape: tuple[int, int, int], tile_rows: int
) -> NDArray[np.float64]:
    """The definition in packing_experts.py, unit by unit and lane by lane."""
    experts, n, k = shape
    chunks = -(-k // 64)
    out = np.full((experts, n, chunks * 64), 12345.0)
    units = iter(packed.reshape(-1, packing_experts.NVFP4_UNIT_BYTES))
    for expert in range(experts):
        for begin, end in packing.mma16_tiles(n, tile_rows):
            for chunk, tile in np.ndindex(chunks, (end - begin) // 16):
                unit = next(units)
                words = unit[64:].view(np.uint32).reshape(32, 2, 2)
                for lane, high, half, i in np.ndindex(32, 2, 2, 4):
                    row = begin + 16 * tile + lane // 4 + 8 * high
                    column = chunk * 64 + lane % 4 * 16 + 8 * half + 2 * i
                    scale, word = int(unit[2 * lane + high]), int(words[lane, high, half])
                    out[expert, row, column : column + 2] = value_of(word, scale, i)
    assert next(units, None) is None
    return out


def random_blocks(shape: tuple[int, int, int], seed: int, scales: range) -> NDArray[np.uint8]:
    experts, n, k = shape
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, n, k // 16, 9)).astype(np.uint8)
    blocks[..., 8] = rng.choice(list(scales), blocks.shape[:-1])
    return blocks.reshape(experts, n, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_nvfp4_element_is_its_definition_where_the_body_reads_it(
    shape: tuple[int, int, int, int],
) -> None:
    *sizes, r = shape
    experts, n, k = sizes
    stored = random_blocks((experts, n, k), n, range(127))
    name = packing_experts.expert_name("nvfp4", r)
    packed = packing.pack(name, stored, sizes, nvfp4)
    assert packed.nbytes == packing.packed_bytes(name, sizes, nvfp4)
    got = unpack_nvfp4(packed, (experts, n, k), 16 * r)
    np.testing.assert_array_equal(got[..., :k], to_float32(stored, nvfp4))
    assert not got[..., k:].any(), "columns that pad K are zeros"


def test_every_code_times_every_scale_is_exact_signs_of_zero_and_nan_too() -> None:
    scales = np.arange(256, dtype=np.uint8)
    blocks = np.zeros((256, 1, 9), np.uint8)
    blocks[:, 0, :8] = np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8)
    blocks[:, 0, 8] = scales
    stored = blocks.reshape(1, 256, 9)
    packed = packing.pack("expert_nvfp4x1", stored, (1, 256, 16), nvfp4)
    got = unpack_nvfp4(packed, (1, 256, 16), 16)[0, :, :16]
    want = to_float32(stored, nvfp4)[0].astype(np.float64)
    np.testing.assert_array_equal(got, want)
    is_number = ~np.isnan(want)
    assert is_number.sum() == 254 * 16
    np.testing.assert_array_equal(np.signbit(got[is_number]), np.signbit(want[is_number]))


def test_products_of_code_and_scale_fit_bf16() -> None:
    blocks = random_blocks((1, 256, 16), 3, range(127))
    values = to_float32(blocks, nvfp4)
    np.testing.assert_array_equal(to_float32(to_bf16(values), bf16), values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bf16_element_lies_where_the_body_reads_it(
    shape: tuple[int, int, int, int],
) -> None:
    *sizes, r = shape
    experts, n, k = sizes
    w = np.random.default_rng(n).integers(0, 0xFFFF, (experts, n, k)).astype(np.uint16)
    packed = packing.pack(packing_experts.expert_name("bf16", r), w, sizes, bf16)
    units = iter(packed.view(np.uint16).reshape(-1, 4, 32, 2, 2, 2))
    out = np.zeros((experts, n, -(-k // 64) * 64), np.uint16)
    for expert in range(experts):
        for begin, end in packing.mma16_tiles(n, 16 * r):
            for chunk, tile in np.ndindex(-(-k // 64), (end - begin) // 16):
                unit = next(units)
                for j, lane, half, high, e in np.ndindex(4, 32, 2, 2, 2):
                    row = begin + 16 * tile + lane // 4 + 8 * high
                    column = 64 * chunk + 16 * (lane % 4) + 4 * j + 2 * half + e
                    out[expert, row, column] = unit[j, lane, half, high, e]
    assert next(units, None) is None
    np.testing.assert_array_equal(out[..., :k], w)
    assert not out[..., k:].any()


def test_float_experts_are_rounded_to_bf16_and_nvfp4_has_its_own_packing() -> None:
    w = np.random.default_rng(1).standard_normal((2, 32, 64)).astype(np.float32)
    got = packing.pack("expert_bf16x2", w, w.shape, f32)
    np.testing.assert_array_equal(got, packing.pack("expert_bf16x2", to_bf16(w), w.shape, bf16))
    with pytest.raises(PlanError, match=r"^experts stored as nvfp4 - at packing expert_bf16x1"):
        packing.pack("expert_bf16x1", np.zeros((1, 16, 9), np.uint8), (1, 16, 16), nvfp4)


# ---- tiles -----------------------------------------------------------------------------------
def operator(n: int, k: int, dtype: str = "nvfp4", rows: int = 16, experts: int = 40) -> Operator:
    graph = Graph(rows=rows)
    routes_words = 2 + min(experts, 2 * rows) * (2 + 2 * rows) + 4 * rows
    return expert_matvec(
        graph,
        graph.activation("x", [rows, k], "f32"),
        graph.weight("w", [experts, n, k], dtype, lambda: None),
        graph.activation("routes", [routes_words], "u32"),
        graph.activation("y", [2 * rows, n], "f32"),
        top_k=2,
    )


@pytest.mark.parametrize(("n", "k", "r"), [(1024, 4096, 4), (4096, 512, 16), (32, 64, 2)])
def test_tiles_cover_every_slot_and_lie_where_the_body_finds_them(n: int, k: int, r: int) -> None:
    op = operator(n, k)
    assert expert_row_tiles(op) == r
    tiles = tile_experts(op, TARGET)
    by_slot = [[t.coords for t in tiles if t.coords[0] == s] for s in range(layout_of(op).slots)]
    assert all([c[1:] for c in coords] == [c[1:] for c in by_slot[0]] for coords in by_slot)
    at = 0
    for _, begin, end, _ in by_slot[0]:
        assert begin == at
        count = (end - begin) // 16
        assert count & (count - 1) == 0, "a task computes a power of two of row tiles"
        # run-time address: rows / 16 * chunks * unit from the expert's first byte
        assert packing_experts.expert_tile_bytes(begin, k, "nvfp4") == at // 16 * -(-k // 64) * 576
        at = end
    assert at == n
    assert EXPERT_MATVEC.packing is not None
    assert EXPERT_MATVEC.packing(op, "w", TARGET) == f"expert_nvfp4x{r}"
    assert EXPERT_MATVEC.packing(op, "w", Target("host", 2)) == ""


@pytest.mark.parametrize(
    ("n", "k", "rows", "text"),
    [(40, 64, 1, r"an expert's W is \[40, 64\]"), (64, 64, 17, "17 rows")],
)
def test_shapes_that_the_body_cannot_compute_are_refused_with_the_numbers(
    n: int, k: int, rows: int, text: str
) -> None:
    with pytest.raises(GraphError, match=f"^{text}"):
        tile_experts(operator(n, k, "bf16", rows), TARGET)


def test_a_plan_for_cuda_states_the_packed_bytes() -> None:
    from tests.gpu.tiny_muse import tiny_muse

    made = plan(tiny_muse(), TARGET)
    made.check()
    up = made.buffers[made.buffer_index("layers[1].up.w")]
    experts, n, k = up.shape
    assert up.packing == "expert_nvfp4x4"
    assert up.size_bytes == experts * n // 16 * -(-k // 64) * 576
