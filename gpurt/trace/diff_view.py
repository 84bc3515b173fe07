"""A Diff in the terminal: the step, then operators and edges, what is beyond noise in colour."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpurt.trace.diff import Change, Diff

LOUD_MAX = 12  # rows of a table that are beyond noise
CALM_MAX = 4  # and the largest others
NOISE = "noise: from step to step within both traces; two runs of one program may differ by more"
STYLES = {"slower": "bold red", "faster": "bold green", "new": "yellow", "gone": "yellow"}
KINDS = {"run": "", "stall": " (stall)", "wait": " (wait)"}


def show_diff(diff: Diff, console: Console) -> None:
    """Print the comparison."""
    for when, about, steps in (
        ("before", diff.before, diff.before_steps),
        ("after", diff.after, diff.after_steps),
    ):
        console.print(Text(f"{when + ':':<8}{about}, medians of {steps} {diff.phase} steps"))
    console.print(_table("step", diff.of("step")))
    console.print(_table("operators, all workers together", diff.of(*KINDS)))
    console.print(_table("edges: time that tasks waited for", diff.of("edge")))
    beyond = [c for c in diff.changes if c.verdict in ("slower", "faster")]
    if not beyond:
        console.print(Text("nothing is beyond the noise of the steps"))
    console.print(Text(NOISE, "grey50"))


# ---- helpers ---------------------------------------------------------------------------------
def _table(title: str, changes: Iterable[Change]) -> Table:
    """What is beyond noise first, then the largest of the rest."""
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
    rows = sorted(changes, key=lambda c: -abs(c.change_us))
    loud = [c for c in rows if c.verdict not in ("same", "unknown")][:LOUD_MAX]
    calm = [c for c in rows if c.verdict in ("same", "unknown")][: CALM_MAX + LOUD_MAX - len(loud)]
    for change in loud + calm:
        table.add_row(
            change.name + KINDS.get(change.kind, ""),
            _figure(change.before_us),
            _figure(change.after_us),
            f"{change.change_us:+.1f}",
            _percent(change),
            "?" if change.noise_us is None else f"{change.noise_us:.1f}",
            Text(change.verdict, STYLES.get(change.verdict, "grey50")),
        )
    if more := len(rows) - len(loud) - len(calm):
        table.add_row(Text(f"and {more} more, see --json", "grey50"))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(change: Change) -> str:
    return f"{change.change_us / change.before_us:+.1%}" if change.before_us else "-"
