"""The trace file: what it gives back, what it refuses, and what of a part of it can be read."""

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

from gpurt.errors import TraceError, TraceWarning
from gpurt.trace import RequestInfo, StepSpans, Trace
from gpurt.trace.file import BLOCK, BLOCK_BYTES, CRC, HEADER, MAGIC
from gpurt.trace.view import show
from tests.helpers.hand_trace import hand_trace


def blocks_of(data):
    """[(kind, step, body)] of a whole file, read without gpurt's own reader."""
    found, at = [], HEADER.size
    while at < len(data):
        kind, _, step, size = BLOCK.unpack_from(data, at)
        found.append((kind, step, data[at + BLOCK_BYTES : at + BLOCK_BYTES + size]))
        at += BLOCK_BYTES + size
    return found


def file_of(blocks):
    """The file with all checksums right."""
    parts = [data_header()]
    for kind, step, body in blocks:
        head = BLOCK.pack(kind, zlib.crc32(body), step, len(body))
        parts += [head, CRC.pack(zlib.crc32(head)), body]
    return b"".join(parts)


def data_header(version=2):
    return struct.pack("<8sI", MAGIC, version)


@pytest.fixture
def path(tmp_path):
    """A file of three steps; of the last one a span is missing."""
    trace = hand_trace(3)
    spans = trace.spans[:-1]
    assert (trace.spans[-1]["step"], spans[-1]["step"]) == (2, 2)
    hand_trace(3, spans=spans).save(tmp_path / "a.trace")
    return tmp_path / "a.trace"


def test_file_gives_back_the_same_trace(tmp_path):
    trace = hand_trace(
        3,
        regions=("x[0:4] f32", "y[0:2] f32"),
        task_reads=(np.array([0, 0, 1, 1, 1]), np.array([0])),
        task_writes=(np.array([0, 1, 1, 1, 1]), np.array([1])),
        requests=(RequestInfo(7, 0, 3, 5, 4, 2, (1, 0)),),
        ranks=2,
        ceiling_gbps=19.5,
        task_dynamic=np.array([False, True, False, False]),
        dropped=9,
    )
    trace.save(tmp_path / "a.trace")
    again = Trace.load(tmp_path / "a.trace")
    for name in ("name", "device", "workers", "operators", "regions", "requests", "ranks"):
        assert getattr(again, name) == getattr(trace, name)
    assert (again.ceiling_gbps, again.dropped, len(again.kept)) == (19.5, 9, 12)
    assert again.spans.tolist() == trace.spans.tolist()
    assert again.steps.tolist() == trace.steps.tolist()
    assert again.producers_of(3).tolist() == [1, 2]
    assert again.task_reads[0].tolist() == [0, 0, 1, 1, 1]
    assert again.task_writes[1].tolist() == [1]
    assert again.task_dynamic.tolist() == [False, True, False, False]


def test_file_is_a_header_and_a_block_a_step(path):
    data = path.read_bytes()
    assert data.startswith(data_header())
    kinds = [(kind, step) for kind, step, _ in blocks_of(data)]
    steps = [(b"STEP", 0), (b"STEP", 1), (b"PART", 2)]
    assert kinds == [(b"HEAD", 0), (b"SUMS", 0), *steps, (b"DONE", 0)]


# ---- read when asked for ---------------------------------------------------------------------
def test_spans_are_read_by_step_when_they_are_asked_for(path):
    blocks = blocks_of(path.read_bytes())
    damaged = bytearray(path.read_bytes())
    at = damaged.index(blocks[3][2])  # of step 1
    damaged[at] ^= 1
    path.write_bytes(damaged)
    trace = Trace.load(path)
    assert trace.whole_steps.tolist() == [0, 1]
    assert len(trace.kept) == 11
    assert trace.critical_path(0)["task"].tolist() == hand_trace().critical_path(0)["task"].tolist()
    assert len(trace.spans_of(2)) == 3
    assert len(trace.spans_of(99)) == 0
    with pytest.raises(TraceError, match=rf"^the trace's checksum is wrong at byte {at} - at "):
        trace.spans_of(1)
    with pytest.raises(TraceError, match=r"^the trace's checksum is wrong"):
        _ = trace.spans


def test_file_that_went_away_is_said_when_a_step_is_asked_for(path):
    trace = Trace.load(path)
    assert len(trace.spans_of(0)) == 4
    path.unlink()
    assert len(trace.spans_of(0)) == 4
    with pytest.raises(TraceError, match=r"^cannot read the trace: No such file"):
        trace.spans_of(1)


def test_opened_trace_is_written_over_its_own_file(path):
    before = path.read_bytes()
    Trace.load(path).save(path)
    assert path.read_bytes() == before


# ---- a file that ends early ------------------------------------------------------------------
def test_file_that_ends_anywhere_opens_up_to_its_last_whole_block(path):
    data = path.read_bytes()
    ends, at = [], HEADER.size
    for _, _, body in blocks_of(data):
        at += BLOCK_BYTES + len(body)
        ends.append(at)
    assert at == len(data)
    for size in sorted({e + d for e in ends[:-1] for d in (-1, 0, 1, BLOCK_BYTES - 1)} | {20}):
        path.write_bytes(data[:size])
        if size < ends[0]:
            with pytest.raises(TraceError, match=rf"^the trace ends in its head, after {size} b"):
                Trace.load(path)
            continue
        steps = sum(size >= end for end in ends[2:5])
        with pytest.warns(TraceWarning, match=rf"^the trace ends early, after .* {steps} step"):
            trace = Trace.load(path)
        assert trace.kept.steps == list(range(steps))
        assert len(trace.steps) == (3 if size >= ends[1] else 0)
        assert trace.whole_steps.tolist() == [0, 1][:steps]


def test_full_disk_is_an_error_and_what_was_written_opens(tmp_path, monkeypatch):
    path = tmp_path / "a.trace"
    hand_trace(3).save(path)
    of = StepSpans.of

    def full(self, step):
        if step == 2:
            raise OSError(28, "No space left on device")
        return of(self, step)

    monkeypatch.setattr(StepSpans, "of", full)
    with pytest.raises(TraceError, match=r"^cannot write the trace: No space left on device"):
        hand_trace(3).save(path)
    monkeypatch.undo()
    with pytest.warns(TraceWarning, match="after the spans of 2 steps"):
        assert Trace.load(path).spans.tolist() == hand_trace(2).spans.tolist()


# ---- what is refused -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: d[:10], "^not a trace file: 10 bytes"),
        (lambda d: b"PK" + d[2:], "^not a trace file"),
        (lambda _: b"", "^not a trace file: 0 bytes"),
        (lambda d: data_header(1) + d[12:], "^trace file of version 1, .*trace the run again"),
        (lambda d: data_header(3) + d[12:], "^trace file of version 3, .*update gpurt"),
        (lambda d: d[:18] + bytes([d[18] ^ 1]) + d[19:], "^the trace is damaged at byte 12"),
        (lambda d: d[:60] + bytes([d[60] ^ 1]) + d[61:], "^the trace's checksum is wrong at byte"),
        (lambda d: d + b"x", "^the trace has 1 bytes too many"),
    ],
)
def test_damaged_file_is_refused_with_its_reason(path, damage, text):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=text):
        Trace.load(path)


def test_large_file_that_is_no_trace_is_not_read(path):
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(TraceError, match=rf"^the trace has {(1 << 42) - len(data)} bytes too many"):
        Trace.load(path)
    with path.open("r+b") as file:
        file.write(b"other")
    with pytest.raises(TraceError, match=r"^not a trace file: 4398046511104 bytes"):
        Trace.load(path)


def test_missing_and_unwritable_paths_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"^cannot read the trace: No such file"):
        Trace.load(tmp_path / "none.trace")
    with pytest.raises(TraceError, match=r"^cannot write the trace: No such file"):
        hand_trace().save(tmp_path / "no" / "a.trace")


@pytest.mark.parametrize(("field", "value"), [("task", 9), ("worker", 2), ("run_ns", -1)])
def test_span_that_cannot_be_is_refused_when_its_step_is_read(tmp_path, field, value):
    trace = hand_trace(2)
    trace.spans[field][5] = value
    blocks = blocks_of(saved(hand_trace(2), tmp_path / "a.trace"))
    blocks[3] = (b"STEP", 1, trace.spans_of(1).tobytes())
    (tmp_path / "a.trace").write_bytes(file_of(blocks))
    found = Trace.load(tmp_path / "a.trace")
    assert len(found.spans_of(0)) == 4
    with pytest.raises(TraceError, match=r"^the trace's fields do not fit"):
        found.spans_of(1)


def saved(trace, path):
    trace.save(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: [b[0], b[1], b[3], b[2]], "steps that are not in order"),
        (lambda b: [*b[:3], (b"STEP", 2, b[4][2])], "step 2 that lacks spans"),
        (lambda b: [*b[:3], (b"PART", 1, b[3][2])], "step 1 that lacks spans, or does not"),
        (lambda b: [*b[:3], (b"STEP", 7, b[3][2])], "spans that are not of step 7"),
        (lambda b: [*b[:3], (b"STEP", 1, b[3][2][1:])], "spans that are not whole"),
        (lambda b: [b[1], b[0]], "block 0 is b'SUMS'"),
        (lambda b: [*b[:2], (b"WHAT", 0, b"")], "block 2 is b'WHAT'"),
        (lambda b: [b[0], b[0]], "block 1 is b'HEAD'"),
    ],
)
def test_blocks_that_do_not_fit_each_other_are_refused(path, change, text):
    blocks = blocks_of(path.read_bytes())
    path.write_bytes(file_of([*change(blocks), (b"DONE", 0, b"")]))
    with pytest.raises(TraceError, match=rf"^the trace's fields do not fit version 2 .*({text})"):
        _ = Trace.load(path).spans


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("workers", "two", "invalid literal"),
        ("ranks", 3, "of 4 tasks, 3 ranks"),
        ("task_op", bytes(8), "of 1 tasks"),
        ("task_bytes", bytes(7), "multiple of element size"),
        ("waits", [np.array([0, 1, 0, 2, 3]).tobytes(), bytes(24)], "waits whose offsets fall"),
        ("waits", [np.array([0, 0, 1, 2, 3]).tobytes(), bytes(8)], "waits of 4 rows"),
        ("producers", [np.array([0, 1, 3]).tobytes(), np.array([0, 1, 7]).tobytes()], "of 4"),
        ("payload_edges", [[0, 8]], "a payload edge outside of 3"),
        ("operators", [["a"]], "not enough values"),
        ("requests", [[1, 2]], "missing"),
        ("task_dynamic", [99], "out of bounds"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(path, field, value, text):
    (kind, step, head), *rest = blocks_of(path.read_bytes())
    fields = msgpack.unpackb(head)
    fields[field] = value
    path.write_bytes(file_of([(kind, step, msgpack.packb(fields)), *rest]))
    with pytest.raises(TraceError, match=rf"^the trace's fields do not fit version 2 .*({text})"):
        Trace.load(path)


@pytest.mark.filterwarnings("ignore::gpurt.errors.TraceWarning")
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_makes_more_than_one_line(path, seed):
    """Bytes of the blocks changed at random, the checksums right again: refused, or shown."""
    rng = np.random.default_rng(seed)
    blocks = blocks_of(path.read_bytes())
    for _ in range(60):
        changed = list(blocks)
        which = int(rng.integers(0, 5))
        kind, step, body = blocks[which]
        data = bytearray(body)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(0, 256)
        changed[which] = (kind, step, bytes(data))
        path.write_bytes(file_of(changed))
        with contextlib.suppress(TraceError):
            show(Trace.load(path), Console(file=io.StringIO(), width=100))


def test_trace_without_steps_or_spans_is_kept_and_says_so(tmp_path):
    empty = hand_trace(1)
    empty = replace(empty, kept=StepSpans(empty.spans[:0]), steps=empty.steps[:0])
    empty.save(tmp_path / "a.trace")
    found = Trace.load(tmp_path / "a.trace")
    assert (len(found.spans), len(found.steps), found.kept.steps) == (0, 0, [])
    with pytest.raises(TraceError, match=r"^no step has all of its 4 spans"):
        show(found, Console(file=io.StringIO()))
