"""The trace file: 24 bytes of header, then one msgpack map whose arrays are raw bytes.

    0  magic "GPURTTRC"    8  version u32    12  crc32 of the body u32    16  body bytes u64

A reader refuses what is newer than it is, and tells truncation from damage.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from gpurt.errors import TraceError
from gpurt.trace.check import check_trace
from gpurt.trace.trace import SPAN, STEP, OperatorInfo, RequestInfo, Rows, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAGIC = b"GPURTTRC"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace`. Raises: TraceError if the path cannot be written."""
    body = cast("bytes", msgpack.packb(_to_wire(trace), use_bin_type=True))
    header = HEADER.pack(MAGIC, VERSION, zlib.crc32(body), len(body))
    try:
        Path(path).write_bytes(header + body)
    except OSError as error:
        what = f"cannot write the trace: {error.strerror}"
        raise TraceError(f"{what} - at {path} - choose another path") from error


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Raises: TraceError naming the file and what is wrong with it.

    The header is checked first, so a large file that is no trace is not read.
    """
    try:
        with Path(path).open("rb") as file:
            size_bytes, checksum = _check_header(file, path)
            body = file.read(size_bytes)
    except OSError as error:
        what = f"cannot read the trace: {error.strerror}"
        raise TraceError(f"{what} - at {path} - check the path") from error
    if zlib.crc32(body) != checksum:
        raise TraceError(f"the trace's checksum is wrong - at {path} - write it again")
    try:
        trace = _from_wire(msgpack.unpackb(body))
        check_trace(trace)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"the trace's fields do not fit version {VERSION} ({error!r})"
        raise TraceError(f"{what} - at {path} - write it again") from error
    return trace


# ---- helpers ---------------------------------------------------------------------------------
def _check_header(file: BinaryIO, path: str | Path) -> tuple[int, int]:
    """(bytes of the body, its checksum)."""
    header = file.read(HEADER.size)
    there = os.fstat(file.fileno()).st_size
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        what = f"not a trace file: {there} bytes without its mark"
        raise TraceError(f"{what} - at {path} - pass a file that gpurt run --trace wrote")
    _, version, checksum, size_bytes = HEADER.unpack(header)
    if not 1 <= version <= VERSION:
        what = f"trace file of version {version}, this gpurt reads 1 to {VERSION}"
        raise TraceError(f"{what} - at {path} - update gpurt")
    if there - HEADER.size != size_bytes:
        what = f"the trace has {there - HEADER.size} bytes of {size_bytes}"
        raise TraceError(f"{what} - at {path} - write it again")
    return size_bytes, checksum


def _to_wire(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "device": trace.device,
        "workers": trace.workers,
        "operators": [[o.name, o.body, o.path, o.layer] for o in trace.operators],
        "task_op": trace.task_op.astype("<i8").tobytes(),
        "task_bytes": trace.task_bytes.astype("<i8").tobytes(),
        "waits": _to_bytes(trace.waits),
        "producers": _to_bytes(trace.producers),
        "payload_edges": [list(e) for e in trace.payload_edges],
        "spans": trace.spans.tobytes(),
        "steps": trace.steps.tobytes(),
        "dropped": trace.dropped,
        "regions": list(trace.regions),
        "task_reads": _to_bytes(trace.task_reads),
        "task_writes": _to_bytes(trace.task_writes),
        "task_dynamic": np.flatnonzero(trace.task_dynamic).tolist(),
        "requests": [list(astuple(r)) for r in trace.requests],
        "variants": [list(trace.variant_rows), np.bincount(trace.task_variant).tolist()],
        "ranks": trace.ranks,
        "ceiling_gbps": trace.ceiling_gbps,
    }


def _from_wire(wire: Mapping[str, Any]) -> Trace:
    nothing = [bytes(8), b""]  # files of version 1 may lack what came later
    task_op = _integers(wire["task_op"])
    dynamic = np.zeros(len(task_op), bool)
    dynamic[list(wire.get("task_dynamic", ()))] = True
    variant_rows, variant_tasks = wire.get("variants", ([0], [len(task_op)]))
    if sum(variant_tasks) != len(task_op) or len(variant_rows) != len(variant_tasks):
        raise ValueError(f"variants {variant_tasks} of {len(task_op)} tasks")
    return Trace(
        name=str(wire["name"]),
        device=str(wire["device"]),
        workers=int(wire["workers"]),
        operators=tuple(OperatorInfo(*row) for row in wire["operators"]),
        task_op=task_op,
        task_bytes=_integers(wire["task_bytes"]),
        waits=_rows(wire["waits"]),
        producers=_rows(wire["producers"]),
        payload_edges=tuple((int(a), int(b)) for a, b in wire["payload_edges"]),
        spans=np.frombuffer(wire["spans"], SPAN).copy(),
        steps=np.frombuffer(wire["steps"], STEP).copy(),
        dropped=int(wire["dropped"]),
        regions=tuple(str(r) for r in wire.get("regions", ())),
        task_reads=_rows(wire.get("task_reads", nothing)),
        task_writes=_rows(wire.get("task_writes", nothing)),
        task_dynamic=dynamic,
        requests=tuple(_request(row) for row in wire.get("requests", ())),
        ranks=int(wire.get("ranks", 1)),
        ceiling_gbps=float(wire.get("ceiling_gbps", 0.0)),
        task_variant=np.repeat(np.arange(len(variant_tasks)), variant_tasks),
        variant_rows=tuple(int(rows) for rows in variant_rows),
    )


def _request(row: Sequence[Any]) -> RequestInfo:
    found = RequestInfo(*row)
    return replace(found, accepted=tuple(int(n) for n in found.accepted))


def _to_bytes(rows: Rows) -> list[bytes]:
    return [a.astype("<i8").tobytes() for a in rows]


def _rows(data: Sequence[bytes]) -> Rows:
    return _integers(data[0]), _integers(data[1])


def _integers(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8").astype(np.int64)
