"""The HTML page in headless Chromium: links, mouse, keys, themes, colours."""

from __future__ import annotations

import json

import pytest

from tests.helpers.hand_trace import hand_trace
from tests.helpers.made_trace import made_trace
from tests.helpers.timeline import place_of, selected, stage

pytestmark = pytest.mark.timeout(300)


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
