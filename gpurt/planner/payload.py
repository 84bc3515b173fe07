"""Payload edges: buffers whose data is its own flag, and the tasks that re-arm them.

    round r     writers fill set r & 1, readers poll it; `rearm` fills set (r+1) & 1 with sentinels
    advance     waits for all of that: the last readers of set (r+1) & 1 ended in round r-1, and the
                fill is released before round r+1, whose writers come next

A round is a step of one variant; no other touches its payload buffers.

So one release a step, through `advance`, orders all fills (device/DESIGN.md). A buffer may be
a payload buffer when no element is written twice in a step and every body that touches it polls.

Symmetric buffers likewise: data of other ranks tells by itself that it came, a fence, a flag and a
hop less. Their next writers are on other ranks, so there `advance` of every rank waits for the
re-arm of all: `armed`, one signal a rank and step. The re-arm stands early in a step, where workers
wait for its first collective, so that nobody waits for it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpurt.body import Target
from gpurt.errors import PlanError
from gpurt.graph import Graph, Operator
from gpurt.plan import ARENA_ALIGN_BYTES, TASK_REARM, Memory, PlanBuffer, Policy, align_up
from gpurt.planner.boxes import are_disjoint
from gpurt.planner.cost import task_ns
from gpurt.planner.draft import Draft, DraftOp, DraftTask, Group

Edges = Literal["counter", "payload", "auto"]
EDGES: tuple[Edges, ...] = ("counter", "payload", "auto")

AUTO_BYTES = 256 << 10  # `auto` takes smaller buffers: the re-arm moves as many bytes again
# The same for symmetric ones: all SMs move 2 MB in less time than a fence and a flag take.
AUTO_SYMMETRIC_BYTES = 2 << 20
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
    plain: set[int] = set()  # used by what can neither poll nor store granules
    for op in graph.operators:
        if op.index in left_out:
            continue
        for name, region in op.args.items():
            index = region.buffer.index
            users.setdefault(index, []).append(op)
            # `ready` needs a last dependency that somebody counts, so its edges stay counters.
            # Who publishes stores each word, or granule, as payload needs it.
            takes = op.body.takes_payload(name) or (name == "y" and bool(op.params.get("y_ranks")))
            if not takes or of_op[op.index] == "ready":
                plain.add(index)
        if op.rows is not None:
            plain.add(op.rows.buffer.index)
    chosen = set()
    for index, ops in users.items():
        buffer = graph.buffers[index]
        is_symmetric = buffer.role == "symmetric"
        if not (buffer.role == "activation" or is_symmetric) or buffer.dtype.name not in _DTYPES:
            continue
        most = AUTO_SYMMETRIC_BYTES if is_symmetric else AUTO_BYTES
        if index in plain or (edges == "auto" and buffer.size_bytes > most):
            continue
        granules = not all(op.body.payload_words for op in ops)
        if granules and any(
            buffer.dtype.row_bytes(n) % GRANULES_BYTES for n in _row_lengths(index, ops)
        ):
            continue
        # Of other ranks' data every row is read that was written: no late store may be unseen.
        samples = {bool(op.params.get("sampled")) for op in ops if "sampled" in op.params}
        if is_symmetric and len(samples) > 1:
            continue
        if _written_once(index, ops):
            chosen.add(index)
    # A task's flags say for all inputs, and for all outputs, whether those with two sets are
    # payload: so of symmetric ones all are, or none.
    return _without_mixed(graph, chosen, left_out)


def _row_lengths(index: int, ops: Sequence[Operator]) -> set[int]:
    """Where regions of rows begin, and how long they are, in elements; of publishes' parts, too."""
    found = set()
    for op in ops:
        for region in op.args.values():
            if region.buffer.index == index:
                low, high = region.bounds[-1]
                found |= {region.buffer.shape[-1], low, high - low}
        if op.body.publishes:  # others on all ranks have parts of whole granules
            found.add(int(op.params["width"]))
    return found


def _without_mixed(graph: Graph, chosen: set[int], left_out: set[int]) -> set[int]:
    symmetric = {b.index for b in graph.buffers if b.role == "symmetric"}
    while True:
        mixed: set[int] = set()
        for op in graph.operators:
            for regions in (op.reads, op.writes) if op.index not in left_out else ():
                used = {r.buffer.index for r in regions}
                if used & symmetric - chosen:
                    mixed |= used & chosen
        if not mixed:
            return chosen
        chosen = chosen - mixed


def rearm(
    index: int,
    policy: Policy,
    buffers: Sequence[PlanBuffer],
    target: Target,
    memory: Memory = "payload",
) -> tuple[DraftOp, list[DraftTask]] | None:
    """The generated operator that re-arms an arena; None without buffers there.

    A task fills `bytes` from byte `begin` of the set: coords = (begin_lo, begin_hi, 0, 0), params =
    (bytes_lo, bytes_hi). addr[0] is the arena's first buffer, at the start of the set.
    """
    placed = [i for i, b in enumerate(buffers) if b.memory == memory]
    if not placed:
        return None
    first = min(placed, key=lambda i: buffers[i].offset_bytes)
    size_bytes = max(align_up(buffers[i].offset_bytes + buffers[i].size_bytes) for i in placed)
    # One worker fewer than there are: the one with the step's last task should not fill, too.
    most = max(1, target.workers - 1)
    count = min(most, max(1, size_bytes // REARM_BYTES_MIN))
    part = align_up(-(-size_bytes // count), ARENA_ALIGN_BYTES)
    name = "rearm" if memory == "payload" else "rearm_ranks"
    op = DraftOp(index, name, "rearm", f"plan.{name}", 0, policy, ((first, 0),), (), TASK_REARM, 1)
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


def armed(index: int, rearmed: DraftOp, draft: Draft) -> Group:
    """Adds the `noop` that tells all ranks when `rearmed` has ended on its own. Returns: what tasks
    wait for, that of all ranks.
    """
    op = DraftOp(index, "armed", "noop", "plan.armed", 0, rearmed.policy, ranks=True)
    wait = rearmed.group(rearmed.all_tiles)
    draft.append(op, [DraftTask(op, (0, 0, 0, 0), waits=(wait,))])
    return op.group(1)


def _written_once(index: int, ops: Sequence[Operator]) -> bool:
    writes = [r.bounds for op in dict.fromkeys(ops) for r in op.writes if r.buffer.index == index]
    both = any(
        any(r.buffer.index == index for r in op.reads)
        and any(r.buffer.index == index for r in op.writes)
        for op in ops
    )
    return bool(writes) and not both and are_disjoint(writes)
