"""The host's embed: rows of a table in any format, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graph import Graph
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.ops.embed import EMBED, embed
from tests.helpers.host_bodies import bodies, guarded, levels, random_weight
from tests.helpers.oracle import step_rows


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [
        ("f32", 33),
        ("f16", 33),
        ("bf16", 33),
        ("q4_1", 576),
        ("q8_0", 576),
        ("q4_1", 32),
        ("nvfp4", 48),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_embed_copies_each_tokens_row(level: str, dtype: str, hidden: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    table = guarded(random_weight(rng, 50, hidden, dtype))
    graph = Graph(rows=rows + 2, vocab=50)
    x = graph.activation("x", (rows + 2, hidden), "f32")
    op = embed(graph, graph.weight("table", (50, hidden), dtype, table), x)
    tokens = [0, 49, *(int(t) for t in rng.integers(0, 50, rows))][:rows]
    arrays = {"table": table, "x": np.full((rows + 2, hidden), np.nan, np.float32)}
    assert bodies(level).run(EMBED, arrays, op.params, step_rows(tokens, range(rows)))[0] == 0
    # A q4_1 value is a product and a sum in float32, here and there: the same bits.
    expected = to_float32(table, DTYPES[dtype])[tokens]
    np.testing.assert_array_equal(arrays["x"][:rows], expected)
    assert np.isnan(arrays["x"][rows:]).all()


def test_every_half_precision_value_is_read_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    table = guarded(bits)
    x = np.zeros((256, 256), np.float32)
    arrays, params = (
        {"table": table, "x": x},
        {"hidden": 256, "table_dtype": 1, "eps": 0.0, "scale": 1.0},
    )
    bodies("portable").run(EMBED, arrays, params, step_rows(range(256), range(256)))
    np.testing.assert_array_equal(x, bits.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bf16", "q4_1"])
def test_embed_with_eps_norms_each_row(dtype: str) -> None:
    rng = np.random.default_rng(1)
    table = guarded(random_weight(rng, 20, 96, dtype))
    graph = Graph(rows=3, vocab=20)
    x = graph.activation("x", (3, 96), "f32")
    op = embed(graph, graph.weight("table", (20, 96), dtype, table), x, eps=1e-5)
    arrays = {"table": table, "x": np.full((3, 96), np.nan, np.float32)}
    expected = {"table": to_float32(table, DTYPES[dtype]), "x": arrays["x"].copy()}
    step = step_rows([3, 19, 3], range(3))
    assert EMBED.reference is not None
    EMBED.reference(op, expected, step)
    bodies("portable").run(EMBED, arrays, op.params, step)
    np.testing.assert_allclose(arrays["x"], expected["x"], rtol=1e-6)
