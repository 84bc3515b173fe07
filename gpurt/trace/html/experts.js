// Experts: which of them the steps of a range chose, layer by layer, how many and how often.

import { fill, make } from "./dom.js";
import { count, percent } from "./format.js";

const NAMED = 3; // of the most chosen

/**
 * A row a place (a layer's experts): {name, experts, steps, distinct, rows}. distinct: experts a
 * step, a mean; rows: by expert, how many rows chose it. A span counts where its run begins.
 */
export function expertChoices(trace, begin, end) {
  const places = new Map();
  for (const [op, name] of trace.expertPlaces)
    places.set(op, { name, experts: trace.operators[op].experts, seen: new Map() });
  const { spans, expert, expertRows, step, task, taskOp } = trace;
  for (let lane = 0; lane < trace.lanes.length && places.size; ++lane) {
    const high = spans.offsets[lane + 1];
    for (let i = spans.firstAfter(lane, begin); i < high && spans.begin[i] < end; ++i) {
      const place = expertRows[i] ? places.get(taskOp[task[i]]) : undefined;
      if (!place || spans.met[i] < begin || spans.met[i] >= end) continue;
      if (!place.seen.has(step[i])) place.seen.set(step[i], new Map());
      place.seen.get(step[i]).set(expert[i] - 1, expertRows[i]); // every tile of it says the same
    }
  }
  return [...places.values()].filter((place) => place.seen.size).map(summary);
}

/** Fills the section for a range of time; hidden if it has no task of an expert. Returns: rows. */
export function showExperts(section, viewer, begin, end) {
  const choices = expertChoices(viewer.trace, begin, end);
  section.hidden = !choices.length;
  const most = Math.max(...choices.flatMap((choice) => choice.rows));
  const rows = choices.map((choice) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, choice.name),
      make("td", {}, `${choice.distinct.toFixed(1)} of ${choice.experts}`),
      make("td", {}, strip(choice, most)),
      make("td", {}, named(viewer, choice)),
    ),
  );
  const head = ["layer", "a step", "rows by expert", "most rows"].map((text) =>
    make("th", { scope: "col" }, text),
  );
  fill(
    section,
    make("h2", {}, "Experts"),
    make(
      "table",
      { class: "experts" },
      make("thead", {}, make("tr", {}, head)),
      make("tbody", {}, rows),
    ),
  );
  return choices;
}

function summary({ name, experts, seen }) {
  let [pairs, top] = [0, experts];
  for (const chosen of seen.values()) {
    pairs += chosen.size;
    top = Math.max(top, ...[...chosen.keys()].map((expert) => expert + 1));
  }
  const rows = new Array(top).fill(0);
  for (const chosen of seen.values())
    for (const [expert, users] of chosen) rows[expert] += users;
  return { name, experts: top, steps: seen.size, distinct: pairs / seen.size, rows };
}

/** A cell an expert, the darker the more rows chose it. */
function strip({ name, rows }, most) {
  const cell = (users, expert) => {
    const title = `expert ${expert}: ${count(users)} rows`;
    return make("i", { title, style: { opacity: users / most } });
  };
  const label = `${name}: rows by expert`;
  return make("span", { class: "strip", role: "img", "aria-label": label }, rows.map(cell));
}

/** The most chosen, each a button that finds its tasks. */
function named(viewer, { name, rows }) {
  const all = rows.reduce((sum, users) => sum + users, 0);
  const order = rows.map((_, expert) => expert).sort((a, b) => rows[b] - rows[a] || a - b);
  return order.slice(0, NAMED).map((expert) => {
    const query = `${name.toLowerCase()}. expert:${expert}`;
    const find = () => viewer.setQuery(viewer.query === query ? "" : query);
    const title = `find expert ${expert}: ${percent(rows[expert] / all)} of all choices`;
    return make("button", { class: "link", onclick: find, title }, `${expert}`);
  });
}
