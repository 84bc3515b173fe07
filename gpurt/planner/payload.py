"""Payload edges: buffers whose data is its own flag, and the tasks that re-arm them.

    round r     writers fill set r & 1, readers poll it; `rearm` fills set (r+1) & 1 with sentinels
    advance     waits for all of that: the last readers of set (r+1) & 1 ended in round r-1, and the
                fill is released before round r+1, whose writers come next

A round is a step of one variant; no other touches its payload buffers.

So one release a step, through `advance`, orders all fills (device/DESIGN.md). A buffer may be
a payload buffer when no element is written twice in a step and every body that touches it polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpurt.body import Target
from gpurt.errors import PlanError
from gpurt.graph import Graph, Operator
from gpurt.plan import ARENA_ALIGN_BYTES, TASK_REARM, PlanBuffer, Policy, align_up
from gpurt.planner.boxes import are_disjoint
from gpurt.planner.cost import task_ns
from gpurt.planner.draft import DraftOp, DraftTask

Edges = Literal["counter", "payload", "auto"]
EDGES: tuple[Edges, ...] = ("counter", "payload", "auto")

AUTO_BYTES = 256 << 10  # `auto` takes smaller buffers: the re-arm moves as many bytes again
GRANULES_BYTES = 32  # bodies poll and store rows by pairs of 16-byte granules
REARM_BYTES_MIN = 16 << 10  # a smaller fill is not worth a task of its own
_DTYPES = ("f32", "bf16")  # those whose all-ones pattern is a NaN that bodies never store


def choose(
    graph: Graph,
    target: Target,
    policies: Sequence[Policy],
    edges: Edges,
    left_out: set[int],
) -> set[int]:
    """Indices of the graph's buffers that become payload buffers. left_out: operators that the plan
    does not have. Raises: PlanError.
    """
    if edges not in EDGES:
        raise PlanError(f"unknown edges {edges!r} - at plan(edges=...) - use one of {list(EDGES)}")
    if edges == "counter" or target.kind != "cuda":
        return set()
    users: dict[int, list[Operator]] = {}
    of_op = {op.index: policy for op, policy in zip(graph.operators, policies, strict=True)}
    for op in graph.operators:
        for region in (*op.reads, *op.writes) if op.index not in left_out else ():
            users.setdefault(region.buffer.index, []).append(op)
    chosen = set()
    for index, ops in users.items():
        buffer = graph.buffers[index]
        if buffer.role != "activation" or buffer.dtype.name not in _DTYPES:
            continue
        if edges == "auto" and buffer.size_bytes > AUTO_BYTES:
            continue
        if buffer.dtype.row_bytes(buffer.shape[-1]) % GRANULES_BYTES:
            continue
        # `ready` needs a last dependency that somebody counts, so its edges stay counters.
        if all(op.body.payload and of_op[op.index] != "ready" for op in ops) and _written_once(
            index, ops
        ):
            chosen.add(index)
    return chosen


def rearm(
    index: int, policy: Policy, buffers: Sequence[PlanBuffer], target: Target
) -> tuple[DraftOp, list[DraftTask]] | None:
    """The generated operator that re-arms the payload arena; None without payload buffers.

    A task fills `bytes` from byte `begin` of the set: coords = (begin_lo, begin_hi, 0, 0), params =
    (bytes_lo, bytes_hi). addr[0] is the arena's first buffer, at the start of the set.
    """
    placed = [i for i, b in enumerate(buffers) if b.memory == "payload"]
    if not placed:
        return None
    first = min(placed, key=lambda i: buffers[i].offset_bytes)
    size_bytes = max(align_up(buffers[i].offset_bytes + buffers[i].size_bytes) for i in placed)
    # One worker fewer than there are: the one with the step's last task should not fill, too.
    most = max(1, target.workers - 1)
    count = min(most, max(1, size_bytes // REARM_BYTES_MIN))
    part = align_up(-(-size_bytes // count), ARENA_ALIGN_BYTES)
    op = DraftOp(index, "rearm", "rearm", "plan.rearm", 0, policy, ((first, 0),), (), TASK_REARM, 1)
    tasks = []
    for begin in range(0, size_bytes, part):
        fill = min(part, size_bytes - begin)
        tasks.append(
            DraftTask(
                op,
                (begin & 0xFFFFFFFF, begin >> 32, 0, 0),
                params=(fill & 0xFFFFFFFF, fill >> 32),
                cost_bytes=fill,
                cost_ns=task_ns(fill, target),
            )
        )
    return op, tasks


def _written_once(index: int, ops: Sequence[Operator]) -> bool:
    writes = [r.bounds for op in dict.fromkeys(ops) for r in op.writes if r.buffer.index == index]
    both = any(
        any(r.buffer.index == index for r in op.reads)
        and any(r.buffer.index == index for r in op.writes)
        for op in ops
    )
    return bool(writes) and not both and are_disjoint(writes)
