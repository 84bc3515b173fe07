"""The checker: each way a plan can be wrong is rejected with a message that names the task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurt.body import Target, body
from gpurt.errors import PlanError
from gpurt.graph import Graph
from gpurt.plan import TASK_ADVANCE, TASK_REARM, PlanCounter, PlanSegment
from gpurt.planner import plan
from tests.helpers.random_graphs import CUDA, POLLING, SPREAD
from tests.unit.test_plan_random import without_wait


def chain(spread=SPREAD, layers=3, tiles=4):
    graph = Graph("chain", rows=2)
    x = graph.input("in", [2, 16], "f32")
    for layer in range(layers):
        with graph.at(f"layers[{layer}]", layer=layer):
            y = graph.activation(f"x{layer}", [2, 16], "f32")
            graph.op(spread, {"x": x, "y": y}, tiles=tiles, halo=-1)
            x = y
    return graph


def edit(made, index, **fields):
    tasks = list(made.tasks)
    tasks[index] = replace(tasks[index], **fields)
    return replace(made, tasks=tuple(tasks))


def edit_counter(made, number, **fields):
    counters = list(made.counters)
    counters[number] = replace(counters[number], **fields)
    return replace(made, counters=tuple(counters))


def rejected(made, match):
    with pytest.raises(PlanError, match=match) as caught:
        made.check()
    assert " - at " in str(caught.value)
    assert str(caught.value).count(" - ") >= 2, "what - where - what to do"


@pytest.fixture
def made():
    return plan(chain(), Target("host", 3))


@pytest.fixture
def claimed():
    return plan(chain(), Target("host", 3), policy="claim")


@pytest.fixture
def polled():
    return plan(chain(POLLING), CUDA, edges="payload")


def test_every_dropped_wait_of_a_claimed_plan_is_found(claimed):
    for index, task in enumerate(claimed.tasks):
        for counter, _ in task.waits:
            what = "does not precede advance" if index == len(claimed.tasks) - 1 else "in no order"
            rejected(without_wait(claimed, index, counter), what)


def test_dropped_wait_names_both_tasks_and_the_region(claimed):
    counter = claimed.tasks[4].waits[0][0]
    rejected(
        without_wait(claimed, 4, counter),
        r"^task 4 \(spread\) reads x0\[0:2, 0:16\] in no order with task 0 \(spread\), which "
        r"writes it: a wait is missing - at chain.layers\[1\].spread - plan again$",
    )


def test_write_after_a_read_that_may_still_run_is_found():
    graph = Graph("war")
    x, y = graph.state("x", [8], "f32"), graph.output("y", [8], "f32")
    f = body("f", lambda *_: None)
    graph.task(f, reads=[x], writes=[y])
    graph.task(f, reads=[], writes=[x[2:4]])
    made = plan(graph, Target("host", 2), policy="claim")
    (counter, _), *_ = made.tasks[1].waits
    what = r"^task 1 \(f\) writes x\[2:4\] in no order with task 0 \(f\), which reads it: a wait"
    rejected(without_wait(made, 1, counter), what)


def test_dropped_signal_is_found_by_its_counter(claimed):
    rejected(edit(claimed, 1, signals=()), r"^task 1 \(spread\) does not signal counter 0")


def test_dropped_signal_that_the_counter_forgot_too_is_found_by_order(claimed):
    counter = claimed.tasks[1].signals[0]
    kept = tuple(p for p in claimed.counters[counter].producers if p != 1)
    broken = edit_counter(
        edit(claimed, 1, signals=()), counter, producers=kept, signals_per_step=len(kept)
    )
    tasks = [
        replace(t, waits=tuple((c, len(kept) if c == counter else n) for c, n in t.waits))
        for t in broken.tasks
    ]
    rejected(replace(broken, tasks=tuple(tasks)), r"^task 4 \(spread\) reads .* with task 1 \(spr")


def test_wrong_signals_per_step_is_rejected(claimed):
    (counter, needed), *_ = claimed.tasks[4].waits
    rejected(
        edit(claimed, 4, waits=((counter, needed + 1),)),
        r"^task 4 \(spread\) waits for 5 signals a step on counter 0, 4 come",
    )
    rejected(
        edit_counter(claimed, counter, signals_per_step=needed - 1),
        r"^task 0 \(spread\) signals counter 0: 4 signals a step come, it says 3",
    )


def test_wait_for_a_counter_that_nobody_signals_is_rejected(claimed):
    counters = (*claimed.counters, PlanCounter(0, (), ()))
    broken = replace(edit(claimed, 0, waits=((len(counters) - 1, 0),)), counters=counters)
    rejected(broken, r"^task 0 \(spread\) waits for counter \d+, which no task signals")


def test_wait_for_a_later_task_is_rejected(claimed):
    # Task 0 signals what the second layer waits for; task 0 itself waits for the second layer.
    counter = claimed.tasks[8].waits[0][0]
    broken = edit(claimed, 0, waits=((counter, 4),))
    rejected(broken, r"^task 0 \(spread\) waits for task 7 \(spread\), which comes no earlier")


def test_swapped_list_order_is_rejected(made):
    rows = [list(made.lists[0][0]), *made.lists[1:]]
    rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
    lists = ((tuple(rows[0]),), *made.lists[1:])
    rejected(replace(made, lists=lists), r"^task \d+ \(spread\) stands after task \d+ in worker 0")


def test_task_in_no_list_or_in_two_is_rejected(made):
    first, second, *rest = made.lists
    lost = ((first[0][1:],), second, *rest)
    rejected(replace(made, lists=lost), r"^task 0 \(spread\) is static, but in no worker's list")
    twice = (first, (tuple(sorted((*second[0], first[0][0]))),), *rest)
    rejected(replace(made, lists=twice), r"^task 0 \(spread\) is in the lists of workers 0 and 1")


def test_task_moved_to_another_worker_loses_the_order_of_its_list():
    made = plan(chain(tiles=1), Target("host", 2))
    assert made.lists == (((0, 1, 2, 3),), ((),)), "a chain stays on one worker, without counters"
    assert not made.counters
    broken = replace(made, lists=(((0, 2, 3),), ((1,),)))
    rejected(broken, r"^task 1 \(spread\) reads x0\[0:2, 0:16\] in no order with task 0 \(spread\)")


def test_claimed_task_in_a_list_is_rejected(claimed):
    lists = (((0,),), *claimed.lists[1:])
    rejected(replace(claimed, lists=lists), r"^task 0 \(spread\) is in worker 0's list of segment")


def test_segments_that_skip_a_task_or_lie_about_its_policy_are_rejected(claimed):
    count = len(claimed.tasks)
    skipped = (PlanSegment("claim", 0, 4), PlanSegment("claim", 5, count))
    lists = tuple(((), ()) for _ in claimed.lists)
    rejected(replace(claimed, segments=skipped, lists=lists), r"^task 4 \(spread\) is where segm")
    lying = (PlanSegment("ready", 0, count),)
    rejected(replace(claimed, segments=lying), r"^task 0 \(spread\) is claim, but lies in segment")


def test_ready_task_that_its_counter_does_not_know_is_rejected():
    made = plan(chain(), Target("host", 3), policy="ready")
    broken = edit_counter(made, 0, successors=made.counters[0].successors[1:])
    rejected(broken, r"^task 4 \(spread\) waits for counter 0, whose successors are")


def test_buffer_smaller_than_its_shape_is_rejected(made):
    index = made.buffer_index("x1")
    buffers = list(made.buffers)
    buffers[index] = replace(buffers[index], size_bytes=64)
    rejected(
        replace(made, buffers=tuple(buffers)),
        r"^task 4 \(spread\) uses buffer x1 of 64 bytes, its shape needs 128",
    )


def test_buffers_that_overlap_in_their_arena_are_rejected(made):
    index = made.buffer_index("x1")
    buffers = list(made.buffers)
    buffers[index] = replace(buffers[index], offset_bytes=0)
    rejected(
        replace(made, buffers=tuple(buffers)),
        r"^task \d \(spread\) uses x1 at byte 0 of the activation arena, x0 ends at 128",
    )


def test_addresses_and_regions_outside_their_buffer_are_rejected(made):
    rejected(edit(made, 0, addr=((0, 128), None, (1, 0))), r"^task 0 \(spread\) starts at byte 128")
    rejected(edit(made, 0, addr=((99, 0), None, (1, 0))), r"^task 0 \(spread\) uses buffer 99, th")
    rejected(
        edit(made, 0, writes=((1, ((0, 2), (0, 17))),)),
        r"^task 0 \(spread\) writes x0\[0:2, 0:17\], no part of shape \[2, 16\]",
    )
    rejected(
        edit(made, 0, reads=((2, ((0, 2), (0, 8))),)),
        r"^task 0 \(spread\) reads buffer 2, which is not among its arguments",
    )


def test_record_that_holds_too_much_is_rejected(made):
    waits = tuple((c, 1) for c in range(5))
    rejected(edit(made, 5, waits=waits), r"^task 5 \(spread\) has 5 waits, a record holds 4")
    rejected(edit(made, 5, signals=tuple(range(5))), r"^task 5 \(spread\) has 5 signals, a record")
    rejected(edit(made, 5, params=(0,) * 21), r"^task 5 \(spread\) has 21 parameters, a record")


def test_read_of_what_nobody_writes_is_rejected(made):
    broken = edit(made, 3, writes=())
    rejected(
        broken,
        r"^task 4 \(spread\) reads x0\[0:2, 0:16\], but no task before it writes "
        r"x0\[0:2, 12:16\] - at chain.layers\[1\].spread - write the whole region or read less",
    )


def test_overlapping_writers_without_order_are_rejected(claimed):
    broken = edit(claimed, 1, writes=((1, ((0, 2), (0, 8))),))
    rejected(broken, r"^task 1 \(spread\) writes x0\[0:2, 0:8\] in no order with task 0 \(spread\)")


def test_task_that_does_not_precede_advance_is_rejected(claimed):
    last = len(claimed.tasks) - 1
    (counter, needed), *_ = claimed.tasks[last].waits
    broken = edit(claimed, last - 1, signals=())
    broken = edit(broken, last, waits=((counter, needed - 1),))
    kept = tuple(p for p in claimed.counters[counter].producers if p != last - 1)
    broken = edit_counter(broken, counter, producers=kept, signals_per_step=needed - 1)
    rejected(broken, rf"^task {last - 1} \(spread\) does not precede advance")


def test_advance_must_be_the_last_task_and_only_one(claimed):
    rejected(edit(claimed, len(claimed.tasks) - 1, flags=0), r"is the last, but advance is \[\]")
    rejected(edit(claimed, 2, flags=TASK_ADVANCE), r"is the last, but advance is \[2, \d+\]")


# ---- payload ---------------------------------------------------------------------------------
def test_removed_rearm_is_rejected(polled):
    index = next(i for i, t in enumerate(polled.tasks) if t.flags & TASK_REARM)
    task = polled.tasks[index]
    broken = edit(polled, index, params=(0, 0))
    rejected(broken, r"^task \d+ \(polling\) reads payload x\d, but no task re-arms bytes \d+:\d+")
    assert task.body == "rearm"


def test_rearm_without_its_edge_to_advance_is_rejected():
    made = plan(chain(POLLING, layers=40), CUDA, edges="payload", policy="claim")
    index = next(i for i, t in enumerate(made.tasks) if t.flags & TASK_REARM)
    last = len(made.tasks) - 1
    counter = made.tasks[index].signals[0]
    kept = tuple(p for p in made.counters[counter].producers if p != index)
    broken = edit_counter(
        edit(made, index, signals=()), counter, producers=kept, signals_per_step=len(kept)
    )
    broken = edit(broken, last, waits=((counter, len(kept)),))
    rejected(broken, rf"^task {index} \(rearm\) does not precede advance: its fill could erase")


def test_payload_reader_that_does_not_poll_is_rejected(polled):
    index = next(i for i, t in enumerate(polled.tasks) if t.op == 1)
    rejected(edit(polled, index, flags=4), rf"^task {index} \(polling\) reads payload")
    rejected(
        edit(polled, index, payload_mask=0), rf"^task {index} \(polling\) has payload mask 0x0"
    )


def test_payload_on_a_host_is_rejected(polled):
    target = replace(polled.target, kind="host")
    rejected(replace(polled, target=target), r"^task 7 \(polling\) reads payload x0, host has none")


def test_payload_set_smaller_than_its_buffers_is_rejected(polled):
    rejected(replace(polled, payload_set_bytes=256), r"uses buffer x1 up to byte 384 of a payload")


def test_second_writer_of_a_payload_buffer_in_a_step_is_rejected(polled):
    index = max(i for i, t in enumerate(polled.tasks) if t.op == 0)
    task = polled.tasks[index]
    other = polled.tasks[index - 1]
    rejected(edit(polled, index, writes=other.writes), r"^task 3 \(polling\) writes payload x0")
    assert task.writes != other.writes


def test_payload_poll_under_ready_is_rejected():
    made = plan(chain(POLLING), CUDA, edges="payload", policy="claim")
    operators = tuple(replace(o, policy="ready") for o in made.operators)
    segments = tuple(replace(s, policy="ready") for s in made.segments)
    waiting = [[] for _ in made.counters]
    for index, task in enumerate(made.tasks):
        for counter, _ in task.waits:
            waiting[counter].append(index)
    counters = tuple(
        replace(c, successors=tuple(w)) for c, w in zip(made.counters, waiting, strict=True)
    )
    broken = replace(made, operators=operators, segments=segments, counters=counters)
    rejected(broken, r"^task 4 \(polling\) polls payload under ready")
