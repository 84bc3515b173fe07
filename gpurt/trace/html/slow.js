// Slow steps: the list of them, and the largest gaps of a step's critical path. What was slow in a
// step was found by gpurt (trace/slow.py); the page shows it and leads to it.

import { fill, make } from "./dom.js";
import { duration } from "./format.js";

const GAPS_SHOWN = 3;

/** The slowest steps, each a button that shows it with its critical path and the task to blame. */
export function showSlowSteps(section, viewer) {
  const { slowSteps } = viewer.trace;
  section.hidden = !slowSteps.length;
  const items = slowSteps.map((slow) => {
    const name = `step ${viewer.trace.firstStep + slow.step}`;
    const head = slow.kept
      ? make("button", { class: "link", onclick: () => goTo(viewer, slow) }, name)
      : make("span", {}, name);
    return make(
      "li",
      { class: "slow" },
      head,
      make("span", { class: "where" }, rowsText(slow.rows)),
      make("span", { class: "figure" }, `${duration(slow.length)}, ${slow.times.toFixed(1)} ×`),
      make("p", { class: "hint" }, slow.why),
    );
  });
  fill(section, make("h2", {}, "Slowest steps"), make("ul", {}, items));
}

/** What a critical path waited for most: [span, the time before it that nothing of it ran]. */
export function largestGaps(trace, path) {
  const { met, end } = trace.spans;
  let reached = end[path[0]];
  const gaps = path.slice(1).map((span) => {
    const gap = Math.max(0, met[span] - reached);
    reached = Math.max(reached, end[span]);
    return [span, gap];
  });
  return gaps
    .filter(([, gap]) => gap > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, GAPS_SHOWN);
}

function goTo(viewer, slow) {
  const { trace } = viewer;
  viewer.setPath(true);
  viewer.select(slow.task < 0 ? -1 : trace.find(slow.step, slow.task));
  viewer.showStep(trace.stepRow.get(slow.step));
}

function rowsText(rows) {
  if (!rows) return "";
  return rows === 1 ? "1 row" : `${rows} rows`;
}
