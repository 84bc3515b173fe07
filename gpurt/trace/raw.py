"""How the rings of all ranks, as workers wrote them, become a Trace.

    rank r:   task t -> r * tasks + t     worker w -> r * workers + w     operators, counters too

A counter that all ranks signal is, on every rank, one whose producers are the tasks of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import TraceError
from gpurt.shared_edges import shared_edges
from gpurt.trace.clocks import offsets
from gpurt.trace.spans import SPAN, StepSpans
from gpurt.trace.trace import STEP, STEP_MASK, OperatorInfo, RequestInfo, Rows, Trace

if TYPE_CHECKING:
    from gpurt.executors.base import RawTrace
    from gpurt.plan import Plan, PlanRegion


def build(
    plan: Plan,
    raws: Sequence[RawTrace],
    first_step: int,
    last_step: int | None,
    requests: tuple[RequestInfo, ...],
    ceiling_gbps: float,
) -> Trace:
    """See Trace.from_raw."""
    ranks, tasks, ops = len(raws), len(plan.tasks), len(plan.operators)
    spans = _merge(raws, tasks, plan.target.workers, first_step, last_step)
    if not len(spans):
        what = "no spans were kept"
        raise TraceError(f"{what} - at plan {plan.name} - open the Runtime with trace=True")
    clock_error_ns = _to_one_clock(spans, plan, ranks)
    steps = _steps(raws[0], first_step, last_step)
    task_op = np.concatenate([np.array([t.op for t in plan.tasks]) + r * ops for r in range(ranks)])
    spans["op"] = task_op[spans["task"]]
    spans["layer"] = np.array([t.layer for t in plan.tasks])[spans["task"] % tasks]
    _to_origin(spans, steps)
    sizes = [t.cost_bytes or (t.stream[2] if t.stream else 0) for t in plan.tasks]
    regions, reads, writes = _regions(plan)
    edges = {(e.producer_op, e.consumer_op) for e in plan.edges if e.kind == "payload"}
    shared = shared_edges(plan)
    variants = plan.step_variants()
    variant = np.repeat(np.arange(len(variants)), [v.end - v.begin for v in variants])
    devices = ranks if plan.target.kind == "cuda" else 1
    return Trace(
        name=plan.name,
        device=f"{plan.target.kind} {plan.target.arch}".rstrip(),
        workers=plan.target.workers * ranks,
        operators=_operators(plan) * ranks,
        task_op=task_op,
        task_bytes=np.tile(np.array(sizes, np.int64), ranks),
        waits=_tiled(_rows([c for c, _ in t.waits] for t in plan.tasks), ranks, len(plan.counters)),
        producers=_producers(plan, ranks),
        payload_edges=tuple(
            (a + other * ops, b + r * ops)
            for r in range(ranks)
            for a, b in sorted(edges)
            for other in (range(ranks) if (a, b) in shared else (r,))
        ),
        kept=StepSpans(spans),
        steps=steps,
        dropped=sum(raw.dropped for raw in raws),
        regions=regions,
        task_reads=_tiled(reads, ranks, 0),
        task_writes=_tiled(writes, ranks, 0),
        task_dynamic=np.tile(_dynamic(plan), ranks),
        requests=requests,
        task_variant=np.tile(variant, ranks),
        variant_rows=tuple(v.rows for v in variants),
        ranks=ranks,
        clock_error_ns=clock_error_ns,
        ceiling_gbps=ceiling_gbps * devices,
    )


# ---- helpers ---------------------------------------------------------------------------------
def _merge(
    raws: Sequence[RawTrace], tasks: int, workers: int, first_step: int, last_step: int | None
) -> NDArray[Any]:
    """The spans of all rings once each, with full step numbers, by step and begin."""
    merged = np.concatenate(
        [
            _of_ring(part, raw.tick_ns, rank, worker, tasks, workers, first_step, shift)
            for rank, (raw, shift) in enumerate(zip(raws, _clock_shifts(raws), strict=True))
            for ring in (raw.spans, raw.sampled)
            for worker, part in enumerate(ring)
        ]
    )
    if last_step is not None:
        merged = merged[merged["step"] <= last_step]
    # A task runs once a step, so (step, task) tells spans that lie in both rings.
    key = (merged["step"] - np.uint64(first_step)) * np.uint64(tasks * len(raws)) + merged["task"]
    _, unique = np.unique(key, return_index=True)
    merged = merged[unique]
    return merged[np.lexsort((merged["begin_ns"], merged["step"]))]


def _of_ring(
    part: NDArray[Any],
    tick_ns: float,
    rank: int,
    worker: int,
    tasks: int,
    workers: int,
    first_step: int,
    shift_ns: int,
) -> NDArray[Any]:
    """One worker's spans; op and layer are still to come."""
    part = part[part["task"] < tasks]
    rows = np.zeros(len(part), SPAN)
    rows["begin_ns"] = _ticks(part["begin"], tick_ns) - shift_ns
    for name in ("wait", "run", "stall"):
        rows[f"{name}_ns"] = _ticks(part[name], tick_ns)
    rows["task"], rows["worker"] = part["task"] + rank * tasks, worker + rank * workers
    rows["expert"], rows["expert_rows"] = part["chosen"] & 0xFFFF, part["chosen"] >> 16
    # Steps of one trace lie within 2^32 of its first one.
    rows["step"] = first_step + ((part["step"].astype(np.int64) - first_step) & STEP_MASK)
    return rows


def _clock_shifts(raws: Sequence[RawTrace]) -> list[int]:
    """Nanoseconds that each rank's clock is ahead of rank 0's; 0 where its steps lie beside those
    of rank 0: two GPUs may count from different moments, and less than a step cannot be told.
    """
    first, shifts = raws[0].summaries, []
    for raw in raws:
        _, mine, theirs = np.intersect1d(raw.summaries["step"], first["step"], return_indices=True)
        own, known = raw.summaries[mine], first[theirs]
        ahead = own["begin_ns"].astype(np.int64) - known["begin_ns"].astype(np.int64)
        lengths = known["end_ns"] - known["begin_ns"]
        shift = int(np.median(ahead)) if len(ahead) else 0
        shifts.append(shift if len(ahead) and abs(shift) > int(np.median(lengths)) else 0)
    return shifts


def _to_one_clock(spans: NDArray[Any], plan: Plan, ranks: int) -> int:
    """Move spans of other GPUs to rank 0's clock, and into order. Returns: the largest error."""
    if ranks == 1 or plan.target.kind != "cuda":
        return 0
    found = offsets(spans, plan, ranks)
    shifts = np.array([shift for shift, _ in found], np.int64)
    spans["begin_ns"] -= shifts[spans["task"] // len(plan.tasks)]
    spans[:] = spans[np.lexsort((spans["begin_ns"], spans["step"]))]
    return max(error for _, error in found)


def _ticks(ticks: NDArray[Any], tick_ns: float) -> NDArray[np.int64]:
    if tick_ns == 1.0:  # exact, where a double would round a large clock
        return ticks.astype(np.int64)
    return np.rint(ticks * tick_ns).astype(np.int64)


def _steps(raw: RawTrace, first_step: int, last_step: int | None) -> NDArray[Any]:
    source = raw.summaries
    kept = (source["step"] >= first_step) & (source["end_ns"] > source["begin_ns"])
    if last_step is not None:
        kept &= source["step"] <= last_step
    source = np.sort(source[kept], order="step")
    steps = np.zeros(len(source), STEP)
    for name in STEP.names or ():
        steps[name] = source[name]
    return steps


def _to_origin(spans: NDArray[Any], steps: NDArray[Any]) -> None:
    """Both clocks from 0. They may differ, so each has its own origin unless they overlap."""
    origin = int(spans["begin_ns"].min()) if len(spans) else 0
    if len(steps):
        low, high = int(steps["begin_ns"].min()), int(steps["end_ns"].max())
        if len(spans) and low <= int(spans["begin_ns"].max()) and origin <= high:
            low = origin = min(low, origin)
        steps["begin_ns"] -= low
        steps["end_ns"] -= low
    spans["begin_ns"] -= origin


def _rows(lists: Iterable[Sequence[int]]) -> Rows:
    kept = [list(r) for r in lists]
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(r) for r in kept], out=offsets[1:])
    return offsets, np.array(list(itertools.chain.from_iterable(kept)), np.int64)


def _operators(plan: Plan) -> tuple[OperatorInfo, ...]:
    """A task that runs an expert reads a weight [experts, rows, columns]."""
    experts: dict[int, int] = {}
    for task in plan.tasks:
        if task.op in experts:
            continue
        read = [plan.buffers[index] for index, _ in task.reads]
        stacks = [b.shape[0] for b in read if b.role == "weight" and len(b.shape) == 3]
        experts[task.op] = max(stacks, default=0)
    return tuple(
        OperatorInfo(o.name, o.body, o.path, o.layer, experts.get(i, 0))
        for i, o in enumerate(plan.operators)
    )


def _tiled(rows: Rows, copies: int, shift: int) -> Rows:
    """Rows of every copy; what those of copy i point to lies i * shift further."""
    offsets, values = rows
    counts = np.tile(np.diff(offsets), copies)
    shifted = [values + i * shift for i in range(copies)]
    return np.concatenate([[0], np.cumsum(counts)]), np.concatenate(shifted)


def _producers(plan: Plan, ranks: int) -> Rows:
    tasks = len(plan.tasks)
    return _rows(
        [p + r * tasks for r in (range(ranks) if c.ranks else (rank,)) for p in c.producers]
        for rank in range(ranks)
        for c in plan.counters
    )


def _dynamic(plan: Plan) -> NDArray[np.bool_]:
    dynamic = np.zeros(len(plan.tasks), bool)
    for segment in plan.segments:
        if segment.dynamic is not None:
            dynamic[segment.begin : segment.end] = True
    return dynamic


def _regions(plan: Plan) -> tuple[tuple[str, ...], Rows, Rows]:
    """What tasks read and write, each region's text once."""
    index: dict[PlanRegion, int] = {}
    reads = _rows([index.setdefault(r, len(index)) for r in t.reads] for t in plan.tasks)
    writes = _rows([index.setdefault(r, len(index)) for r in t.writes] for t in plan.tasks)
    texts = []
    for buffer_index, bounds in index:
        buffer = plan.buffers[buffer_index]
        ranges = ", ".join(f"{low}:{high}" for low, high in bounds)
        texts.append(f"{buffer.name}[{ranges}] {buffer.dtype}")
    return tuple(texts), reads, writes
