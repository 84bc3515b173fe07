"""Faults in words: which task gave up, on which edge, who did not signal and where they are stuck.

A Fault record has numbers; the Plan has the names, the spans of the faulting step tell which tasks
ran, and the counters which edges are still open. Of several waits that ran out together, any may
be the one that is reported: so what is late is followed back to where it began.
Host only; everything here runs after the kernel has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gpurt.plan import plan_counter
from gpurt.shared_edges import shared_edges
from gpurt.wire import FaultKind

if TYPE_CHECKING:
    from gpurt.executors.base import Executor, RawTrace
    from gpurt.plan import Plan

NAMED_PRODUCERS = 3  # more make a line nobody reads
STEP_MASK = (1 << 32) - 1  # a span keeps the low half of the step's number


def describe_faults(executor: Executor, drained: bool) -> str:
    """What an executor's last launch ended in: of several ranks what each one reports, those first
    that gave up by themselves. drained: its workers have left. Empty if nobody reports.
    """
    faults = [(one, one.host.own_fault()) for one in executor.ranks]
    seen = executor.host.fault()  # of a process group: also what this process saw of the others
    own = [fault["kind"] for _, fault in faults if fault is not None]
    lost = seen is not None and seen["kind"] == FaultKind.RANK_LOST
    if not own or (lost and all(kind == FaultKind.PEER for kind in own)):
        faults = [(executor, seen)]
    reports: list[tuple[bool, str]] = []
    for one, fault in faults:
        if fault is None:
            continue
        raw, counters = (one.raw_trace(), one.counters()) if drained else (None, None)
        text = describe_fault(one.plan, fault, raw, counters)
        if executor.host.peers:
            text = f"rank {one.plan.rank}: {text}"
        reports.append((fault["kind"] == FaultKind.PEER, text))
    return "; ".join(text for _, text in sorted(reports, key=lambda row: row[0]))


def describe_fault(
    plan: Plan, fault: Any, raw: RawTrace | None, counters: NDArray[Any] | None
) -> str:
    """One line: what, with numbers - where - what to do. fault: a numpy record of wire.FAULT; raw,
    counters: of its executor after the end, None if its workers are still there.
    """
    kind, task, worker = int(fault["kind"]), int(fault["task"]), int(fault["worker"])
    if kind == FaultKind.CHECK_IN:
        what = f"{int(fault['seen'])} of {int(fault['needed'])} workers checked in"
        return f"{what} - at launch of {plan.name} - free the device, or use fewer workers"
    if kind == FaultKind.PEER:
        what = f"it ended because rank {int(fault['detail'][0])} gave up"
        return f"{what} - at plan {plan.name} - see that rank's report"
    if kind == FaultKind.RANK_LOST:
        what = f"the process of rank {int(fault['detail'][0])} is gone"
        return f"{what} - at plan {plan.name} - see its log for why, then start all ranks again"
    if kind == FaultKind.RANKS_DIFFER:
        what = f"in step {int(fault['step'])} it sampled other tokens than rank 0"
        what += f" (checks {int(fault['seen']):#x} and {int(fault['needed']):#x})"
        return f"{what} - at plan {plan.name} - give all ranks the same model and kind of device"
    if task >= len(plan.tasks):
        return f"fault {kind} at unknown task {task} - at plan {plan.name} - plan again"
    step = int(fault["step"])
    who = f"{task_name(plan, task)}, worker {worker},"
    path = plan.operators[plan.tasks[task].op].path
    if kind == FaultKind.NON_FINITE:
        row, column, arg = (int(x) for x in fault["detail"][:3])
        what = f"{who} met NaN or infinity at row {row}, column {column} of argument {arg}"
        return f"{what} in step {step} - at {path} - check the weights and what feeds this task"
    if kind == FaultKind.HOST_BODY:
        return f"{who} raised in step {step} - at {path} - see the exception that caused this"
    if kind == FaultKind.CAPACITY:
        what = f"{who} named {int(fault['seen'])} live slots, the plan has {int(fault['needed'])}"
        return f"{what}, in step {step} - at {path} - check what it decides from"
    waited = f"{who} waited {int(fault['waited_ns']) / 1e6:.0f} ms in step {step}"
    numbers = f"seen {int(fault['seen'])}, needed {int(fault['needed'])}"
    history = _History(plan, raw, counters, fault)
    if kind == FaultKind.EDGE_TIMEOUT:
        counter = plan_counter(plan, int(fault["counter"]))
        if plan.counters[counter : counter + 1] and plan.counters[counter].ranks:
            late = f"rank {int(fault['detail'][0])} did not signal"
            names = ", ".join(task_name(plan, t) for t in plan.counters[counter].producers)
            late += f" that it ended {names}"
        else:
            late = history.blame_counter(counter, int(fault["needed"]) - int(fault["seen"]))
        what = f"{waited} for counter {counter}: {numbers}; {late}"
    elif kind == FaultKind.PAYLOAD_TIMEOUT:
        what = f"{waited} for data that never came; {history.blame_payload(task)}"
    elif kind == FaultKind.STREAM_TIMEOUT:
        what = f"{waited} for its weights: {numbers}"
    else:
        what = f"{waited} for ready slot {int(fault['seen'])}; {history.blame_task(task)}"
    return f"{what} - at {path} - look at what it waits for, or raise wait_timeout_ms"


def task_name(plan: Plan, task: int) -> str:
    """As in `task 12 (matvec layers[3].up)`."""
    op = plan.operators[plan.tasks[task].op]
    name = f"{op.body} {op.name}" if op.name != op.body else op.body
    return f"task {task} ({name})"


class _History:
    """What ran in the faulting step, and what is still open, as far as spans and counters tell."""

    def __init__(
        self, plan: Plan, raw: RawTrace | None, counters: NDArray[Any] | None, fault: Any
    ) -> None:
        self._plan = plan
        self._counters = counters
        self._round = _round(plan, fault)
        self._ran: set[int] | None = None
        self._worker_of = {
            task: worker
            for worker, segments in enumerate(plan.lists)
            for tasks in segments
            for task in tasks
        }
        if raw is not None and any(len(s) for s in raw.spans):
            self._ran = set()
            for spans in raw.spans:
                here = spans[spans["step"] == (int(fault["step"]) & STEP_MASK)]
                self._ran.update(int(t) for t in here["task"])

    def blame_counter(self, counter: int, lacking: int) -> str:
        if counter >= len(self._plan.counters):
            return "the plan has no such counter"
        producers = self._plan.counters[counter].producers
        for segment in self._plan.segments:
            d = segment.dynamic
            if d is None or not any(counter == row[0] for row in d.absent):
                continue
            if self._ran is not None and d.compensator not in self._ran:
                return self._blame([d.compensator])
            # Of those that did not run, the last ones did not exist in this step.
            ran = self._ran or set()
            late = [p for p in producers if p not in ran][:lacking]
            producers = tuple(p for p in producers if p in ran or p in late)
        return self._blame(producers)

    def blame_payload(self, task: int) -> str:
        op = self._plan.tasks[task].op
        ops = {
            e.producer_op for e in self._plan.edges if e.kind == "payload" and e.consumer_op == op
        }
        late = self._blame([t for t, record in enumerate(self._plan.tasks) if record.op in ops])
        if any(consumer == op for _, consumer in shared_edges(self._plan)):
            late += "; all ranks store it, so another one may be late"
        return late

    def blame_task(self, task: int) -> str:
        counters = [c for c, _ in self._plan.tasks[task].waits]
        return self._blame([p for c in counters for p in self._plan.counters[c].producers])

    def _blame(self, producers: Sequence[int]) -> str:
        if not producers:
            return "no task signals it"
        if self._ran is None:
            return f"its producers are {self._names(producers)} (no trace says which of them ran)"
        missing = [p for p in producers if p not in self._ran]
        if not missing:
            return f"all its producers ran: {self._names(producers)}"
        parts = [f"{task_name(self._plan, p)}, {self._stuck(p)}" for p in missing[:NAMED_PRODUCERS]]
        more = len(missing) - len(parts)
        return "did not signal: " + "; ".join(parts) + (f"; {more} more" if more > 0 else "")

    def _stuck(self, task: int) -> str:
        """Where `task` is stuck, followed back to the first one that lacks nothing or nobody."""
        seen, open_edge = [task], self._open_edge(task)
        while open_edge is not None:
            producers = self._plan.counters[open_edge[0]].producers
            late = [p for p in producers if p not in (self._ran or ()) and p not in seen]
            if not late:
                break
            seen.append(late[0])
            open_edge = self._open_edge(late[0])
        last = seen[-1]
        who = "it" if last == task else f"it waits for {task_name(self._plan, last)}, which"
        if open_edge is None:
            return f"{who} {self._place(last)}"
        counter, count, needed = open_edge
        producers = self._plan.counters[counter].producers
        ran = f"though all its producers ran: {self._names(producers)}"
        why = ran if producers else "which no task signals"
        return f"{who} waits for counter {counter}: seen {count}, needed {needed}, {why}"

    def _open_edge(self, task: int) -> tuple[int, int, int] | None:
        """(counter, seen, needed) of the first wait of `task` that is not met."""
        for counter, signals in self._plan.tasks[task].waits:
            needed = signals * self._round
            producers = self._plan.counters[counter].producers
            if self._counters is not None:
                if int(self._counters[counter]) < needed:
                    return counter, int(self._counters[counter]), needed
            elif any(p not in (self._ran or ()) for p in producers):
                return counter, needed - 1, needed
        return None

    def _place(self, task: int) -> str:
        """What became of a task that had all it waits for."""
        worker = self._worker_of.get(task)
        if worker is None:
            return "was not finished by any worker"
        for other in (t for tasks in self._plan.lists[worker] for t in tasks):
            if other == task:
                break
            if other not in (self._ran or ()):
                name = task_name(self._plan, other)
                return f"stands behind {name} in the list of worker {worker}"
        return f"had all it waits for and did not finish on worker {worker}"

    def _names(self, tasks: Sequence[int]) -> str:
        names = ", ".join(task_name(self._plan, t) for t in tasks[:NAMED_PRODUCERS])
        more = len(tasks) - NAMED_PRODUCERS
        return names + (f" and {more} more" if more > 0 else "")


def _round(plan: Plan, fault: Any) -> int:
    """Which step since launch it was, from 1: counters grow by their signals in each."""
    task, counter = int(fault["task"]), plan_counter(plan, int(fault["counter"]))
    if int(fault["kind"]) == FaultKind.EDGE_TIMEOUT:
        for index, signals in plan.tasks[task].waits:
            if index == counter and signals:
                return int(fault["needed"]) // signals
    return int(fault["step"]) + 1
