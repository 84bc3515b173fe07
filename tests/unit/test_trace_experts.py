"""Which experts steps chose, on a trace that can be counted by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gpurt.trace import StepSpans, Trace
from gpurt.trace.expect import check, known_figures, read_expectations
from gpurt.trace.experts import expert_choices
from gpurt.trace.perfetto import to_perfetto
from gpurt.trace.view import show, summary
from tests.helpers.expert_trace import expert_trace
from tests.helpers.hand_trace import hand_trace


def test_choices_are_counted_by_layer():
    first, second = expert_choices(expert_trace())
    assert (first.name, second.name) == ("layers[0]", "layers[1]")
    assert (first.experts, first.steps_counted) == (4, 3)
    assert first.steps == (2, 1, 1, 2)
    assert first.rows == (3, 1, 1, 4)
    assert (first.distinct, first.least, first.most) == (2.0, 1, 3)
    assert first.again == pytest.approx((1 / 3 + 0) / 2)
    assert second.again == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert (first.never, second.never) == (0, 1)
    assert second.hits == [(1, 6 / 9), (3, 2 / 9), (0, 1 / 9), (2, 0.0)]


def test_steps_apart_have_no_share_of_again():
    trace = expert_trace()
    apart = replace(trace, kept=StepSpans(trace.spans[trace.spans["step"] != 1]))
    assert [c.again for c in expert_choices(apart)] == [None, None]
    assert "again" not in summary(apart)["expert_choices"][0]


def test_a_step_that_lacks_spans_does_not_count():
    trace = expert_trace()
    kept = (trace.spans["step"] != 0) | (trace.spans["task"] != 2)
    lacks = replace(trace, kept=StepSpans(trace.spans[kept]))
    assert expert_choices(lacks)[0].steps == (1, 1, 1, 1)


def test_model_without_experts_has_no_choices():
    assert expert_choices(hand_trace(3)) == []
    assert summary(hand_trace(3))["expert_choices"] == []


def test_terminal_names_the_most_chosen():
    out = io.StringIO()
    show(expert_trace(), Console(file=out, width=120))
    line = next(row for row in out.getvalue().splitlines() if row.startswith(" layers[1] "))
    wanted = "layers[1] 4 2.0 1 3 58% 1 1 (67%) 3 (22%) 0 (11%) 2 (0%)"
    assert line.split() == wanted.split()


def test_file_keeps_them_and_expectations_name_them(tmp_path):
    expert_trace().save(tmp_path / "a.trace")
    trace = Trace.load(tmp_path / "a.trace")
    assert expert_choices(trace) == expert_choices(expert_trace())
    bounds = '{"expert_choices": {"layers[0]": {"distinct": {"max": 1.5}, "rows": {"3": 4}}}}'
    (tmp_path / "bounds.json").write_text(bounds)
    results = check(trace, read_expectations(tmp_path / "bounds.json"))
    assert [r.met for r in results] == [False, True]
    assert known_figures(trace)["expert_choices"]["layers[1]"]["steps"]["1"] == 3


def test_perfetto_has_the_expert_of_a_task_and_no_other():
    slices = [r["args"] for r in to_perfetto(expert_trace())["traceEvents"] if r["ph"] == "X"]
    named = [(a["expert"], a["expert_rows"]) for a in slices if "expert" in a and a["step"] == 0]
    assert named == 2 * [(0, 2), (3, 1)] + 2 * [(1, 3)]
    assert sum("expert" not in a for a in slices if a["step"] == 0) == 18 - 6
