"""The trace page in headless Chromium; tests that ask for it are skipped where there is none."""

from __future__ import annotations

import pytest

from gpurt.trace.page import write_html
from tests.helpers.browser import Browser, find_browser


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(program) as opened:
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
