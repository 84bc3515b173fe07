"""Operators that cuda computes by several in steps of many rows: what a plan then holds."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.body import StepRows, Target
from gpurt.buffer import Buffer, f32
from gpurt.errors import GraphError
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.matvec_wide_cuda import COLUMNS_MAX, in_lanes, input_reference
from gpurt.graphs.ops.packing import CHUNK, pack
from gpurt.plan import TASK_DECIDES, TASK_RING, Plan
from gpurt.planner import plan
from gpurt.planner.lower import lower
from tests.gpu.tiny_llama import tiny_llama
from tests.gpu.tiny_muse import tiny_muse

CUDA = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
WIDE = {"matvec_input", "matvec_wide", "attention_rows"}


def bodies(made: Plan, number: int) -> set[str]:
    variant = made.step_variants()[number]
    return {task.body for task in made.tasks[variant.begin : variant.end]}


def test_only_steps_of_many_rows_on_cuda_have_bodies_of_their_own() -> None:
    graph = tiny_llama(rows=128)
    made = plan(graph, CUDA, rows=(16, 128))
    assert not bodies(made, 0) & WIDE
    assert bodies(made, 1) >= WIDE
    assert not bodies(made, 1) & {"matvec", "attention"}
    assert not bodies(plan(graph, Target("host", 2), rows=(16, 128)), 1) & WIDE
    assert not bodies(plan(tiny_llama(), CUDA), 0) & WIDE


def test_both_sizes_share_the_packed_weights() -> None:
    few, both = plan(tiny_llama(), CUDA), plan(tiny_llama(rows=128), CUDA, rows=(16, 128))
    weights = [{b.name for b in made.buffers if b.memory == "weight"} for made in (few, both)]
    assert weights[0] == weights[1]
    assert few.arena_bytes("weight") == both.arena_bytes("weight")


def test_the_graphs_operators_keep_their_indices_and_policies() -> None:
    graph = tiny_llama(rows=40)
    made = plan(graph, CUDA, policy={"q": "claim", "matvec": "ready"}, rows=(16, 40))
    for op in graph.operators:
        assert made.operators[op.index].path == op.path
        assert made.operators[op.index].body == op.body.name
    by_name = {op.name: op.policy for op in made.operators}
    assert by_name["q.input"] == by_name["q.wide"] == "claim"
    assert by_name["down.wide"] == "ready"
    assert by_name["attention.rows"] == "static"
    assert {t.op for t in made.tasks if t.body == "matvec_wide"}.isdisjoint(
        op.index for op in graph.operators
    )


def test_a_task_with_the_ring_as_its_room_streams_nothing() -> None:
    made = plan(tiny_llama(rows=40), CUDA)
    wide = [t for t in made.tasks if t.body == "matvec_wide"]
    assert wide
    for task in made.tasks:
        assert bool(task.flags & TASK_RING) == (task.body in ("matvec_wide", "attention_rows"))
        assert task.stream is None or not task.flags & TASK_RING


@pytest.mark.parametrize("group", [4, 8])
def test_lanes_of_x_have_the_columns_of_their_lanes_of_w(group: int) -> None:
    """One unit of each, numbered by column: element e of lane (g, c) of both is the same column."""
    columns = np.tile(np.arange(64, dtype=np.float32), (16, 1))
    packed = pack(f"mma16g{group}x1", columns, [16, 64], f32)
    of_w = packed.view(np.uint16).reshape(2, 4, 2, 32, 2)  # high, mma, half, lane, element
    tiles = in_lanes(columns[:8], group).reshape(16, 4, 2, 32, 2)  # mma, half, lane, element
    of_x = tiles[0]
    for mma in range(4):
        for half in range(2):
            x = of_x[mma, half]
            w_bits = of_w[0, mma, half].astype(np.uint32) << 16
            assert np.array_equal(x, w_bits.view(np.float32)), (mma, half)


def test_the_input_of_sampled_rows_is_theirs() -> None:
    graph = Graph(rows=20, vocab=16)
    w = graph.weight("w", [16, 64], "bf16", np.zeros((16, 64), np.float32))
    x, y = graph.activation("x", [20, 64], "f32"), graph.activation("y", [20, 16], "f32")
    matvec(graph, x, w, y, sampled=True)
    op = next(o for o in lower(graph, CUDA, ["static"]).graph.operators if "input" in o.name)
    rows = np.arange(20 * 64, dtype=np.float32).reshape(20, 64) % 128
    out = np.zeros(op.args["y"].shape, np.float32)
    none = np.zeros(20, np.uint32)
    step = StepRows(none, none, none, np.array([3, 17], np.uint32))
    input_reference(op, {"x": rows, "y": out}, step)
    assert np.array_equal(out[:1], in_lanes(rows[[3, 17]], 4))


def test_rows_of_a_table_are_refused_with_both_numbers() -> None:
    graph = Graph(rows=32)
    table = graph.row_table("table", 32)
    op = over(graph, table)
    lowered = lower(graph, CUDA, ["static"])
    assert list(lowered.graph.operators) == graph.operators
    assert op.body.tile is not None
    with pytest.raises(GraphError, match="32 rows a step, the CUDA body takes 16"):
        op.body.tile(op, CUDA)


def over(graph: Graph, table: Buffer) -> Operator:
    w = graph.weight("w", [16, 64], "bf16", np.zeros((16, 64), np.float32))
    x, y = graph.activation("x", [32, 64], "f32"), graph.activation("y", [32, 16], "f32")
    with graph.over(table):
        return matvec(graph, x, w, y)


def test_a_mixtures_rows_choose_in_parts_and_one_task_decides() -> None:
    made = plan(tiny_muse(rows=100), CUDA, rows=(16, 100), policy={"expert_matvec": "claim"})
    assert not bodies(made, 0) & {"route_choose", "route_group"}
    of = {
        name: [t for t in made.tasks if t.body == name] for name in ("route_choose", "route_group")
    }
    assert len(of["route_choose"]) == 7 * len(of["route_group"])
    assert all(task.flags & TASK_DECIDES for task in of["route_group"])
    assert [(s.dynamic is not None) for s in made.segments].count(True) == 8


def test_more_pairs_than_the_body_has_room_for_are_refused() -> None:
    with pytest.raises(GraphError, match="3000 rows of 3 experts, the CUDA body takes 8192 pairs"):
        plan(tiny_muse(rows=3000), CUDA)


def test_matvecs_of_one_input_share_it_until_it_is_written_again() -> None:
    made = plan(tiny_llama(rows=40), CUDA)
    inputs = [op.name for op in made.operators if op.body == "matvec_input"]
    assert inputs == [*["q.input", "o.input", "gate_up.input", "down.input"] * 2, "head.input"]
    graph = Graph(rows=20)
    w = graph.weight("w", [64, 64], "bf16", np.zeros((64, 64), np.float32))
    a, b, c = (graph.activation(name, [20, 64], "f32") for name in "abc")
    norm = graph.weight("norm", [64], "f32", np.zeros(64, np.float32))
    matvec(graph, a, w, b, name="first")
    matvec(graph, a, w, c, name="shares")
    matvec(graph, a, w, c, norm=norm, eps=1e-5, name="normed")
    matvec(graph, b, w, a, name="writes")
    matvec(graph, a, w, c, name="again")
    names = [op.name for op in lower(graph, CUDA, ["static"] * 5).graph.operators]
    assert [n for n in names if "input" in n] == [
        "first.input",
        "normed.input",
        "writes.input",
        "again.input",
    ]


def test_more_columns_than_a_task_can_order_are_refused() -> None:
    graph = Graph("wide", rows=32, context=64, vocab=16)
    columns = COLUMNS_MAX + CHUNK
    x, y = (graph.row_activation(name, width, "f32") for name, width in (("x", columns), ("y", 16)))
    w = graph.weight("w", [16, columns], "bf16", lambda: np.zeros((16, columns), np.float32))
    matvec(graph, x, w, y)
    with pytest.raises(GraphError, match=r"W has 65600 columns, .* takes 65536 - at wide\.matvec"):
        lower(graph, CUDA, ["static"])
