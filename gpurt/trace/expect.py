"""Expectations of a trace, for `gpurt trace FILE --expect BOUNDS.json` in somebody's CI.

The file mirrors what `gpurt trace FILE --json` prints; operators, experts and edges are
named instead of listed. A leaf is {"min": a, "max": b}, one of the two, or a plain value that must
be met exactly:

    {
      "steps": {"decode": {"median_us": {"max": 520}, "p99_us": {"max": 800}}},
      "split": {"wait": {"max": 0.25}},
      "operators": {"layers[*].gate_up": {"gigabytes_per_s": {"min": 900}}},
      "edges": {"layers[*].o -> layers[*].gate_up": {"hop_us": {"max": 1.5}}},
      "critical_path": {"step_us": {"max": 520}},
      "dropped_spans": 0
    }
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpurt.errors import TraceError
from gpurt.json_file import read_json_file
from gpurt.trace.edges import ARROW
from gpurt.trace.trace import Trace
from gpurt.trace.view import summary

BOUNDS = {"min", "max"}
NAMES_SHOWN = 8
TENTHS_FROM = 1000  # larger figures are shown to a tenth, not as powers of ten


@dataclass(frozen=True)
class Expectation:
    """One leaf of the file. path: its keys from the top. exactly: any plain value."""

    path: tuple[str, ...]
    low: float | None
    high: float | None
    exactly: Any = None


@dataclass(frozen=True)
class Result:
    """What became of an expectation."""

    figure: str
    value: Any
    low: float | None
    high: float | None
    exactly: Any
    met: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def read_expectations(path: str | Path) -> list[Expectation]:
    """Every leaf of a file. Raises: TraceError if it cannot be read or is no such file."""
    hint = "see gpurt/trace/expect.py"
    record = read_json_file(path, "the expectations", TraceError, hint)
    found = list(_leaves(record, (), str(path))) if isinstance(record, dict) else []
    if not found:
        what = "the file expects nothing"
        raise TraceError(f"{what} - at {path} - name a figure of gpurt trace FILE --json")
    return found


def check(trace: Trace, expectations: list[Expectation]) -> list[Result]:
    """A result for each. Raises: TraceError for a figure that the trace does not have."""
    figures = known_figures(trace)
    return [_result(e, _look_up(figures, e.path)) for e in expectations]


def known_figures(trace: Trace) -> dict[str, Any]:
    """What `gpurt trace FILE --json` prints, operators and edges by name."""
    figures = summary(trace)
    figures["operators"] = {row["name"]: row for row in figures["operators"]}
    for name in ("experts", "expert_choices"):
        figures[name] = {row["name"]: row for row in figures[name]}
    edges = figures["edges"]
    figures["edges"] = {f"{e['producer']}{ARROW}{e['consumer']}": e for e in edges}
    return figures


def report(results: list[Result]) -> str:
    """A line a result, what is out of bounds marked, and a line that sums up."""
    wide = max(len(r.figure) for r in results)
    lines = [
        f"{'ok ' if r.met else 'OUT'}  {r.figure:<{wide}}  {_text(r.value):>10}  {_bounds(r)}"
        for r in results
    ]
    out = sum(not r.met for r in results)
    lines.append(f"{len(results)} figures, {out or 'none'} out of bounds")
    return "\n".join(lines)


# ---- helpers ---------------------------------------------------------------------------------
def _leaves(record: dict[str, Any], path: tuple[str, ...], file: str) -> Iterator[Expectation]:
    for key, value in record.items():
        here = (*path, key)
        if not isinstance(value, dict):
            if isinstance(value, list) or value is None:
                raise _wrong(here, f"is {json.dumps(value)[:40]}", file)
            yield Expectation(here, None, None, value)
        elif value.keys() & BOUNDS:
            yield _bounded(value, here, file)
        else:
            yield from _leaves(value, here, file)


def _bounded(value: dict[str, Any], path: tuple[str, ...], file: str) -> Expectation:
    if extra := value.keys() - BOUNDS:
        raise _wrong(path, f"has {sorted(extra)} beside its bounds", file)
    low, high = value.get("min"), value.get("max")
    for bound in (low, high):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise _wrong(path, f"has the bound {bound!r}", file)
    if low is not None and high is not None and low > high:
        raise _wrong(path, f"has min {low:g} over max {high:g}", file)
    return Expectation(path, low, high)


def _wrong(path: tuple[str, ...], what: str, file: str) -> TraceError:
    hint = 'write {"min": a, "max": b}, one of them, or a plain value'
    return TraceError(f"{' / '.join(path)} {what} - at {file} - {hint}")


def _look_up(figures: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = figures
    for depth, key in enumerate(path):
        if not isinstance(value, dict) or key not in value:
            what = f"this trace has no figure {' / '.join(path[: depth + 1])}"
            names = list(value) if isinstance(value, dict) else []
            known = ", ".join(names[:NAMES_SHOWN]) or "none below it"
            raise TraceError(f"{what} - at --expect - it has {known}")
        value = value[key]
    if isinstance(value, dict | list):
        what = f"{' / '.join(path)} is no single figure"
        raise TraceError(f"{what} - at --expect - name one below it")
    return value


def _result(expectation: Expectation, value: Any) -> Result:
    low, high, exactly = expectation.low, expectation.high, expectation.exactly
    if low is None and high is None:
        met = value == exactly
    else:
        if isinstance(value, str):
            what = f"{' / '.join(expectation.path)} is {value!r}, which has no bounds"
            raise TraceError(f"{what} - at --expect - give the text itself")
        # Not a number meets no bound.
        met = (low is None or value >= low) and (high is None or value <= high)
    return Result(" / ".join(expectation.path), value, low, high, exactly, bool(met))


def _text(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.1f}" if abs(value) >= TENTHS_FROM else f"{value:.4g}"


def _bounds(result: Result) -> str:
    if result.low is None and result.high is None:
        return f"exactly {_text(result.exactly)}"
    parts = [
        f"at least {_text(result.low)}" if result.low is not None else "",
        f"at most {_text(result.high)}" if result.high is not None else "",
    ]
    return ", ".join(filter(None, parts))
