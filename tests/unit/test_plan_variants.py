"""Plans of several step sizes: each is whole in itself, and only what may be shared is."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from gpurt.body import Target, body
from gpurt.buffer import f32
from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph
from gpurt.graphs import llama, qwen3_moe
from gpurt.loaders import load_model
from gpurt.loaders.hf_qwen3_moe import config_from_json
from gpurt.loaders.model import WeightSource
from gpurt.plan import Plan, PlanVariant
from gpurt.planner import plan, variants
from gpurt.profiles import plan_with
from tests.helpers.random_graphs import CUDA, POLLING, SPREAD
from tests.helpers.tiny import CONFIG, tiny_folder
from tests.unit.test_check_plan import edit, edit_counter, rejected

HOST = Target("host", 3)
POLICIES = ["static", "claim", "ready"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    model = load_model(str(tiny_folder(tmp_path_factory.mktemp("tiny"))))
    return llama.build(model.config, model.weights, rows=8, slots=2, context=32)


@pytest.fixture(scope="module")
def made(graph):
    return plan(graph, HOST, rows=(2, 8))


def chain(spread=POLLING, rows=4):
    graph = Graph("chain", rows=rows, vocab=7)
    x = graph.input("in", [rows, 16], "f32")
    for layer in range(3):
        y = graph.row_activation(f"x{layer}", 16, "f32")
        graph.op(spread, {"x": x, "y": y}, tiles=2, halo=-1)
        x = y
    graph.task(body("draw", lambda *_: None), [x], [graph.sampled])
    return graph


def tasks_of(made, number):
    variant = made.step_variants()[number]
    return made.tasks[variant.begin : variant.end]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_variant_has_the_tasks_of_its_own_plan(graph, policy):
    joined = plan(graph, HOST, policy=policy, rows=(2, 8))
    for number, rows in enumerate((2, 8)):
        alone = plan(graph, HOST, policy=policy, rows=(rows,))
        for ours, theirs in zip(tasks_of(joined, number), alone.tasks, strict=True):
            same = ("body", "coords", "flags", "params", "payload_mask", "layer", "cost_bytes")
            assert all(getattr(ours, n) == getattr(theirs, n) for n in same)
            assert [n for _, n in ours.waits] == [n for _, n in theirs.waits]
            names = [joined.buffers[b].name for b, _ in ours.reads]
            assert names == [alone.buffers[b].name for b, _ in theirs.reads]


def test_variants_share_every_buffer_but_use_their_own_rows(graph, made):
    assert [b.name for b in made.buffers] == [b.name for b in graph.buffers]
    assert made.rows == 8
    logits = made.buffer_index("logits")
    for number, rows in enumerate((2, 8)):
        regions = {r for t in tasks_of(made, number) for r in (*t.reads, *t.writes)}
        assert {bounds[0] for buffer, bounds in regions if buffer == logits} == {(0, rows)}


def test_a_plan_of_one_smaller_size_keeps_the_graphs_bounds(graph):
    small = plan(graph, HOST, rows=(2,))
    assert (small.rows, [v.rows for v in small.step_variants()]) == (8, [2])
    assert plan(graph, HOST, rows=(8,)) == plan(graph, HOST)


def test_payload_buffers_belong_to_one_variant():
    made = plan(chain(), CUDA, edges="payload", rows=(2, 4))
    polled = [
        {b for t in tasks_of(made, n) for b, _ in t.reads if made.buffers[b].memory == "payload"}
        for n in range(2)
    ]
    assert all(polled)
    assert not polled[0] & polled[1]
    assert made.payload_set_bytes == sum(
        plan(chain(), CUDA, edges="payload", rows=(n,)).payload_set_bytes for n in (2, 4)
    )


def test_a_step_of_fewer_rows_has_fewer_slots_of_experts():
    values = CONFIG | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    config = config_from_json(values | {"moe_intermediate_size": 12, "head_dim": 4}, "test")
    weights = {
        name: WeightSource(name, f32, shape, lambda shape=shape: np.zeros(shape, np.float32))
        for name, shape in config.tensors().items()
    }
    graph = qwen3_moe.build(config, weights, rows=8, context=32)
    made = plan(graph, HOST, policy={"expert_matvec": "claim"}, rows=(1, 8))
    slots = [
        {t.coords[0] for t in tasks_of(made, n) if t.body == "expert_matvec"} for n in range(2)
    ]
    assert slots == [set(range(2)), set(range(8))]
    assert all(s.dynamic for s in made.segments if s.policy == "claim")


def test_a_plan_file_keeps_the_variants(made, tmp_path):
    made.save(tmp_path / "a.plan")
    loaded = Plan.load(tmp_path / "a.plan")
    assert loaded == made
    loaded.check()


def test_a_plan_file_from_before_variants_is_of_one(graph, tmp_path):
    path = tmp_path / "a.plan"
    plan(graph, HOST).save(path)
    record = msgpack.unpackb(path.read_bytes())
    wire = msgpack.unpackb(record["payload"], strict_map_key=False)
    del wire["variants"]
    wire["edges"] = [row[:5] for row in wire["edges"]]
    record["payload"] = msgpack.packb(wire)
    record["checksum"] = hashlib.sha256(record["payload"]).digest()
    path.write_bytes(msgpack.packb(record))
    loaded = Plan.load(path)
    loaded.check()
    assert loaded == plan(graph, HOST)


def test_the_table_shows_each_variant(made):
    text = str(made)
    first, second = made.step_variants()
    assert f"variant 0: steps of up to 2 rows, tasks [0, {first.end})" in text
    assert f"variant 1: steps of up to 8 rows, tasks [{second.begin}, {second.end})" in text
    assert text.count("\nattention ") == 2


@pytest.mark.parametrize("rows", [(), (0, 8), (8, 8), (8, 2), (2, 9), (1, 2, 3, 4, 8)])
def test_sizes_that_are_no_ladder_are_refused(graph, rows):
    with pytest.raises(
        PlanError, match=r"^variants of \[.*\] rows - at plan llama - use 1 to 4 asc"
    ):
        plan(graph, HOST, rows=rows)


def test_a_graph_without_tokens_has_one_size():
    plain = Graph("plain", rows=4)
    plain.task(body("f", lambda *_: None), [], [plain.row_activation("x", 4, "f32")])
    with pytest.raises(PlanError, match=r"^variants of \[2, 4\] rows .* a graph without tokens"):
        plan(plain, HOST, rows=(2, 4))


def half():
    graph = chain(SPREAD)
    x = graph.row_activation("half", 16, "f32")
    graph.task(body("half", lambda *_: None), [], [x[0:2]])
    return graph


def sizes(graph, target, **options):
    made = plan_with(graph, target, "a device", "static", "auto", **options)
    return [variant.rows for variant in made.step_variants()]


def test_who_decodes_on_a_gpu_without_a_drafter_has_steps_of_one_row():
    assert sizes(chain(), CUDA) == [1, 4]
    assert sizes(chain(), CUDA, rows=(4,)) == [4]
    assert sizes(chain(), HOST) == [4]
    assert sizes(chain(rows=1), CUDA) == [1]


def test_a_drafter_or_operators_on_some_rows_keep_steps_of_all_rows():
    drafted = chain()
    drafted.draft(3)
    plain = Graph("plain", rows=4)
    plain.task(body("f", lambda *_: None), [], [plain.row_activation("x", 4, "f32")])
    assert [variants.usual_rows(g, "cuda") for g in (drafted, half(), plain)] == [None] * 3
    assert variants.usual_rows(chain(), "cuda") == (1, 4)


def test_an_operator_on_some_rows_has_one_size():
    graph = half()
    with pytest.raises(GraphError, match=r"^half takes half\[0:2, 0:16\], only some rows"):
        plan(graph, HOST, rows=(2, 4))


# ---- the checker -----------------------------------------------------------------------------
def test_a_wait_for_another_variant_is_found(graph):
    made = plan(graph, HOST, policy="claim", rows=(2, 8))
    first, second = made.step_variants()
    index = next(i for i in range(second.begin, second.end) if made.tasks[i].waits)
    counter, signals = made.tasks[first.end - 1].waits[0]
    waits = ((counter, signals), *made.tasks[index].waits[1:])
    rejected(edit(made, index, waits=waits), rf"^task {index} .* of another variant")


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_wait_is_found_in_either_variant(graph, number):
    made = plan(graph, HOST, policy="claim", rows=(2, 8))
    variant = made.step_variants()[number]
    index = next(i for i in range(variant.begin, variant.end) if len(made.tasks[i].waits) == 1)
    counter = made.tasks[index].waits[0][0]
    alone = [i for i, t in enumerate(made.tasks) if any(c == counter for c, _ in t.waits)] == [
        index
    ]
    broken = edit(made, index, waits=())
    if alone:
        for producer in made.counters[counter].producers:
            signals = tuple(c for c in broken.tasks[producer].signals if c != counter)
            broken = edit(broken, producer, signals=signals)
        broken = edit_counter(broken, counter, producers=())
    rejected(broken, rf"^task {index} .* in no order with")


@pytest.mark.parametrize("number", [0, 1])
def test_a_task_that_its_advance_does_not_follow_is_found(number):
    graph = chain()
    graph.task(body("side", lambda *_: None), [], [graph.row_activation("y", 4, "f32")])
    made = plan(graph, HOST, policy="claim", rows=(2, 4))
    v = made.step_variants()[number]
    side = next(i for i in range(v.begin, v.end) if made.tasks[i].body == "side")
    ((counter, signals),) = made.tasks[v.end - 1].waits
    assert made.tasks[side].signals == (counter,)
    rest = tuple(p for p in made.counters[counter].producers if p != side)
    broken = edit(made, side, signals=())
    broken = edit(broken, v.end - 1, waits=((counter, signals - 1),))
    broken = edit_counter(broken, counter, producers=rest, signals_per_step=len(rest))
    rejected(broken, rf"^task {side} \(side\) does not precede advance")


def test_a_read_of_what_only_the_other_variant_writes_is_found(made):
    first = made.step_variants()[0]
    writer = next(i for i in range(first.begin, first.end) if made.tasks[i].body == "embed")
    rejected(edit(made, writer, writes=()), r"^task \d+ .* reads embed.x.*no task before it writes")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 8}, r"^variant 1 of 8 rows.* rows must ascend"),
        ({"rows": 9}, r"^variant 0 of 9 rows.* rows must ascend"),
        ({"end": -1}, r"^variant 0 .* its segments are"),
        ({"begin": 1}, r"^variant 0 .* its segments are"),
        ({"segment_end": 0}, r"^variant 0 .* its segments are none"),
    ],
    ids=str,
)
def test_ranges_that_do_not_fit_are_found(made, change, match):
    first, second = made.step_variants()
    changed = replace(first, **{k: v if v >= 0 else first.end + v for k, v in change.items()})
    rejected(replace(made, variants=(changed, second)), match)


def test_tasks_beyond_the_last_variant_are_found(made):
    rejected(replace(made, variants=made.variants[:1]), r"^task \d+ .* lies in no variant")


def test_every_variant_ends_with_its_own_advance(made):
    first = made.step_variants()[0]
    whole = PlanVariant(8, 0, len(made.tasks), 0, len(made.segments))
    rejected(replace(made, variants=(whole,)), r"is the last, but advance is \[")
    rejected(edit(made, first.end - 1, flags=0), rf"^task {first.end - 1} .* advance is \[\]")


def test_a_payload_buffer_of_two_variants_is_found():
    made = plan(chain(), CUDA, edges="payload", rows=(2, 4))
    first, second = made.step_variants()
    index, task = next(
        (i, t)
        for i, t in enumerate(tasks_of(made, 1), second.begin)
        if any(made.buffers[b].memory == "payload" for b, _ in t.reads)
    )
    other = made.tasks[index - second.begin + first.begin]
    broken = edit(made, index, reads=other.reads, addr=(other.addr[0], *task.addr[1:]))
    rejected(broken, r"uses payload .*, as does another variant")
