"""A trace of nano, from the command line to the page in headless Chromium."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.trace import Trace
from gpurt.trace.spans import end_ns
from tests.helpers.browser import Browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.timeout(120)
QUESTION = "7 years ago Julia was twice as old as Max. Today Max is 15. What is Julia's age?"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The trace of one answer, and its page."""
    folder = tmp_path_factory.mktemp("nano")
    files = folder / "a.trace", folder / "a.html"
    options = ["--device", "host", "--workers", "2", "--trace", str(files[0])]
    assert main(["run", "--chat", "--prompt", QUESTION, *options]) == 0
    assert main(["trace", str(files[0]), "--html", str(files[1])]) == 0
    return files


def test_the_summary_names_what_ran_and_what_drafts_gained(files, capsys):
    assert main(["trace", str(files[0])]) == 0
    text = capsys.readouterr().out
    for words in (
        "muse_spark on host, 2 workers",
        "decode steps: 4,",
        "tokens a step in 4 steps",
        "draft.draft_walk",
        "expert_up",
    ):
        assert words in text


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_shows_it(files):
    trace = Trace.load(files[0])
    with Browser(PROGRAM) as browser:
        browser.open(files[1])
        about = browser.text("#about")
        assert f"{len(trace.spans):,} spans" in about
        assert f"{len(trace.whole_steps)} whole steps" in about
        step = int(trace.whole_steps[2])
        row = step - int(trace.spans["step"].min())
        browser.evaluate(f"gpurt.showStep(gpurt.trace.stepRow.get({step}))")
        browser.settle()
        browser.press("/")
        browser.type(f"draft_walk step:{step}")
        browser.press("Enter")
        browser.press("Escape")
        spans = trace.spans_of(step)
        walks = [i for i, o in enumerate(trace.operators) if o.path.endswith("draft_walk")]
        walk = spans[np.isin(spans["op"], walks)]
        selected = "[gpurt.trace.step[gpurt.selected], gpurt.trace.task[gpurt.selected]]"
        assert browser.evaluate(selected) == [row, int(walk["task"][0])]
        browser.press("[")  # to the task that it waited for: a producer, or its worker's last one
        browser.settle()
        is_earlier = (spans["worker"] == walk["worker"]) & (spans["begin_ns"] < walk["begin_ns"])
        own = spans[is_earlier]["task"][np.argmax(spans[is_earlier]["begin_ns"])]
        waited = spans[np.isin(spans["task"], [own, *trace.producers_of(int(walk["task"][0]))])]
        late = int(waited["task"][np.argmax(end_ns(waited))])
        assert browser.evaluate(selected) == [row, late]
        browser.press("c")
        browser.settle()
        assert "expert_up" in browser.text("#path")
        path = browser.evaluate(f"gpurt.chains.criticalPath({row}).map((s) => gpurt.trace.task[s])")
        assert path == trace.critical_path(step)["task"].tolist()
        assert (browser.errors, browser.requests) == ([], [])
