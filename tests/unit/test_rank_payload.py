"""Collectives whose data is its own flag: which are, who re-arms, what the checker catches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurt.body import Target
from gpurt.errors import PlanError
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_gather, all_reduce
from gpurt.graphs.ops.matvec import matvec
from gpurt.plan import TASK_PAYLOAD_IN, TASK_PAYLOAD_OUT, TASK_REARM, Plan
from gpurt.planner import forms, payload, plan
from gpurt.planner.check_ranks import check_group

CUDA = Target("cuda", 7, 16, "sm_90a", 232448, 60 << 20)


def chain(rank=0, count=4, width=256, rows=3):
    """A sum of all ranks, a matvec of it, a gather of that, and a matvec of what was gathered."""
    graph = Graph("chain", rows=rows, rank=rank, rank_count=count)
    x = graph.input("x", [rows, width], "f32")

    def product(name, of, n):
        w = graph.weight(f"{name}.w", [n, of.shape[-1]], "bf16", lambda: None)
        y = graph.row_activation(name, n, "f32")
        matvec(graph, of, w, y, name=name)
        return y

    total = all_reduce(graph, product("part", x, width), count)
    product("out", all_gather(graph, product("column", total, width), count), 32)
    return graph


def polled(made: Plan):
    return [b.name for b in made.buffers if b.memory == "symmetric_payload"]


def edited(made: Plan, index: int, **changes: object) -> Plan:
    tasks = list(made.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return replace(made, tasks=tuple(tasks))


def test_small_collectives_on_a_gpu_wait_for_data_alone():
    made = plan(chain(), CUDA, edges="auto")
    assert polled(made) == ["part.slots", "column.all"]
    crossing = [i for i, counter in enumerate(made.counters) if counter.ranks]
    assert len(crossing) == 1  # that the next step's set is armed
    waiting = [t for t in made.tasks if any(c in crossing for c, _ in t.waits)]
    assert waiting == [made.tasks[-1]]
    for task in made.tasks:
        if task.body == "collect":
            assert task.flags & TASK_PAYLOAD_IN
            assert not task.waits
    assert {e.what for e in made.edges if e.kind == "payload"} >= {"part.slots", "column.all"}
    assert "symmetric_payload" in str(made)


def test_two_shots_wait_for_data_alone(monkeypatch):
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", -1)
    made = plan(chain(count=8), CUDA, edges="auto")
    assert polled(made) == ["part.shares", "part.sums", "column.all"]


def test_the_rearm_stands_early_and_is_one_signal_a_rank():
    made = plan(chain(), CUDA, edges="auto")
    rearms = [i for i, t in enumerate(made.tasks) if t.flags & TASK_REARM]
    ranked = [i for i in rearms if made.operators[made.tasks[i].op].name == "rearm_ranks"]
    armed = next(i for i, t in enumerate(made.tasks) if made.operators[t.op].name == "armed")
    first_collect = next(i for i, t in enumerate(made.tasks) if t.body == "collect")
    assert max(ranked) < armed < first_collect
    (counter,) = (c for c in made.counters if c.ranks)
    assert counter.producers == (armed,)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"edges": "counter"}, "not asked for"),
        ({"edges": "auto", "policy": "ready"}, "ready"),
        ({"edges": "payload", "target": Target("host", 2)}, "host"),
    ],
)
def test_otherwise_a_flag_tells(options, why):
    target = options.pop("target", CUDA)
    assert polled(plan(chain(), target, **options)) == [], why


def test_what_a_rearm_would_take_long_for_waits_for_a_flag(monkeypatch):
    monkeypatch.setattr(payload, "AUTO_SYMMETRIC_BYTES", 10 << 10)
    assert polled(plan(chain(), CUDA, edges="auto")) == []
    assert polled(plan(chain(rows=2), CUDA, edges="auto")) == ["part.slots", "column.all"]
    assert polled(plan(chain(), CUDA, edges="payload")) == ["part.slots", "column.all"]


def test_an_unordered_rearm_is_caught():
    made = plan(chain(), CUDA, edges="auto")
    waits = tuple(w for w in made.tasks[-1].waits if not made.counters[w[0]].ranks)
    unordered = edited(made, len(made.tasks) - 1, waits=waits)
    with pytest.raises(PlanError, match=r"fills symmetric memory in no order|no task of chain"):
        unordered.check()


def test_a_rearm_that_only_its_own_rank_waits_for_is_caught():
    made = plan(chain(rows=16), CUDA, edges="auto")
    counters = tuple(replace(c, ranks=False) for c in made.counters)
    with pytest.raises(PlanError, match=r"no task of chain waits for all of 4 ranks"):
        replace(made, counters=counters).check()
    late = [i for i, t in enumerate(made.tasks) if made.operators[t.op].name == "rearm_ranks"]
    # Ranks are told before one of them has filled its part.
    armed = next(i for i, t in enumerate(made.tasks) if made.operators[t.op].name == "armed")
    early = edited(made, armed, waits=())
    with pytest.raises(PlanError, match=rf"task ({'|'.join(map(str, late))}) \(rearm\).* order"):
        early.check()


def test_what_nobody_reads_is_caught():
    made = plan(chain(), CUDA, edges="auto")
    index = next(i for i, t in enumerate(made.tasks) if t.body == "collect")
    reads = tuple(r for r in made.tasks[index].reads if made.buffers[r[0]].name != "part.slots")
    unread = edited(made, index, reads=reads, flags=TASK_PAYLOAD_OUT)
    with pytest.raises(PlanError, match=r"matvec\) writes payload part.slots.* nobody reads"):
        unread.check()


def test_ranks_have_one_plan():
    check_group([plan(chain(rank), CUDA, edges="auto") for rank in range(4)])


def test_sums_of_sums_take_turns_on_two_sets_of_workers():
    """Whoever sums what the last collect made must be polling already when that stores it."""
    graph = Graph("sums", rows=1, rank_count=2)
    part = graph.input("x", [1, 4096], "f32")
    for _ in range(4):
        part = all_reduce(graph, part, 2)
    made = plan(graph, Target("cuda", 9, 16, "sm_90a", 232448, 60 << 20), edges="auto")
    homes: dict[int, set[int]] = {}
    for worker, lists in enumerate(made.lists):
        for task in (made.tasks[t] for part in lists for t in part):
            if task.body == "collect":
                homes.setdefault(task.op, set()).add(worker)
    first, second, third, fourth = (homes[op] for op in sorted(homes))
    assert first.isdisjoint(second)
    assert (first, second) == (third, fourth)
