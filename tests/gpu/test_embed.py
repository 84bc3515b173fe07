"""embed and rearm on the GPU against their references."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graphs.ops.dtypes import dtype_code, to_bf16, to_float32, to_storage
from tests.gpu.one_op import TEAMS, runner
from tests.gpu.one_task import OneTask, Step


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_1"])
def test_embed_copies_each_tokens_row_exactly(dtype: str) -> None:
    rng = np.random.default_rng(3)
    vocab, hidden = 1000, 576
    if dtype.startswith("q"):
        stored = rng.integers(0, 256, (vocab, DTYPES[dtype].row_bytes(hidden))).astype(np.uint8)
        blocks = stored.reshape(vocab, -1, DTYPES[dtype].block_bytes)
        halves = rng.standard_normal((*blocks.shape[:2], 2)).astype(np.float16)
        width = 4 if dtype == "q4_1" else 2
        blocks[..., :width] = halves.view(np.uint8)[..., :width]
    else:
        stored = to_storage(rng.standard_normal((vocab, hidden)).astype(np.float32), DTYPES[dtype])
    tokens = [0, 999, 5, 5, 123]
    x = np.full((16, hidden), np.nan, np.float32)
    step = Step([0] * 5, range(5), tokens=tokens)
    got = OneTask("embed").run(
        [stored, x], [hidden, dtype_code(DTYPES[dtype])], [(0, 0, 0, 0)], step
    )[1]
    assert got is not None
    want = to_float32(stored, DTYPES[dtype])[tokens]
    assert np.array_equal(got[:5], want)
    assert np.isnan(got[5:]).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hidden", [48, 576, 8192])
def test_embed_norms_each_row_and_its_bits_depend_on_no_team(dtype: str, hidden: int) -> None:
    rng = np.random.default_rng(4)
    table = to_storage(rng.standard_normal((50, hidden)).astype(np.float32), DTYPES[dtype])
    tokens = [0, 49, 5, 5, 12]
    step = Step([0] * 5, range(5), tokens=tokens)
    x = np.full((16, hidden), np.nan, np.float32)
    params = [hidden, dtype_code(DTYPES[dtype]), 1e-5]
    got = []
    for team in (16, 1):
        one = OneTask("embed", "", team, ("GPURT_EMBED_NORMS",))
        got.append(one.run([table, x], params, [(0, 0, 0, 0)], step)[1])
    assert got[0] is not None
    assert got[0].tobytes() == got[1].tobytes()
    rows = to_float32(table, DTYPES[dtype])[tokens]
    want = rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(1e-5))
    np.testing.assert_allclose(got[0][:5], want, rtol=2e-6, atol=1e-7)
    assert np.isnan(got[0][5:]).all()


@pytest.mark.parametrize("hidden", [64, 8192])
def test_embed_norms_what_it_made_beside_it(hidden: int) -> None:
    rng = np.random.default_rng(5)
    table = to_storage(rng.standard_normal((50, hidden)).astype(np.float32), DTYPES["bf16"])
    norm, tokens = rng.standard_normal(hidden).astype(np.float32), [0, 49, 5, 5, 12]
    x = np.full((16, hidden), np.nan, np.float32)
    params = [hidden, dtype_code(DTYPES["bf16"]), 1e-5, 1.0, 1e-2, dtype_code(DTYPES["bf16"])]
    got = []
    for team in TEAMS:
        one = runner("embed", team, ("GPURT_EMBED_NORMS",))
        rows = [(0, 0, row, row + 1) for row in range(16)]
        step = Step([0] * 5, range(5), tokens=tokens)
        got.append(one.run([table, x, norm, to_bf16(x)], params, rows, step))
    (_, made, _, first, _), (*_, second, _) = got
    assert made is not None
    assert first is not None
    assert second is not None
    assert first.tobytes() == second.tobytes()
    seen, made = to_float32(first, DTYPES["bf16"]), made[:5]
    want = made / np.sqrt(np.mean(made * made, axis=-1, keepdims=True) + np.float32(1e-2)) * norm
    np.testing.assert_allclose(seen[:5], want, rtol=4e-3)
    assert np.isnan(seen[5:]).all()


@pytest.mark.parametrize("number", [0, 1])
def test_rearm_fills_its_part_of_the_next_steps_set_only(number: int) -> None:
    sets = np.zeros((2, 4096), np.uint8)
    got = OneTask("rearm").run(
        [sets], [1024, 0], [(512, 0, 0, 0)], Step([0], [0], number=number), payload_set_bytes=4096
    )[0]
    want = np.zeros((2, 4096), np.uint8)
    want[(number + 1) & 1, 512 : 512 + 1024] = 0xFF
    assert got is not None
    assert np.array_equal(got, want)
