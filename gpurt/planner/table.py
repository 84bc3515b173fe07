"""Table: what print(plan) and `gpurt plan` show. For people; no program reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpurt.plan import MEMORIES, TASK_PAYLOAD_IN, TWO_SETS, Plan, sent_bytes

_ROWS_MAX = 48  # operators listed one by one; a longer plan is folded by layer
_BUFFER_ROWS_MAX = 6


def plan_table(plan: Plan, bandwidth_bytes_per_s: float = 0.0) -> str:
    """The table. bandwidth_bytes_per_s: the device's; 0 leaves out the floor of a step."""
    target = plan.target
    where = f"{target.kind} {target.arch}".strip()
    head = f"plan {plan.name}: {where}, {_count(target.workers, 'worker')}"
    if target.kind == "cuda":
        head += f" of {_count(target.team_warps, 'warp')}"
    tokens = f", vocab {plan.vocab}" if plan.vocab else ""
    bounds = f"{plan.rows} rows, {plan.slots} slots, context {plan.context}{tokens}"
    parts = [f"{head}; {bounds}", f"profile: {plan.profile}" if plan.profile else ""]
    parts += plan.notes
    variants = plan.step_variants()
    for number, v in enumerate(variants):
        if len(variants) > 1:
            parts.append(
                f"variant {number}: steps of up to {v.rows} rows, tasks [{v.begin}, {v.end})"
            )
        own = _only(plan, number)
        parts += [_totals(own, bandwidth_bytes_per_s), _operators(own), _segments(own)]
        parts += [_edges(own), _links(own), _load(own)]
    parts.append(_memory(plan))
    return "\n\n".join(part for part in parts if part)


def _only(plan: Plan, variant: int) -> Plan:
    """One variant's tasks, under the numbers they have in the plan: to be counted only."""
    v = plan.step_variants()[variant]
    segments = slice(v.segment_begin, v.segment_end)
    return replace(
        plan,
        tasks=plan.tasks[v.begin : v.end],
        segments=plan.segments[segments],
        lists=tuple(rows[segments] for rows in plan.lists),
        edges=tuple(e for e in plan.edges if e.variant == variant),
    )


def _totals(plan: Plan, bandwidth_bytes_per_s: float) -> str:
    moved = sum(t.cost_bytes for t in plan.tasks)
    counters = {counter for t in plan.tasks for counter in t.signals}
    line = f"{_count(len(plan.tasks), 'task')}, {_count(len(counters), 'counter')}, "
    line += f"{sum(len(t.waits) for t in plan.tasks)} waits, "
    line += f"{sum(len(t.signals) for t in plan.tasks)} signals; {size_text(moved)} a step"
    if bandwidth_bytes_per_s > 0:
        floor_us = moved / bandwidth_bytes_per_s * 1e6
        line += f", floor {floor_us:.1f} us at {bandwidth_bytes_per_s / 1e9:.0f} GB/s"
    return line


def _operators(plan: Plan) -> str:
    """One row an operator, or one for all layers' operators of a name when there are many."""
    rows: dict[object, list[int]] = {}
    totals: dict[int, list[int]] = {}
    inputs = {kind: _inputs(plan, kind) for kind in ("counter", "order", "payload", "ranks")}
    for task in plan.tasks:
        total = totals.setdefault(task.op, [0, 0, 0])
        total[0] += 1
        total[1] += task.cost_bytes
        total[2] += task.cost_ns
    fold = len(plan.operators) > _ROWS_MAX
    for index in totals:  # in the order of their first tasks
        op = plan.operators[index]
        key = (op.name, op.body, op.policy) if fold else index
        rows.setdefault(key, []).append(index)
    table = [("operator", "body", "layers", "policy", "tiles", "bytes", "us", "waits on")]
    for indices in rows.values():
        op = plan.operators[indices[0]]
        layers = [plan.operators[i].layer for i in indices]
        sums = [sum(totals[i][part] for i in indices) for part in range(3)]
        span = str(layers[0]) if len(indices) == 1 else f"{min(layers)}-{max(layers)}"
        waits = [
            f"{kind} {n}"
            for kind, by in inputs.items()
            if (n := sum(by.get(i, 0) for i in indices))
        ]
        table.append(
            (
                op.name,
                op.body,
                span,
                op.policy,
                f"{sums[0]}",
                size_text(sums[1]),
                f"{sums[2] / 1000:.1f}",
                ", ".join(waits) or "the step",
            )
        )
    return _aligned(table, right={4, 5, 6})


def _inputs(plan: Plan, kind: str) -> dict[int, int]:
    """Waits of one kind by the operator that waits."""
    counts: dict[int, int] = {}
    for edge in plan.edges:
        if edge.kind == kind:
            counts[edge.consumer_op] = counts.get(edge.consumer_op, 0) + edge.count
    return counts


def _segments(plan: Plan) -> str:
    if len(plan.segments) == 1:
        return f"segments: all {plan.segments[0].policy}"
    shown = [f"{s.policy} [{s.begin}, {s.end})" for s in plan.segments[:_BUFFER_ROWS_MAX]]
    rest = len(plan.segments) - len(shown)
    lines = [f"segments: {', '.join(shown)}" + (f" and {rest} more" if rest > 0 else "")]
    return "\n".join([*lines, *_dynamic(plan)])


def _dynamic(plan: Plan) -> list[str]:
    """One line a dynamic segment: how many tasks a step has, who says so, who makes up for them."""
    lines = []
    for segment in plan.segments:
        d = segment.dynamic
        if d is None:
            continue
        slots = (segment.end - segment.begin) // d.tiles_per_slot
        who = f"task {d.decider} decides"
        who += "" if d.compensator == d.decider else f", task {d.compensator} compensates"
        span = f"  dynamic [{segment.begin}, {segment.end}): up to {slots} slots of"
        lines.append(f"{span} {_count(d.tiles_per_slot, 'task')}, {who}")
    rest = len(lines) - _BUFFER_ROWS_MAX
    return [*lines[:_BUFFER_ROWS_MAX], *([f"  and {rest} more"] if rest > 0 else [])]


def _edges(plan: Plan) -> str:
    counts: dict[str, list[int]] = {}
    for edge in plan.edges:
        total = counts.setdefault(edge.kind, [0, 0])
        total[0] += 1
        total[1] += edge.count
    shown = [f"{kind} {n} pairs, {tasks} waits" for kind, (n, tasks) in sorted(counts.items())]
    polls = sum(bool(t.flags & TASK_PAYLOAD_IN) for t in plan.tasks)
    if polls:
        shown.append(f"{polls} tasks poll")
    return f"edges: {'; '.join(shown) or 'none'}"


def _links(plan: Plan) -> str:
    """What a rank sends in a step at most, by collective. All-reduces have one of two forms."""
    rows: dict[str, dict[int, int]] = {}  # by name: bytes by operator
    for task in plan.tasks:
        sent = sent_bytes(plan, task)
        if sent:
            by_op = rows.setdefault(plan.operators[task.op].name, {})
            by_op[task.op] = by_op.get(task.op, 0) + sent
    if not rows:
        return ""
    shown = [
        f"{name.replace('_', ' ')} x{len(by_op)} {size_text(sum(by_op.values()))}"
        for name, by_op in rows.items()
    ]
    total = size_text(sum(sum(by_op.values()) for by_op in rows.values()))
    others = _count(plan.rank_count - 1, "other")
    return f"links: a rank sends {total} a step to {others}: {', '.join(shown)}"


def _load(plan: Plan) -> str:
    first = plan.segments[0].begin
    static = [
        sum(plan.tasks[i - first].cost_ns for row in rows for i in row) / 1000
        for rows in plan.lists
    ]
    if not any(static):
        return "load: no static lists, workers take tasks as they come"
    mean = sum(static) / len(static)
    counts = [sum(len(row) for row in rows) for rows in plan.lists]
    line = f"load: static us a worker {min(static):.1f} to {max(static):.1f}, mean {mean:.1f} "
    line += f"({mean / max(static):.0%} balanced); tasks {min(counts)} to {max(counts)}"
    if len(static) <= _BUFFER_ROWS_MAX:
        line += "; " + ", ".join(f"w{i} {us:.1f}" for i, us in enumerate(static))
    return line


def _memory(plan: Plan) -> str:
    table = [("memory", "buffers", "bytes", "largest")]
    for memory in MEMORIES[:-1]:
        buffers = sorted(
            (b for b in plan.buffers if b.memory == memory), key=lambda b: -b.size_bytes
        )
        if not buffers:
            continue
        total = plan.arena_bytes(memory)
        size = f"2 x {size_text(total)}" if memory in TWO_SETS else size_text(total)
        largest = ", ".join(f"{b.name} {size_text(b.size_bytes)}" for b in buffers[:2])
        table.append((memory, str(len(buffers)), size, largest))
    return _aligned(table, right={1, 2})


def size_text(size_bytes: int) -> str:
    """As in `1.5 MB`: decimal units, three digits."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _aligned(table: Sequence[Sequence[str]], right: Iterable[int]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rights = set(right)
    lines = []
    for number, row in enumerate(table):
        cells = [
            cell.rjust(w) if i in rights else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)
