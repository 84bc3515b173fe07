"""Graph.check: what is wrong with a graph is said before it is planned, by task and region."""

from __future__ import annotations

import pytest

from gpurt.body import Arg, Body, Target, Tile, body
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.planner import plan
from tests.helpers.random_graphs import SPREAD

F = body("f", lambda *_: None)
HOST = Target("host", 2)


def test_read_of_a_region_nobody_writes_is_rejected_at_check():
    graph = Graph("graph")
    x, y = graph.activation("x", [576], "bf16"), graph.activation("y", [576], "bf16")
    graph.task(body("rms_norm", print), reads=[graph.input("tokens", [1], "u32")], writes=[x[:512]])
    with graph.at("layers[3]", layer=3):
        graph.task(body("matvec", print), reads=[x[0:576]], writes=[y[0:576]], name="mlp")
    message = (
        r"^task 1 \(matvec\) reads x\[0:576\], but no task writes x\[512:576\] - at "
        r"graph.layers\[3\].mlp - write the whole region or read less of it$"
    )
    with pytest.raises(GraphError, match=message):
        graph.check()
    with pytest.raises(GraphError, match=message):
        plan(graph, HOST)


def test_hole_between_two_writers_is_named_in_two_dimensions():
    graph = Graph("g")
    x, y = graph.activation("x", [4, 12], "f32"), graph.activation("y", [4], "f32")
    graph.task(F, reads=[], writes=[x[:, 0:4]])
    graph.task(F, reads=[], writes=[x[0:2, 4:12]])
    graph.task(F, reads=[x[1:4, 2:10]], writes=[y])
    what = r"^task 2 \(f\) reads x\[1:4, 2:10\], but no task writes x\[2:4, 4:10\]"
    with pytest.raises(GraphError, match=what):
        graph.check()


def test_overlapping_writers_are_not_counted_twice():
    graph = Graph("g")
    x = graph.activation("x", [8], "f32")
    graph.task(F, reads=[], writes=[x[0:4]])
    graph.task(F, reads=[], writes=[x[2:6]])
    graph.task(F, reads=[x], writes=[graph.output("y", [8], "f32")])
    with pytest.raises(GraphError, match=r"^task 2 \(f\) reads x\[0:8\], but .* writes x\[6:8\]"):
        graph.check()


def test_read_before_the_write_is_rejected_and_names_the_writer():
    graph = Graph("g")
    x, y = graph.activation("x", [8], "f32"), graph.activation("y", [8], "f32")
    graph.task(F, reads=[x[2:6]], writes=[y])
    graph.task(F, reads=[y], writes=[x])
    what = r"^task 0 \(f\) reads x\[2:6\], but x\[2:6\] is what task 1 \(f\) writes only afterwards"
    with pytest.raises(GraphError, match=what):
        graph.check()


def test_activation_that_only_its_own_task_writes_cannot_be_read_by_it():
    graph = Graph("g")
    x = graph.activation("x", [8], "f32")
    graph.task(F, reads=[x], writes=[x])
    with pytest.raises(GraphError, match=r"^task 0 \(f\) reads x\[0:8\], but .* it writes itself"):
        graph.check()


def test_state_may_be_read_before_it_is_written():
    graph = Graph("g")
    x = graph.state("x", [8], "f32")
    graph.task(F, reads=[x], writes=[x])
    graph.check()
    assert [t.body for t in plan(graph, HOST).tasks] == ["f", "advance"]


def test_task_that_writes_an_element_twice_is_rejected():
    graph = Graph("g")
    x = graph.activation("x", [8], "f32")
    graph.task(F, reads=[], writes=[x[0:5], x[4:8]])
    with pytest.raises(GraphError, match=r"^task 0 \(f\) writes x\[0:5\] and x\[4:8\], which over"):
        graph.check()


def test_two_tiles_of_one_operator_that_conflict_are_unordered_writers():
    def tiles(op, _target):
        y = op.args["y"]
        return [Tile((i, 0, 0, 0), (), (y.buffer[i : i + 2],)) for i in range(3)]

    graph = Graph("g")
    y = graph.activation("y", [4], "f32")
    graph.op(Body("halo", (Arg("y", "w"),), tile=tiles), {"y": y})
    what = r"^tile 0 of task 0 \(halo\) writes y\[0:2\], but tile 1 writes y\[1:3\] in no order"
    with pytest.raises(GraphError, match=what):
        plan(graph, HOST)


def test_operator_in_place_that_reads_all_it_writes_in_tiles_is_rejected():
    graph = Graph("g", rows=2)
    x = graph.state("x", [2, 8], "f32")
    graph.op(SPREAD, {"x": x, "y": x}, tiles=4, halo=-1)
    what = r"^tile 0 of task 0 \(spread\) writes x\[0:2, 0:2\], but tile 1 reads x\[0:2, 0:8\]"
    with pytest.raises(GraphError, match=what):
        plan(graph, HOST)


def test_operator_in_place_whose_tiles_keep_to_themselves_is_planned():
    graph = Graph("g", rows=2)
    x = graph.state("x", [2, 8], "f32")
    graph.op(SPREAD, {"x": x, "y": x}, tiles=4, halo=0)
    assert len(plan(graph, HOST).tasks) == 5


def test_empty_graph_is_rejected():
    with pytest.raises(GraphError, match=r"^graph g has 0 tasks"):
        Graph("g").check()


def test_graph_with_a_vocab_that_samples_nothing_is_rejected():
    graph = Graph("g", vocab=10)
    graph.task(F, reads=[], writes=[graph.activation("x", [1], "f32")])
    with pytest.raises(GraphError, match=r"^graph g has a vocab of 10, but no task writes all of"):
        graph.check()


def test_tile_outside_its_operator_is_rejected():
    def tiles(op, _target):
        return [Tile((0, 0, 0, 0), (), (op.args["y"].buffer.whole,))]

    graph = Graph("g")
    y = graph.activation("y", [4], "f32")
    graph.op(Body("wide", (Arg("y", "w"),), tile=tiles), {"y": y[0:2]})
    with pytest.raises(GraphError, match=r"^a tile of wide writes y\[0:4\], which the operator do"):
        plan(graph, HOST)


def test_operator_with_more_arguments_than_a_record_holds_is_rejected():
    graph = Graph("g")
    x = graph.state("x", [16], "f32")
    reads = [x[i : i + 1] for i in range(11)]
    graph.task(F, reads=reads, writes=[])
    with pytest.raises(GraphError, match=r"^f has 11 arguments, a task record holds 10 - at g.f"):
        plan(graph, HOST)


def test_a_body_needs_an_identifier_for_a_name() -> None:
    with pytest.raises(GraphError, match=r"^a body is named 'two words', which"):
        body("two words", print)
