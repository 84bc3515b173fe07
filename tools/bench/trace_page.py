"""The trace page with many spans in headless Chromium: export, size, opening, frame times.

A frame's `draw` is the time of the page's own script. `period` is from one presented frame to the
next while the view moves on every frame, so it holds what the browser adds; no less than 16.7 ms.

    python -m tools.bench.trace_page [--spans 1000000] [--screenshots FOLDER] [TRACE ...]

With screenshots, TRACE (or the made one) is also kept as PNG: in whole, and zoomed to a chain.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpurt.trace import Trace
from gpurt.trace.page import write_html
from tests.helpers.browser import Browser, find_browser
from tests.helpers.made_trace import made_trace

FRAMES = 40
BOUND_MS = 50.0  # what the project asks of a frame when zoomed
SHOT_SIZE = (1360, 800)
MOVES = {
    "zoomed to a step, panning": "gpurt.pan(0.01 * gpurt.view.length)",
    "zoomed to a step, zooming": "gpurt.zoom(i % 2 ? 1.05 : 0.95)",
    "whole trace, zooming": "gpurt.zoom(i % 2 ? 0.97 : 1.03)",
    "whole trace, search shown": "gpurt.zoom(i % 2 ? 0.97 : 1.03)",
}
BEFORE = {
    "whole trace, zooming": "gpurt.show(...gpurt.view.whole)",
    "whole trace, search shown": "gpurt.setQuery('attention')",
}
MOVE = """(async () => {{
  const periods = [];
  gpurt.frames.length = 0;
  let last = 0;
  for (let i = 0; i < {frames}; ++i) {{
    {move};
    const now = await new Promise(requestAnimationFrame);
    if (last) periods.push(now - last);
    last = now;
  }}
  return [gpurt.frames, periods];
}})()"""


def measure(browser: Browser) -> dict[str, Any]:
    """Median and 95th percentile of draw and period of each move, in ms."""
    results = {}
    for name, move in MOVES.items():
        if name in BEFORE:
            browser.evaluate(f"void {BEFORE[name]}")
        browser.settle()
        draw, period = browser.evaluate(MOVE.format(frames=FRAMES, move=move))
        row = {
            "draw_ms": round(float(np.median(draw)), 1),
            "draw_ms_p95": round(float(np.percentile(draw, 95)), 1),
            "period_ms": round(float(np.median(period)), 1),
        }
        results[name] = row
        print(f"{name:<28} draw {row['draw_ms']} ms, p95 {row['draw_ms_p95']} ms;", end=" ")
        print(f"period {row['period_ms']} ms (asked for: {BOUND_MS:g} ms when zoomed)")
    return results


def opened(browser: Browser, trace: Trace, path: Path) -> dict[str, Any]:
    """Export and open; how long both took."""
    began = time.perf_counter()
    write_html(trace, path)
    exported = time.perf_counter()
    browser.open(path)
    ready = time.perf_counter()
    row = {
        "spans": len(trace.spans),
        "export_s": round(exported - began, 2),
        "page_mb": round(path.stat().st_size / 1e6, 1),
        "open_s": round(ready - exported, 2),
    }
    print(f"{row['spans']:,} spans: export {row['export_s']} s, {row['page_mb']} MB,", end=" ")
    print(f"open {row['open_s']} s")
    return row


def keep_screenshots(browser: Browser, trace: Trace, path: Path, folder: Path) -> None:
    """trace_page.png: a step and its critical path; trace_page_zoomed.png: a span and its chain."""
    write_html(trace, path)
    browser.resize(*SHOT_SIZE)
    browser.open(path)
    browser.evaluate("gpurt.setPath(true)")
    settle_and_keep(browser, folder / "trace_page.png")
    browser.evaluate(
        """(() => {
          gpurt.setPath(false);
          const { trace, view } = gpurt;
          const middle = (view.begin + view.end) / 2;
          const row = trace.steps.find((s) => s.end > middle);
          const path = gpurt.chains.criticalPath(row.step);
          const hops = (s, i) => i > path.length / 2 && trace.lane[s] !== trace.lane[path[i - 1]];
          const span = path.find(hops) ?? path[path.length >> 1];
          gpurt.select(span);
          const at = trace.spans.met[span];
          const room = (row.end - row.begin) / 20;
          gpurt.show(at - 1.25 * room, at + 0.75 * room);
          if (trace.lanes.length > 40) gpurt.growLanes(6);
          gpurt.select(span);
        })()"""
    )
    settle_and_keep(browser, folder / "trace_page_zoomed.png")


def settle_and_keep(browser: Browser, path: Path) -> None:
    """One screenshot, after everything that was asked for is drawn."""
    time.sleep(0.4)  # the figures of the view follow when it rests
    browser.settle()
    browser.screenshot(path)
    print(f"wrote {path}, {path.stat().st_size / 1e3:.0f} kB")


def main() -> int:
    """Run it. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--screenshots", type=Path)
    arguments = parser.parse_args()
    program = find_browser()
    if program is None:
        print("no Chromium here - at tools.bench.trace_page - apt-get install chromium")
        return 2
    one = made_trace(steps=1)
    steps = -(-arguments.spans // len(one.spans))
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        path = Path(folder) / "trace.html"
        shown = Trace.load(arguments.trace) if arguments.trace else made_trace(steps=6)
        if arguments.screenshots:
            keep_screenshots(browser, shown, path, arguments.screenshots)
            return 0
        trace = Trace.load(arguments.trace) if arguments.trace else made_trace(steps=steps)
        row = opened(browser, trace, path)
        frames = measure(browser)
    record = {"case": "trace-page", "unit": "ms", "floor": 16.7, **row, "frames": frames}
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
