"""A Trace in the terminal: split of step time, a timeline, operators, waits, critical path.

Also the same figures as one dict, for `gpurt trace --json`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpurt.errors import TraceError
from gpurt.trace import analysis, figures
from gpurt.trace.clocks import late_ranks
from gpurt.trace.edges import EdgeRow, edge_rows
from gpurt.trace.experts import ExpertChoice, expert_choices
from gpurt.trace.slow import slow_steps
from gpurt.trace.spans import end_ns
from gpurt.trace.trace import PHASES, Trace

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red", "bright_cyan", "bright_green")
SPLIT_COLOURS = dict(
    zip(analysis.SPLIT_NAMES, ("green", "yellow", "red", "grey50", "grey35"), strict=True)
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OTHERS = "*"  # of operators beyond the letters
LANE_HEAD = 6  # columns of a lane before its timeline, beside its name
MAX_LANES = 16  # more workers than this: as many, evenly chosen
TABLE_ROWS = 12
EXPERT_ROWS = 16  # layers; their whole table is in the JSON
EXPERTS_NAMED = 6


def summary(trace: Trace, waits: int = 10) -> dict[str, Any]:
    """All figures as plain values: what the terminal shows."""
    step = analysis.typical_step(trace)
    parts = analysis.split(trace)
    low, high = analysis.step_window(trace, step)
    rate, taken = figures.bandwidth(trace), figures.acceptance(trace)
    late = late_ranks(trace)
    return {
        "name": trace.name,
        "device": trace.device,
        "workers": trace.workers,
        "ranks": trace.ranks,
        "clock_error_us": trace.clock_error_ns / 1e3,
        "late_ranks": {} if late is None else asdict(late),
        "spans": len(trace.spans),
        "dropped_spans": trace.dropped,
        "whole_steps": len(trace.whole_steps),
        "steps": {p: t for p in PHASES if (t := _times(analysis.step_times_us(trace, p)))}
        or {"all": _times(analysis.step_times_us(trace))},
        "step_sizes": {str(rows): steps for rows, steps in _step_sizes(trace).items()},
        "split": _shares(parts.sum(axis=0)),
        "utilisation": [round(float(u), 4) for u in _utilisation(parts)],
        "operators": [asdict(r) for r in analysis.operators(trace)],
        "edges": [asdict(r) for r in _edge_rows(trace)],
        "slow_steps": [asdict(r) | {"why": r.why} for r in slow_steps(trace)],
        "bandwidth": rate.as_dict(),
        "experts": [asdict(r) for r in figures.experts(trace)],
        "expert_choices": [r.as_dict() for r in expert_choices(trace)],
        "acceptance": {} if taken is None else taken.as_dict(),
        "longest_waits": [asdict(w) for w in analysis.longest_waits(trace, waits)],
        "critical_path": {
            "step": step,
            "step_us": (high - low) / 1e3,
            "parts_us": {k: v / 1e3 for k, v in analysis.path_parts(trace, step).items()},
            "tasks": [_path_entry(trace, s) for s in trace.critical_path(step)],
        },
    }


def show(trace: Trace, console: Console, step: int | None = None) -> None:
    """Print the whole view, with the timeline and the path of a step: None for the typical one.

    Raises: TraceError if the step's spans are not all here.
    """
    if step is None:
        step = analysis.typical_step(trace)
    elif step not in trace.whole_steps:
        kept = [int(s) for s in trace.whole_steps]
        shown = ", ".join(map(str, kept[-TABLE_ROWS:])) or "none"
        what = f"step {step} was not kept with all of its spans"
        raise TraceError(f"{what} - at --step - the last that were: {shown}")
    for part in _parts(trace, console.width, step):
        console.print(part)
        console.print()


# ---- parts -----------------------------------------------------------------------------------
def _parts(trace: Trace, width: int, step: int) -> Iterable[RenderableType]:
    parts = analysis.split(trace)
    yield _head(trace, parts, width)
    yield _lanes(trace, step, _utilisation(parts), width)
    yield _slow(trace)
    yield _operators(trace)
    if rows := figures.experts(trace):
        yield _experts(rows)
    if choices := expert_choices(trace):
        yield _expert_choices(choices)
    yield _waits(trace)
    yield _critical(trace, step)


def _head(trace: Trace, parts: Any, width: int) -> RenderableType:
    kept = f"{len(trace.spans)} spans of {len(trace.whole_steps)} whole steps"
    dropped = f", {trace.dropped} dropped" if trace.dropped else ""
    workers = f"{trace.workers} workers" + (f" of {trace.ranks} ranks" if trace.ranks > 1 else "")
    if trace.clock_error_ns:
        workers += f" (clocks within {trace.clock_error_ns / 1e3:.2f} us)"
    lines = [Text(f"{trace.name} on {trace.device}, {workers}: {kept}{dropped}")]
    for phase in (*PHASES, None):
        times = _times(analysis.step_times_us(trace, phase))
        if times and (phase is not None or not len(trace.steps)):
            text = (
                f"{phase or 'all'} steps: {times['count']}, median {times['median_us']:.1f} us,"
                f" p99 {times['p99_us']:.1f} us, slowest {times['max_us']:.1f} us"
            )
            lines.append(Text(text))
    sizes = [f"{steps} of up to {rows} rows" for rows, steps in _step_sizes(trace).items()]
    if len(sizes) > 1:
        lines.append(Text(f"step sizes: {', '.join(sizes)}"))
    shares = _shares(parts.sum(axis=0))
    lines.append(_bar(shares, max(20, min(width - 2, 100))))
    legend = Text()
    for name, share in shares.items():
        legend.append(f"{name} {share:.1%}  ", SPLIT_COLOURS[name])
    lines.append(legend)
    lines += [Text(line) for line in _rates(trace)]
    late = late_ranks(trace)
    lines += [] if late is None else [Text(str(late))]
    return Group(*lines)


def _step_sizes(trace: Trace) -> dict[int, int]:
    """Summarised steps by the rows that their variant may carry."""
    counts = np.bincount(trace.steps["variant"], minlength=len(trace.variant_rows))
    return dict(zip(trace.variant_rows, counts.tolist(), strict=False))


def _rates(trace: Trace) -> Iterable[str]:
    rate = figures.bandwidth(trace)
    line = f"a step moves {rate.megabytes:.1f} MB, {rate.gigabytes_per_s:.1f} GB/s"
    if rate.share is None:
        yield f"{line} (gpurt doctor --bandwidth measures what this machine reaches)"
    else:
        yield f"{line}: {rate.share:.0%} of the {rate.ceiling:.1f} GB/s measured here"
    if (taken := figures.acceptance(trace)) is not None:
        positions = " ".join(f"{share:.0%}" for share in taken.by_position)
        yield (
            f"drafts: {taken.tokens_per_step:.2f} tokens a step in {taken.verify_steps} steps;"
            f" proposals taken by position: {positions}"
        )


def _slow(trace: Trace) -> RenderableType:
    rows = slow_steps(trace)
    names = ("step", "rows", "us", "medians", "what was slow")
    phase = rows[0].phase if rows else ""
    table = _table(f"slowest {phase} steps", names, left=("what was slow",))
    for row in rows:
        table.add_row(
            str(row.step), str(row.rows), f"{row.step_us:.1f}", f"{row.times:.2f}", row.why
        )
    return table


def _experts(rows: list[figures.ExpertRow]) -> RenderableType:
    names = ("operator", "tasks", "run", "least", "most")
    table = _table("tasks that steps have only for chosen experts", names, left=("operator",))
    for row in rows[:TABLE_ROWS]:
        shares = [f"{share:.1%}" for share in (row.share, row.least, row.most)]
        table.add_row(row.name, str(row.tasks), *shares)
    return table


def _expert_choices(choices: list[ExpertChoice]) -> RenderableType:
    """again: of a step's experts, those that the step before had too. In brackets: of all choices
    of rows.
    """
    names = ("layer", "experts", "a step", "least", "most", "again", "never", "chosen most")
    title = f"experts that rows chose, in {choices[0].steps_counted} steps"
    table = _table(title, names, left=("layer", "chosen most"))
    for choice in choices[:EXPERT_ROWS]:
        hits = [f"{expert} ({share:.0%})" for expert, share in choice.hits[:EXPERTS_NAMED]]
        again = "-" if choice.again is None else f"{choice.again:.0%}"
        counts = (choice.experts, f"{choice.distinct:.1f}", choice.least, choice.most)
        table.add_row(choice.name, *map(str, counts), again, str(choice.never), "  ".join(hits))
    if len(choices) > EXPERT_ROWS:
        table.add_row(f"and {len(choices) - EXPERT_ROWS} more, see --json")
    return table


def _lanes(trace: Trace, step: int, utilisation: Any, width: int) -> RenderableType:
    low, high = analysis.step_window(trace, step)
    spans = trace.spans_of(step)
    keys = [analysis.operator_key(o.path, trace.name) for o in trace.operators]
    shown = _lettered(spans, keys)
    letter = {key: LETTERS[i] for i, key in enumerate(shown)}
    colour = {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(shown)}
    wide = max(len(trace.lane_name(w)) for w in range(trace.workers))
    columns = max(20, min(width - wide - LANE_HEAD, 160))
    count = min(trace.workers, MAX_LANES)
    workers = [i * trace.workers // count for i in range(count)]
    title = f"step {step}, {(high - low) / 1e3:.1f} us, a column is "
    legend = "small letters and '.': more wait than run"
    lines = [Text(title + f"{(high - low) / 1e3 / columns:.2f} us ({legend})", "bold")]
    for worker in workers:
        lane = Text(f"{trace.lane_name(worker):<{wide}} {utilisation[worker]:>4.0%} ")
        mine = spans[spans["worker"] == worker]
        for char, key in _cells(mine, keys, letter, low, high, columns):
            style = colour.get(key, "grey50")
            lane.append(char, f"dim {style}" if char.islower() else style)
        lines.append(lane)
    names = Text()
    for key in shown:
        names.append(f"{letter[key]} {key}  ", colour[key])
    if others := len({keys[int(op)] for op in spans["op"]} - set(shown)):
        names.append(f"{OTHERS} {others} others  ", "grey50")
    if trace.workers > count:
        names.append(f"({count} of {trace.workers} workers)")
    return Group(*lines, names)


def _lettered(spans: Any, keys: list[str]) -> list[str]:
    """Operators that get a letter, in the order of the graph: those that ran longest."""
    runs: dict[str, int] = {}
    for span in np.sort(spans, order="op"):
        key = keys[int(span["op"])]
        runs[key] = runs.get(key, 0) + int(span["run_ns"])
    longest = sorted(runs, key=lambda k: -runs[k])[: len(LETTERS)]
    return [key for key in runs if key in longest]


def _cells(
    spans: Any, keys: list[str], letter: dict[str, str], low: int, high: int, columns: int
) -> Iterable[tuple[str, str]]:
    """(character, operator key) of each column: what the worker ran longest in it."""
    edges = np.linspace(low, high, columns + 1)
    met = spans["begin_ns"] + spans["wait_ns"]
    ended = end_ns(spans)
    for left, right in itertools.pairwise(edges):
        run = np.clip(np.minimum(ended, right) - np.maximum(met, left), 0, None)
        wait = np.clip(np.minimum(met, right) - np.maximum(spans["begin_ns"], left), 0, None)
        if not len(spans) or float(run.sum() + wait.sum()) < (right - left) / 2:
            yield " ", ""
        elif float(wait.sum()) > 10 * float(run.sum()):
            yield ".", ""
        else:
            key = keys[int(spans["op"][int(np.argmax(run))])]
            waits = float(wait.sum()) > float(run.sum())
            shown = letter.get(key, OTHERS)
            yield shown.lower() if waits else shown, key


def _operators(trace: Trace) -> RenderableType:
    names = ("tasks", "run us", "share", "task us", "stall us", "wait us", "GB/s")
    table = _table("operators, per step", ("operator", *names), left=("operator",))
    for row in analysis.operators(trace)[:TABLE_ROWS]:
        table.add_row(
            row.name,
            f"{row.tasks:.0f}",
            f"{row.run_us:.1f}",
            f"{row.share:.1%}",
            f"{row.task_us:.2f}",
            f"{row.stall_us:.1f}",
            f"{row.wait_us:.1f}",
            f"{row.gigabytes_per_s:.1f}" if row.gigabytes_per_s else "-",
        )
    return table


def _worker(trace: Trace, worker: int) -> str:
    """Its number; with several ranks also whose it is."""
    return trace.lane_name(worker) if trace.ranks > 1 else str(worker)


def _waits(trace: Trace) -> RenderableType:
    left = ("task", "waited for", "why")
    names = ("step", "wait us", "on", "task", "waited for", "on", "late us", "why")
    table = _table("longest waits (on: worker), and who was late", names, left)
    for wait in analysis.longest_waits(trace):
        late = wait.late_operator
        if wait.late_task >= 0:
            late = f"{wait.late_task} {late}"
        table.add_row(
            str(wait.step),
            f"{wait.wait_us:.1f}",
            _worker(trace, wait.worker),
            f"{wait.task} {wait.operator}",
            late,
            _worker(trace, wait.late_worker) if wait.late_worker >= 0 else "-",
            f"{wait.late_us:.1f}",
            wait.why,
        )
    return table


def _critical(trace: Trace, step: int) -> RenderableType:
    path = trace.critical_path(step)
    low, high = analysis.step_window(trace, step)
    parts = analysis.path_parts(trace, step)
    head = f"critical path of step {step}: {len(path)} tasks, {(high - low) / 1e3:.1f} us = " + (
        " + ".join(f"{name} {ns / 1e3:.1f}" for name, ns in parts.items())
    )
    table = _table("", ("operator", "tasks", "run us", "share of step"), left=("operator",))
    keys = [analysis.operator_key(trace.operators[int(o)].path, trace.name) for o in path["op"]]
    places = analysis.path_places(trace, step, path)
    runs = places[:, :2].sum(axis=1)  # compute and stall: what of a run the path waited for
    sums: dict[str, list[float]] = {}
    for key, run in zip(keys, runs.tolist(), strict=True):
        entry = sums.setdefault(key, [0, 0])
        entry[0] += 1
        entry[1] += run
    for key, (count, nanoseconds) in sorted(sums.items(), key=lambda e: -e[1][1])[:TABLE_ROWS]:
        share = nanoseconds / max(high - low, 1)
        table.add_row(key, f"{count:.0f}", f"{nanoseconds / 1e3:.1f}", f"{share:.1%}")
    return Group(Text(head, "italic"), table)


# ---- helpers ---------------------------------------------------------------------------------
def _edge_rows(trace: Trace) -> list[EdgeRow]:
    keys = [analysis.operator_key(o.path, trace.name) for o in trace.operators]
    return edge_rows(trace, analysis.whole_steps(trace), keys)


def _table(title: str, names: Iterable[str], left: Iterable[str]) -> Table:
    """Numbers to the right and whole; where the terminal is narrow, names give way."""
    shape = box.SIMPLE_HEAD
    table = Table(
        title=title or None, title_justify="left", box=shape, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in names:
        side: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(name, justify=side, no_wrap=name not in left, overflow="fold")
    return table


def _times(times: Any) -> dict[str, float]:
    if not len(times):
        return {}
    return {
        "count": len(times),
        "median_us": float(np.median(times)),
        "p99_us": float(np.percentile(times, 99)),
        "max_us": float(times.max()),
    }


def _shares(nanoseconds: Any) -> dict[str, float]:
    total = max(float(nanoseconds.sum()), 1.0)
    return {
        name: float(part) / total
        for name, part in zip(analysis.SPLIT_NAMES, nanoseconds, strict=True)
    }


def _utilisation(parts: Any) -> Any:
    """Share of each worker's time in which it computed."""
    return parts[:, 0] / np.maximum(parts.sum(axis=1), 1)


def _bar(shares: dict[str, float], width: int) -> Text:
    bar = Text()
    for name, share in shares.items():
        bar.append("█" * round(share * width), SPLIT_COLOURS[name])
    return bar


def _path_entry(trace: Trace, span: Any) -> dict[str, Any]:
    return {
        "task": int(span["task"]),
        "operator": analysis.operator_name(trace, int(span["op"])),
        "worker": int(span["worker"]),
        "wait_us": int(span["wait_ns"]) / 1e3,
        "run_us": int(span["run_ns"]) / 1e3,
    }
