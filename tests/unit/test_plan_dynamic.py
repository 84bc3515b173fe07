"""Plans with dynamic segments: made where they can be, proved for every number of live slots."""

import random
from dataclasses import replace

import numpy as np
import pytest

from gpurt.body import Arg, Body, Stream, Target, Tile, body
from gpurt.buffer import Region
from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph
from gpurt.plan import TASK_DECIDES, Plan, PlanSegment
from gpurt.planner import plan
from tests.helpers.experts import Experts
from tests.helpers.random_graphs import conflict

HOST = Target("host", 3)
SLOTS, TILES = 3, 2
MIX = body("mix", lambda *_: None)


def slot_tiles(op, _target):
    """Slot by slot; reads all of `x`, of `row` its own slot's."""
    w = op.args["w"].buffer
    tiles = []
    for slot in range(SLOTS):
        for tile in range(TILES):
            written = Region(w, ((slot, slot + 1), (tile, tile + 1)))
            reads = [op.args["routes"]]
            if "x" in op.args:
                reads.append(op.args["x"])
            if "row" in op.args:
                reads.append(Region(op.args["row"].buffer, ((slot, slot + 1), (0, TILES))))
            tiles.append(Tile((slot, tile, 0, 0), tuple(reads), (written,)))
    return tiles


ARGS = (Arg("routes", "r"), Arg("x", "r", optional=True), Arg("row", "r", optional=True))
EXPERT = Body("expert", (*ARGS, Arg("w", "w")), tile=slot_tiles, dynamic=True)


def family(*, z_first=False, count=2, routers=1):
    """x -> route -> routes; x -> z; z, routes -> `count` experts in a chain -> y."""
    graph = Graph("g")
    x = graph.input("x", [4], "f32")
    z, y = graph.activation("z", [4], "f32"), graph.activation("y", [4], "f32")
    routes = graph.activation("routes", [8], "u32")
    if z_first:
        graph.task(MIX, [x], [z], name="pre")
    parts = [z] if z_first else [x]
    for i in range(routers):
        size = 8 // routers
        graph.task(MIX, parts, [routes[i * size : (i + 1) * size]], name="route")
    if not z_first:
        graph.task(MIX, [x], [z], name="pre")
    before = None
    for number in range(count):
        w = graph.activation(f"h{number}", [SLOTS, TILES], "f32")
        graph.op(EXPERT, {"routes": routes, "x": z, "row": before, "w": w}, name=f"e{number}")
        before = w
    graph.task(MIX, [before, routes], [y], name="combine")
    return graph


def dynamics(made: Plan):
    return [s.dynamic for s in made.segments if s.dynamic is not None]


def names(made: Plan):
    return [made.operators[t.op].name for t in made.tasks]


def test_decider_compensates_where_it_follows_all_that_experts_wait_for():
    made = plan(family(z_first=True), HOST, policy={"expert": "claim"})
    assert [(d.decider, d.compensator) for d in dynamics(made)] == [(1, 1), (1, 1)]
    assert names(made)[1] == "route"
    assert made.tasks[1].flags & TASK_DECIDES
    assert [(s.begin, s.end) for s in made.segments if s.dynamic] == [(2, 8), (8, 14)]


def test_other_inputs_of_experts_get_a_compensator_of_their_own():
    made = plan(family(), HOST, policy={"expert": "claim"})
    assert names(made)[:5] == ["route", "pre", "e0.absent", "e0", "e0"]
    assert [(d.decider, d.compensator) for d in dynamics(made)] == [(0, 2), (0, 2)]


def test_absent_signals_are_stated_slot_by_slot_and_counter_by_counter():
    made = plan(family(), HOST, policy={"expert": "claim"})
    first, second = dynamics(made)
    assert [row[1:] for row in first.absent] == [(slot, slot + 1, TILES) for slot in range(SLOTS)]
    assert [row[1:] for row in second.absent] == [(0, SLOTS, TILES)]


@pytest.mark.parametrize("policy", ["static", "ready"])
def test_other_policies_stay_as_they_are(policy):
    made = plan(family(), HOST, policy=policy)
    assert dynamics(made) == []
    assert "e0.absent" not in names(made)


def test_routes_of_two_tasks_have_no_decider():
    made = plan(family(routers=2), HOST, policy={"expert": "claim"})
    assert dynamics(made) == []


def test_a_fifth_operator_of_one_decider_stays_under_claim():
    made = plan(family(count=5), HOST, policy={"expert": "claim"})
    assert len(dynamics(made)) == 4


def test_tiles_that_do_not_lie_slot_by_slot_are_rejected():
    def mixed(op, target):
        return list(reversed(slot_tiles(op, target)))

    graph = Graph("g")
    routes, w = graph.input("routes", [8], "u32"), graph.activation("w", [SLOTS, TILES], "f32")
    own = graph.activation("own", [8], "u32")
    graph.task(MIX, [routes], [own], name="route")
    graph.op(replace(EXPERT, tile=mixed), {"routes": own, "w": w})
    with pytest.raises(GraphError, match=r"^expert is dynamic, but its 6 tiles do not lie slot by"):
        plan(graph, HOST, policy="claim")


def test_the_table_says_who_decides_and_how_much():
    text = str(plan(family(), HOST, policy={"expert": "claim"}))
    assert "  dynamic [3, 9): up to 3 slots of 2 tasks, task 0 decides, task 2 compensates" in text
    made = plan(family(z_first=True), HOST, policy={"expert": "claim"})
    assert "slots of 2 tasks, task 1 decides\n" in str(made)


def test_a_plan_file_keeps_dynamic_segments(tmp_path):
    made = plan(family(), HOST, policy="claim")
    made.save(tmp_path / "p.plan")
    loaded = Plan.load(tmp_path / "p.plan")
    assert loaded == made
    loaded.check()


# ---- expert streams --------------------------------------------------------------------------
def streaming(stride=64, experts=4, size=48, id_bytes=4, stage=32):
    def tiles(op, target):
        return [
            replace(
                t,
                reads=(*t.reads, op.args["x"]),
                stream=Stream("x", 0, size, stride, id_bytes * (1 + t.coords[0]), stage),
            )
            for t in slot_tiles(op, target)
        ]

    graph = Graph("g")
    routes = graph.activation("routes", [10], "u32")
    source = np.zeros([experts, 16], np.float32)
    x, w = graph.weight("x", source.shape, "f32", source), graph.activation("w", [3, 2], "f32")
    logits = graph.input("logits", [4], "f32")
    graph.task(MIX, [logits], [routes], name="route")
    graph.op(replace(EXPERT, tile=tiles), {"routes": routes, "x": x, "w": w}, name="e0")
    return graph


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
def test_expert_streams_wait_for_their_decider_under_every_policy(policy, tmp_path):
    made = plan(streaming(), HOST, policy=policy)
    for task in made.tasks[1:7]:
        assert task.expert is not None
        assert (task.expert.stride_bytes, task.expert.stage_bytes) == (64, 32)
        assert task.expert.live == (0, 0)
        assert task.expert.expert_id == (0, 4 * (1 + task.coords[0]))
        counter, signals = task.expert.wait
        assert (made.counters[counter].producers, signals) == ((0,), 1)
    made.save(tmp_path / "p.plan")
    assert Plan.load(tmp_path / "p.plan") == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride": 32}, r"has experts of 48 bytes every 32: no multiple of 16, or they overlap"),
        ({"stride": 72}, r"has experts of 48 bytes every 72: no multiple of 16"),
        ({"stride": 80}, r"streams up to byte 288 of x for its last expert, it has 256"),
        ({"stage": 36880}, r"has stages of 36880 bytes: no multiple of 16 up to 36864"),
        ({"stage": 24}, r"has stages of 24 bytes"),
        ({"id_bytes": 16}, r"finds its expert at byte 32 of buffer 0"),
    ],
)
def test_expert_streams_that_lie_wrong_are_rejected(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(streaming(**changes), HOST)


def test_expert_stream_without_a_decider_is_rejected():
    graph = streaming()
    routes = graph.buffers[0]
    graph.operators[0] = replace(graph.operators[0], writes=(routes[0:4],))
    graph.operators.insert(1, replace(graph.operators[0], index=1, writes=(routes[4:10],)))
    graph.operators[2] = replace(graph.operators[2], index=2)
    with pytest.raises(GraphError, match=r"streams an expert's weights, but no one task writes"):
        plan(graph, HOST)


# ---- what the checker refuses ------------------------------------------------------------------
@pytest.fixture
def made():
    return plan(family(), HOST, policy={"expert": "claim"})


def edited(made: Plan, number: int, **changes) -> Plan:
    """The plan with changes in the number-th dynamic segment."""
    segments = list(made.segments)
    at = [i for i, s in enumerate(segments) if s.dynamic is not None][number]
    segments[at] = replace(segments[at], dynamic=replace(segments[at].dynamic, **changes))
    return replace(made, segments=tuple(segments))


def refused(broken: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        broken.check()


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (0, {"absent": ()}, r"^task 2 \(noop\) lacks 2 signals on counter \d for each absent slot"),
        (1, {"absent": ((0, 0, 1, 1),)}, r"^task 2 \(noop\) gives 1 signals on counter 0 for each"),
        (
            0,
            {"compensator": 0},
            r"^task 3 \(expert\) follows task 1 \(mix\), which its compensator",
        ),
        (
            0,
            {"compensator": 3},
            r"^task 3 \(expert\) is dynamic by task 0 and compensated by task 3",
        ),
        (0, {"decider": 1}, r"^task 1 \(mix\) leaves its count in routes, which it does not write"),
        (0, {"live": (0, 0)}, r"^task 0 \(mix\) leaves its count in buffer 0, which is no u32"),
        (0, {"live": (3, 32)}, r"^task 0 \(mix\) leaves its count at byte 32 of routes"),
        (0, {"tiles_per_slot": 4}, r"^task 3 \(expert\) is one of 6, no multiple of 4 a slot"),
        (0, {"tiles_per_slot": 3}, r"^task 5 \(expert\) is of slot 1, but lies where slot 0 does"),
    ],
)
def test_a_wrong_dynamic_segment_is_refused(made, number, changes, message):
    refused(edited(made, number, **changes), message)


def test_flags_that_do_not_fit_are_refused(made):
    tasks = list(made.tasks)
    tasks[0] = replace(tasks[0], flags=0)
    refused(replace(made, tasks=tuple(tasks)), r"^task 0 \(mix\) does not decide by its flags")
    tasks = list(made.tasks)
    tasks[1] = replace(tasks[1], flags=TASK_DECIDES)
    refused(replace(made, tasks=tuple(tasks)), r"^task 1 \(mix\) decides by its flags, unlike")


def test_a_decider_that_may_be_absent_is_refused(made):
    refused(
        edited(made, 1, decider=3, compensator=3),
        r"^task 3 \(expert\) decides about task 9, but may be absent itself",
    )


def test_a_static_segment_cannot_be_dynamic(made):
    segments = list(made.segments)
    segments[0] = replace(segments[0], dynamic=dynamics(made)[0])
    refused(replace(made, segments=tuple(segments)), r"is static and dynamic: only claim segments")


def test_a_wait_for_another_slot_is_refused(made):
    tasks, counters = list(made.tasks), list(made.counters)
    # The last tile of slot 2 in e1 waits for slot 0 of e0 too.
    first = next(c for c, _ in tasks[9].waits if counters[c].producers == (3, 4))
    tasks[14] = replace(tasks[14], waits=(*tasks[14].waits, (first, 2)))
    refused(replace(made, tasks=tuple(tasks)), r"^task 14 \(expert\) of slot 2 waits for task 3 of")


def test_a_count_that_changes_before_its_last_reader_is_refused():
    graph = Graph("g")
    x, w = graph.input("x", [4], "f32"), graph.activation("w", [SLOTS, TILES], "f32")
    y, routes = graph.activation("y", [4], "f32"), graph.activation("routes", [8], "u32")
    graph.task(MIX, [x], [routes], name="route")
    graph.op(EXPERT, {"routes": routes, "w": w}, name="e0")
    graph.task(MIX, [x], [routes], name="again")
    graph.op(EXPERT, {"routes": routes, "w": w}, name="e1")
    graph.task(MIX, [w], [y])
    made = plan(graph, HOST, policy={"expert": "claim"})
    assert [d.decider for d in dynamics(made)] == [0, 7]
    broken = edited(made, 1, decider=0, compensator=0)
    refused(broken, r"^task 7 \(mix\) writes routes between its decider, task 0, and task 13")


# ---- every number of live slots, by brute force ----------------------------------------------
def random_moe(seed: int) -> Graph:
    """Families of dynamic operators among other work, on few buffers that all of them reuse."""
    rng = random.Random(seed)
    graph = Graph(f"random{seed}")
    flat = [graph.input("in", [4], "f32")]
    flat += [graph.activation(f"b{i}", [4], "f32") for i in range(3)]
    tables = [graph.activation(f"routes{i}", [8], "u32") for i in range(2)]
    grids = [graph.activation(f"h{i}", [SLOTS, TILES], "f32") for i in range(3)]
    written = [flat[0]]

    def mix(target=None):
        reads = rng.sample(written, min(len(written), rng.randint(1, 2)))
        y = target or rng.choice([b for b in flat[1:] if b not in reads] or [flat[3]])
        graph.task(MIX, [r for r in reads if r is not y], [y])
        if y not in written:
            written.append(y)

    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(0, 2)):
            mix()
        routes = rng.choice(tables)
        mix(routes)
        for _ in range(rng.randint(0, 2)):
            mix()
        before = None
        for _ in range(rng.randint(1, 3)):
            w = rng.choice([g for g in grids if g is not before])
            flats = [b for b in written if b in flat]
            x = rng.choice(flats) if before is None or rng.random() < 0.4 else None
            graph.op(EXPERT, {"routes": routes, "x": x, "row": before, "w": w})
            before = w
            if rng.random() < 0.3:
                written.append(w)
                mix()
                written.remove(w)
        y = rng.choice(flat[1:])
        graph.task(MIX, [before, routes], [y], name="combine")
        if y not in written:
            written.append(y)
    return graph


def closure_of(made: Plan, live: dict[int, int]) -> np.ndarray:
    """What ends before what in a step with these live slots a decider; absent tasks stand alone."""
    count = len(made.tasks)
    speaker = list(range(count))  # who gives a task's signals
    for s in made.segments:
        if s.dynamic is not None:
            for index in range(s.begin, s.end):
                if (index - s.begin) // s.dynamic.tiles_per_slot >= live[s.dynamic.decider]:
                    speaker[index] = s.dynamic.compensator
    before = np.zeros((count, count), dtype=bool)
    for index, task in enumerate(made.tasks):
        for counter, _ in task.waits:
            before[[speaker[p] for p in made.counters[counter].producers], index] = True
    for rows in made.lists:
        chain = [i for row in rows for i in row]
        before[chain[:-1], chain[1:]] = True
    absent = [i for i in range(count) if speaker[i] != i]
    before[:, absent] = False
    for index in range(count):
        for earlier in np.flatnonzero(before[:, index]):
            before[:, index] |= before[:, earlier]
    return before, set(absent)


@pytest.mark.parametrize("seed", range(60))
def test_every_step_orders_what_conflicts_whatever_is_live(seed):
    rng = random.Random(seed)
    policy = rng.choice(["claim", {"expert": "claim"}, {"expert": "claim", "mix": "ready"}])
    made = plan(random_moe(seed), Target("host", rng.randint(1, 4)), policy=policy)
    deciders = sorted({d.decider for d in dynamics(made)})
    assert deciders
    last = len(made.tasks) - 1
    pairs = [
        (one, two)
        for two in range(last)
        for one in range(two)
        if conflict(made, made.tasks[one], made.tasks[two])
    ]
    outcomes = [dict.fromkeys(deciders, n) for n in range(SLOTS + 1)]
    outcomes += [{d: rng.randint(0, SLOTS) for d in deciders} for _ in range(6)]
    for live in outcomes:
        before, absent = closure_of(made, live)
        for one, two in [*pairs, *((i, last) for i in range(last))]:
            if one not in absent and two not in absent:
                assert before[one, two], (one, two, live)


def test_experts_of_the_executor_tests_have_every_kind_of_segment():
    made = plan(Experts().graph(), HOST, policy={"expert_up": "claim", "expert_down": "claim"})
    kinds = [s.policy + ("!" if s.dynamic else "") for s in made.segments]
    assert kinds == ["static", "claim!", "claim!"] * 2 + ["static"]
    assert isinstance(made.segments[0], PlanSegment)
