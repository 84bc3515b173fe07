"""gpurt trace --expect: bounds in a file, exit code 1 when a figure leaves them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.errors import TraceError
from gpurt.trace import RequestInfo
from gpurt.trace.expect import check, known_figures, read_expectations
from tests.helpers.hand_trace import hand_trace

MET = {
    "steps": {"decode": {"median_us": {"max": 1.0}, "count": 3}},
    "split": {"wait": {"min": 0.30, "max": 0.31}},
    "operators": {"layers[*].up": {"run_us": {"min": 1.0}, "body": "matvec"}},
    "edges": {"layers[*].up -> advance": {"wait_us": {"max": 0.5}, "hop_us": {"max": 0.02}}},
    "critical_path": {"step_us": {"max": 1}, "parts_us": {"hop": {"max": 0.03}}},
    "dropped_spans": 0,
}


@pytest.fixture
def files(tmp_path):
    """(trace path, function that writes expectations and gives their path)."""
    hand_trace(3).save(tmp_path / "a.trace")

    def write(record):
        text = json.dumps(record).encode() if isinstance(record, dict) else record
        (tmp_path / "bounds.json").write_bytes(text)
        return str(tmp_path / "bounds.json")

    return str(tmp_path / "a.trace"), write


def test_figures_within_their_bounds_give_exit_code_0(capsys, files):
    trace, write = files
    assert main(["trace", trace, "--expect", write(MET)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "10 figures, none out of bounds"
    assert "OUT" not in out


@pytest.mark.parametrize(
    ("record", "figure"),
    [
        ({"steps": {"decode": {"median_us": {"max": 0.99}}}}, "steps / decode / median_us"),
        ({"split": {"wait": {"min": 0.31}}}, "split / wait"),
        ({"operators": {"layers[*].up": {"body": "noop"}}}, "operators / layers[*].up / body"),
        ({"dropped_spans": 1}, "dropped_spans"),
    ],
)
def test_a_figure_out_of_bounds_gives_exit_code_1_and_is_marked(capsys, files, record, figure):
    trace, write = files
    assert main(["trace", trace, "--expect", write(record)]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith(f"OUT  {figure}  ")
    assert lines[-1] == "1 figures, 1 out of bounds"
    assert captured.err == ""


def test_json_says_which_figures_were_met(capsys, files):
    trace, write = files
    bounds = {"workers": 2, "split": {"compute": {"min": 0.9}}}
    assert main(["trace", trace, "--expect", write(bounds), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["met"] is False
    assert [(f["figure"], f["met"]) for f in record["figures"]] == [
        ("workers", True),
        ("split / compute", False),
    ]
    assert record["figures"][1]["low"] == 0.9
    assert record["figures"][1]["value"] == pytest.approx(0.485)


@pytest.mark.parametrize(
    ("record", "start"),
    [
        ({"steps": {"prefill": {"count": 1}}}, "this trace has no figure steps / prefill"),
        ({"operators": {"up": {"run_us": 1}}}, "this trace has no figure operators / up"),
        ({"split": 1}, "split is no single figure"),
        ({"name": {"max": 3}}, "name is 'hand', which has no bounds"),
        ({"split": {"wait": {"max": "0.3"}}}, "split / wait has the bound '0.3'"),
        ({"split": {"wait": {"max": 1, "mean": 2}}}, "split / wait has ['mean'] beside"),
        ({"split": {"wait": {"min": 2, "max": 1}}}, "split / wait has min 2 over max 1"),
        ({"split": {"wait": None}}, "split / wait is null"),
        ({}, "the file expects nothing"),
        (b"[1]", "the file expects nothing"),
        (b"{", "no JSON"),
        (b"{\xff}", "no JSON: byte 1 is no UTF-8"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(capsys, files, record, start):
    trace, write = files
    assert main(["trace", trace, "--expect", write(record)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"gpurt: {start}")
    assert err.count("\n") == 1


def test_a_missing_file_is_said():
    with pytest.raises(TraceError, match=r"^cannot read the expectations: No such file"):
        read_expectations("/no/such.json")


def test_every_figure_of_the_json_can_be_expected(files):
    """What --json prints, fed back as expectations, is met exactly."""
    trace = hand_trace(
        3,
        task_dynamic=np.array([False, True, True, False]),
        requests=(RequestInfo(0, 0, 3, 5, 4, 3, (2, 1)),),
        ceiling_gbps=20.0,
    )
    figures = known_figures(trace)
    for listed in ("utilisation", "longest_waits", "slow_steps"):
        figures.pop(listed)
    figures["critical_path"].pop("tasks")
    _, write = files
    results = check(trace, read_expectations(write(figures)))
    assert len(results) > 40
    assert all(r.met for r in results)


def test_trace_without_a_command_shows_and_exports(capsys, files, tmp_path):
    trace, _ = files
    page = tmp_path / "a.html"
    assert main(["trace", trace, "--html", str(page)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"wrote {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert main(["trace", "--json", trace]) == 0
    assert json.loads(capsys.readouterr().out)["edges"][0]["consumer"] == "advance"
    assert main(["trace", "show", trace]) == 0
    assert "critical path" in capsys.readouterr().out
