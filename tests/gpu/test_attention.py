"""attention on the GPU against its reference, task by task, and its bits over rows and teams."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt.body import StepRows
from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.attention import attention, attention_reference
from gpurt.graphs.ops.dtypes import dtype_code, to_storage
from tests.gpu.one_task import OneTask, Step, first_difference, reference_arrays

PAGE, PAGES_PER_SLOT, SLOTS = 64, 8, 3
SHAPES = [(3, 1, 64), (9, 3, 64), (8, 2, 128), (4, 2, 128), (2, 2, 64), (8, 1, 128)]
# 16-bit caches round keys and values; the rest is float32 with another order of sums.
TOLERANCE = {"f32": 3e-6, "bf16": 1.2e-2, "f16": 2e-3}


@cache
def runner(dim: int, group: int, dtype: str, team_warps: int = 16) -> OneTask:
    code = dtype_code(DTYPES[dtype])
    return OneTask("attention", f"attention_of<{dim}, {group}, {code}>", team_warps)


def operator(heads: int, kv_heads: int, dim: int, dtype: str, norm: bool) -> Operator:
    graph = Graph("attention", rows=16, slots=SLOTS, context=PAGE * PAGES_PER_SLOT)
    cache_shape = [SLOTS * PAGES_PER_SLOT, kv_heads, PAGE, dim]
    rope = graph.weight("rope", [graph.context, dim], "f32", np.zeros(1))
    return attention(
        graph,
        graph.activation("q", [16, heads * dim], "f32"),
        graph.activation("kv", [16, 2 * kv_heads * dim], "f32"),
        graph.state("k", cache_shape, dtype),
        graph.state("v", cache_shape, dtype),
        graph.state("table", [SLOTS, PAGES_PER_SLOT], "u32"),
        rope,
        graph.activation("out", [16, heads * dim], "f32"),
        heads=heads,
        qk_norm=graph.weight("norm", [2, dim], "f32", np.zeros(1)) if norm else None,
        eps=1e-6,
    )


def inputs(op: Operator, step: Step, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Random arguments; caches hold NaN but where earlier positions lie."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, region in op.args.items():
        shape = region.buffer.shape
        arrays[name] = rng.standard_normal(shape).astype(np.float32)
    arrays["page_table"] = rng.permutation(SLOTS * PAGES_PER_SLOT).astype(np.uint32)
    arrays["page_table"] = arrays["page_table"].reshape(SLOTS, PAGES_PER_SLOT)
    angles = rng.uniform(0, 6, arrays["rope"].shape).astype(np.float32)
    half = angles.shape[1] // 2
    arrays["rope"][:, :half], arrays["rope"][:, half:] = (
        np.cos(angles[:, :half]),
        np.sin(angles[:, :half]),
    )
    for name in ("k_cache", "v_cache"):
        filled = np.full(op.args[name].buffer.shape, np.nan, np.float32)
        for slot, position in zip(step.slots, step.positions, strict=True):
            before = position
            for page in range(-(-before // PAGE)):
                count = min(PAGE, before - page * PAGE)
                values = rng.standard_normal((filled.shape[1], count, filled.shape[3]))
                filled[arrays["page_table"][slot, page], :, :count] = values
        arrays[name] = to_storage(filled, DTYPES[dtype])
    rows = len(step.slots)
    for name in ("q", "kv"):
        arrays[name][rows:] = np.nan
    arrays["out"][...] = np.nan
    return arrays


def run(op: Operator, arrays: dict[str, Any], step: Step, one: OneTask) -> dict[str, Any]:
    names = [arg.name for arg in op.body.args]
    coords = [(head, 0, 0, 0) for head in range(int(op.params["kv_heads"]))]
    got = one.run([arrays.get(n) for n in names], list(op.params.values()), coords, step)
    return dict(zip([*names, "sampled"], got, strict=True))


def step_rows(step: Step) -> StepRows:
    return StepRows(
        np.zeros(len(step.slots), np.uint32),
        np.array(step.slots, np.uint32),
        np.array(step.positions, np.uint32),
        np.zeros(0, np.uint32),
    )


STEPS = {
    "first token": Step([0], [0]),
    "one row": Step([1], [100]),
    "page edge": Step([2], [64]),
    "long": Step([1], [511]),
    "prefill": Step([0] * 16, list(range(16))),
    "prefill over a page edge": Step([2] * 16, list(range(56, 72))),
    "mixed slots": Step([0, 1, 2, 2, 2], [300, 17, 5, 6, 7]),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
def test_attention_equals_its_reference_task_by_task(
    shape: tuple[int, int, int], dtype: str, norm: bool
) -> None:
    heads, kv_heads, dim = shape
    if (dtype == "f16" or norm) and shape not in SHAPES[:3]:
        pytest.skip("covered by smaller shapes")
    op = operator(heads, kv_heads, dim, dtype, norm)
    one = runner(dim, heads // kv_heads, dtype)
    for name, step in STEPS.items():
        arrays = inputs(op, step, dtype)
        got = run(op, arrays, step, one)
        want = reference_arrays(
            {
                k: v.view(np.float16).astype(np.float32) if v.dtype == np.float16 else v
                for k, v in arrays.items()
            }
        )
        attention_reference(op, want, step_rows(step))
        rows, group = len(step.slots), heads // kv_heads * dim
        for head in range(kv_heads):
            part = slice(head * group, (head + 1) * group)
            difference = first_difference(
                got["out"][:rows, part],
                want["out"][:rows, part],
                TOLERANCE[dtype],
                case=name,
                head=head,
                shape=shape,
                dtype=dtype,
            )
            assert difference is None, difference
        assert np.isnan(got["out"][rows:]).all(), f"{name}: rows past the step were written"


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_team_of_one_warp_gives_the_same_bits(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    op = operator(heads, kv_heads, dim, "bf16", True)
    for name, step in STEPS.items():
        arrays = inputs(op, step, "bf16", seed=5)
        outs = [
            run(op, arrays, step, runner(dim, heads // kv_heads, "bf16", team)) for team in (16, 1)
        ]
        for which in ("out", "k_cache", "v_cache"):
            assert outs[0][which].tobytes() == outs[1][which].tobytes(), (name, which)


def test_a_row_alone_gives_the_same_bits_as_among_16() -> None:
    op = operator(9, 3, 64, "bf16", False)
    step = Step([0] * 16, list(range(40, 56)))
    arrays = inputs(op, step, "bf16", seed=9)
    together = run(op, arrays, step, runner(64, 3, "bf16"))
    caches = {name: arrays[name] for name in ("k_cache", "v_cache")}
    for row in range(16):
        alone = dict(arrays, **caches)
        for name in ("q", "kv"):
            alone[name] = np.full_like(arrays[name], np.nan)
            alone[name][0] = arrays[name][row]
        got = run(op, alone, Step([0], [40 + row]), runner(64, 3, "bf16"))
        caches = {name: got[name] for name in caches}
        assert got["out"][0].tobytes() == together["out"][row].tobytes(), f"row {row}"
