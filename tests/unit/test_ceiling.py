"""Measured bandwidth: kept by device, quoted by traces, never in the way."""

from __future__ import annotations

import numpy as np
import pytest

import gpurt
from gpurt.ceiling import FILE, recall, remember
from gpurt.cli import main
from gpurt.graph import Graph
from gpurt.runtime import Runtime
from gpurt.trace import Trace

DOUBLE = gpurt.body("double", lambda x, y: np.multiply(x, 2, out=y))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_newest_measurement_of_a_device_counts(folder):
    assert recall("cpu", 2) == 0
    remember("cpu", 2, 19.456)
    remember("cpu", 4, 30.0)
    remember("cpu", 2, 20.0)
    assert (recall("cpu", 2), recall("cpu", 4), recall("gpu", 2)) == (20.0, 30.0, 0)
    assert [p.name for p in folder.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["", "[1]", '{"cpu, 2 workers": "fast"}', "\xff"])
def test_a_damaged_file_counts_as_none(folder, text):
    (folder / FILE).write_text(text, encoding="latin-1")
    assert recall("cpu", 2) == 0


def test_a_folder_that_cannot_be_written_changes_nothing(monkeypatch):
    monkeypatch.setenv("GPURT_CACHE_DIR", "/proc/none")
    remember("cpu", 2, 20.0)
    assert recall("cpu", 2) == 0


def test_doctor_measures_and_a_trace_quotes(folder, monkeypatch, capsys):
    assert main(["doctor"]) == 0
    assert "gpurt doctor --bandwidth measures it" in capsys.readouterr().out
    monkeypatch.setattr("gpurt.bench.machine.read_bandwidth", lambda _: 12.5e9)
    assert main(["doctor", "--bandwidth"]) == 0
    assert "host 12.5 GB/s" in capsys.readouterr().out
    graph = Graph("one")
    x, y = graph.input("x", [4], "f32"), graph.output("y", [4], "f32")
    graph.task(DOUBLE, reads=[x], writes=[y])
    with Runtime("host") as runtime:
        request = runtime.submit(graph, inputs={"x": [1, 2, 3, 4]})
        request.result()
        request.trace().save(folder / "a.trace")
    assert Trace.load(folder / "a.trace").ceiling_gbps == 12.5
