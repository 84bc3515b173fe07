"""Case: what is measured, the bytes that bound it, and who is measured beside it.

Owns: Case, Side, the interleaved measurement, Record. Does not know: devices, graphs, peers.

A Side is one competitor: it warms up when it is made, `measure` gives one figure in the case's
unit, `rest` leaves the device to the others. Sides are measured in turn, round after round, so that
a clock that drifts reaches all of them; medians are kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from gpurt.bench.machine import Kind, Machine, UnavailableError
from gpurt.bench.phases import Phases
from gpurt.graph import Graph
from gpurt.progress import Progress

UNITS = ("us", "GB/s", "tok/s")


class Side(Protocol):
    """One competitor."""

    def measure(self) -> float:
        """One figure. Raises: GpurtError, or what a peer's library raises."""

    def rest(self) -> None:
        """Leave the device to the other sides until the next `measure`."""

    def note(self) -> str:
        """What the record should say beside the figure; may be empty."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Workload:
    """What a case runs, at one size. Pure: nothing is measured or allocated by making it.

    graph: builds the Graph; None for a case that runs none. settings: of the Runtime: policy,
    edges. step: what the sides need to know (rows, position, ...). bytes_moved: of one figure's
    unit of work. per: how many units one step of the graph is (layers of a chain). config, routing:
    of a model, for peers that build it themselves. parts: workloads that together do the same.
    """

    graph: Callable[[], Graph] | None
    bytes_moved: Callable[[], int]
    settings: dict[str, Any] = field(default_factory=dict)
    step: dict[str, int] = field(default_factory=dict)
    per: int = 1
    config: Any = None
    routing: str = "natural"
    parts: tuple[Workload, ...] = ()


@dataclass(frozen=True)
class Case:
    """One line of the table.

    make: the workload, at true size or (small=True) one for tests. ours: opens our side. peers: by
    name; each opens a side, or raises UnavailableError with the reason. goal: what the project
    asks, in the case's unit; prototype: what a bare prototype reached on an H200. beside: whether
    the sides fit the device together; if not, peers run after ours is closed.
    """

    name: str
    measures: str
    kind: Kind
    unit: str
    make: Callable[[bool], Workload]
    ours: Callable[[Machine, Workload, Progress], Side]
    peers: dict[str, Callable[[Machine, Workload], Side]] = field(default_factory=dict)
    goal: float | None = None
    prototype: float | None = None
    beside: bool = True
    rounds: int = 5

    def floor(self, machine: Machine, workload: Workload) -> float:
        """The bound that the machine's bandwidth sets, in the case's unit; 0 if there is none."""
        size_bytes = workload.bytes_moved()
        if size_bytes == 0:
            return 0.0
        if self.unit == "GB/s":
            return machine.bandwidth / 1e9
        us = machine.floor_us(size_bytes)
        return us if self.unit == "us" else 1e6 / us


@dataclass(frozen=True)
class Record:
    """One object of a results file."""

    case: str
    gpu: str
    driver: str
    commit: str
    date: str
    unit: str
    floor: float
    ours: float
    peers: dict[str, float]
    note: str

    def as_dict(self) -> dict[str, Any]:
        """As the file has it."""
        return asdict(self)


def ratio(unit: str, ours: float, other: float) -> float:
    """How many times `other` ours is as fast."""
    if not ours or not other:
        return 0.0
    return other / ours if unit == "us" else ours / other


def measure_case(
    case: Case,
    machine: Machine,
    progress: Progress,
    settings: dict[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Record:
    """Open all sides, measure, close. settings: of the Runtime, over the case's own. tell: called
    with one line at the begin of every phase.

    Raises: UnavailableError if our side cannot run here; what our side raises.
    """
    workload = case.make(False)
    workload.settings.update(settings or {})
    notes: list[str] = []
    phases = Phases(case.name, progress, tell)
    sides: dict[str, Side] = {}
    figures: dict[str, float] = {}
    try:
        ours = case.ours(machine, workload, phases)
        sides["ours"] = ours
        if not case.beside:
            figures |= _in_turn(sides, case, phases, notes)
            _close(sides)
        for name, opens in case.peers.items():
            phases(f"opening {name}", 0, 1)
            try:
                sides[name] = opens(machine, workload)
            except UnavailableError as error:
                notes.append(f"{name}: {error}")
        if sides:
            figures |= _in_turn(sides, case, phases, notes)
    finally:
        _close(sides)
    notes.append(phases.note())
    return _record(case, machine, workload, figures, notes)


# ---- helpers ---------------------------------------------------------------------------------
def _in_turn(
    sides: dict[str, Side], case: Case, progress: Progress, notes: list[str]
) -> dict[str, float]:
    """The median of every side, and what ours has to say while it is open. A peer that fails is
    noted and left out; ours is not.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(case.rounds):
        progress("measuring", turn, case.rounds)
        for name, side in list(sides.items()):
            try:
                figures[name].append(side.measure())
                side.rest()
            except Exception as error:
                if name == "ours":
                    raise
                notes.append(f"{name} failed: {_line(error)}")
                figures.pop(name)
                sides.pop(name).close()
    progress("measuring", case.rounds, case.rounds)
    if "ours" in sides:
        values = figures["ours"]
        if len(values) > 1:
            notes.append(f"ours {min(values):.4g} to {max(values):.4g} in {len(values)} rounds")
        notes.append(sides["ours"].note())
    return {name: statistics.median(values) for name, values in figures.items() if values}


def _close(sides: dict[str, Side]) -> None:
    while sides:
        sides.popitem()[1].close()


def _record(
    case: Case,
    machine: Machine,
    workload: Workload,
    figures: dict[str, float],
    notes: Sequence[str],
) -> Record:
    size_bytes = workload.bytes_moved()
    bound = f"floor = {size_bytes / 1e6:.6g} MB at {machine.bandwidth / 1e12:.4g} TB/s"
    parts = [case.measures, bound if size_bytes else "", *notes, machine.clocks]
    if case.prototype is not None:
        parts.append(f"prototype {case.prototype:g} on an H200")
    return Record(
        case=case.name,
        gpu=machine.name,
        driver=machine.driver,
        commit=machine.commit,
        date=machine.date,
        unit=case.unit,
        floor=_digits(case.floor(machine, workload)),
        ours=_digits(figures["ours"]),
        peers={name: _digits(v) for name, v in figures.items() if name != "ours"},
        note="; ".join(part for part in parts if part),
    )


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
