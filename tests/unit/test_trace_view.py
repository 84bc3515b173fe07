"""The terminal view and the Perfetto file."""

from __future__ import annotations

import io
import itertools
import json

import numpy as np
import pytest
from rich.console import Console

from gpurt.errors import TraceError
from gpurt.trace import SPAN, OperatorInfo, RequestInfo
from gpurt.trace.perfetto import to_perfetto, write_perfetto
from gpurt.trace.view import show, summary
from tests.helpers.hand_trace import hand_trace


def rendered(trace, width=120):
    out = io.StringIO()
    show(trace, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_terminal_shows_lanes_split_waits_and_path():
    text = rendered(hand_trace(3))
    assert "12 spans of 3 whole steps" in text
    assert "decode steps: 3, median 1.0 us" in text
    lanes = [line for line in text.splitlines() if line.startswith("worker 0  50% ")]
    body = lanes[0][14:]
    assert 45 <= body.count(".") <= 55  # it waits for half of the step
    assert 8 <= body.count("A") <= 12
    assert "3 advance" in text
    assert "2 layers[0].up" in text
    assert "critical path of step" in text


@pytest.mark.parametrize("width", [40, 80, 300])
def test_terminal_fits_any_width(width):
    assert max(len(line) for line in rendered(hand_trace(2), width).splitlines()) <= width


def test_terminal_says_what_the_steps_moved_took_and_chose():
    text = rendered(
        hand_trace(
            3,
            task_dynamic=np.array([False, True, False, False]),
            requests=(RequestInfo(0, 0, 2, 5, 4, 3, (2, 1)),),
            ceiling_gbps=21.4,
        )
    )
    assert "10.7 GB/s: 50% of the 21.4 GB/s measured here" in text
    assert "2.00 tokens a step in 3 steps; proposals taken by position: 67% 33%" in text
    assert "tasks that steps have only for chosen experts" in text
    assert "slowest decode steps" in text
    assert "gpurt doctor --bandwidth measures" in rendered(hand_trace(2))


def test_terminal_shows_the_step_that_was_asked_for():
    out = io.StringIO()
    show(hand_trace(3), Console(file=out, width=100), step=1)
    assert "\nstep 1, 1.0 us" in out.getvalue()
    with pytest.raises(TraceError, match=r"^step 7 was not kept .* the last that were: 0, 1, 2$"):
        show(hand_trace(3), Console(file=out), step=7)


@pytest.mark.parametrize(("wait_ns", "lane"), [(110, "..BBBB"), (130, "..bBBB"), (149, "...BBB")])
def test_a_column_of_more_wait_than_run_has_a_small_letter(wait_ns, lane):
    trace = hand_trace()
    row = trace.spans["task"] == 2
    trace.spans["wait_ns"][row], trace.spans["run_ns"][row] = wait_ns, 880 - wait_ns
    lanes = [x for x in rendered(trace, 34).splitlines() if x.startswith("worker 1")]
    assert lanes[0].split("% ")[1].startswith(lane)  # 50 ns a column


def test_lanes_of_several_ranks_are_named_by_both():
    text = rendered(hand_trace(2, ranks=2))
    assert "rank 0 worker 0  50%" in text
    assert "rank 1 worker 0" in text
    records = to_perfetto(hand_trace(2, ranks=2))["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    assert {(r["pid"], r["tid"]) for r in slices} == {(1, 10), (2, 11)}
    many = to_perfetto(hand_trace(2, ranks=16, workers=16))["traceEvents"]
    pids = {r["pid"] for r in many}
    assert not pids & {r["tid"] for r in many if "tid" in r}


def test_dropped_spans_are_shown():
    assert ", 7 dropped" in rendered(hand_trace(2, dropped=7))


def test_summary_is_plain_json():
    figures = json.loads(json.dumps(summary(hand_trace(3))))
    assert figures["utilisation"] == [0.5, 0.47]
    assert sum(figures["split"].values()) == pytest.approx(1)
    assert [t["task"] for t in figures["critical_path"]["tasks"]] == [0, 2, 3]
    assert figures["longest_waits"][0]["late_task"] == 2


def test_perfetto_lanes_have_ids_that_viewers_keep_apart():
    records = to_perfetto(hand_trace(2))["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    assert {r["tid"] for r in slices} == {10, 11}
    assert all(r["pid"] != r["tid"] and r["tid"] >= 10 for r in slices)
    names = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names == {10: "worker 0", 11: "worker 1"}
    run = next(r for r in slices if r["args"].get("bytes") == 7700)
    assert (run["ts"], run["dur"], run["name"]) == (0.11, 0.77, "layers[0].up")


def test_perfetto_flows_lead_from_the_late_task_into_the_waiting_one():
    records = to_perfetto(hand_trace())["traceEvents"]
    starts = {r["id"]: r for r in records if r["ph"] == "s"}
    ends = {r["id"]: r for r in records if r["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2
    arrow = starts[0], ends[0]
    assert (arrow[0]["tid"], arrow[1]["tid"]) == (11, 10)
    assert arrow[0]["ts"] <= arrow[1]["ts"] == 0.9


def test_perfetto_slices_of_a_lane_do_not_overlap():
    records = to_perfetto(hand_trace(3))["traceEvents"]
    for tid in (10, 11):
        lane = sorted((r["ts"], r["dur"]) for r in records if r["ph"] == "X" and r["tid"] == tid)
        for (a, length), (b, _) in itertools.pairwise(lane):
            assert a + length <= b + 1e-9


def test_perfetto_counters_come_once_a_step():
    records = to_perfetto(hand_trace(3))["traceEvents"]
    assert [r["args"]["us"] for r in records if r["name"] == "step us"] == [1.0, 1.0, 1.0]


def test_unwritable_perfetto_path_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"^cannot write the Perfetto file"):
        write_perfetto(hand_trace(), tmp_path / "no" / "a.json")


def test_no_two_operators_of_the_timeline_share_a_letter():
    names = [f"op{i}" for i in range(40)]
    count = len(names)
    rows = [(100 * i, 0, 10 + i, 0, 0, i, i, 0, 0, 0, 0) for i in range(count)]
    none = np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    trace = hand_trace(
        workers=1,
        operators=tuple(OperatorInfo(n, "b", f"hand.{n}", 0) for n in names),
        task_op=np.arange(count),
        task_bytes=np.zeros(count, np.int64),
        waits=none,
        producers=(np.zeros(1, np.int64), np.zeros(0, np.int64)),
        spans=np.array(rows, SPAN),
    )
    lines = rendered(trace, width=200).splitlines()
    legend = " ".join(lines[lines.index(next(x for x in lines if x.startswith("A op"))) :][:4])
    assert "A op14  B op15  C op16" in legend  # the longest 26, in the order of the graph
    assert "Z op39  * 14 others" in legend
    lane = next(x for x in lines if x.startswith("worker 0 "))
    assert {"*", "A", "Z"} <= set(lane)


def test_lanes_of_ranks_fit_the_terminal():
    lines = rendered(hand_trace(2, ranks=2), width=60).splitlines()
    lanes = [x for x in lines if x.startswith("rank ")]
    assert len(lanes) == 2
    assert all(len(x.split("%", 1)[1]) > 30 for x in lanes)
    assert max(map(len, lines)) <= 60
