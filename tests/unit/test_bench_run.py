"""A run of the bench: medians in turn, peers that are absent or fail, Ctrl-C, tables and files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpurt.bench import cases
from gpurt.bench.case import Case, Record, Workload, measure_case, ratio
from gpurt.bench.machine import Machine, UnavailableError, commit, read_bandwidth
from gpurt.bench.report import append_records, read_records, run_cases, table
from gpurt.body import Target
from gpurt.cli import main
from gpurt.errors import ConfigError, FaultError

MACHINE = Machine("host", "a CPU", Target("host", 2), "1.2", "3 GHz", "abc", "2026-01-01", 1e9)
KEYS = ["case", "gpu", "driver", "commit", "date", "unit", "floor", "ours", "peers", "note"]


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


class Fake:
    """A side with given figures. calls: of all sides of one case, in order."""

    def __init__(self, name: str, figures: list[Any], calls: list[str]) -> None:
        self.name, self.figures, self.calls = name, list(figures), calls

    def measure(self) -> float:
        self.calls.append(self.name)
        figure = self.figures.pop(0)
        if isinstance(figure, BaseException):
            raise figure
        return float(figure)

    def rest(self) -> None:
        self.calls.append(f"{self.name} rests")

    def note(self) -> str:
        return f"{self.name} says so"

    def close(self) -> None:
        self.calls.append(f"{self.name} closed")


class Closing(Fake):
    """One that can say nothing once it is closed."""

    def note(self) -> str:
        assert f"{self.name} closed" not in self.calls
        return super().note()


def fake_case(calls: list[str], ours: list[Any], **peers: Any) -> Case:
    def opener(name: str, figures: Any) -> Any:
        def opened(machine: Machine, workload: Workload) -> Fake:
            del machine, workload
            if isinstance(figures, BaseException):
                raise figures
            return Fake(name, figures, calls)

        return opened

    return Case(
        name="fake",
        measures="a fake",
        kind="host",
        unit="us",
        make=lambda small: Workload(None, lambda: 2000, step={"small": int(small)}),
        ours=lambda *_: Fake("ours", ours, calls),
        peers={name: opener(name, figures) for name, figures in peers.items()},
        prototype=3.5,
        rounds=3,
    )


def test_sides_are_measured_in_turn_and_medians_are_kept() -> None:
    calls: list[str] = []
    case = fake_case(calls, [4, 9, 5], peer=[8, 10, 7])
    record = measure_case(case, MACHINE, quiet)
    assert (record.ours, record.peers, record.floor) == (5.0, {"peer": 8.0}, 2.0)
    one_round = ["ours", "ours rests", "peer", "peer rests"]
    assert calls[:12] == one_round * 3
    assert sorted(calls[12:]) == ["ours closed", "peer closed"]
    note, seconds = record.note.split("; seconds: ")
    assert note == ("a fake; floor = 0.002 MB at 0.001 TB/s; ours 4 to 9 in 3 rounds; ours says so")
    assert seconds.endswith("; 3 GHz; prototype 3.5 on an H200")
    assert list(record.as_dict()) == KEYS


def test_a_peer_that_is_absent_or_fails_is_noted_and_does_not_stop_the_case() -> None:
    calls: list[str] = []
    case = fake_case(calls, [4, 4, 4], gone=UnavailableError("not here"), bad=[1, OSError("oh")])
    record = measure_case(case, MACHINE, quiet)
    assert record.peers == {}
    assert "gone: not here" in record.note
    assert "bad failed: oh" in record.note
    assert calls.count("bad closed") == 1
    assert calls.count("ours") == 3


def test_sides_that_do_not_fit_together_run_one_after_another() -> None:
    calls: list[str] = []
    case = replace(fake_case(calls, [4, 4, 4], peer=[8, 8, 8]), beside=False)
    case = replace(case, ours=lambda *_: Closing("ours", [4, 4, 4], calls))
    told: list[str] = []
    record = measure_case(case, MACHINE, quiet, tell=told.append)
    assert calls.index("ours closed") < calls.index("peer")
    assert "ours says so" in record.note
    assert [line.split(": ")[-1] for line in told] == ["measuring", "opening peer", "measuring"]


def test_our_own_failure_ends_the_case_and_closes_every_side() -> None:
    calls: list[str] = []
    case = fake_case(calls, [4, FaultError("stuck")], peer=[8, 8, 8])
    told: list[str] = []
    report = run_cases([case], {"host": lambda: MACHINE}, quiet, told.append)
    assert report.failed == {"fake": "stuck"}
    assert told == ["fake: FAILED: stuck"]
    assert {"ours closed", "peer closed"} <= set(calls)


def test_what_cannot_run_here_says_why_once_and_is_not_counted() -> None:
    opened: list[int] = []

    def no_gpu() -> Machine:
        opened.append(1)
        raise UnavailableError("no usable GPU: none")

    gpu = replace(fake_case([], [1, 1, 1]), kind="cuda", name="gpu")
    told: list[str] = []

    def later(*_: Any) -> Fake:
        raise UnavailableError("not built yet")

    host = replace(gpu, kind="host", name="later", ours=later)
    cases = [gpu, host, replace(gpu, name="gpu2")]
    openers = {"cuda": no_gpu, "host": lambda: MACHINE}
    report = run_cases(cases, openers, quiet, told.append)
    assert report.records == []
    assert told == [
        "gpu: not run: no usable GPU: none",
        "later: not run: not built yet",
        "gpu2: not run: no usable GPU: none",
    ]
    assert len(opened) == 1
    assert report.as_dict()["skipped"]["later"] == "not built yet"


def test_an_interrupted_run_keeps_what_was_measured() -> None:
    calls: list[str] = []
    first, second = fake_case([], [4, 4, 4]), fake_case(calls, [KeyboardInterrupt()])
    told: list[str] = []
    kept: list[Record] = []
    openers = {"host": lambda: MACHINE}
    report = run_cases([first, second, first], openers, quiet, told.append, keep=kept.append)
    assert (len(report.records), report.interrupted) == (1, True)
    assert kept == report.records
    assert told == ["interrupted: 1 of 3 cases were measured"]
    assert calls[-1] == "ours closed"


def test_a_ratio_above_one_says_that_ours_is_faster() -> None:
    assert ratio("us", 2.0, 3.0) == 1.5
    assert ratio("tok/s", 3.0, 2.0) == 1.5
    assert ratio("GB/s", 0.0, 2.0) == 0.0


def test_the_table_shows_share_prototype_and_every_peer() -> None:
    case = fake_case([], [])
    record = Record("fake", "g", "d", "c", "t", "us", 2.0, 2.5, {"one": 5.0, "two": 2.0}, "")
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table([record], [case]))
    rows = console.export_text().splitlines()
    assert rows[1].split() == ["fake", "us", "2", "-", "3.5", "2.5", "80%", "one", "5", "2.00x"]
    assert rows[2].split() == ["two", "2", "0.80x"]


def test_results_files_grow_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    record = Record("fake", "g", "d", "c", "t", "us", 2.0, 2.5, {"one": 5.0}, "n")
    append_records(path, [record])
    append_records(path, [record])
    known = read_records(path)
    assert known == [record.as_dict()] * 2
    assert list(known[0]) == KEYS
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"^no list of results"):
        append_records(path, [record])
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"^cannot read results"):
        read_records(path)
    with pytest.raises(ConfigError, match=r"^cannot write results"):
        append_records(tmp_path / "none" / "x.json", [record])


def test_results_of_the_project_have_the_form_that_the_bench_writes() -> None:
    folder = Path(__file__).resolve().parents[2] / "tools" / "bench" / "results"
    for path in folder.glob("*.json"):
        for entry in read_records(path):
            assert list(entry) == KEYS, path


def test_the_machine_is_named_by_commit_and_bandwidth() -> None:
    assert commit()
    assert read_bandwidth(2, 1 << 20) > 1e8


# ---- command line ----------------------------------------------------------------------------
def test_the_command_lists_cases_and_refuses_unknown_ones(capsys: Any) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("chain-134-r1 ") for line in listed)
    assert main(["bench", "--case", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("gpurt: no case is named nothing - at --case")


def test_a_case_that_cannot_run_is_no_failure_and_the_last_line_is_json(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def no_gpu() -> Machine:
        raise UnavailableError("no usable GPU: none")

    monkeypatch.setattr("gpurt.bench.machine.cuda_machine", no_gpu)
    out = tmp_path / "out.json"
    assert main(["bench", "--case", "draft-slice", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("draft-slice: not run: ")
    last = json.loads(captured.out.splitlines()[-1])
    assert (last["results"], list(last["skipped"])) == ([], ["draft-slice"])
    assert not out.exists(), "nothing was measured"


def test_a_host_case_is_written_as_soon_as_it_is_measured(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    out = tmp_path / "out.json"
    found = cases.find(["smollm2-host"])[0]
    workload = found.make(True)
    small = replace(found, make=lambda _: workload, rounds=1)
    monkeypatch.setattr("gpurt.bench.cases.all_cases", lambda: [small])
    monkeypatch.setattr("gpurt.bench.machine.read_bandwidth", lambda _: 1e9)
    assert main(["bench", "--out", str(out), "--no-peers", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (written,) = read_records(out)
    assert json.loads(lines[-1])["results"] == [written]
    assert (written["case"], written["peers"], written["unit"]) == ("smollm2-host", {}, "tok/s")
    assert written["ours"] > 0
    assert written["floor"] > 0
    assert lines[1].startswith("smollm2-host")


def test_a_results_file_of_another_kind_is_refused_before_anything_runs(
    capsys: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text("{}")
    assert main(["bench", "--case", "smollm2-host", "--out", str(out)]) == 2
    assert "no list of results" in capsys.readouterr().err
