"""Report: the table, the results file, and a run of cases that Ctrl-C may end early."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurt.bench.case import Case, Record, measure_case, ratio
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.errors import ConfigError, GpurtError
from gpurt.progress import Progress

if TYPE_CHECKING:
    from rich.table import Table

Opener = Callable[[], Machine]


@dataclass
class Report:
    """What came of a run. skipped, failed: by case, why."""

    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    machines: dict[str, dict[str, object]] = field(default_factory=dict)
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The JSON line."""
        return {
            "results": [record.as_dict() for record in self.records],
            "skipped": self.skipped,
            "failed": self.failed,
            "machines": self.machines,
            "interrupted": self.interrupted,
        }


def run_cases(
    cases: Sequence[Case],
    openers: dict[str, Opener],
    progress: Progress,
    tell: Callable[[str], None],
    settings: dict[str, Any] | None = None,
    keep: Callable[[Record], None] | None = None,
    tell_phase: Callable[[str], None] | None = None,
) -> Report:
    """Measure every case that can run here. openers: how a kind of device is opened, once.

    tell: called with one line a case that did not run, as it happens. settings: of the Runtime, for
    every case. keep: called with each record as soon as it is there, so that a process that is
    killed loses no more than the case that runs. tell_phase: called with one line at the begin of
    every phase of a case. Ctrl-C ends that case and the run.
    """
    report = Report()
    machines: dict[str, Machine | str] = {}
    try:
        for case in cases:
            with _telling(case, report, tell):
                machine = _machine(case, openers, machines)
                report.machines[case.kind] = machine.as_dict()
                record = measure_case(case, machine, progress, settings, tell_phase)
                report.records.append(record)
                if keep:
                    keep(record)
    except KeyboardInterrupt:
        report.interrupted = True
        tell(f"interrupted: {len(report.records)} of {len(cases)} cases were measured")
    return report


def table(records: Iterable[Record], cases: Sequence[Case]) -> Table:
    """Case, floor, ours, peers, how many times a peer ours is as fast, share of the bandwidth."""
    from rich.table import Table

    goals = {case.name: (case.goal, case.prototype) for case in cases}
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("case", no_wrap=True)
    for name in ("unit", "floor", "asked", "prototype", "ours", "share"):
        shown.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    shown.add_column("peer")
    for name in ("theirs", "ratio"):
        shown.add_column(name, justify="right", no_wrap=True)
    for record in records:
        goal, prototype = goals.get(record.case, (None, None))
        share = ratio(record.unit, record.floor, record.ours)
        first = [
            *(record.case, record.unit, _number(record.floor), _number(goal), _number(prototype)),
            *(_number(record.ours), f"{1 / share:.0%}" if share else "-"),
        ]
        rows = [
            (name, _number(value), f"{ratio(record.unit, record.ours, value):.2f}x")
            for name, value in record.peers.items()
        ] or [("-", "-", "-")]
        for index, row in enumerate(rows):
            shown.add_row(*(first if index == 0 else [""] * len(first)), *row)
    return shown


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Add records to a results file, which is a JSON list. Raises: ConfigError."""
    known = read_records(path) if path.exists() else []
    known += [record.as_dict() for record in records]
    text = ",\n".join("  " + json.dumps(entry, indent=2).replace("\n", "\n  ") for entry in known)
    try:
        path.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    except OSError as error:
        msg = f"cannot write results: {error.strerror}"
        raise ConfigError(
            f"{msg} - at --out {path} - name a file in a folder that exists"
        ) from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """A results file. Raises: ConfigError if it is no JSON list of objects."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"cannot read results: {error}"
        raise ConfigError(f"{what} - at --out {path} - name another file") from None
    if not isinstance(known, list) or not all(isinstance(entry, dict) for entry in known):
        raise ConfigError(f"no list of results - at --out {path} - name another file")
    return known


# ---- helpers ---------------------------------------------------------------------------------
@contextmanager
def _telling(case: Case, report: Report, tell: Callable[[str], None]) -> Iterator[None]:
    """A case that cannot run, or fails, is told and does not end the run."""
    try:
        yield
    except UnavailableError as error:
        report.skipped[case.name] = str(error)
        tell(f"{case.name}: not run: {error}")
    except GpurtError as error:
        report.failed[case.name] = str(error)
        tell(f"{case.name}: FAILED: {error}")


def _machine(case: Case, openers: dict[str, Opener], machines: dict[str, Machine | str]) -> Machine:
    if case.kind not in machines:
        try:
            machines[case.kind] = openers[case.kind]()
        except UnavailableError as error:
            machines[case.kind] = str(error)
    found = machines[case.kind]
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


def _number(value: float | None) -> str:
    if not value:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
