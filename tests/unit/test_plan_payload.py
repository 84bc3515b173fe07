"""Payload edges: which buffers get them, what their tasks carry, and how they are re-armed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpurt.body import Target, body
from gpurt.graph import Graph
from gpurt.plan import TASK_PAYLOAD_IN, TASK_PAYLOAD_OUT
from gpurt.planner import plan
from gpurt.planner.payload import AUTO_BYTES
from tests.helpers.random_graphs import CUDA, POLLING, SPREAD
from tests.unit.test_check_plan import chain


def polled(made):
    return [b.name for b in made.buffers if b.memory == "payload"]


def test_reader_of_payload_has_no_counter_and_polls():
    made = plan(chain(POLLING), CUDA, edges="payload")
    assert polled(made) == ["x0", "x1", "x2"]
    flags = [t.flags for t in made.tasks if t.body == "polling"]
    both = TASK_PAYLOAD_IN | TASK_PAYLOAD_OUT
    assert flags == [TASK_PAYLOAD_OUT] * 4 + [both] * 8
    assert all(not t.waits for t in made.tasks if t.body == "polling")
    # x, absent z, y: the input is a state, so only y polls in the first layer.
    assert [t.payload_mask for t in made.tasks[::4]][:3] == [0b100, 0b101, 0b101]
    assert {e.kind for e in made.edges} <= {"payload", "order", "counter"}
    shown = [(e.producer_op, e.consumer_op, e.count, e.what) for e in made.edges][-2:]
    assert shown == [(0, 1, 4, "x0"), (1, 2, 4, "x1")]


def test_rearm_covers_the_set_and_comes_after_the_step_on_each_worker():
    made = plan(chain(POLLING, layers=300), CUDA, edges="payload")
    fills = sorted((t.coords[0], t.params[0]) for t in made.tasks if t.body == "rearm")
    assert len(fills) == 4, "300 buffers of 256 bytes in parts of 16 KiB or more"
    assert fills[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in pairwise(fills))
    assert sum(n for _, n in fills) == made.payload_set_bytes == 300 * 256
    for rows in made.lists:
        bodies = [made.tasks[i].body for i in rows[0]]
        assert "polling" not in bodies[bodies.index("rearm") :] if "rearm" in bodies else True
    assert len(made.counters) == 1, "one release a step orders all fills"


def test_body_that_cannot_poll_keeps_its_buffers_on_counters():
    graph = Graph("mixed", rows=2)
    x, y, z = (graph.activation(n, [2, 16], "f32") for n in "xyz")
    graph.op(POLLING, {"x": graph.input("in", [2, 16], "f32"), "y": x}, tiles=4, halo=-1)
    graph.op(POLLING, {"x": x, "y": y}, tiles=4, halo=-1)
    graph.op(SPREAD, {"x": y, "y": z}, tiles=4, halo=-1)
    made = plan(graph, CUDA, edges="payload")
    assert polled(made) == ["x"]
    assert all(t.waits or t.op < 2 for t in made.tasks if t.body == "spread")


def test_ready_operator_turns_its_payload_edges_to_counters():
    made = plan(chain(POLLING), CUDA, edges="payload", policy="ready")
    assert not polled(made)
    assert not any(t.body == "rearm" for t in made.tasks)
    assert made.payload_set_bytes == 0


def test_host_plans_have_no_payload_edges():
    assert not polled(plan(chain(POLLING), Target("host", 7), edges="payload"))


def test_counter_edges_are_the_default_on_cuda():
    assert not polled(plan(chain(POLLING), CUDA))


def test_buffer_written_twice_in_a_step_stays_on_counters():
    graph = Graph("reuse", rows=2)
    x, y = (graph.activation(n, [2, 16], "f32") for n in "xy")
    source = graph.input("in", [2, 16], "f32")
    for a, b in ((source, x), (x, y), (y, x)):
        graph.op(POLLING, {"x": a, "y": b}, tiles=4, halo=-1)
    assert polled(plan(graph, CUDA, edges="payload")) == ["y"]


@pytest.mark.parametrize(("dtype", "found"), [("bf16", ["x"]), ("f16", []), ("i32", [])])
def test_only_types_with_a_sentinel_can_be_payload(dtype, found):
    graph = Graph("types", rows=2)
    x = graph.activation("x", [2, 16], dtype)
    y = graph.output("y", [2, 16], "f32")
    graph.op(POLLING, {"x": graph.input("in", [2, 16], "f32"), "y": x}, tiles=4, halo=-1)
    graph.op(POLLING, {"x": x, "y": y}, tiles=4, halo=-1)
    assert polled(plan(graph, CUDA, edges="payload")) == found


def test_auto_leaves_large_buffers_on_counters():
    graph = Graph("sizes", rows=1)
    source = graph.input("in", [1, 16], "f32")
    for name, width in (("small", AUTO_BYTES // 4), ("large", AUTO_BYTES // 4 + 8)):
        x = graph.activation(name, [1, width], "f32")
        graph.op(POLLING, {"x": source, "y": x}, tiles=4, halo=-1)
    assert polled(plan(graph, CUDA, edges="auto")) == ["small"]
    assert polled(plan(graph, CUDA, edges="payload")) == ["small", "large"]


def test_payload_does_not_order_other_memory():
    # b is read by `first`, whose payload output `second` polls before it writes b: the poll says
    # that first's output is there, not that its reads have ended.
    graph = Graph("war", rows=2)
    b, x = graph.state("b", [2, 16], "f32"), graph.activation("x", [2, 16], "f32")
    graph.op(POLLING, {"x": b, "y": x}, name="first", tiles=1, halo=-1)
    graph.op(POLLING, {"x": x, "y": b}, name="second", tiles=1, halo=-1)
    made = plan(graph, CUDA, edges="payload", policy="claim")
    assert polled(made) == ["x"]
    assert made.counters[made.tasks[1].waits[0][0]].producers == (0,)


def test_user_bodies_are_never_payload():
    graph = Graph("user")
    x = graph.activation("x", [4], "f32")
    f = body("f", lambda *_: None)
    graph.task(f, reads=[], writes=[x])
    graph.task(f, reads=[x], writes=[graph.output("y", [4], "f32")])
    assert not polled(plan(graph, CUDA, edges="payload"))


def test_a_row_that_is_not_whole_granules_is_no_payload():
    graph = Graph("odd", rows=2)
    x = graph.activation("x", [2, 12], "f32")
    y = graph.output("y", [2, 12], "f32")
    graph.op(POLLING, {"x": graph.input("in", [2, 12], "f32"), "y": x}, tiles=4, halo=-1)
    graph.op(POLLING, {"x": x, "y": y}, tiles=4, halo=-1)
    assert polled(plan(graph, CUDA, edges="payload")) == []
