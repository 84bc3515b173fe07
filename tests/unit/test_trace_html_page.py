"""The HTML page in headless Chromium: a real trace, a made one of a million spans, hostile ones.

The page and gpurt/trace/analysis.py must name the same tasks: who was late, what was critical.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpurt.trace import OperatorInfo, Trace, analysis
from gpurt.trace.page import to_html, write_html
from tests.helpers.browser import Browser, find_browser
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan, random_nodes
from tests.helpers.hand_trace import hand_trace
from tests.helpers.made_trace import made_trace
from tests.helpers.random_trace import random_trace

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]
MILLION_STEPS = 115


@pytest.fixture(scope="module")
def browser():
    with Browser(PROGRAM) as opened:
        yield opened


@pytest.fixture
def page(browser, tmp_path):
    """Opens a trace; at the end the page must have thrown nothing and asked for nothing."""

    def open_page(trace, fragment=""):
        write_html(trace, tmp_path / "trace.html")
        browser.open(tmp_path / "trace.html", fragment)
        return browser

    browser.errors.clear()
    browser.requests.clear()
    browser.scheme("light")
    yield open_page
    assert browser.errors == []
    assert browser.requests == []


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


def stage(browser):
    """Where the timeline lies on the page: x, y, width, height."""
    script = "(({x, y, width, height}) => [x, y, width, height])"
    return browser.evaluate(f"{script}(gpurt.elements.stage.getBoundingClientRect())")


def place_of(browser, step, task):
    """Page coordinates of the middle of a task's run."""
    script = f"""(() => {{
      const {{ trace, view }} = gpurt;
      const span = trace.find({step} - trace.firstStep, {task});
      const middle = (trace.spans.met[span] + trace.spans.end[span]) / 2;
      return [view.x(middle), view.laneY(trace.lane[span]) + view.laneHeight / 2];
    }})()"""
    x, y = browser.evaluate(script)
    left, top, *_ = stage(browser)
    return left + x, top + y


def selected(browser):
    """(step, task) of the selection."""
    script = "[gpurt.trace.firstStep + gpurt.trace.step[gpurt.selected]"
    return tuple(browser.evaluate(f"{script}, gpurt.trace.task[gpurt.selected]]"))


# ---- the page tells what the trace holds -----------------------------------------------------
def test_real_trace_opens_with_its_figures(page, real_trace):
    browser = page(real_trace)
    about = browser.text("#about")
    assert f"{len(real_trace.spans):,} spans" in about
    assert "3 workers" in about
    assert f"{len(real_trace.whole_steps)} whole steps" in about
    assert "noop" in browser.text("#range")


@pytest.fixture(params=["real", 0, 1, 3])
def any_trace(request, real_trace):
    """The real one, or a random one; those of odd seeds have many equal times."""
    return real_trace if request.param == "real" else random_trace(request.param)


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


# ---- controls --------------------------------------------------------------------------------
def test_a_link_opens_the_same_view(page):
    trace = made_trace(workers=6, layers=3, steps=6)
    browser = page(trace)
    browser.evaluate(
        """(() => {
          gpurt.show(100000, 180000); gpurt.select(gpurt.trace.find(3, 9));
          gpurt.setRange([110000, 120000]); gpurt.setQuery("matvec run>2.5");
          gpurt.setMode("layer"); gpurt.setPath(true); gpurt.setTheme("dark");
          gpurt.links.writeNow();
        })()"""
    )
    state = """[Math.round(gpurt.view.begin), Math.round(gpurt.view.end), gpurt.range, gpurt.query,
        gpurt.colours.mode, gpurt.pathShown, gpurt.theme, gpurt.selected, gpurt.matches.size]"""
    before, fragment = browser.evaluate(state), browser.evaluate("location.hash")
    assert "span=3.9" in fragment
    assert before == page(trace, fragment).evaluate(state)


def test_dragging_on_the_ruler_marks_a_range_and_escape_clears_it(page):
    browser = page(made_trace(workers=6, layers=3, steps=6))
    left, top, width, _ = stage(browser)
    browser.drag((left + 0.4 * width, top + 10), (left + 0.7 * width, top + 12))
    begin, end = browser.evaluate("gpurt.range")
    known = browser.evaluate(f"[gpurt.view.time({0.4 * width}), gpurt.view.time({0.7 * width})]")
    assert [begin, end] == pytest.approx(known, rel=1e-3)
    assert browser.text("#range h2").startswith("Range")
    browser.press("Escape")
    assert browser.evaluate("gpurt.range") is None
    assert browser.text("#range h2").startswith("View")


def test_dragging_the_lanes_moves_the_view_and_selects_nothing(page):
    browser = page(made_trace(workers=6, layers=3, steps=6))
    left, top, width, _ = stage(browser)
    begin = browser.evaluate("gpurt.view.begin")
    browser.drag((left + 0.7 * width, top + 80), (left + 0.3 * width, top + 80))
    assert browser.evaluate("gpurt.view.begin") > begin
    assert browser.evaluate("gpurt.selected") == -1


def test_keys_do_what_the_help_says(page):
    browser = page(made_trace(workers=6, layers=3, steps=6))
    length = browser.evaluate("gpurt.view.length")
    browser.press("w")
    browser.settle()
    assert browser.evaluate("gpurt.view.length") == pytest.approx(length / 2)
    begin = browser.evaluate("gpurt.view.begin")
    browser.press("ArrowRight")
    browser.settle()
    assert browser.evaluate("gpurt.view.begin") == pytest.approx(begin + length / 8)
    browser.press("0")
    browser.settle()
    assert browser.evaluate("gpurt.view.length === gpurt.view.wholeLength")
    browser.press("t")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.press("?")
    assert browser.evaluate("document.getElementById('help').open")
    keys = browser.text("#keys")
    assert "critical path" in keys
    browser.press("Escape")
    browser.wait("!document.getElementById('help').open")


def test_a_span_can_be_reached_by_keyboard_and_is_announced(page):
    browser = page(made_trace(workers=6, layers=3, steps=6))
    browser.press("/")
    browser.type("advance step:2")
    browser.press("Enter")
    browser.press("Escape")  # leaves the field, and the search
    assert browser.evaluate("document.activeElement.id") == "overlay"
    task = len(made_trace(workers=6, layers=3, steps=6).task_op) - 1
    assert selected(browser) == (2, task)
    assert browser.text("#announce").startswith("advance, ")
    browser.press(",")
    assert selected(browser) != (2, task)


def test_every_control_has_a_name_and_takes_the_focus(page):
    browser = page(hand_trace(3))
    unnamed = browser.evaluate(
        """[...document.querySelectorAll("button, input, canvas[tabindex]")]
          .filter((e) => !(e.innerText?.trim() || e.ariaLabel || e.labels?.[0]?.innerText))
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    reached = set()
    for _ in range(16):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"search", "mode", "path-toggle", "theme", "help-toggle", "overlay"} <= reached


def test_system_theme_is_followed_until_one_is_chosen(page):
    browser = page(hand_trace(3))
    theme = "document.documentElement.dataset.theme"
    assert browser.evaluate(theme) == "light"
    browser.scheme("dark")
    browser.wait(f"{theme} === 'dark'")
    browser.evaluate("gpurt.setTheme('light')")
    browser.scheme("light")
    browser.scheme("dark")
    assert browser.evaluate(theme) == "light"


def test_hover_shows_shapes_bytes_and_edges(page):
    browser = page(made_trace(workers=6, layers=3, steps=6))
    task = 6
    browser.evaluate(f"gpurt.showSpan(gpurt.trace.find(3, {task}))")
    browser.settle()
    browser.mouse("mouseMoved", *place_of(browser, 3, task))
    text = browser.wait("!document.getElementById('tooltip').hidden") and browser.text("#tooltip")
    assert "layers[0].qkv" in text
    assert "62.0 kB" in text
    assert "writes layers[0].qkv.y[0:16, 0:576] f32" in text
    assert "1 edges in, 6 out" in text


@pytest.mark.parametrize("mode", ["operator", "layer", "request", "stall"])
def test_each_colour_mode_paints_its_own_picture(page, mode):
    browser = page(made_trace(workers=6, layers=3, steps=6), f"#colour={mode}")
    script = """(() => {
      const pixels = new Set(gpurt.painter.pixels);
      return [gpurt.colours.packed.filter((c) => pixels.has(c)).length, gpurt.colours.mode];
    })()"""
    painted, found = browser.evaluate(script)
    assert found == mode
    assert painted >= {"operator": 5, "layer": 3, "request": 1, "stall": 3}[mode]
    assert json.loads(browser.evaluate("JSON.stringify(gpurt.colours.entries.length)")) > 1
