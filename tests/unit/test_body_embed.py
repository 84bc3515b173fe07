"""The host's embed: rows of a table in any format, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.buffer import DTYPES, bf16
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
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
        {
            "hidden": 256,
            "table_dtype": 1,
            "eps": 0.0,
            "scale": 1.0,
            "norm_eps": 0.0,
            "normed_dtype": 0,
            "normed_fragments": 0,
        },
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


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_embed_norms_what_it_made_beside_it(eps: float, dtype: str) -> None:
    rng = np.random.default_rng(2)
    table = guarded(random_weight(rng, 20, 96, "bf16"))
    norm = rng.standard_normal(96).astype(np.float32)
    graph = Graph(rows=4, vocab=20)
    x, normed = graph.activation("x", (4, 96), "f32"), graph.activation("normed", (4, 96), dtype)
    weights = graph.weight("table", (20, 96), "bf16", table), graph.weight("n", (96,), "f32", norm)
    options = {"norm": weights[1], "normed": normed, "norm_eps": 1e-2}
    op = embed(graph, weights[0], x, eps=eps, scale=1.5, **options)
    made = np.full((4, 96), np.nan, np.float32)
    arrays = {"table": table, "x": made.copy(), "norm": norm, "normed": made.copy()}
    expected = {**arrays, "table": to_float32(table, bf16)}
    expected |= {name: arrays[name].copy() for name in ("x", "normed")}
    if dtype == "bf16":
        arrays["normed"] = to_bf16(made)
    step = step_rows([3, 19, 3], range(3))
    assert EMBED.reference is not None
    EMBED.reference(op, expected, step)
    bodies("portable").run(EMBED, arrays, op.params, step)
    np.testing.assert_allclose(arrays["x"][:3], expected["x"][:3], rtol=1e-6)
    is_bf16 = dtype == "bf16"
    seen = to_float32(arrays["normed"], bf16) if is_bf16 else arrays["normed"]
    np.testing.assert_allclose(seen[:3], expected["normed"][:3], rtol=4e-3 if is_bf16 else 2e-6)
    assert np.isnan(seen[3]).all()


def test_a_norm_and_what_it_makes_come_together() -> None:
    graph = Graph(rows=4, vocab=20)
    table, x = (
        graph.weight("t", (20, 8), "bf16", lambda: None),
        graph.activation("x", (4, 8), "f32"),
    )
    with pytest.raises(GraphError, match=r"^normed alone"):
        embed(graph, table, x, normed=x)
