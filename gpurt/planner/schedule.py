"""Schedule: which worker runs each task of a static segment, and the waits that this makes vain.

List scheduling with the cost model, operator by operator. The tiles of an operator are spread so
that no worker gets more of it than another by more than one tile; who takes the odd ones is who has
least of the operators beside it, then least to do in the whole step, then round-robin from a start
that moves on with every operator.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpurt.body import Target
from gpurt.planner.cost import hop_ns
from gpurt.planner.draft import NO_WORKER, Draft, DraftOp, DraftTask, Group

# Bodies that run once a layer, outside the hot loop, keep their workers on a GPU: their code then
# stays in those SMs' instruction caches. Fetching it anew cost attention 9 us a layer, and a layer
# of Muse Spark 3 % in all (H200).
HOMED_BODIES = frozenset(
    (
        *("attention", "route", "combine", "gated_residual", "matvec_f32"),
        *("publish", "reduce", "collect", "reduce_squares", "combine_columns", "block_conv"),
    )
)

# Attention takes long (13 us), and begins when its worker has done its own part of what it reads.
# So a worker where it is at home is given this much less of that. Not so of short bodies: 28 of 128
# tasks of `o` were second ones, on workers without `reduce`, and all waited for them, 5 us.
_LONG_BODIES = ("attention",)
_HOME_NS = 5000


@dataclass
class _Home:
    workers: list[int]
    written: set[int] = field(default_factory=set)  # by the body's last operator there


class Schedule:
    """Lists by worker, each in task order, and the clock of every worker in the cost model."""

    def __init__(self, draft: Draft, target: Target) -> None:
        self._draft = draft
        self._count = target.workers
        self._hop_ns = hop_ns(target)
        self._clock = [0] * target.workers  # when the worker would be free
        self._load = [0] * target.workers  # ns of all its tasks
        self._start = 0
        self._is_cuda = target.kind == "cuda"
        self._homes: dict[tuple[str, int], list[_Home]] = {}
        # Of the operators side by side, none of which reads what another one wrote: what they
        # wrote, and ns of their tasks by worker.
        self._written: set[int] = set()
        self._beside = [0] * target.workers
        # By buffer, the long body that reads it, with its number of tasks.
        self._readers = {
            region[0]: (op.body, op.end - op.begin)
            for op in draft.ops
            if self._is_cuda and op.body in _LONG_BODIES
            for task in draft.tasks[op.begin : op.end]
            for region in task.reads
        }
        self.lists: list[list[int]] = [[] for _ in range(target.workers)]
        self.order_edges: dict[tuple[int, int], int] = {}  # (producer op, consumer op) -> waits

    def place(self, op: DraftOp) -> None:
        """Give every task of `op` a worker. Dynamic tasks only move the clocks."""
        tasks = self._draft.tasks[op.begin : op.end]
        if any(r[0] in self._written for task in tasks for r in task.reads):
            self._written, self._beside = set(), [0] * self._count
        self._written.update(r[0] for task in tasks for r in task.writes)
        if self._is_cuda and op.body in HOMED_BODIES:
            workers = self._at_home(op.body, tasks)
        else:
            workers = self._workers(tasks, range(self._count))
        for index, (task, worker) in enumerate(zip(tasks, workers, strict=True), op.begin):
            ready = max((self._ready_ns(g) for g in task.waits), default=0)
            task.end_ns = max(self._clock[worker], ready) + task.cost_ns
            self._clock[worker] = task.end_ns
            self._load[worker] += task.cost_ns
            self._beside[worker] += task.cost_ns
            if op.policy == "static":
                task.worker = worker
                self.lists[worker].append(index)
        self._start = (self._start + len(tasks)) % self._count

    def drop_waits(self) -> None:
        """Drop a wait where the task's own list already gives it: all the producers stand earlier
        in it, or a task that stands earlier waits for the same.
        """
        waited: list[set[int]] = [set() for _ in range(self._count)]
        for task in self._draft.tasks:
            if task.worker == NO_WORKER or not task.waits:
                continue
            seen, kept = waited[task.worker], []
            for group in task.waits:
                final = group.final()
                own = self._sole_worker(final) == task.worker and not final.op.ranks
                # Warps of a GPU's team go from one expert's task to the next without a barrier.
                own = own and not (self._is_cuda and task.expert is not None)
                if own or id(final) in seen:
                    key = (final.op.index, task.op.index)
                    self.order_edges[key] = self.order_edges.get(key, 0) + 1
                else:
                    kept.append(final)
            seen.update(id(g) for g in kept)
            task.waits = tuple(kept)
        self._drop_signals()

    def _drop_signals(self) -> None:
        """Of a group's producers in one list only the last needs to signal: the others precede."""
        for group in {id(g): g for task in self._draft.tasks for g in task.waits}.values():
            last: dict[int, int] = {}
            for index in group.tasks:
                worker = self._draft.tasks[index].worker
                # A dynamic task may run anywhere, so it speaks for itself.
                last[worker if worker != NO_WORKER else -2 - index] = index
            group.tasks = tuple(sorted(last.values()))

    def _at_home(self, body: str, tasks: list[DraftTask]) -> list[int]:
        """The workers that this body has always had, or others where those would still be at the
        end of what the tasks read when it comes: there they can be polling already.
        """
        homes = self._homes.setdefault((body, len(tasks)), [])
        reads = {r[0] for task in tasks for r in task.reads}
        home = next((h for h in homes if h.written.isdisjoint(reads)), None)
        if home is None:
            taken = {worker for h in homes for worker in h.workers}
            free = [worker for worker in range(self._count) if worker not in taken]
            home = _Home(self._workers(tasks, free or range(self._count)))
            homes.append(home)
        home.written = {r[0] for task in tasks for r in task.writes}
        return home.workers

    def _workers(self, tasks: list[DraftTask], among: Sequence[int]) -> list[int]:
        return [self._best(tasks[0], among)] if len(tasks) == 1 else self._spread(tasks, among)

    def _spread(self, tasks: list[DraftTask], among: Sequence[int]) -> list[int]:
        count, start = self._count, self._start
        load, homes, begin = self._load, self._homeliness(), self._begin_ns(tasks)
        order = [((w - start) % count, w) for w in among]
        heap = [(begin[w], self._beside[w], homes[w], load[w], turn, w) for turn, w in order]
        heapq.heapify(heap)
        workers = []
        for task in tasks:
            in_op, beside, home, total, turn, worker = heap[0]
            more = task.cost_ns
            heapq.heapreplace(heap, (in_op + more, beside, home, total + more, turn, worker))
            workers.append(worker)
        return workers

    def _begin_ns(self, tasks: list[DraftTask]) -> list[int]:
        """By worker, what these tasks come on top of: nothing, so that they are spread evenly; or,
        if a long body reads what they write, all beside them, and more where that is at home.
        """
        readers = {self._readers.get(r[0]) for task in tasks for r in task.writes} - {None}
        homes = [home for reader in readers if reader for home in self._homes.get(reader, ())]
        if not homes:
            return [0] * self._count
        begin = list(self._beside)
        for worker in {worker for home in homes for worker in home.workers}:
            begin[worker] += _HOME_NS
        return begin

    def _homeliness(self) -> list[float]:
        """By worker, how many bodies are at home there, each by its part of all its homes.

        A homed body of the same moment would wait behind other tasks: a router did, 6 us long.
        One of few tasks is what a step waits for, so who has that is chosen last.
        """
        part = [0.0] * self._count
        for home in itertools.chain.from_iterable(self._homes.values()):
            for worker in home.workers:
                part[worker] += 1 / len(home.workers)
        return part

    def _best(self, task: DraftTask, among: Sequence[int]) -> int:
        """Where a lone task would start first; among those the one with least to do."""
        near: dict[int, int] = {}  # worker -> start, if that worker produced a group alone
        ready = 0
        for group in task.waits:
            ready = max(ready, self._ready_ns(group) + self._hop_ns)
        for group in task.waits:
            worker = self._sole_worker(group.final())
            if worker != NO_WORKER and worker not in near:
                others = [
                    self._ready_ns(g) + self._hop_ns * (self._sole_worker(g.final()) != worker)
                    for g in task.waits
                ]
                near[worker] = max(others)
        start = [max(clock, ready) for clock in self._clock]
        for worker, ready_ns in near.items():
            start[worker] = max(self._clock[worker], ready_ns)
        turns = [(worker - self._start) % self._count for worker in range(self._count)]
        return min(among, key=lambda w: (start[w], self._load[w], turns[w]))

    def _ready_ns(self, group: Group) -> int:
        group = group.final()
        if group.ready_ns < 0:
            group.ready_ns = max(self._draft.tasks[t].end_ns for t in group.tasks)
        return group.ready_ns

    def _sole_worker(self, group: Group) -> int:
        if group.worker is None:
            workers = {self._draft.tasks[t].worker for t in group.tasks}
            group.worker = workers.pop() if len(workers) == 1 else NO_WORKER
        return group.worker


def add_advance(
    draft: Draft, schedule: Schedule, advance: DraftOp, task: DraftTask, armed: Group | None
) -> None:
    """Append the step's last task. It waits for one group: all tasks that nothing else waits for
    and that no list continues after; and for what all ranks have `armed`.
    """
    other_waits = () if armed is None else (armed,)
    followed = bytearray(len(draft.tasks))
    groups = {id(g.final()): g.final() for other in draft.tasks for g in other.waits}
    for group in groups.values():
        for index in group.tasks:
            followed[index] = 1
    for tasks in schedule.lists:
        for index in tasks[:-1]:
            followed[index] = 1
    for index in () if armed is None else armed.tasks:
        followed[index] = 1
    sinks = [index for index, seen in enumerate(followed) if not seen]
    task.waits = (Group(advance, tuple(sinks), 0), *other_waits)
    draft.append(advance, [task])
    schedule.place(advance)
    if task.worker == NO_WORKER:
        return
    # What stands last in advance's own list precedes it without a signal.
    rest = tuple(s for s in sinks if draft.tasks[s].worker != task.worker)
    for index in sinks:
        if draft.tasks[index].worker == task.worker:
            key = (draft.tasks[index].op.index, advance.index)
            schedule.order_edges[key] = schedule.order_edges.get(key, 0) + 1
    task.waits = ((Group(advance, rest, 0),) if rest else ()) + other_waits
