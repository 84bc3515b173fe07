"""Faults in words: which task gave up, on which edge, who did not signal and where they are stuck.

A Fault record has numbers; the Plan has the names, and the spans of the faulting step tell which
tasks ran. Host only; everything here runs after the kernel has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpurt.wire import FaultKind

if TYPE_CHECKING:
    from gpurt.executors.base import RawTrace
    from gpurt.plan import Plan

NAMED_PRODUCERS = 3  # more make a line nobody reads
STEP_MASK = (1 << 32) - 1  # a span keeps the low half of the step's number


def describe_fault(plan: Plan, fault: Any, raw: RawTrace | None) -> str:
    """One line: what, with numbers - where - what to do. `fault`: a numpy record of wire.FAULT."""
    kind, task, worker = int(fault["kind"]), int(fault["task"]), int(fault["worker"])
    if kind == FaultKind.CHECK_IN:
        what = f"{int(fault['seen'])} of {int(fault['needed'])} workers checked in"
        return f"{what} - at launch of {plan.name} - free the device, or use fewer workers"
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
    waited = f"{who} waited {int(fault['waited_ns']) / 1e6:.0f} ms in step {step}"
    numbers = f"seen {int(fault['seen'])}, needed {int(fault['needed'])}"
    history = _History(plan, raw, step)
    if kind == FaultKind.EDGE_TIMEOUT:
        counter = int(fault["counter"])
        late = history.blame_counter(counter)
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
    """Which tasks of one step ran, as far as spans tell."""

    def __init__(self, plan: Plan, raw: RawTrace | None, step: int) -> None:
        self._plan = plan
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
                here = spans[spans["step"] == (step & STEP_MASK)]
                self._ran.update(int(t) for t in here["task"])

    def blame_counter(self, counter: int) -> str:
        if counter >= len(self._plan.counters):
            return "the plan has no such counter"
        entry = self._plan.counters[counter]
        if not entry.producers:
            return "no task signals it"
        return self._blame(entry.producers)

    def blame_payload(self, task: int) -> str:
        op = self._plan.tasks[task].op
        ops = {
            e.producer_op for e in self._plan.edges if e.kind == "payload" and e.consumer_op == op
        }
        return self._blame([t for t, record in enumerate(self._plan.tasks) if record.op in ops])

    def blame_task(self, task: int) -> str:
        counters = [c for c, _ in self._plan.tasks[task].waits]
        return self._blame([p for c in counters for p in self._plan.counters[c].producers])

    def _blame(self, producers: list[int] | tuple[int, ...]) -> str:
        if self._ran is None:
            names = ", ".join(task_name(self._plan, p) for p in producers[:NAMED_PRODUCERS])
            return f"its producers are {names or 'none'} (no trace says which of them ran)"
        missing = [p for p in producers if p not in self._ran]
        if not missing:
            names = ", ".join(task_name(self._plan, p) for p in producers[:NAMED_PRODUCERS])
            return f"all its producers ran: {names or 'none'}"
        parts = [f"{task_name(self._plan, p)} {self._stuck(p)}" for p in missing[:NAMED_PRODUCERS]]
        more = len(missing) - len(parts)
        return "did not signal: " + "; ".join(parts) + (f"; {more} more" if more > 0 else "")

    def _stuck(self, task: int) -> str:
        """Where `task` is stuck, followed to the first task that had all it needed."""
        chain, seen = task, {task}
        while True:
            late = self._first_missing(chain)
            if late is None or late in seen:
                break
            chain = late
            seen.add(late)
        if chain == task:
            return f"had all it waits for and {self._place(task)}"
        return f"waits for {task_name(self._plan, chain)}, which {self._place(chain)}"

    def _first_missing(self, task: int) -> int | None:
        ran = self._ran or set()
        for counter, _ in self._plan.tasks[task].waits:
            for producer in self._plan.counters[counter].producers:
                if producer not in ran:
                    return producer
        return None

    def _place(self, task: int) -> str:
        worker = self._worker_of.get(task)
        if worker is None:
            return "was never finished by any worker"
        ran = self._ran or set()
        for tasks in self._plan.lists[worker]:
            for other in tasks:
                if other == task:
                    return f"did not finish on worker {worker}"
                if other not in ran:
                    name = task_name(self._plan, other)
                    return f"stands behind {name} in the list of worker {worker}"
        return f"did not finish on worker {worker}"
