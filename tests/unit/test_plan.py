"""The planner's claims: which waits, lists, segments, joins and places a plan has."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gpurt.body import Arg, Body, Stream, Target, Tile, body
from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph
from gpurt.graphs.ops.attention import attention
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.sample import sample
from gpurt.plan import WAITS_PER_TASK, PlanSegment
from gpurt.planner import plan
from tests.gpu.tiny_muse import tiny_muse
from tests.helpers.random_graphs import SPREAD, legal_order, unordered_pairs

HOST = Target("host", 2)


def llama(layers=2, hidden=192, kv_heads=3, rows=4, vocab=96):
    """The shape of a Llama step: every operator, no weights."""
    graph = Graph("llama", rows=rows, slots=2, context=128, vocab=vocab)

    def weight(name, *shape):
        return graph.weight(name, shape, "f32", lambda: None)

    def act(name, width):
        return graph.activation(name, [rows, width], "f32")

    head_dim = hidden // 6
    x = act("x", hidden)
    embed(graph, weight("table", vocab, hidden), x)
    rope, pages = weight("rope", 128, head_dim), graph.state("pages", [2, 2], "u32")
    for n in range(layers):
        with graph.at(f"layers[{n}]", layer=n):
            q, kv = act(f"q{n}", hidden), act(f"kv{n}", 2 * kv_heads * head_dim)
            norm = weight(f"norm{n}", hidden)
            matvec(graph, x, weight(f"wq{n}", hidden, hidden), q, norm=norm, name="q")
            matvec(graph, x, weight(f"wkv{n}", kv.shape[1], hidden), kv, norm=norm, name="kv")
            cache = [4, kv_heads, 64, head_dim]
            k, v = (graph.state(f"{c}{n}", cache, "f32") for c in "kv".upper())
            out, h = act(f"out{n}", hidden), act(f"h{n}", hidden)
            attention(graph, q, kv, k, v, pages, rope, out, heads=6)
            matvec(graph, out, weight(f"wo{n}", hidden, hidden), h, residual=x, name="o")
            m, x = act(f"m{n}", 2 * hidden), act(f"x{n}", hidden)
            up = weight(f"wgu{n}", 4 * hidden, hidden)
            matvec(graph, h, up, m, norm=norm, swiglu=True, name="gate_up")
            down = weight(f"wd{n}", hidden, 2 * hidden)
            matvec(graph, m, down, x, residual=h, name="down")
    logits = act("logits", vocab)
    matvec(graph, x, weight("head", vocab, hidden), logits, sampled=True, name="head")
    sample(graph, logits)
    return graph


def tasks_of(made, name):
    ops = [i for i, o in enumerate(made.operators) if o.name == name]
    return [i for i, t in enumerate(made.tasks) if t.op in ops]


def producers(made, task):
    return sorted({p for c, _ in made.tasks[task].waits for p in made.counters[c].producers})


def test_four_task_diamond_is_a_twelve_line_program():
    square = body("square", lambda x, y: np.multiply(x, x, out=y))
    total = body("total", lambda a, b, y: np.add(a, b, out=y))
    graph = Graph("diamond")
    x, a, b = (graph.activation(n, [4], "f32") for n in "xab")
    y = graph.output("y", [4], "f32")
    graph.task(square, reads=[graph.input("in", [4], "f32")], writes=[x])
    graph.task(square, reads=[x], writes=[a])
    graph.task(square, reads=[x], writes=[b])
    graph.task(total, reads=[a, b], writes=[y])
    made = plan(graph, HOST)
    assert len(made.tasks) == 5
    assert not unordered_pairs(made)
    arms = [worker for worker, rows in enumerate(made.lists) for i in rows[0] if i in (1, 2)]
    assert sorted(arms) == [0, 1], "the arms run side by side"


def test_head_of_attention_waits_only_for_the_tiles_it_reads():
    made = plan(llama(), Target("host", 7), policy="claim")
    heads = tasks_of(made, "attention")[:3]
    q_tiles = tasks_of(made, "q")
    assert len(q_tiles) >= 6
    for head in heads:
        mine = producers(made, head)
        reads = [r for r in made.tasks[head].reads if made.buffers[r[0]].name in ("q0", "kv0")]
        touched = [
            i
            for i in range(head)
            for buffer, bounds in made.tasks[i].writes
            for other, wanted in reads
            if buffer == other and bounds[-1][0] < wanted[-1][1] and wanted[-1][0] < bounds[-1][1]
        ]
        assert mine == sorted(set(touched))
        assert len(mine) < len(q_tiles)


def test_residual_is_not_waited_for_when_the_input_already_implies_it():
    made = plan(llama(), Target("host", 7), policy="claim")
    for task in tasks_of(made, "o") + tasks_of(made, "down"):
        assert len(made.tasks[task].waits) == 1, "x precedes attention, h precedes gate_up"


def test_no_wait_of_a_claimed_plan_is_redundant():
    made = plan(llama(layers=1), Target("host", 7), policy="claim")
    for index, task in enumerate(made.tasks):
        for counter, _ in task.waits:
            # Anything that still orders the producers before the task goes through its other waits.
            others = [c for c, _ in task.waits if c != counter]
            reached, todo = set(), [p for c in others for p in made.counters[c].producers]
            while todo:
                at = todo.pop()
                if at not in reached:
                    reached.add(at)
                    todo += [p for c, _ in made.tasks[at].waits for p in made.counters[c].producers]
            assert not set(made.counters[counter].producers) <= reached, index


def test_one_worker_needs_no_counter():
    made = plan(llama(), Target("host", 1))
    assert not made.counters
    assert made.lists == ((tuple(range(len(made.tasks))),),)


def test_only_the_last_producer_of_a_list_signals():
    made = plan(llama(), HOST)
    for counter in made.counters:
        assert len(counter.producers) <= 2


def test_tiles_of_an_operator_are_spread_evenly():
    made = plan(llama(), Target("host", 7))
    for op in range(len(made.operators)):
        counts = [sum(made.tasks[i].op == op for i in rows[0]) for rows in made.lists]
        assert max(counts) - min(counts) <= 1, made.operators[op].name
    loads = [sum(made.tasks[i].cost_ns for i in rows[0]) for rows in made.lists]
    assert max(loads) < 1.5 * min(loads)


def test_policies_make_segments_and_neighbours_merge():
    made = plan(
        llama(layers=1), HOST, policy={"attention": "ready", "matvec": "claim", "o": "static"}
    )
    assert [s.policy for s in made.segments] == [
        "static", "claim", "ready", "static", "claim", "static",
    ]  # fmt: skip
    assert made.segments[0] == PlanSegment("static", 0, 1)
    assert made.segments[-1].end == len(made.tasks)
    for rows in made.lists:
        for segment, row in zip(made.segments, rows, strict=True):
            assert segment.policy == "static" or not row


def test_unknown_policy_or_name_is_one_clear_error():
    with pytest.raises(PlanError, match=r"^unknown policy 'fast' - at plan\(policy=\.\.\.\)"):
        plan(llama(), HOST, policy="fast")
    with pytest.raises(PlanError, match=r"^no operator or body is named \['atention'\]"):
        plan(llama(), HOST, policy={"atention": "claim"})
    with pytest.raises(PlanError, match=r"^0 workers - at target host"):
        plan(llama(), Target("host", 0))
    with pytest.raises(PlanError, match=r"^unknown edges 'tagged'"):
        plan(llama(), HOST, edges="tagged")


def test_task_that_needs_many_producers_gets_joins():
    graph = Graph("wide", rows=2)
    parts = [graph.activation(f"p{i}", [2, 4], "f32") for i in range(30)]
    gather = graph.activation("all", [2, 120], "f32")
    f = body("f", lambda *_: None)
    for i, part in enumerate(parts):
        graph.task(f, reads=[], writes=[part])
        graph.task(f, reads=[part], writes=[gather[:, 4 * i : 4 * i + 4]])
    graph.task(f, reads=[gather], writes=[graph.activation("y", [2], "f32")])
    for policy in ("claim", "ready"):
        made = plan(graph, Target("host", 7), policy=policy)
        joins = [t for t in made.tasks if t.body == "noop"]
        assert len(joins) == 9, "30 waits become 3 through joins of four"
        assert all(len(t.waits) <= WAITS_PER_TASK for t in made.tasks)
        assert made.operators[60].name == "f", "the graph's operators keep their indices"
        legal_order(made, 1)


def test_operator_whose_tiles_would_signal_too_much_is_waited_for_as_a_whole():
    graph = Graph("many", rows=2)
    x = graph.activation("x", [2, 40], "f32")
    graph.op(SPREAD, {"x": graph.input("in", [2, 40], "f32"), "y": x}, tiles=20, halo=0)
    f = body("f", lambda *_: None)
    for i in range(8):  # eight different sets of tiles, all with the middle ones
        y = graph.activation(f"y{i}", [2], "f32")
        graph.task(f, reads=[x[:, i : 20 + 2 * i]], writes=[y])
    made = plan(graph, Target("host", 7), policy="claim")
    assert all(len(t.signals) <= 2 for t in made.tasks)
    assert len(made.counters) == 2, "one of the whole operator, one for advance"


def test_weights_wanted_in_two_packings_get_a_buffer_each():
    def packing(op, arg, _target):
        return "tiled" if op.name == "head" and arg == "w" else ""

    def tiles(op, _target):
        stream = Stream("w", 0, 4096) if op.name == "head" else None
        return [Tile((0, 0, 0, 0), op.reads, op.writes, stream)]

    dense = Body("dense", (Arg("w", "r"), Arg("y", "w")), tile=tiles, packing=packing)
    graph = Graph("tied")
    w = graph.weight("w", [4, 16], "f32", lambda: None)
    graph.op(dense, {"w": w, "y": graph.activation("a", [4], "f32")}, name="embed")
    graph.op(dense, {"w": w, "y": graph.activation("b", [4], "f32")}, name="head")
    made = plan_without_packer(graph)
    assert [(b.name, b.source, b.packing) for b in made.buffers if b.memory == "weight"] == [
        ("w", "w", ""),
        ("w@tiled", "w", "tiled"),
    ]
    extra = made.buffers[made.buffer_index("w@tiled")]
    assert extra.size_bytes == 4096, "as much as is streamed"
    assert extra.offset_bytes == 256
    assert made.tasks[1].addr[0] == (made.buffer_index("w@tiled"), 0)


def plan_without_packer(graph):
    from gpurt.planner import finish

    stated = finish.packed_bytes
    finish.packed_bytes = lambda *_: {}
    try:
        return plan(graph, HOST)
    finally:
        finish.packed_bytes = stated


def test_packing_part_of_a_weight_is_rejected():
    dense = Body("dense", (Arg("w", "r"), Arg("y", "w")), packing=lambda *_: "tiled")
    graph = Graph("part")
    w = graph.weight("w", [4, 16], "f32", lambda: None)
    graph.op(dense, {"w": w[0:2], "y": graph.activation("a", [4], "f32")})
    with pytest.raises(GraphError, match=r"^dense packs w\[0:2, 0:16\] as tiled, a part"):
        plan(graph, HOST)


def test_arena_places_are_aligned_and_disjoint():
    made = plan(llama(), HOST)
    for memory in ("weight", "state", "activation"):
        places = sorted(
            (b.offset_bytes, b.offset_bytes + b.size_bytes)
            for b in made.buffers
            if b.memory == memory
        )
        assert all(low % 256 == 0 for low, _ in places)
        assert all(a[1] <= b[0] for a, b in pairwise(places))
        assert made.arena_bytes(memory) >= places[-1][1]
    assert made.buffers[made.buffer_index("step.sampled")].memory == "step"


def test_advance_reads_what_sample_wrote():
    made = plan(llama(), HOST)
    assert made.tasks[-1].body == "advance"
    assert made.tasks[-1].addr == ((made.buffer_index("step.sampled"), 0),)


def test_plan_of_twenty_thousand_tasks_is_made_and_proved():
    graph = Graph("large", rows=1)
    x = graph.input("in", [1, 4000], "f32")
    for layer in range(10):
        y = graph.activation(f"x{layer}", [1, 4000], "f32")
        graph.op(SPREAD, {"x": x, "y": y}, tiles=2000, halo=layer % 3 - 1)
        x = y
    made = plan(graph, Target("cuda", 132))
    assert len(made.tasks) == 20_001


def test_few_tasks_keep_away_from_where_cold_bodies_live() -> None:
    """On a GPU: what runs beside a router must not stand before it in its workers' lists."""
    # As many workers as all of them have homes, and some more.
    made = plan(tiny_muse(), Target("cuda", 160, 16, "sm_90a", 232448, 60 << 20))
    workers: dict[str, set[int]] = {}
    for worker, lists in enumerate(made.lists):
        for task in (task for part in lists for task in part):
            op = made.operators[made.tasks[task].op]
            if op.layer == 1:
                workers.setdefault(op.name.rpartition(".")[2], set()).add(worker)
    for name in ("pre_expert", "post_expert", "kv"):
        assert workers[name].isdisjoint(workers["router"] | workers["route"] | workers["combine"])


def test_who_has_attention_has_less_of_what_it_reads() -> None:
    """On a GPU: attention begins when its worker has done its tiles of q, k and v."""
    made = plan(llama(layers=3, rows=1), Target("cuda", 13, 16, "sm_90a", 232448, 60 << 20))
    tiles: dict[bool, list[int]] = {True: [], False: []}
    for lists in made.lists:
        own = [made.operators[made.tasks[t].op] for part in lists for t in part]
        names = [op.name.rpartition(".")[2] for op in own if op.layer == 1]
        tiles["attention" in names].append(names.count("q") + names.count("kv"))
    assert len(tiles[True]) == 3
    assert max(tiles[True]) < max(tiles[False])


def test_who_has_a_short_body_has_as_much_of_what_it_reads() -> None:
    """On a GPU: as many tiles as workers are one each, wherever the residual behind is at home."""
    graph = Graph(rows=4)
    x = graph.state("x", [4, 192], "f32")
    gates = [graph.weight(name, [192], "f32", lambda: None) for name in ("alpha", "beta")]
    for layer in range(3):
        with graph.at(f"layers[{layer}]", layer=layer):
            made = [graph.row_activation(f"{name}{layer}", 192, "f32") for name in ("o", "y")]
            w = graph.weight(f"w{layer}", [192, 192], "bf16", lambda: None)
            matvec(graph, x, w, made[0], name="o")
            gated_residual(graph, made[0], x, *gates, made[1], eps=1e-5)
            x = made[1]
    found = plan(graph, Target("cuda", 12, 16, "sm_90a", 232448, 60 << 20))
    for lists in found.lists:
        names = [found.operators[found.tasks[t].op].name for part in lists for t in part]
        assert names.count("o") == 3


def test_what_shares_a_worker_with_kv_is_the_gates_end() -> None:
    """kv and qg run side by side. With too few workers for both, who waits is the gate."""
    graph = tiny_muse()
    qg = next(op for op in graph.operators if op.name == "qg")
    kv = next(op for op in graph.operators if op.name == "kv")
    tiles = [-(-op.args["w"].shape[0] // 16) for op in (qg, kv)]
    made = plan(graph, Target("cuda", sum(tiles) - 1, 16, "sm_90a", 232448, 60 << 20))
    for worker in made.lists:
        own = [made.tasks[t] for part in worker for t in part]
        names = [made.operators[t.op].name for t in own if made.operators[t.op].layer == 1]
        if "kv" in names and "qg" in names:
            break
    else:
        raise AssertionError("none has both")
    first = [t.coords[0] for t in own if made.operators[t.op].name == "qg"]
    assert names.index("kv") < names.index("qg")
    assert max(first) >= qg.args["w"].shape[0] // 2
