"""Which edges of a plan go between ranks without a counter: traces and fault reports ask."""

from __future__ import annotations

from gpurt.plan import Plan


def shared_edges(plan: Plan) -> set[tuple[int, int]]:
    """(producer, consumer) operators between which data of all ranks goes as payload."""
    writers = {
        task.op
        for task in plan.tasks
        if any(plan.buffers[n].memory == "symmetric_payload" for n, _ in task.writes)
    }
    return {
        (e.producer_op, e.consumer_op)
        for e in plan.edges
        if e.kind == "payload" and e.producer_op in writers
    }
