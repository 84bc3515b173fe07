"""gpurt bench and gpurt tune: what this machine reaches, and which policies it likes best."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurt.errors import ConfigError

if TYPE_CHECKING:
    from gpurt.graph import Graph

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
    peers: Annotated[bool, typer.Option(help="Measure them too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON line only.")] = False,
) -> None:
    """Measure this machine: ours beside the floor and the peers. The last line is JSON."""
    from dataclasses import replace

    from rich.console import Console

    from gpurt.bench.cases import find
    from gpurt.bench.machine import cuda_machine, host_machine
    from gpurt.bench.report import append_records, read_records, run_cases, table
    from gpurt.progress import ProgressBars

    chosen = find(case or [])
    if not peers:
        chosen = [replace(one, peers={}) for one in chosen]
    if list_cases:
        width = max(len(c.name) for c in chosen)
        for one in chosen:
            typer.echo(f"{one.name:<{width}}  {one.kind:<4}  {one.unit:<5}  {one.measures}")
        return
    if out is not None and out.exists():
        read_records(out)  # refused before an hour is spent

    def say(line: str) -> None:
        typer.echo(line, err=True)

    with ProgressBars() as bars:
        report = run_cases(
            chosen,
            {"host": lambda: host_machine(workers), "cuda": cuda_machine},
            bars,
            say,
            _settings(policy, edges),
            None if out is None else lambda record: append_records(out, [record]),
            None if sys.stderr.isatty() else say,  # a terminal has bars
        )
    if not as_json:
        console = Console()
        console = console if console.is_terminal else Console(width=PIPE_COLUMNS)
        console.print(table(report.records, chosen))
    typer.echo(json.dumps(report.as_dict()))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if report.failed:
        raise typer.Exit(FAILED_EXIT_CODE)


def tune(
    model: Annotated[str | None, typer.Option("--model", help="As of gpurt run.")] = None,
    case: Annotated[str | None, typer.Option(help="A case of gpurt bench instead.")] = None,
    device: Annotated[str, typer.Option(help="auto, host, cuda or cuda:N.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Threads or SMs; default: all.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of one step; default 16.")] = None,
    context: Annotated[int | None, typer.Option(help="Positions of one sequence.")] = None,
    seconds: Annotated[float, typer.Option(help="No trial begins after this long.")] = 60.0,
    tokens: Annotated[int, typer.Option(help="Of one sample.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Instead of gpurt's cache folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The profile as JSON on stdout.")] = False,
) -> None:
    """Measure which policy each operator likes best here, for --policy auto."""
    from dataclasses import asdict

    from gpurt import profiles
    from gpurt.bench.machine import commit
    from gpurt.config import resolve
    from gpurt.tune import Choice, Decoding, Trial, Tuner, operators_of, profile_of

    if tokens < 2 or seconds <= 0:
        msg = f"tokens is {tokens}, seconds {seconds:g} - at gpurt tune"
        raise ConfigError(f"{msg} - use 2 or more, and more than 0")
    config = resolve(device, workers=workers)
    target = config.target
    graph = _graph_to_tune(model, case, target.kind, rows, context)

    def opened(choice: Choice) -> Decoding:
        return Decoding(graph, config.device, target.workers, choice, tokens)

    def tell(trial: Trial) -> None:
        typer.echo(str(trial), err=True)

    kinds = ("auto", "payload", "counter") if target.kind == "cuda" else ("auto",)
    base = opened(Choice())
    operators = operators_of(base.plan)
    base.close()
    tuner = Tuner(opened, operators, kinds, seconds, tell=tell)
    choice, trial = tuner.run()
    key = profiles.key_of(graph, config.device_name, target.workers)
    profile = profile_of(key, choice, trial, tuner, commit())
    path = profiles.save(profile, out)
    typer.echo(json.dumps(asdict(profile)) if as_json else str(profile))
    typer.echo(f"wrote {path}; --policy auto uses it", err=True)


# ---- helpers ---------------------------------------------------------------------------------
def _graph_to_tune(
    model: str | None, case: str | None, kind: str, rows: int | None, context: int | None
) -> Graph:
    if (model is None) == (case is None):
        raise ConfigError("no model, or two - at gpurt tune - use one of --model and --case")
    if case is not None:
        from gpurt.bench.cases import find

        (found,) = find([case])
        build = found.make(False).graph
        if build is None or found.kind != kind or not (graph := build()).vocab:
            msg = f"{case} decodes nothing on {kind}"
            raise ConfigError(f"{msg} - at --case - use one that makes tokens on this device")
        return graph
    from gpurt.loaders import load_model
    from gpurt.progress import ProgressBars
    from gpurt.serving import model_graph

    with ProgressBars() as bars:
        loaded = load_model(str(model), bars)
    return model_graph(loaded, kind, rows=rows, context=context)


def _settings(policy: str | None, edges: str | None) -> dict[str, Any]:
    from gpurt.cli_options import parse_policy
    from gpurt.config import check_edges, check_policy

    chosen: dict[str, Any] = {}
    if policy is not None:
        chosen["policy"] = check_policy(parse_policy(policy))
    if edges is not None:
        chosen["edges"] = check_edges(edges)
    return chosen
