"""The HTML page as a file: what it holds, before any browser reads it."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest

from gpurt.errors import TraceError
from gpurt.trace import OperatorInfo
from gpurt.trace.page import MODULES, STYLES, pack, script, source_of, to_html, write_html
from tests.helpers.hand_trace import hand_trace
from tests.helpers.made_trace import made_trace

FILE_LINES_MAX = 500
LINE_LENGTH_MAX = 100
TOP_LEVEL_NAME = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def unpacked(data):
    """(header, {column name: integers}) of a page's data."""
    body = zlib.decompress(data)
    size = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + size])
    columns = {}
    for name, about in header["columns"].items():
        at, length, planes = 4 + size + about["offset"], about["length"], about["planes"]
        table = np.frombuffer(body, np.uint8, length * planes, at).reshape(planes, length)
        columns[name] = np.zeros(length, np.int64)
        for plane in range(planes):
            columns[name] += table[plane].astype(np.int64) << (8 * plane)
    return header, columns


def test_columns_give_back_every_span_lane_by_lane():
    trace = made_trace(workers=5, layers=2, steps=3)
    _, columns = unpacked(pack(trace))
    spans = trace.spans[np.lexsort((trace.spans["begin_ns"], trace.spans["worker"]))]
    for name in ("wait", "run", "stall"):
        assert columns[name].tolist() == spans[f"{name}_ns"].tolist()
    assert columns["task"].tolist() == spans["task"].tolist()
    lanes = columns["lane_offsets"]
    assert lanes.tolist() == [0, *np.cumsum(np.bincount(spans["worker"])).tolist()]
    begins = [np.cumsum(columns["begin"][a:b]) for a, b in itertools.pairwise(lanes)]
    assert np.concatenate(begins).tolist() == spans["begin_ns"].tolist()
    assert columns["kept_steps"][columns["step_index"]].tolist() == spans["step"].tolist()


def test_times_beyond_32_bits_are_kept():
    trace = hand_trace()
    trace.spans["begin_ns"] += 1 << 40
    trace.spans["wait_ns"][-1] = 1 << 33
    _, columns = unpacked(pack(replace(trace, steps=trace.steps[:0])))
    assert int(columns["begin"].max()) == (1 << 40)
    assert int(columns["wait"].max()) == 1 << 33


def test_a_worker_without_spans_keeps_its_lane():
    header, columns = unpacked(pack(hand_trace(workers=4)))
    assert header["lanes"] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert columns["lane_offsets"].tolist() == [0, 3, 4, 4, 4]


def test_lanes_of_several_ranks_follow_each_other():
    header, _ = unpacked(pack(hand_trace(workers=4, ranks=2)))
    assert header["lanes"] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_steps_of_another_clock_are_left_out():
    far = hand_trace(2)
    far.steps["begin_ns"] += 10**9
    far.steps["end_ns"] += 10**9
    assert unpacked(pack(far))[1]["steps"].tolist() == []
    assert unpacked(pack(hand_trace(2)))[1]["steps"].tolist() == [0, 1]


def test_a_negative_time_is_refused():
    trace = hand_trace()
    trace.spans["run_ns"][0] = -1
    with pytest.raises(TraceError, match=r"^a figure is negative: -1 - at the trace's spans"):
        pack(trace)


def test_page_is_one_file_that_asks_the_network_for_nothing():
    page = to_html(hand_trace(3))
    assert "default-src 'none'" in page
    without_data = page.replace(base64.b64encode(pack(hand_trace(3))).decode(), "")
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", without_data)
    assert not re.findall(r"^\s*(?:import|export)\b", script(), re.MULTILINE)


def test_names_cannot_leave_their_place_in_the_page():
    evil = '</script><script>alert(1)</script>{{data}}"'
    operators = [OperatorInfo(evil, evil, f"{evil}.x", 0) for _ in range(3)]
    page = to_html(hand_trace(name=evil, operators=tuple(operators)))
    assert "alert(1)" not in page.replace(html.escape(evil), "")
    assert page.count("<script") == 2


def test_joined_modules_share_no_name():
    names = TOP_LEVEL_NAME.findall(script())
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_every_module_is_joined_and_short_and_says_what_it_owns():
    from importlib import resources

    files = {p.name for p in (resources.files("gpurt.trace") / "html").iterdir()}
    assert files == {f"{m}.js" for m in MODULES} | {f"{s}.css" for s in STYLES} | {"page.html"}
    for name in files:
        lines = source_of(name).splitlines()
        assert len(lines) <= FILE_LINES_MAX, name
        assert [i for i, x in enumerate(lines, 1) if len(x) > LINE_LENGTH_MAX] == [], name
        if name.endswith(".js"):
            assert lines[0].startswith("// "), name
        assert not re.search(r"innerHTML|outerHTML|document\.write|\beval\(", source_of(name)), name


def test_a_module_uses_only_modules_that_are_joined_before_it():
    for place, name in enumerate(MODULES):
        used = set(re.findall(r'from "\./(\w+)\.js"', source_of(f"{name}.js")))
        assert used <= set(MODULES[:place]), name


def test_a_million_spans_make_a_page_of_a_few_megabytes():
    trace = made_trace(steps=8)
    assert len(pack(trace)) / len(trace.spans) < 8  # bytes a span


def test_unwritable_path_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"^cannot write the page: No such file"):
        write_html(hand_trace(), tmp_path / "no" / "a.html")
