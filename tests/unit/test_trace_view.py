"""The terminal view and the Perfetto file."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from rich.console import Console

from gpurt.errors import TraceError
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
    assert "worker   0  50%" in text
    lanes = [line for line in text.splitlines() if line.startswith("worker   0")]
    body = lanes[0][15:]
    assert 45 <= body.count(".") <= 55  # it waits for half of the step
    assert 8 <= body.count("A") <= 12
    assert "3 advance" in text
    assert "2 layers[0].up" in text
    assert "critical path of step" in text


@pytest.mark.parametrize("width", [40, 80, 300])
def test_terminal_fits_any_width(width):
    assert max(len(line) for line in rendered(hand_trace(2), width).splitlines()) <= width


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
