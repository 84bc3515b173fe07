"""The trace file: a header, then blocks as they come.

    header   magic "GPURTTRC" | version u32
    block    kind 4 bytes | crc32 of the body u32 | step u64 | bytes u64 | crc32 of these u32 | body

    HEAD   msgpack: what the plan says, requests, figures of the whole run. The first one
    SUMS   the summaries of all steps, STEP
    STEP   the spans of one step that has all of them, SPAN by begin
    PART   the same of a step that lacks some
    DONE   nothing: the file is whole

Opening reads the blocks' heads and the first two bodies; a step's spans are read, and checked, when
they are asked for. A file that ends early (a full disk, a copy that broke off) opens up to its last
whole block, with one TraceWarning; it needs its HEAD. Damage is an error; so is another version.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from gpurt.errors import TraceError, TraceWarning
from gpurt.trace.check import check_spans, check_trace
from gpurt.trace.spans import SPAN, StepSpans
from gpurt.trace.trace import STEP, OperatorInfo, RequestInfo, Rows, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAGIC = b"GPURTTRC"
VERSION = 2
HEADER = struct.Struct("<8sI")
BLOCK = struct.Struct("<4sIQQ")
CRC = struct.Struct("<I")
BLOCK_BYTES = BLOCK.size + CRC.size
KINDS = (b"HEAD", b"SUMS", b"STEP", b"PART", b"DONE")


@dataclass(frozen=True)
class Block:
    """Where a block's body lies in the file."""

    kind: bytes
    step: int
    begin: int
    size_bytes: int
    checksum: int


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace`, step by step. Raises: TraceError if the path cannot be written."""
    if isinstance(trace.kept, FileSpans):
        trace.kept.all()  # it may be the file that is about to be written
    try:
        with Path(path).open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION))
            for kind, step, body in _bodies(trace):
                head = BLOCK.pack(kind, zlib.crc32(body), step, len(body))
                file.write(head + CRC.pack(zlib.crc32(head)))
                file.write(body)
    except OSError as error:
        what = f"cannot write the trace: {error.strerror}"
        raise TraceError(f"{what} - at {path} - choose another path") from error


def read_trace(path: str | Path) -> Trace:
    """Open a trace. Raises: TraceError naming the file and what is wrong with it; a step that is
    damaged is named when its spans are asked for. Warns: TraceWarning if the file ends early.
    """
    try:
        with Path(path).open("rb") as file:
            blocks = _index(file, path)
            head = _body(file, blocks[0], path)
            sums = [_body(file, b, path) for b in blocks if b.kind == b"SUMS"]
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        spans = FileSpans(path, [b for b in blocks if b.kind in (b"STEP", b"PART")])
        steps = np.frombuffer(b"".join(sums), STEP).copy()
        trace = _from_wire(msgpack.unpackb(head), spans, steps)
        check_trace(trace)
        spans.belong_to(trace)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _unfit(path, error) from error
    return trace


class FileSpans(StepSpans):
    """Spans of a file, by step: read and checked when asked for, and then kept."""

    def __init__(self, path: str | Path, blocks: Sequence[Block]) -> None:
        """Blocks: of spans. Raises: ValueError if they are not in the order of their steps."""
        self._path = path
        self._blocks = {b.step: b for b in blocks}
        numbers = [b.step for b in blocks]
        if numbers != sorted(self._blocks):
            raise ValueError("steps that are not in order")
        if any(b.size_bytes % SPAN.itemsize for b in blocks):
            raise ValueError("spans that are not whole")
        self._read: dict[int, NDArray[Any]] = {}
        self._joined: NDArray[Any] | None = None
        self._trace: Trace | None = None
        whole = [b.step for b in blocks if b.kind == b"STEP"]
        self.whole_steps = np.array(whole, np.uint64)

    def belong_to(self, trace: Trace) -> None:
        """To check them against."""
        self._trace = trace

    def __len__(self) -> int:
        return sum(b.size_bytes for b in self._blocks.values()) // SPAN.itemsize

    @property
    def steps(self) -> list[int]:
        """See StepSpans."""
        return list(self._blocks)

    def all(self) -> NDArray[Any]:
        """See StepSpans. Raises: TraceError for a damaged one."""
        if self._joined is None:
            parts = [self.of(step) for step in self._blocks]
            self._joined = np.concatenate([np.zeros(0, SPAN), *parts])
            ends = np.cumsum([len(p) for p in parts])
            for step, part, end in zip(self._blocks, parts, ends, strict=True):
                self._read[step] = self._joined[end - len(part) : end]
        return self._joined

    def of(self, step: int) -> NDArray[Any]:
        """See StepSpans. Raises: TraceError for a damaged one, or if the file has changed."""
        if step not in self._blocks:
            return np.zeros(0, SPAN)
        if step not in self._read:
            self._read[step] = self._load(self._blocks[step])
        return self._read[step]

    def _load(self, block: Block) -> NDArray[Any]:
        try:
            with Path(self._path).open("rb") as file:
                spans = np.frombuffer(_body(file, block, self._path), SPAN).copy()
        except OSError as error:
            raise _unreadable(self._path, error) from error
        try:
            if self._trace is not None:
                check_spans(self._trace, spans, block.step, is_whole=block.kind == b"STEP")
        except ValueError as error:
            raise _unfit(self._path, error) from error
        return spans


# ---- blocks ----------------------------------------------------------------------------------
def _bodies(trace: Trace) -> Iterator[tuple[bytes, int, bytes]]:
    """(kind, step, body) of all blocks."""
    yield b"HEAD", 0, cast("bytes", msgpack.packb(_to_wire(trace), use_bin_type=True))
    yield b"SUMS", 0, trace.steps.tobytes()
    whole = set(trace.whole_steps.tolist())
    for step in trace.kept.steps:
        yield b"STEP" if step in whole else b"PART", step, trace.spans_of(step).tobytes()
    yield b"DONE", 0, b""


def _index(file: BinaryIO, path: str | Path) -> list[Block]:
    """All whole blocks; the first is the HEAD."""
    there = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        what = f"not a trace file: {there} bytes without its mark"
        raise TraceError(f"{what} - at {path} - pass a file that gpurt run --trace wrote")
    version = HEADER.unpack(header)[1]
    if version != VERSION:
        what = f"trace file of version {version}, this gpurt reads version {VERSION}"
        hint = "update gpurt" if version > VERSION else "trace the run again"
        raise TraceError(f"{what} - at {path} - {hint}")
    blocks: list[Block] = []
    at = HEADER.size
    while at + BLOCK_BYTES <= there and (not blocks or blocks[-1].kind != b"DONE"):
        file.seek(at)
        packed = file.read(BLOCK_BYTES)
        kind, checksum, step, size_bytes = BLOCK.unpack_from(packed)
        is_first = not blocks
        if CRC.unpack_from(packed, BLOCK.size)[0] != zlib.crc32(packed[: BLOCK.size]):
            raise TraceError(f"the trace is damaged at byte {at} - at {path} - write it again")
        if kind not in KINDS or (kind == b"HEAD") != is_first:
            raise _unfit(path, ValueError(f"block {len(blocks)} is {kind!r}"))
        if at + BLOCK_BYTES + size_bytes > there:
            break
        blocks.append(Block(kind, step, at + BLOCK_BYTES, size_bytes, checksum))
        at += BLOCK_BYTES + size_bytes
    if not blocks:
        what = f"the trace ends in its head, after {there} bytes"
        raise TraceError(f"{what} - at {path} - write it again")
    if blocks[-1].kind != b"DONE":
        steps = sum(b.kind in (b"STEP", b"PART") for b in blocks)
        what = f"the trace ends early, after the spans of {steps} step{'' if steps == 1 else 's'}"
        warnings.warn(f"{what} - at {path} - what follows is of those", TraceWarning, stacklevel=4)
    elif at != there:
        what = f"the trace has {there - at} bytes too many"
        raise TraceError(f"{what} - at {path} - write it again")
    return blocks


def _body(file: BinaryIO, block: Block, path: str | Path) -> bytes:
    file.seek(block.begin)
    body = file.read(block.size_bytes)
    if len(body) != block.size_bytes or zlib.crc32(body) != block.checksum:
        what = f"the trace's checksum is wrong at byte {block.begin}"
        raise TraceError(f"{what} - at {path} - write it again")
    return body


# ---- errors ----------------------------------------------------------------------------------
def _unreadable(path: str | Path, error: OSError) -> TraceError:
    what = f"cannot read the trace: {error.strerror}"
    return TraceError(f"{what} - at {path} - check the path")


def _unfit(path: str | Path, error: Exception) -> TraceError:
    what = f"the trace's fields do not fit version {VERSION} ({error!r})"
    return TraceError(f"{what} - at {path} - write it again")


# ---- the HEAD --------------------------------------------------------------------------------
def _to_wire(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "device": trace.device,
        "workers": trace.workers,
        "operators": [list(astuple(o)) for o in trace.operators],
        "task_op": trace.task_op.astype("<i8").tobytes(),
        "task_bytes": trace.task_bytes.astype("<i8").tobytes(),
        "waits": _to_bytes(trace.waits),
        "producers": _to_bytes(trace.producers),
        "payload_edges": [list(e) for e in trace.payload_edges],
        "dropped": trace.dropped,
        "regions": list(trace.regions),
        "task_reads": _to_bytes(trace.task_reads),
        "task_writes": _to_bytes(trace.task_writes),
        "task_dynamic": np.flatnonzero(trace.task_dynamic).tolist(),
        "requests": [list(astuple(r)) for r in trace.requests],
        "variants": [list(trace.variant_rows), _variant_tasks(trace)],
        "ranks": trace.ranks,
        "clock_error_ns": trace.clock_error_ns,
        "ceiling_gbps": trace.ceiling_gbps,
    }


def _from_wire(wire: Mapping[str, Any], kept: StepSpans, steps: NDArray[Any]) -> Trace:
    task_op = _integers(wire["task_op"])
    dynamic = np.zeros(len(task_op), bool)
    dynamic[list(wire["task_dynamic"])] = True
    variant_rows, variant_tasks = wire["variants"]
    ranks = int(wire["ranks"])
    if ranks * sum(variant_tasks) != len(task_op) or len(variant_rows) != len(variant_tasks):
        raise ValueError(f"variants {variant_tasks} of {len(task_op)} tasks, {ranks} ranks")
    return Trace(
        name=str(wire["name"]),
        device=str(wire["device"]),
        workers=int(wire["workers"]),
        operators=tuple(
            OperatorInfo(str(name), str(body), str(path), int(layer), int(experts))
            for name, body, path, layer, experts in wire["operators"]
        ),
        task_op=task_op,
        task_bytes=_integers(wire["task_bytes"]),
        waits=_rows(wire["waits"]),
        producers=_rows(wire["producers"]),
        payload_edges=tuple((int(a), int(b)) for a, b in wire["payload_edges"]),
        kept=kept,
        steps=steps,
        dropped=int(wire["dropped"]),
        regions=tuple(str(r) for r in wire["regions"]),
        task_reads=_rows(wire["task_reads"]),
        task_writes=_rows(wire["task_writes"]),
        task_dynamic=dynamic,
        requests=tuple(_request(row) for row in wire["requests"]),
        ranks=ranks,
        clock_error_ns=int(wire.get("clock_error_ns", 0)),
        ceiling_gbps=float(wire["ceiling_gbps"]),
        task_variant=np.tile(np.repeat(np.arange(len(variant_tasks)), variant_tasks), ranks),
        variant_rows=tuple(int(rows) for rows in variant_rows),
    )


def _variant_tasks(trace: Trace) -> list[int]:
    """How many tasks of a rank belong to each variant."""
    of_rank = trace.task_variant[: len(trace.task_op) // trace.ranks]
    counts: list[int] = np.bincount(of_rank, minlength=len(trace.variant_rows)).tolist()
    return counts


def _request(row: Sequence[Any]) -> RequestInfo:
    found = RequestInfo(*row)
    return replace(found, accepted=tuple(int(n) for n in found.accepted))


def _to_bytes(rows: Rows) -> list[bytes]:
    return [a.astype("<i8").tobytes() for a in rows]


def _rows(data: Sequence[bytes]) -> Rows:
    return _integers(data[0]), _integers(data[1])


def _integers(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8").astype(np.int64)
