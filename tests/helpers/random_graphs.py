"""Random graphs for the planner's tests, a brute-force oracle of order, and a tiny interpreter.

The oracle shares no code with gpurt/planner/check_order.py: plain loops over all pairs of tasks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from gpurt.body import Arg, Body, Target, Tile, body
from gpurt.buffer import Region
from gpurt.graph import Graph
from gpurt.plan import Plan

HOST = Target("host", 3)
CUDA = Target("cuda", 7, team_warps=16, arch="sm_90a")
COLUMNS = 24


def columns(region: Region, low: int, high: int) -> Region:
    start = region.bounds[-1][0]
    bounds = (*region.bounds[:-1], (start + low, start + high))
    return Region(region.buffer, bounds)


def spread_tiles(op, _target):
    """Cuts y by columns; a tile reads all of x, its own columns, or those and its neighbours'."""
    x, y = op.args["x"], op.args["y"]
    count, halo = op.params["tiles"], op.params["halo"]
    width = y.shape[-1]
    tiles = []
    for number in range(count):
        low, high = width * number // count, width * (number + 1) // count
        if low == high:
            continue
        part = x
        if halo >= 0:
            part = columns(x, max(0, low - halo), min(x.shape[-1], high + halo))
        reads = (part, columns(op.args["z"], low, high)) if "z" in op.args else (part,)
        tiles.append(Tile((low, high, 0, 0), reads, (columns(y, low, high),)))
    return tiles


SPREAD = Body(
    name="spread",
    args=(Arg("x", "r"), Arg("z", "r", optional=True), Arg("y", "w")),
    params=("tiles", "halo"),
    tile=spread_tiles,
)
# As a built-in body that can poll; the plain one cannot.
POLLING = replace(SPREAD, name="polling", payload=True)
MIX = body("mix", lambda *_: None)


@st.composite
def graphs(draw, spread: Body = SPREAD, reuse: bool = True):
    """A graph of up to 9 operators over up to 6 buffers, some of them reused."""
    graph = Graph("random", rows=2)
    width = draw(st.sampled_from([6, COLUMNS]))
    written = [graph.input("in", [2, width], "f32")]
    for number in range(draw(st.integers(1, 9))):
        sources = draw(st.lists(st.sampled_from(written), min_size=1, max_size=3))
        fresh = not reuse or draw(st.booleans()) or len(written) > 5
        free = [b for b in written[1:] if b not in sources[:2]]
        if fresh or not free:
            kind = draw(st.sampled_from(["activation", "state"])) if reuse else "activation"
            y = getattr(graph, kind)(f"b{number}", [2, width], "f32")
        else:
            y = draw(st.sampled_from(free))
        if draw(st.booleans()):
            graph.op(
                spread,
                {"x": sources[0], "z": sources[1] if len(sources) > 1 else None, "y": y},
                name=f"op{number}",
                tiles=draw(st.integers(1, 8)),
                halo=draw(st.sampled_from([-1, 0, 2])),
            )
        else:
            low = draw(st.integers(0, width - 1))
            reads = [s[:, low : draw(st.integers(low + 1, width))] for s in sources]
            if y in written:  # a part of a buffer that is whole already
                end = draw(st.integers(low + 1, width))
                graph.task(MIX, reads=reads, writes=[y[:, low:end]], name=f"op{number}")
            else:
                graph.task(MIX, reads=reads, writes=[y], name=f"op{number}")
        if y not in written:
            written.append(y)
    return graph


policies = st.sampled_from(
    ["static", "claim", "ready", {"spread": "claim"}, {"mix": "ready"}, {"spread": "ready"}]
)


# ---- oracle ----------------------------------------------------------------------------------
def closure(plan: Plan) -> np.ndarray:
    """[tasks, tasks]: whether the row's task ends before the column's begins."""
    count = len(plan.tasks)
    before = np.zeros((count, count), dtype=bool)
    for index, task in enumerate(plan.tasks):
        for counter, _ in task.waits:
            before[list(plan.counters[counter].producers), index] = True
    for rows in plan.lists:
        chain = [i for row in rows for i in row]
        for one, two in pairwise(chain):
            before[one, two] = True
    for index in range(count):
        for earlier in np.flatnonzero(before[:, index]):
            before[:, index] |= before[:, earlier]
    return before


def unordered_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Conflicting pairs (and those that miss advance) that nothing orders."""
    before = closure(plan)
    pairs = []
    last = len(plan.tasks) - 1
    for two, later in enumerate(plan.tasks):
        pairs += [
            (one, two)
            for one in range(two)
            if conflict(plan, plan.tasks[one], later) and not before[one, two]
        ]
    pairs += [(one, last) for one in range(last) if not before[one, last]]
    return pairs


def conflict(plan: Plan, a, b) -> bool:
    for theirs, ours in ((a.writes, (*b.reads, *b.writes)), (a.reads, b.writes)):
        for buffer, bounds in theirs:
            for other, other_bounds in ours:
                if buffer == other and plan.buffers[buffer].memory not in ("weight", "payload"):
                    pairs = zip(bounds, other_bounds, strict=True)
                    if all(p < s and r < q for (p, q), (r, s) in pairs):
                        return True
    return False


# ---- interpreter -----------------------------------------------------------------------------
def run(plan: Plan, order: list[int]) -> list[np.ndarray]:
    """Every buffer after one step in this order of tasks; a task's value depends on its reads."""
    arrays = [np.full(b.shape, i + 1, dtype=np.int64) for i, b in enumerate(plan.buffers)]
    for index in order:
        task = plan.tasks[index]
        seed = index + 1
        for buffer, bounds in task.reads:
            part = arrays[buffer][tuple(slice(*b) for b in bounds)]
            weights = np.arange(1, part.size + 1)
            seed = int((seed * 31 + (part.ravel() * weights).sum()) % 1_000_003)
        for buffer, bounds in task.writes:
            arrays[buffer][tuple(slice(*b) for b in bounds)] = seed
    return arrays


def legal_order(plan: Plan, seed: int) -> list[int]:
    """A random order that the plan's counters and lists allow, as threads might take it."""
    rng = random.Random(seed)
    signalled = [0] * len(plan.counters)
    chains = [[i for row in rows for i in row] for rows in plan.lists]
    listed = {i for chain in chains for i in chain}
    loose = [i for i in range(len(plan.tasks)) if i not in listed]
    order: list[int] = []
    while len(order) < len(plan.tasks):
        heads = [chain[0] for chain in chains if chain] + loose
        able = [
            i for i in heads if all(signalled[c] >= needed for c, needed in plan.tasks[i].waits)
        ]
        assert able, f"no task can run after {order}"
        index = rng.choice(able)
        order.append(index)
        for counter in plan.tasks[index].signals:
            signalled[counter] += 1
        for chain in chains:
            if chain and chain[0] == index:
                chain.pop(0)
        if index in loose:
            loose.remove(index)
    return order
