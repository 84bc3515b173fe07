"""gpurt trace: show a trace, export it, hold it to expectations, compare two.

`gpurt trace FILE` is short for `gpurt trace show FILE`; a file named like a command is ./diff.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from gpurt.errors import GpurtError

if TYPE_CHECKING:
    from gpurt.runtime import Runtime
    from gpurt.trace import Trace

FAILED_EXIT_CODE = 1
DEFAULT_COMMAND = "show"
HELP = "Show a trace file, export it, or compare two: gpurt trace FILE, gpurt trace diff A B."


class _ShowByDefault(TyperGroup):
    """A first argument that is no command is a trace file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


trace_app = typer.Typer(cls=_ShowByDefault, no_args_is_help=True, help=HELP)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@trace_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="What gpurt run --trace wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write JSON for Perfetto here.")] = None,
    expect: Annotated[
        Path | None, typer.Option(help="JSON of bounds; exit code 1 when a figure leaves one.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Show this step; default: the one of median length.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Timeline, utilisation, slowest steps, operators, longest waits, critical path."""
    from gpurt.trace import Trace
    from gpurt.trace.view import show, summary

    trace = Trace.load(file)
    exported = _export(trace, html, perfetto)
    if expect is not None:
        _hold_to(trace, expect, as_json)
    elif as_json:
        typer.echo(json.dumps(summary(trace)))
    elif not exported:
        from rich.console import Console

        show(trace, Console(), step)


@trace_app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="The trace to compare with.")],
    after: Annotated[Path, typer.Argument(help="The trace that may have got slower.")],
    phase: Annotated[
        str | None, typer.Option(help="plain, prefill or decode; default: the last of both.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What got slower from one trace to the other, by operator and by edge."""
    from gpurt.trace import Trace
    from gpurt.trace.diff import compare
    from gpurt.trace.diff_view import show_diff

    found = compare(Trace.load(before), Trace.load(after), phase)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        from rich.console import Console

        show_diff(found, Console())


@contextmanager
def trace_on_signal(runtime: Runtime, path: Path | None) -> Iterator[None]:
    """Meanwhile SIGUSR1 writes what the runtime has traced so far; path None: it does not.

    Only in the main thread, and where that signal is.
    """
    number = getattr(signal, "SIGUSR1", None)
    if path is None or number is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def dump(*_: object) -> None:
        try:
            runtime.trace().save(path)
            typer.echo(f"wrote {path}", err=True)
        except GpurtError as error:
            typer.echo(f"gpurt: {error}", err=True)

    before = signal.signal(number, dump)
    try:
        yield
    finally:
        signal.signal(number, before)


# ---- helpers ---------------------------------------------------------------------------------
def _export(trace: Trace, html: Path | None, perfetto: Path | None) -> bool:
    """Write the files that were asked for; whether there was one."""
    from gpurt.trace.page import write_html
    from gpurt.trace.perfetto import write_perfetto

    for path, write in ((html, write_html), (perfetto, write_perfetto)):
        if path is not None:
            write(trace, path)
            typer.echo(f"wrote {path}", err=True)
    return html is not None or perfetto is not None


def _hold_to(trace: Trace, path: Path, as_json: bool) -> None:
    """Print what the expectations say. Raises: typer.Exit with code 1 if one is not met."""
    from gpurt.trace.expect import check, read_expectations, report

    results = check(trace, read_expectations(path))
    met = all(r.met for r in results)
    if as_json:
        record = {"met": met, "figures": [r.as_dict() for r in results]}
        typer.echo(json.dumps(record))
    else:
        typer.echo(report(results))
    if not met:
        raise typer.Exit(FAILED_EXIT_CODE)
