"""The HTML page in headless Chromium: a real trace, a made one of a million spans, hostile ones.

The page and gpurt/trace/analysis.py must name the same tasks: who was late, what was critical.
"""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.trace import OperatorInfo, Trace, analysis
from gpurt.trace.page import to_html, write_html
from tests.helpers.drive import driven
from tests.helpers.expert_trace import CHOSEN, STEP_NS, expert_trace
from tests.helpers.hand_plan import Node, hand_plan, random_nodes
from tests.helpers.hand_trace import hand_trace
from tests.helpers.made_trace import made_trace
from tests.helpers.random_trace import random_trace
from tests.helpers.rank_trace import trace_of
from tests.helpers.timeline import place_of, selected, stage

pytestmark = pytest.mark.timeout(300)
MILLION_STEPS = 115


@pytest.fixture(scope="module")
def real_trace():
    """What the host executor traced of 30 steps of a random graph on three workers."""
    nodes = random_nodes(40, 5, lambda _, after: Node("noop", after))
    plan = hand_plan(nodes, 3, [("ready", 0)])
    with driven(plan) as driver:
        driver.run(max_tokens=30)
        raw = driver.executor.raw_trace()
    return Trace.from_raw(plan[0], raw)


@pytest.fixture(scope="module")
def million():
    trace = made_trace(steps=MILLION_STEPS)
    assert len(trace.spans) > 1_000_000
    return trace


@pytest.fixture(scope="module")
def million_page(million, tmp_path_factory):
    path = tmp_path_factory.mktemp("million") / "trace.html"
    write_html(million, path)
    return path


# ---- the page tells what the trace holds -----------------------------------------------------
def test_real_trace_opens_with_its_figures(page, real_trace):
    browser = page(real_trace)
    about = browser.text("#about")
    assert f"{len(real_trace.spans):,} spans" in about
    assert "3 workers" in about
    assert f"{len(real_trace.whole_steps)} whole steps" in about
    assert "noop" in browser.text("#range")


@pytest.fixture(params=["real", "ranks", 0, 1, 3])
def any_trace(request, real_trace):
    """The real one, of two ranks, or a random one; those of odd seeds have many equal times."""
    known = {"real": real_trace, "ranks": trace_of()}
    return known[request.param] if request.param in known else random_trace(request.param)


def test_page_and_terminal_name_the_same_critical_path(page, any_trace):
    browser = page(any_trace)
    script = "gpurt.chains.criticalPath({0}).map((s) => gpurt.trace.task[s])"
    for step in any_trace.whole_steps[:10].tolist():
        found = browser.evaluate(script.format(step - int(any_trace.spans["step"].min())))
        assert found == any_trace.critical_path(step)["task"].tolist()


def test_page_and_terminal_blame_the_same_task_for_the_same_reason(page, any_trace):
    browser = page(any_trace)
    first = int(any_trace.spans["step"].min())
    script = """((at, task) => {
      const blame = gpurt.chains.blame(gpurt.trace.find(at, task));
      return blame && [gpurt.trace.task[blame.late], blame.lateBy, blame.why];
    })"""
    for span in any_trace.spans_of(int(any_trace.whole_steps[1])):
        found = browser.evaluate(f"{script}({int(span['step']) - first}, {int(span['task'])})")
        known = analysis.blame(any_trace, span)
        if known.late_task < 0:
            assert found is None
        else:
            assert found == [known.late_task, round(1000 * known.late_us), known.why]


def test_range_of_a_step_splits_its_time_without_a_rest(page):
    trace = hand_trace(3)
    browser = page(trace)
    browser.evaluate("gpurt.showStep(gpurt.trace.stepRow.get(1))")
    browser.settle()
    split = browser.evaluate("gpurt.panel.stats.split.map((part) => part.ns)")
    #                compute stall wait idle
    assert split == [970, 300, 610, 120]
    compute, stall, wait, idle, tail = analysis.split(trace, [1]).sum(axis=0).tolist()
    assert split == [compute, stall, wait, idle + tail]
    assert sum(split) == 2 * 1000
    assert "compute 49 %" in browser.text("#range")


def test_charts_integrate_exactly_what_lanes_show(page):
    trace = made_trace(workers=7, layers=2, steps=3)
    browser = page(trace)
    columns, (begin, end) = 333, (20_000, 150_000)
    found = browser.evaluate(
        f"""(() => {{
          const c = gpurt.integrals.columns({begin}, {end}, {columns});
          return [c.run, c.wait, c.stall, c.bytes].map((values) => Array.from(values));
        }})()"""
    )
    edges = np.linspace(begin, end, columns + 1)
    known = np.zeros((4, columns))
    for span in trace.spans:
        claimed, met = int(span["begin_ns"]), int(span["begin_ns"] + span["wait_ns"])
        run = int(span["run_ns"])
        up_to = np.clip(edges, met, met + run)
        share = np.diff(up_to) / max(run, 1)
        size = int(trace.task_bytes[span["task"]])
        known[0] += share * run
        known[1] += np.diff(np.clip(edges, claimed, met))
        known[2] += share * int(span["stall_ns"])
        known[3] += share * size
    assert np.abs(np.array(found) - known).max() < 1e-3


def test_lanes_paint_runs_where_they_are(page):
    """One worker that runs [250, 500) of [0, 1000): the lane's pixels say so."""
    spans = hand_trace().spans[:1].copy()
    spans["run_ns"], spans["begin_ns"] = 250, 250
    browser = page(hand_trace(workers=1, spans=spans))
    browser.evaluate("gpurt.show(0, 1000)")
    browser.settle()
    row = browser.evaluate(
        """(() => {
          const { view, ratio, elements, ink } = gpurt;
          const y = Math.round((view.laneY(0) + 3) * ratio);
          const x = Math.round(view.gutter * ratio);
          const width = Math.round(view.plotWidth * ratio);
          const { data } = elements.base.getContext("2d").getImageData(x, y, width, 1);
          const first = [data[4], data[5], data[6]].join();
          return Array.from({ length: width }, (_, i) =>
            [data[4 * i], data[4 * i + 1], data[4 * i + 2]].join() === first ? 0 : 1);
        })()"""
    )
    painted = np.flatnonzero(row)
    begin, end = browser.evaluate("[gpurt.view.begin, gpurt.view.end]")
    scale = len(row) / (end - begin)
    assert painted[0] == pytest.approx((250 - begin) * scale, abs=1)
    assert painted[-1] == pytest.approx((500 - begin) * scale, abs=1)
    assert len(painted) == painted[-1] - painted[0] + 1


def test_names_of_a_hostile_graph_are_text(page):
    evil = '</script><img src=x onerror="document.title=1">'
    operators = [OperatorInfo(evil, "b", f"hand.{evil}", 0) for _ in range(3)]
    browser = page(hand_trace(3, name=evil, operators=tuple(operators)))
    assert evil in browser.text("#name")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_dropped_spans_are_announced(page):
    assert page(hand_trace(2, dropped=1234)).text("#dropped") == "1,234 spans dropped"


def test_damaged_data_is_said_in_words(browser, tmp_path):
    text = to_html(hand_trace()).replace('type="text/plain">', 'type="text/plain">AAAA')
    (tmp_path / "bad.html").write_text(text)
    browser.call("Page.navigate", {"url": (tmp_path / "bad.html").as_uri()})
    browser.wait("document.documentElement?.dataset.ready === 'failed'")
    assert browser.text(".failure").startswith("This trace cannot be shown")


# ---- a million spans -------------------------------------------------------------------------
def test_wheel_zooms_a_million_spans_around_the_mouse(page, browser, million_page):
    page(hand_trace())
    browser.open(million_page)
    left, top, width, height = stage(browser)
    x, y = round(left + 0.6 * width), round(top + 0.3 * height)
    at = f"gpurt.view.time({x - left})"
    before, length = browser.evaluate(at), browser.evaluate("gpurt.view.length")
    for _ in range(4):
        browser.wheel(x, y, -250)
    browser.settle()
    assert browser.evaluate(at) == pytest.approx(before, abs=1)
    assert browser.evaluate("gpurt.view.length") < length / 4
    browser.wheel(x, y, 400, shift=True)
    browser.settle()
    assert browser.evaluate(at) > before
    assert len(browser.evaluate("gpurt.frames")) > 4


def test_search_finds_all_of_a_million_and_walks_through_them(page, browser, million, million_page):
    page(hand_trace())
    browser.open(million_page)
    browser.press("/")
    browser.type("attention layer:3 step:40")
    browser.press("Enter")
    browser.settle()
    spans = million.spans[million.spans["step"] == 40]
    ops = [i for i, o in enumerate(million.operators) if o.path == "made.layers[3].attention"]
    wanted = spans[np.isin(spans["op"], ops)]
    assert browser.text("#found") == f"{len(wanted)} found"
    order = np.lexsort((wanted["worker"], wanted["begin_ns"]))
    assert selected(browser) == (40, int(wanted["task"][order[0]]))
    browser.press("Enter")
    assert selected(browser) == (40, int(wanted["task"][order[1]]))
    browser.evaluate("gpurt.setQuery('run>7')")
    assert browser.text("#found") == f"{int((million.spans['run_ns'] > 7000).sum()):,} found"
    browser.evaluate("gpurt.setQuery('nonsense:4')")
    assert "no filter reads" in browser.text("#found")


def test_keys_follow_the_chain_of_a_clicked_span(page, browser, million, million_page):
    page(hand_trace())
    browser.open(million_page)
    step, task = 57, int(np.flatnonzero(million.task_op == 33)[5])
    browser.evaluate(f"gpurt.showSpan(gpurt.trace.find({step}, {task}))")
    browser.settle()
    browser.click(*place_of(browser, step, task))
    assert selected(browser) == (step, task)
    spans = million.spans_of(step)
    span = spans[spans["task"] == task][0]
    late = analysis.late_producer(million, span)
    blame = analysis.blame(million, span)
    assert f"{late['task']} {blame.late_operator}" in browser.text("#selection .note")
    browser.press("[")
    browser.settle()
    assert selected(browser) == (step, int(late["task"]))
    browser.press("]")
    after = int(selected(browser)[1])
    assert int(late["task"]) in million.producers_of(after)
    chain = browser.evaluate("gpurt.chain.map((s) => gpurt.trace.task[s])")
    assert chain[-2:] == [int(late["task"]), after]


def test_critical_path_of_a_million_spans_is_drawn_and_listed(page, browser, million, million_page):
    page(hand_trace())
    browser.open(million_page)
    browser.press("c")
    browser.settle()
    assert browser.evaluate("document.getElementById('path').hidden") is False
    step = browser.evaluate("gpurt.panel.pathStep()")
    path = million.critical_path(step)
    found = browser.evaluate(f"gpurt.chains.criticalPath({step}).map((s) => gpurt.trace.task[s])")
    assert found == path["task"].tolist()
    shown = browser.evaluate("Array.from(gpurt.pathSet.id)")
    assert set(browser.evaluate(f"gpurt.chains.criticalPath({step})")) <= set(shown)
    assert "gate_up" in browser.text("#path")
    browser.press("c")
    assert browser.evaluate("document.getElementById('path').hidden") is True


def test_slowest_steps_are_listed_and_lead_to_what_was_slow(page):
    trace = hand_trace(5)
    late = (trace.spans["step"] == 3) & (trace.spans["task"] == 2)
    trace.spans["run_ns"][late] += 5000
    trace.spans["wait_ns"][(trace.spans["step"] == 3) & (trace.spans["task"] == 3)] += 5000
    trace.spans["begin_ns"][trace.spans["step"] > 3] += 5000
    trace.steps["end_ns"][3:] += 5000
    trace.steps["begin_ns"][4:] += 5000
    browser = page(trace)
    assert "+5.0 us running tasks; 5.0 us at 2 layers[0].up on worker 1" in browser.text("#slow")
    browser.evaluate("document.querySelector('#slow button').click()")
    browser.settle()
    assert selected(browser) == (3, 2)
    assert browser.evaluate("gpurt.range") == [3000, 9000]
    assert "Largest gaps, before" in browser.text("#path")
    first = browser.text("#path .edges li")
    assert first.startswith("3 advance")  # 20 ns after task 2 signalled, 10 before that
    assert first.endswith("20 ns")


def test_bandwidth_stands_beside_its_ceiling(page):
    assert "of 21.4 measured" in page(hand_trace(3, ceiling_gbps=21.4)).text("#range")


def test_lanes_are_named_by_rank_and_worker(page):
    browser = page(hand_trace(3, ranks=2))
    assert browser.evaluate("gpurt.trace.laneName(1)") == "rank 1 · 0"
    browser.evaluate("gpurt.setQuery('rank:1')")
    assert browser.text("#found") == "3 found"


def test_experts_of_the_range_are_counted_found_and_named(page):
    browser = page(expert_trace())
    rows = "gpurt.panel.experts.map((c) => [c.name, c.experts, c.distinct, c.rows])"
    first, second = browser.evaluate(rows)
    assert first == ["layers[0]", 4, 2, [3, 1, 1, 4]]
    assert second == ["layers[1]", 4, 2, [1, 6, 0, 2]]
    assert "2.0 of 4" in browser.text("#experts")
    browser.evaluate(f"gpurt.setRange([{STEP_NS}, {2 * STEP_NS}])")
    browser.settle()
    assert browser.evaluate(rows)[0][2:] == [len(CHOSEN[0][1]), [1, 1, 1, 0]]
    browser.press("Escape")
    browser.evaluate("document.querySelector('#experts tbody tr:last-child button').click()")
    assert browser.text("#found") == "6 found"  # expert 1 of layer 1: up and down, three steps
    browser.evaluate("gpurt.select(gpurt.trace.find(0, 1))")
    assert "expert 0, 2 rows" in browser.text("#selection")
    browser.evaluate("gpurt.select(gpurt.trace.find(0, 3))")  # a slot without an expert
    assert "expert 0" not in browser.text("#selection")


def test_page_without_experts_has_no_list_of_them(page):
    assert page(hand_trace(3)).evaluate("document.getElementById('experts').hidden") is True


def test_steps_of_every_size_are_whole(page):
    trace = hand_trace(2)
    spans = trace.spans[:4]
    sizes = {"task_op": np.tile(trace.task_op, 2), "task_bytes": np.tile(trace.task_bytes, 2)}
    rows = np.concatenate([[0, 0, 1, 2, 3], [3, 3, 3, 3]]), trace.waits[1]
    two = hand_trace(
        **sizes, spans=spans, waits=rows, task_variant=np.repeat([0, 1], 4), variant_rows=(1, 8)
    )
    assert "1 whole step" in page(two).text("#about")
