"""A Diff in the terminal: the step, then operators and edges, what is beyond noise in colour."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpurt.trace.diff import Change, Diff

ROWS_MAX = 14
STYLES = {"slower": "bold red", "faster": "bold green", "new": "yellow", "gone": "yellow"}
KINDS = {"run": "", "stall": " (stall)", "wait": " (wait)"}


def show_diff(diff: Diff, console: Console) -> None:
    """Print the comparison."""
    steps = f"{diff.before_steps} and {diff.after_steps} {diff.phase} steps"
    console.print(Text(f"{diff.before} before, {diff.after} after: {steps}, medians a step"))
    console.print(_table("step", diff.of("step")))
    console.print(_table("operators, all workers together", _worth(diff.of(*KINDS))))
    console.print(_table("edges: time that tasks waited for", _worth(diff.of("edge"))))
    beyond = [c for c in diff.changes if c.verdict in ("slower", "faster")]
    if not beyond:
        console.print(Text("nothing is beyond the noise of the steps"))


# ---- helpers ---------------------------------------------------------------------------------
def _worth(changes: list[Change]) -> list[Change]:
    """What is beyond noise first, then the largest of the rest."""
    loud = [c for c in changes if c.verdict not in ("same", "unknown")]
    calm = [c for c in changes if c.verdict in ("same", "unknown") and c.kind in ("run", "edge")]
    return sorted(loud, key=lambda c: -abs(c.change_us)) + calm


def _table(title: str, changes: Iterable[Change]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("name", overflow="fold")
    for name in ("before us", "after us", "change us", "%", "noise us"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    rows = list(changes)
    for change in rows[:ROWS_MAX]:
        table.add_row(
            change.name + KINDS.get(change.kind, ""),
            _figure(change.before_us),
            _figure(change.after_us),
            f"{change.change_us:+.1f}",
            _percent(change),
            "?" if change.noise_us is None else f"{change.noise_us:.1f}",
            Text(change.verdict, STYLES.get(change.verdict, "grey50")),
        )
    if len(rows) > ROWS_MAX:
        table.add_row(Text(f"and {len(rows) - ROWS_MAX} more, see --json", "grey50"))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(change: Change) -> str:
    return f"{change.change_us / change.before_us:+.1%}" if change.before_us else "-"
