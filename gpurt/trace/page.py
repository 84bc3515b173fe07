"""Trace as one HTML page that needs no network: the viewer in gpurt/trace/html, and its data.

    page.html  <- STYLES, the modules of MODULES joined to one, the data as base64 text
    data       =  zlib( u32 length of the header | header as JSON | columns )

A column is a list of unsigned integers as byte planes: the lowest bytes of all values, then the
second lowest of all, as many planes as the largest value needs. Planes deflate far better than
whole words. Spans lie by lane (a worker of a rank) and begin; their begins are differences.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpurt
from gpurt.errors import TraceError
from gpurt.trace.analysis import operator_key, operator_name
from gpurt.trace.experts import expert_places
from gpurt.trace.slow import slow_steps
from gpurt.trace.spans import end_ns
from gpurt.trace.trace import PHASES, Rows, Trace

# In the order in which they may use each other while they load.
MODULES = (
    "format",
    "dom",
    "data",
    "chain",
    "colour",
    "view",
    "lanes",
    "frame",
    "charts",
    "stats",
    "experts",
    "slow",
    "search",
    "overlay",
    "overview",
    "links",
    "viewer",
    "panel",
    "tooltip",
    "input",
    "main",
)
STYLES = ("style", "details")
COMPRESSION = 6
_IMPORT = re.compile(r"^import\s[^;]*;\n+", re.MULTILINE)
_EXPORT = re.compile(r"^export\s+", re.MULTILINE)


def write_html(trace: Trace, path: str | Path) -> None:
    """Write the page. Raises: TraceError if the path cannot be written."""
    text = to_html(trace)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write the page: {error.strerror}"
        raise TraceError(f"{what} - at {path} - choose another path") from error


def to_html(trace: Trace) -> str:
    """The page as text."""
    fields = {
        "title": html.escape(f"{trace.name} - gpurt trace"),
        "version": html.escape(gpurt.__version__),
        "style": "".join(source_of(f"{name}.css") for name in STYLES),
        "script": script(),
        "data": base64.b64encode(pack(trace)).decode("ascii"),
    }
    # One pass: what a field holds is not searched again.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: fields[m[1]], source_of("page.html"))


def script() -> str:
    """All modules as one: their own imports and exports are taken out, their comments stay."""
    parts = []
    for name in MODULES:
        text = _EXPORT.sub("", _IMPORT.sub("", source_of(f"{name}.js")))
        parts.append(f"// ==== {name}.js ====\n{text.strip()}\n")
    return "\n".join(parts)


def pack(trace: Trace) -> bytes:
    """The data of the page, compressed."""
    columns, parts, offset = {}, [], 0
    for name, values in _columns(trace).items():
        planes, data = _planes(values)
        columns[name] = {"offset": offset, "length": len(values), "planes": planes}
        parts.append(data)
        offset += len(data)
    header = json.dumps({**_header(trace), "columns": columns}, separators=(",", ":")).encode()
    body = b"".join([len(header).to_bytes(4, "little"), header, *parts])
    return zlib.compress(body, COMPRESSION)


def source_of(name: str) -> str:
    """A file of gpurt/trace/html."""
    return (resources.files("gpurt.trace") / "html" / name).read_text(encoding="utf-8")


# ---- helpers ---------------------------------------------------------------------------------
def _header(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "device": trace.device,
        "version": gpurt.__version__,
        "dropped": trace.dropped,
        "lanes": [list(trace.lane(worker)) for worker in range(trace.workers)],  # rank, worker
        "operators": [
            [operator_name(trace, i), o.body, operator_key(o.path, trace.name), o.layer, o.experts]
            for i, o in enumerate(trace.operators)
        ],
        "payload_edges": [list(edge) for edge in trace.payload_edges],
        "regions": list(trace.regions),
        "requests": [
            [r.sequence, r.first_step, r.last_step, r.prompt_tokens, r.tokens]
            for r in trace.requests
        ],
        "expert_places": list(expert_places(trace).items()),
        "phases": list(PHASES),
        "first_step": _first_step(trace),
        "ceiling_gbps": trace.ceiling_gbps,
        "slow_steps": [
            [r.step - _first_step(trace), r.rows, 1e3 * r.step_us, r.times, r.kept, r.task, r.why]
            for r in slow_steps(trace)
        ],
    }


def _first_step(trace: Trace) -> int:
    numbers = [int(a["step"].min()) for a in (trace.spans, trace.steps) if len(a)]
    return min(numbers, default=0)


def _columns(trace: Trace) -> dict[str, NDArray[Any]]:
    spans = trace.spans[np.lexsort((trace.spans["begin_ns"], trace.spans["worker"]))]
    steps = _steps_on_the_clock_of_spans(trace)
    starts = [int(a["begin_ns"].min()) for a in (spans, steps) if len(a)]
    origin = min([0, *starts])
    lanes = np.searchsorted(spans["worker"], np.arange(trace.workers + 1))
    begin = spans["begin_ns"] - origin
    differences = np.diff(begin, prepend=0)
    heads = lanes[:-1][lanes[:-1] < lanes[1:]]
    differences[heads] = begin[heads]
    first = _first_step(trace)
    kept_steps, step_index = np.unique(spans["step"], return_inverse=True)
    layers = np.zeros(len(trace.task_op), np.int64)
    layers[spans["task"]] = spans["layer"]
    columns = {
        "lane_offsets": lanes,
        "begin": differences,
        "wait": spans["wait_ns"],
        "run": spans["run_ns"],
        "stall": spans["stall_ns"],
        "task": spans["task"],
        "expert": np.where(spans["expert_rows"] > 0, spans["expert"] + 1, 0),
        "expert_rows": spans["expert_rows"],
        "step_index": step_index,
        "kept_steps": kept_steps - np.uint64(first),
        "kept_whole": np.isin(kept_steps, trace.whole_steps),
        "task_op": trace.task_op,
        "task_layer": layers,
        "task_bytes": trace.task_bytes,
        "steps": steps["step"] - np.uint64(first),
        "step_begin": steps["begin_ns"] - origin,
        "step_length": steps["end_ns"] - steps["begin_ns"],
        "step_rows": steps["rows"],
        "step_phase": steps["phase"],
        "step_limit": _step_limits(trace, steps),
    }
    rows: dict[str, Rows] = {
        "waits": trace.waits,
        "producers": trace.producers,
        "reads": trace.task_reads,
        "writes": trace.task_writes,
    }
    for name, (offsets, values) in rows.items():
        columns[f"{name}_offsets"], columns[f"{name}_values"] = offsets, values
    return columns


def _steps_on_the_clock_of_spans(trace: Trace) -> NDArray[Any]:
    """The summaries, if they tell of the same times as the spans; steps of another clock are of
    no use on one time axis.
    """
    row_of = {int(s): i for i, s in enumerate(trace.steps["step"])}
    known = [(step, row_of[step]) for step in trace.kept.steps if step in row_of]
    apart = 0
    for step, row in known:
        spans, summary = trace.spans_of(step), trace.steps[row]
        ended, began = int(end_ns(spans).max()), int(spans["begin_ns"].min())
        apart += int(summary["begin_ns"]) > ended or int(summary["end_ns"]) < began
    return trace.steps[:0] if 2 * apart > len(known) else trace.steps


def _step_limits(trace: Trace, steps: NDArray[Any]) -> NDArray[Any]:
    """The rows that each step's variant may carry; 0 where a plan has one variant."""
    if len(trace.variant_rows) == 1:
        return np.zeros(len(steps), np.int64)
    limits: NDArray[Any] = np.array(trace.variant_rows, np.int64)[steps["variant"]]
    return limits


def _planes(values: NDArray[Any]) -> tuple[int, bytes]:
    """How many byte planes there are, and they. Raises: TraceError for a negative value."""
    if not len(values):
        return 0, b""
    if int(values.min()) < 0:
        what = f"a figure is negative: {int(values.min())}"
        raise TraceError(f"{what} - at the trace's spans - the trace is damaged, write it again")
    words = np.ascontiguousarray(values, "<u8")
    planes = max(1, (int(words.max()).bit_length() + 7) // 8)
    table = words.view(np.uint8).reshape(-1, 8)[:, :planes]
    return planes, np.ascontiguousarray(table.T).tobytes()
