"""gpurt bench and gpurt tune: what this machine reaches, and which policies it likes best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
PIPE_COLUMNS = 160  # of the table, where nobody says how wide the page is


def bench(
    case: Annotated[list[str] | None, typer.Option(help="One of --list; may be repeated.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Name the cases and leave.")] = False,
    out: Annotated[Path | None, typer.Option(help="Add the records to this JSON list.")] = None,
    workers: Annotated[int | None, typer.Option(help="Threads of the host cases.")] = None,
    policy: Annotated[str | None, typer.Option(help="In place of every case's own.")] = None,
    edges: Annotated[str | None, typer.Option(help="In place of every case's own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON line only.")] = False,
) -> None:
    """Measure this machine: ours beside the floor and the peers. The last line is JSON."""
    from rich.console import Console

    from gpurt.bench.cases import find
    from gpurt.bench.machine import cuda_machine, host_machine
    from gpurt.bench.report import append_records, read_records, run_cases, table
    from gpurt.progress import ProgressBars

    chosen = find(case or [])
    if list_cases:
        width = max(len(c.name) for c in chosen)
        for one in chosen:
            typer.echo(f"{one.name:<{width}}  {one.kind:<4}  {one.unit:<5}  {one.measures}")
        return
    if out is not None and out.exists():
        read_records(out)  # refused before an hour is spent
    with ProgressBars() as bars:
        report = run_cases(
            chosen,
            {"host": lambda: host_machine(workers), "cuda": cuda_machine},
            bars,
            lambda line: typer.echo(line, err=True),
            _settings(policy, edges),
        )
    if out is not None and report.records:
        append_records(out, report.records)
    if not as_json:
        console = Console()
        console = console if console.is_terminal else Console(width=PIPE_COLUMNS)
        console.print(table(report.records, chosen))
    typer.echo(json.dumps(report.as_dict()))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if report.failed:
        raise typer.Exit(FAILED_EXIT_CODE)


def _settings(policy: str | None, edges: str | None) -> dict[str, Any]:
    from gpurt.cli import parse_policy
    from gpurt.config import check_edges, check_policy

    chosen: dict[str, Any] = {}
    if policy is not None:
        chosen["policy"] = check_policy(parse_policy(policy))
    if edges is not None:
        chosen["edges"] = check_edges(edges)
    return chosen
