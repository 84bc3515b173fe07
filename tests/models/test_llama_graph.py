"""graphs/llama.py: bounds, dtypes, shared weights, and how mixed formats are joined."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpurt.body import Target
from gpurt.buffer import DTYPES, bf16, f16, f32, q4_1, q8_0
from gpurt.errors import BoundError, GraphError
from gpurt.graphs.llama import PAGE, build, rope_table
from gpurt.graphs.ops.dtypes import to_bf16, to_float32, to_storage
from gpurt.loaders import WeightSource, load_model
from gpurt.planner import plan
from tests.helpers.tiny import tiny_folder


@pytest.fixture
def model(tmp_path):
    return load_model(tiny_folder(tmp_path))


def buffer_of(graph, name):
    return next(buffer for buffer in graph.buffers if buffer.name == name)


def test_a_context_beyond_the_model_is_refused_with_both_numbers(model):
    with pytest.raises(BoundError, match=r"^context is 65, the model was made for 64 positions"):
        build(model.config, model.weights, context=65)
    with pytest.raises(BoundError, match=r"^context is 0"):
        build(model.config, model.weights, context=0)


@pytest.mark.parametrize("option", ["kv_dtype", "weight_dtype"])
def test_a_dtype_that_is_no_float_is_refused(model, option):
    with pytest.raises(GraphError, match=f"^{option} is 'q4_1'"):
        build(model.config, model.weights, **{option: "q4_1"})


def test_a_layer_is_six_operators_and_no_activation_is_written_twice(model):
    graph = build(model.config, model.weights)
    names = [op.name for op in graph.operators]
    assert names == ["embed", "q", "kv", "attention", "o", "gate_up", "down", "head", "sample"]
    written = [r.buffer.name for op in graph.operators for r in op.writes]
    activations = [b.name for b in graph.buffers if b.role == "activation"]
    assert sorted(name for name in written if name in activations) == sorted(activations)


def test_a_tied_head_and_the_embedding_are_one_buffer(model, tmp_path):
    tied = load_model(tiny_folder(tmp_path / "tied", tie_word_embeddings=True))
    graph = build(tied.config, tied.weights)
    assert graph.operators[-2].args["w"].buffer is graph.operators[0].args["table"].buffer
    untied = build(model.config, model.weights)
    assert untied.operators[-2].args["w"].buffer is not untied.operators[0].args["table"].buffer


def test_every_slot_has_pages_of_its_own(model):
    graph = build(model.config, model.weights, slots=3, context=64)
    table = buffer_of(graph, "page_table")
    assert table.shape == (3, 1)
    assert np.array_equal(table.source.ravel(), np.arange(3))
    assert buffer_of(graph, "layers[0].k_cache").shape == (3, 1, PAGE, 4)


def test_gate_and_up_rows_alternate_and_key_rows_precede_value_rows(model):
    graph = build(model.config, model.weights)
    at = "model.layers.0"
    joined = buffer_of(graph, "layers[0].gate_up.w").source()
    assert np.array_equal(joined[0::2], model.weights[f"{at}.mlp.gate_proj.weight"].load())
    assert np.array_equal(joined[1::2], model.weights[f"{at}.mlp.up_proj.weight"].load())
    joined = buffer_of(graph, "layers[0].kv.w").source()
    assert np.array_equal(joined[:4], model.weights[f"{at}.self_attn.k_proj.weight"].load())
    assert np.array_equal(joined[4:], model.weights[f"{at}.self_attn.v_proj.weight"].load())


def test_matrices_of_mixed_formats_are_joined_in_float32(model):
    weights = dict(model.weights)
    name = "model.layers.0.mlp.up_proj.weight"
    full = weights[name].load()
    half = full.astype(np.float16)
    weights[name] = WeightSource(name, f16, full.shape, lambda: half)
    graph = build(model.config, weights)
    joined = buffer_of(graph, "layers[0].gate_up.w")
    assert joined.dtype is f32
    assert np.array_equal(joined.source()[1::2], half.astype(np.float32))
    assert buffer_of(graph, "layers[0].down.w").dtype is f32


def test_a_weight_dtype_converts_matrices_and_leaves_norms(model):
    graph = build(model.config, model.weights, weight_dtype="bf16")
    for op in graph.operators:
        if "w" in op.args:
            assert op.args["w"].buffer.dtype is bf16
            assert op.params["w_dtype"] == 2
        if "norm" in op.args:
            assert op.args["norm"].buffer.dtype is f32
    source = buffer_of(graph, "layers[0].down.w").source()
    assert np.array_equal(
        source, to_bf16(model.weights["model.layers.0.mlp.down_proj.weight"].load())
    )


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, np.inf, np.nan, 3e38], np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020, 0x7F80, 0x7FC0, 0x7F62]


@pytest.mark.parametrize("dtype", [q4_1, q8_0])
def test_block_formats_read_as_the_gguf_package_reads_them(dtype):
    gguf = pytest.importorskip("gguf")
    kind = {"q4_1": gguf.GGMLQuantizationType.Q4_1, "q8_0": gguf.GGMLQuantizationType.Q8_0}
    values = np.random.default_rng(0).normal(0, 1, (7, 96)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind[dtype.name])
    wanted = gguf.quants.dequantize(stored, kind[dtype.name])
    assert np.array_equal(to_float32(stored, dtype), wanted)
    assert np.abs(wanted - values).max() < 0.3


def test_gpurt_does_not_quantise():
    with pytest.raises(GraphError, match=r"^gpurt does not quantise to q8_0"):
        to_storage(np.zeros(32, np.float32), DTYPES["q8_0"])
    with pytest.raises(GraphError, match=r"^u32 elements are not numbers of a model"):
        to_float32(np.zeros(4, np.uint32), DTYPES["u32"])


def test_rope_rotates_by_nothing_at_position_0(model):
    table = rope_table(model.config, 8)
    assert table.shape == (8, 4)
    assert table[0].tolist() == [1, 1, 0, 0]
    assert table[3, 0] == pytest.approx(np.cos(3.0))
    assert table[3, 3] == pytest.approx(np.sin(3.0 / 100))


@pytest.mark.parametrize("workers", [1, 2, 7, 132])
def test_host_tiles_do_not_depend_on_workers(workers, model):
    config = dataclasses.replace(model.config, vocab=20)
    tiles = [
        (task.op, task.coords)
        for task in plan(build(config, model.weights), Target("host", workers)).tasks
        if task.body == "matvec"
    ]
    alone = plan(build(config, model.weights), Target("host", 1)).tasks
    assert tiles == [(task.op, task.coords) for task in alone if task.body == "matvec"]
