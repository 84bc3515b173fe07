"""Where things are on a trace page in a Browser."""

from __future__ import annotations


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
