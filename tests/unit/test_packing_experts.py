"""Packings of expert weights: every element lies where device/bodies/expert_units.cuh reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from gpurt.graphs.ops.expert_matvec_cuda import expert_cut, tile_experts
from gpurt.graphs.ops.packing_experts import ExpertCut
from gpurt.planner import plan

TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
# [E, N, K], K groups, row tiles a virtual warp: K inside a chunk, over two, over whole rounds; last
# tasks with fewer rows
SHAPES = [(2, 48, 64, 16, 1), (3, 112, 144, 8, 2), (1, 176, 16, 16, 4), (2, 288, 80, 1, 1)]


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


def places(shape: tuple[int, int, int], cut: ExpertCut) -> Iterator[tuple[int, int, int]]:
    """Expert, first row and first column of every unit in its order: packing_experts.py's table."""
    experts, n, k = shape
    row_groups = 16 // cut.k_groups
    for expert in range(experts):
        for begin, _ in cut.tiles(n):
            for q, i, g, r in np.ndindex(cut.rounds(k), cut.warp_tiles, cut.k_groups, row_groups):
                yield expert, begin + 16 * (i * row_groups + r), 64 * (q * cut.k_groups + g)


def padded(shape: tuple[int, int, int], cut: ExpertCut) -> tuple[int, int, int]:
    """Shape with N and K as far as tiles and rounds go."""
    experts, n, k = shape
    rows = len(cut.tiles(n)) * cut.tile_rows
    return experts, rows, cut.rounds(k) * cut.k_groups * 64


def unpack_nvfp4(
    packed: NDArray[np.uint8], shape: tuple[int, int, int], cut: ExpertCut
) -> NDArray[np.float64]:
    """The definition in packing_experts.py, unit by unit and lane by lane."""
    out = np.full(padded(shape, cut), 12345.0)
    units = packed.reshape(-1, packing_experts.NVFP4_UNIT_BYTES)
    for unit, (expert, first_row, first) in zip(units, places(shape, cut), strict=True):
        words = unit[64:].view(np.uint32).reshape(32, 2, 2)
        for lane, high, half, i in np.ndindex(32, 2, 2, 4):
            row = first_row + lane // 4 + 8 * high
            column = first + lane % 4 * 16 + 8 * half + 2 * i
            scale, word = int(unit[2 * lane + high]), int(words[lane, high, half])
            out[expert, row, column : column + 2] = value_of(word, scale, i)
    return out


def cut_out(
    out: NDArray[Any], shape: tuple[int, int, int]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """W, the rows and the columns that pad it."""
    _, n, k = shape
    return out[:, :n, :k], out[:, n:], out[:, :, k:]


def random_blocks(shape: tuple[int, int, int], seed: int, scales: range) -> NDArray[np.uint8]:
    experts, n, k = shape
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, n, k // 16, 9)).astype(np.uint8)
    blocks[..., 8] = rng.choice(list(scales), blocks.shape[:-1])
    return blocks.reshape(experts, n, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_nvfp4_element_is_its_definition_where_the_body_reads_it(
    shape: tuple[int, int, int, int, int],
) -> None:
    sizes, cut = shape[:3], ExpertCut(*shape[3:])
    stored = random_blocks(sizes, sizes[1], range(127))
    packed = packing.pack(cut.name("nvfp4"), stored, sizes, nvfp4)
    assert packed.nbytes == packing.packed_bytes(cut.name("nvfp4"), sizes, nvfp4)
    got, rows, columns = cut_out(unpack_nvfp4(packed, sizes, cut), sizes)
    np.testing.assert_array_equal(got, to_float32(stored, nvfp4))
    assert not rows.any(), "rows that pad N are zeros"
    assert not columns.any(), "columns that pad K are zeros"


def test_every_code_times_every_scale_is_exact_signs_of_zero_and_nan_too() -> None:
    scales = np.arange(256, dtype=np.uint8)
    blocks = np.zeros((256, 1, 9), np.uint8)
    blocks[:, 0, :8] = np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8)
    blocks[:, 0, 8] = scales
    stored = blocks.reshape(1, 256, 9)
    packed = packing.pack("expert_nvfp4k1w1", stored, (1, 256, 16), nvfp4)
    got = unpack_nvfp4(packed, (1, 256, 16), ExpertCut(1, 1))[0, :, :16]
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
    shape: tuple[int, int, int, int, int],
) -> None:
    sizes, cut = shape[:3], ExpertCut(*shape[3:])
    w = np.random.default_rng(sizes[1]).integers(0, 0xFFFF, sizes).astype(np.uint16)
    packed = packing.pack(cut.name("bf16"), w, sizes, bf16)
    units = packed.view(np.uint16).reshape(-1, 4, 32, 2, 2, 2)
    out = np.zeros(padded(sizes, cut), np.uint16)
    for unit, (expert, first_row, first) in zip(units, places(sizes, cut), strict=True):
        for j, lane, half, high, e in np.ndindex(4, 32, 2, 2, 2):
            row = first_row + lane // 4 + 8 * high
            out[expert, row, first + 16 * (lane % 4) + 4 * j + 2 * half + e] = unit[
                j, lane, half, high, e
            ]
    got, rows, columns = cut_out(out, sizes)
    np.testing.assert_array_equal(got, w)
    assert not rows.any()
    assert not columns.any()


def test_float_experts_are_rounded_to_bf16_and_nvfp4_has_its_own_packing() -> None:
    w = np.random.default_rng(1).standard_normal((2, 32, 64)).astype(np.float32)
    got = packing.pack("expert_bf16k8w2", w, w.shape, f32)
    np.testing.assert_array_equal(got, packing.pack("expert_bf16k8w2", to_bf16(w), w.shape, bf16))
    with pytest.raises(PlanError, match=r"^experts stored as nvfp4 - at packing expert_bf16k1w1"):
        packing.pack("expert_bf16k1w1", np.zeros((1, 16, 9), np.uint8), (1, 16, 16), nvfp4)


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


@pytest.mark.parametrize(
    ("n", "k", "dtype", "cut", "rows", "kilobytes"),
    [
        (1024, 4096, "nvfp4", ExpertCut(16, 4), 64, 144),  # Muse Spark, a rank of 8
        (4096, 512, "nvfp4", ExpertCut(2, 4), 512, 144),
        (1024, 4096, "bf16", ExpertCut(16, 1), 16, 128),
        (1536, 2048, "bf16", ExpertCut(16, 2), 32, 128),  # Qwen3-30B-A3B
        (2048, 768, "bf16", ExpertCut(4, 2), 128, 192),
    ],
)
def test_tiles_cover_every_slot_and_stream_an_experts_bytes_one_after_another(
    n: int, k: int, dtype: str, cut: ExpertCut, rows: int, kilobytes: int
) -> None:
    op = operator(n, k, dtype)
    assert expert_cut(op) == cut
    assert cut.expert_bytes(n, k, dtype) == n // 16 * (k // 64) * packing_experts.unit_bytes(dtype)
    layout, at = layout_of(op), 0
    tiles = tile_experts(op, TARGET)
    for number, tile in enumerate(tiles):
        slot, index = divmod(number, n // rows)
        code = cut.k_groups.bit_length() - 1 | cut.warp_tiles << 8
        assert tile.coords == (slot, index * rows, (index + 1) * rows, code)
        stream = tile.stream
        assert stream is not None
        at = 0 if index == 0 else at
        assert (stream.offset_bytes, stream.size_bytes) == (at, kilobytes << 10)
        assert stream.stride_bytes == cut.expert_bytes(n, k, dtype)
        assert stream.expert_id_bytes == 4 * layout.slot(slot)
        assert stream.stage_bytes == (36864 if dtype == "nvfp4" else 32768)
        at += stream.size_bytes
    assert len(tiles) == layout.slots * n // rows
    assert EXPERT_MATVEC.packing is not None
    assert EXPERT_MATVEC.packing(op, "w", TARGET) == cut.name(dtype)
    assert EXPERT_MATVEC.packing(op, "w", Target("host", 2)) == ""


def test_a_team_of_one_streams_nothing() -> None:
    tiles = tile_experts(operator(1024, 4096), replace(TARGET, team_warps=1))
    assert all(tile.stream is None for tile in tiles)


def test_a_shape_that_the_body_cannot_compute_is_refused_with_its_numbers() -> None:
    with pytest.raises(GraphError, match=r"^an expert's W is \[40, 64\]"):
        tile_experts(operator(40, 64, "bf16", 1), TARGET)


def test_a_plan_for_cuda_states_the_packed_bytes() -> None:
    from tests.gpu.tiny_muse import tiny_muse

    made = plan(tiny_muse(), TARGET)
    made.check()
    up = made.buffers[made.buffer_index("layers[1].up.w")]
    experts, n, k = up.shape
    cut = next(c for c in packing_experts.EXPERT_CUTS if c.name("nvfp4") == up.packing)
    assert up.size_bytes == experts * cut.expert_bytes(n, k, "nvfp4")
    streams = [t for t in made.tasks if t.expert is not None and t.stream is not None]
    assert streams
    assert {t.expert.stage_bytes for t in streams if t.expert is not None} == {36864, 32768}
