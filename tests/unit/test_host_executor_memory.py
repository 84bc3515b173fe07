"""Weights, state and the views of Python bodies: where the bytes of a graph's buffers come from."""

import numpy as np
import pytest
import torch

from gpurt.body import Target, body
from gpurt.errors import GraphError, PlanError
from gpurt.executors import host
from gpurt.executors.base import Options
from gpurt.graph import Graph
from gpurt.planner import plan
from gpurt.wire import FinishReason
from tests.helpers.drive import Driver


def loaded(graph):
    return host.load(plan(graph, Target("host", 2)), graph, Options(residency_ms=0.0))


def run(graph, steps=1, **writes):
    executor = loaded(graph)
    for name, array in writes.items():
        executor.write(name, array)
    assert Driver(executor).run(max_tokens=steps) == ([], FinishReason.STEPS)
    assert executor.fault_cause() is None
    return executor


def scale(w, x, y, *, factor):
    y[...] = (w * x).sum(axis=1) * factor


def weighted(source, shape=(3, 4)):
    graph = Graph("weighted")
    w = graph.weight("w", shape, "f32", source)
    x, y = graph.input("x", [4], "f32"), graph.output("y", [3], "f32")
    graph.task(body("scale", scale), [w, x], [y], factor=2.0)
    return graph


@pytest.mark.parametrize("kind", ["array", "function", "tensor", "strided"])
def test_a_weight_comes_from_an_array_a_function_or_a_tensor(kind):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    source = {
        "array": values,
        "function": lambda: values,
        "tensor": torch.from_numpy(values),
        "strided": np.ascontiguousarray(values.T).T,
    }[kind]
    x = np.array([1, 2, 3, 4], np.float32)
    executor = run(weighted(source), x=x)
    assert executor.read("y").tolist() == ((values @ x) * 2).tolist()
    executor.close()


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_contiguous_weight_is_used_where_it_lies(kind):
    values = np.zeros((3, 4), np.float32)
    executor = loaded(weighted(values if kind == "array" else torch.from_numpy(values)))
    values[...] = 5  # only while nothing runs
    assert executor.read("w").tolist() == values.tolist()
    executor.close()


def test_a_bf16_tensor_is_its_bit_patterns():
    graph = Graph("bits")
    tensor = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.bfloat16)
    w = graph.weight("w", [1, 4], "bf16", tensor)
    y = graph.output("y", [1, 4], "bf16")
    graph.task(body("copy", lambda a, b: np.copyto(b, a)), [w], [y])
    executor = run(graph)
    assert executor.read("y").tolist() == tensor.view(torch.uint16).tolist()
    executor.close()


def test_a_weight_of_the_wrong_size_is_refused_with_both_numbers():
    with pytest.raises(GraphError, match=r"^the source of w .* has shape \[2, 4\], 32 bytes"):
        loaded(weighted(np.zeros((2, 4), np.float32)))


def test_a_weight_of_another_kind_of_number_is_refused():
    with pytest.raises(GraphError, match=r"^the source of w .* has dtype complex128"):
        loaded(weighted(np.zeros((3, 4), np.complex128)))


def test_bodies_see_exactly_their_regions_and_cannot_write_what_they_read():
    seen = {}

    def look(a, b):
        seen["shape"] = (a.shape, b.shape)
        b[...] = a * 2
        with pytest.raises(ValueError, match="read-only"):
            a[...] = 0

    graph = Graph("regions")
    x, y = graph.input("x", [4, 6], "f32"), graph.output("y", [4, 6], "f32")
    graph.task(body("look", look), [x[1:3, 2:5]], [y[0:2, 0:3]])
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    executor = run(graph, x=values)
    assert seen["shape"] == ((2, 3), (2, 3))
    expected = np.zeros((4, 6), np.float32)
    expected[0:2, 0:3] = values[1:3, 2:5] * 2
    assert executor.read("y").tolist() == expected.tolist()
    executor.close()


def test_state_outlives_steps_and_requests():
    graph = Graph("sum")
    total = graph.output("total", [1], "i32")
    graph.task(body("add", lambda a, b: np.add(a, 1, out=b)), [total], [total])
    executor = run(graph, steps=5)
    assert Driver(executor).run(max_tokens=7) == ([], FinishReason.STEPS)
    assert executor.read("total").tolist() == [12]
    executor.close()


def test_write_refuses_other_shapes_and_weights():
    executor = loaded(weighted(np.zeros((3, 4), np.float32)))
    with pytest.raises(PlanError, match=r"^float64 \[4\] for float32 \[4\]"):
        executor.write("x", np.zeros(4))
    with pytest.raises(PlanError, match=r"^w is a weight"):
        executor.write("w", np.zeros((3, 4), np.float32))
    with pytest.raises(PlanError, match=r"^no buffer is named 'nonesuch'"):
        executor.read("nonesuch")
    executor.close()


def test_two_bodies_of_one_name_are_refused():
    graph = Graph("twice")
    y, z = graph.output("y", [1], "f32"), graph.output("z", [1], "f32")
    graph.task(body("same", lambda out: out.fill(0)), [], [y])
    graph.task(body("same", lambda out: out.fill(1)), [], [z])
    with pytest.raises(PlanError, match=r"^two bodies are named 'same'"):
        loaded(graph)
