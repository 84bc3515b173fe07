"""The trace file, and how raw rings become a Trace."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from rich.console import Console

from gpurt import wire
from gpurt.errors import TraceError
from gpurt.executors.base import RawTrace
from gpurt.graph import Graph
from gpurt.plan import PlanBuffer, PlanDynamic, PlanSegment
from gpurt.trace import RequestInfo, Trace
from gpurt.trace.file import HEADER, MAGIC, VERSION
from gpurt.trace.trace import row
from gpurt.trace.view import show
from tests.helpers.fake_executor import toy_plan
from tests.helpers.hand_trace import hand_trace


def raw_of(rows, tick_ns=1.0, sampled=(), dropped=0):
    def rings(spans):
        return [np.array([s for s in spans if s[-1] == w], wire.SPAN) for w in (0, 1)]

    steps = sorted({r[2] for r in rows})
    summaries = np.array([(s, 10 + s, 20 + s, 1, 2, 0) for s in steps], wire.STEP_SUMMARY)
    return RawTrace(rings(rows), rings(sampled), summaries, tick_ns, dropped)


def test_file_gives_back_the_same_trace(tmp_path):
    trace = hand_trace(3)
    path = tmp_path / "a.trace"
    trace.save(path)
    again = Trace.load(path)
    assert (again.name, again.workers, again.operators) == ("hand", 2, trace.operators)
    assert again.spans.tolist() == trace.spans.tolist()
    assert again.steps.tolist() == trace.steps.tolist()
    assert again.producers_of(3).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: d[:-10], r"^the trace has \d+ bytes of \d+"),
        (lambda d: d[:12], "^not a trace file: 12 bytes"),
        (lambda d: b"PK" + d[2:], "^not a trace file"),
        (lambda d: d[:40] + bytes([d[40] ^ 1]) + d[41:], "^the trace's checksum is wrong"),
        (lambda d: d[:8] + struct.pack("<I", 99) + d[12:], "^trace file of version 99, this gpurt"),
        (lambda d: d[:8] + struct.pack("<I", 0) + d[12:], "^trace file of version 0, this gpurt"),
        (lambda _: b"", "^not a trace file: 0 bytes"),
    ],
)
def test_damaged_file_is_refused_with_its_reason(tmp_path, damage, text):
    path = tmp_path / "a.trace"
    hand_trace().save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=text):
        Trace.load(path)


def resaved(path, change):
    """Rewrite a trace's fields; its checksum is right again."""
    fields = msgpack.unpackb(path.read_bytes()[HEADER.size :])
    change(fields)
    body = msgpack.packb(fields)
    path.write_bytes(HEADER.pack(MAGIC, VERSION, zlib.crc32(body), len(body)) + body)


@pytest.mark.parametrize(("field", "value"), [("task", 9), ("worker", 2), ("run_ns", -1)])
def test_span_that_cannot_be_is_refused(tmp_path, field, value):
    trace = hand_trace()
    trace.spans[field][0] = value
    trace.save(tmp_path / "a.trace")
    with pytest.raises(TraceError, match=r"^the trace's fields do not fit"):
        Trace.load(tmp_path / "a.trace")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("workers", "two", "invalid literal"),
        ("ranks", 3, "2 workers of 3 ranks"),
        ("task_op", bytes(8), "of 1 tasks"),
        ("task_bytes", bytes(7), "multiple of element size"),
        ("waits", [np.array([0, 1, 0, 2, 3]).tobytes(), bytes(24)], "waits whose offsets fall"),
        ("waits", [np.array([0, 0, 1, 2, 3]).tobytes(), bytes(8)], "waits of 4 rows"),
        ("producers", [np.array([0, 1, 3]).tobytes(), np.array([0, 1, 7]).tobytes()], "of 4"),
        ("payload_edges", [[0, 8]], "a payload edge outside of 3"),
        ("operators", [["a"]], "missing"),
        ("spans", bytes(13), "multiple"),
        ("requests", [[1, 2]], "missing"),
        ("task_dynamic", [99], "out of bounds"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(tmp_path, field, value, text):
    path = tmp_path / "a.trace"
    hand_trace(2).save(path)
    resaved(path, lambda fields: fields.update({field: value}))
    with pytest.raises(TraceError, match=rf"^the trace's fields do not fit version 1 .*({text})"):
        Trace.load(path)


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_makes_more_than_one_line(tmp_path, seed):
    """Bytes of the body changed at random, the checksum right again: refused, or shown."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "a.trace"
    hand_trace(2).save(path)
    body = path.read_bytes()[HEADER.size :]
    for _ in range(60):
        changed = bytearray(body)
        for place in rng.integers(0, len(body), 3):
            changed[place] = rng.integers(0, 256)
        data = bytes(changed)
        path.write_bytes(HEADER.pack(MAGIC, VERSION, zlib.crc32(data), len(data)) + data)
        with contextlib.suppress(TraceError):
            show(Trace.load(path), Console(file=io.StringIO(), width=100))


def test_large_file_that_is_no_trace_is_not_read(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(TraceError, match=r"^not a trace file: 4398046511104 bytes"):
        Trace.load(path)
    with path.open("r+b") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 0, 100))
    with pytest.raises(TraceError, match=r"^the trace has 43980465\d+ bytes of 100"):
        Trace.load(path)


def test_missing_and_unwritable_paths_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"^cannot read the trace: No such file"):
        Trace.load(tmp_path / "none.trace")
    with pytest.raises(TraceError, match=r"^cannot write the trace: No such file"):
        hand_trace().save(tmp_path / "no" / "a.trace")


def test_both_rings_are_merged_once_and_ticks_become_nanoseconds():
    plan = toy_plan(Graph("toy", vocab=5))
    rows = [(100, 0, 4, 0, 0, 8, 0), (110, 1, 4, 2, 1, 8, 1), (120, 2, 4, 3, 0, 8, 0)]
    trace = Trace.from_raw(plan, raw_of(rows, 2.5, sampled=rows[:2]), first_step=4)
    assert trace.spans["task"].tolist() == [0, 1, 2]
    assert trace.spans["begin_ns"].tolist() == [0, 25, 50]
    assert trace.spans["wait_ns"].tolist() == [0, 5, 8]
    assert trace.spans["run_ns"].tolist() == [20, 20, 20]
    assert trace.whole_steps.tolist() == [4]


def test_steps_beyond_32_bits_keep_their_number():
    plan = toy_plan(Graph("toy", vocab=5))
    first = (1 << 32) - 1
    rows = [(s * 10, 0, (first + s) & 0xFFFFFFFF, 0, 0, 5, 0) for s in range(3)]
    trace = Trace.from_raw(plan, raw_of(rows), first_step=first)
    assert trace.spans["step"].tolist() == [first, first + 1, first + 2]


def test_only_the_steps_of_the_request_are_taken():
    plan = toy_plan(Graph("toy", vocab=5))
    rows = [(s * 10, 0, s, 0, 0, 5, 0) for s in range(10)]
    trace = Trace.from_raw(plan, raw_of(rows), first_step=3, last_step=6)
    assert trace.spans["step"].tolist() == [3, 4, 5, 6]
    assert trace.steps["step"].tolist() == [3, 4, 5, 6]


def test_no_spans_is_an_error_that_says_how_to_get_some():
    with pytest.raises(TraceError, match=r"^no spans were kept - at plan toy - open the Runtime"):
        Trace.from_raw(toy_plan(Graph("toy", vocab=5)), raw_of([]))


def test_file_keeps_regions_requests_and_dynamic_tasks(tmp_path):
    trace = hand_trace(
        regions=("x[0:4] f32", "y[0:2] f32"),
        task_reads=(np.array([0, 0, 1, 1, 1]), np.array([0])),
        task_writes=(np.array([0, 1, 1, 1, 1]), np.array([1])),
        requests=(RequestInfo(7, 0, 3, 5, 4, 2, (1, 0)),),
        ranks=2,
        ceiling_gbps=19.5,
        task_dynamic=np.array([False, True, False, False]),
    )
    trace.save(tmp_path / "a.trace")
    again = Trace.load(tmp_path / "a.trace")
    assert (again.regions, again.requests) == (trace.regions, trace.requests)
    assert (again.ranks, again.ceiling_gbps) == (2, 19.5)
    assert again.task_reads[0].tolist() == [0, 0, 1, 1, 1]
    assert again.task_writes[1].tolist() == [1]
    assert again.task_dynamic.tolist() == [False, True, False, False]


def test_file_of_an_older_gpurt_is_read_without_what_came_later(tmp_path):
    path = tmp_path / "a.trace"
    hand_trace(2).save(path)
    fields = msgpack.unpackb(path.read_bytes()[HEADER.size :])
    for late in (
        "regions",
        "task_reads",
        "task_writes",
        "task_dynamic",
        "requests",
        "ranks",
        "ceiling_gbps",
    ):
        del fields[late]
    body = msgpack.packb(fields)
    path.write_bytes(HEADER.pack(MAGIC, VERSION, zlib.crc32(body), len(body)) + body)
    again = Trace.load(path)
    assert (again.regions, again.requests) == ((), ())
    assert (again.ranks, again.ceiling_gbps) == (1, 0.0)
    assert not again.task_dynamic.any()
    assert again.whole_steps.tolist() == [0, 1]


def test_regions_of_the_plan_are_named_once_and_dynamic_segments_marked():
    plan = toy_plan(Graph("toy", vocab=5))
    buffer = PlanBuffer("x", (4, 8), "f32", "activation", "", 128, "activation", 0)
    whole, part = (0, ((0, 4), (0, 8))), (0, ((0, 4), (2, 4)))
    tasks = [replace(plan.tasks[0], writes=(whole,)), replace(plan.tasks[1], reads=(whole, part))]
    dynamic = PlanDynamic(0, 0, (0, 0), 1, ())
    segments = (PlanSegment("static", 0, 1), PlanSegment("claim", 1, 2, dynamic))
    changed = replace(plan, buffers=(buffer,), tasks=(*tasks, plan.tasks[2]), segments=segments)
    trace = Trace.from_raw(changed, raw_of([(0, 0, 0, 0, 0, 5, 0)]))
    assert trace.regions == ("x[0:4, 0:8] f32", "x[0:4, 2:4] f32")
    assert [row(trace.task_reads, t).tolist() for t in range(3)] == [[], [0, 1], []]
    assert row(trace.task_writes, 0).tolist() == [0]
    assert trace.task_dynamic.tolist() == [False, True, False]
