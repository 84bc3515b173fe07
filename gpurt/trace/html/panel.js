// Panel: the selected span, the figures of the range or of the view, the critical path.

import { byId, fill, make } from "./dom.js";
import { bytes, count, duration, moment, percent, rate } from "./format.js";
import { showExperts } from "./experts.js";
import { largestGaps, showSlowSteps } from "./slow.js";
import { rangeStats } from "./stats.js";

const EDGES_SHOWN = 6;
const OPERATORS_SHOWN = 14;

export class Panel {
  constructor(viewer) {
    this.viewer = viewer;
    viewer.onChange((what) => {
      if (what === "select" || what === "mode") this.showSelection();
      if (what !== "theme") this.showRange();
      if (["path", "view", "select"].includes(what)) this.showPath();
    });
    this.showSelection();
    this.showRange();
    this.showPath();
    showSlowSteps(byId("slow"), viewer);
  }

  // ---- selection -----------------------------------------------------------------------------
  showSelection() {
    const { selected, trace } = this.viewer;
    const section = byId("selection");
    if (selected < 0) {
      fill(
        section,
        make("h2", {}, "Selection"),
        make("p", { class: "hint" }, "Click a span to follow its dependencies."),
      );
      return;
    }
    const op = trace.op(selected);
    const { begin, met, end } = trace.spans;
    const run = end[selected] - met[selected];
    fill(
      section,
      make("h2", {}, "Selection"),
      make("p", { class: "title" }, this.swatch(selected), op.name),
      make("p", { class: "sub" }, this.place(selected)),
      facts([
        ["run", duration(run)],
        ["wait before it", duration(met[selected] - begin[selected])],
        ["stall in it", duration(trace.spans.stall[selected])],
        ["starts at", moment(met[selected], 1)],
        ["bytes", this.byteText(selected, run)],
        ...(trace.expertRows[selected] ? [["ran", trace.expertText(selected)]] : []),
      ]),
      this.blameText(selected),
      this.shapes(selected),
      ...this.edgeLists(selected),
    );
    byId("announce").textContent = `${op.name}, ${this.place(selected)}, ${duration(run)}`;
  }

  place(span) {
    const { trace } = this.viewer;
    const step = `step ${trace.firstStep + trace.step[span]}`;
    const layer = `layer ${trace.taskLayer[trace.task[span]]}`;
    const lane = trace.laneName(trace.lane[span]);
    return [trace.op(span).body, `task ${trace.task[span]}`, step, lane, layer].join(" · ");
  }

  byteText(span, run) {
    const moved = this.viewer.trace.bytesOf(span);
    return moved ? `${bytes(moved)}, ${rate(moved, run)}` : "none counted";
  }

  blameText(span) {
    const { trace, chains } = this.viewer;
    const waited = trace.spans.met[span] - trace.spans.begin[span];
    if (waited <= 0) return null;
    const blame = chains.blame(span);
    if (!blame) return make("p", { class: "note" }, "Waited for the step to open.");
    return make(
      "p",
      { class: "note" },
      `Waited ${duration(waited)} for `,
      this.link(blame.late),
      `, late by ${duration(blame.lateBy)}: ${blame.why}.`,
    );
  }

  shapes(span) {
    const { trace } = this.viewer;
    const task = trace.task[span];
    const rows = [
      ...trace.regionsOf(trace.reads, task).map((text) => ["reads", text]),
      ...trace.regionsOf(trace.writes, task).map((text) => ["writes", text]),
    ];
    if (!rows.length) return null;
    const items = rows.map(([how, text]) => [
      make("dt", {}, how),
      make("dd", { class: "code" }, text),
    ]);
    return make("dl", { class: "shapes" }, items.flat());
  }

  edgeLists(span) {
    const { chains, trace, chain } = this.viewer;
    const task = trace.task[span];
    const before = chains.spansOf(chains.producers(task), span);
    const after = chains.spansOf(chains.consumers(task), span).reverse();
    const runs = chain.reduce((sum, s) => sum + trace.spans.end[s] - trace.spans.met[s], 0);
    return [
      this.edgeList("Edges in", "[", before, "late"),
      this.edgeList("Edges out", "]", after, ""),
      make("p", { class: "hint" }, `Chain: ${chain.length} tasks, ${duration(runs)} of runs.`),
    ];
  }

  edgeList(title, key, spans, firstMark) {
    const { trace } = this.viewer;
    const items = spans
      .slice(0, EDGES_SHOWN)
      .map((span, i) =>
        make(
          "li",
          {},
          this.link(span),
          make("span", { class: "where" }, trace.laneName(trace.lane[span])),
          i === 0 && firstMark && spans.length > 1
            ? make("span", { class: "mark" }, firstMark)
            : null,
        ),
      );
    const rest = spans.length - items.length;
    if (rest > 0) items.push(make("li", { class: "hint" }, `and ${count(rest)} more`));
    if (!items.length)
      items.push(make("li", { class: "hint" }, "none: the order on its worker is enough"));
    const head = make("h3", {}, `${title} `, make("span", { class: "count" }, count(spans.length)));
    if (spans.length) head.append(make("kbd", {}, key));
    return make("div", { class: "edges" }, head, make("ul", {}, items));
  }

  link(span) {
    const { trace } = this.viewer;
    const select = () => this.viewer.select(span, { reveal: true });
    const text = `${trace.task[span]} ${trace.op(span).name}`;
    return make("button", { class: "link", onclick: select }, text);
  }

  swatch(span) {
    const { colours } = this.viewer;
    return swatch(colours.css[colours.categoryOf(span)]);
  }

  // ---- range ---------------------------------------------------------------------------------
  showRange() {
    const { viewer } = this;
    const [begin, end] = viewer.range ?? [viewer.view.begin, viewer.view.end];
    const stats = rangeStats(viewer.trace, begin, end);
    this.stats = stats;
    const clear = make("button", { class: "link", onclick: () => viewer.setRange(null) }, "clear");
    fill(
      byId("range"),
      make("h2", {}, viewer.range ? "Range" : "View", viewer.range ? clear : null),
      facts([
        ["length", duration(stats.length)],
        ["spans", count(stats.spans)],
        ["whole steps", stepsText(stats)],
        ["bandwidth", this.bandwidthText(stats)],
      ]),
      splitBar(stats.split),
      this.legend(),
      this.operatorTable(stats),
    );
    this.experts = showExperts(byId("experts"), viewer, begin, end);
  }

  bandwidthText(stats) {
    const { ceiling } = this.viewer.trace;
    if (!stats.bytes) return "no bytes counted";
    const text = rate(stats.bytes, stats.length);
    if (!ceiling || !stats.length) return text;
    const share = percent(stats.bytes / stats.length / ceiling);
    return `${text}, ${share} of ${ceiling.toFixed(1)} measured`;
  }

  legend() {
    const { colours, trace } = this.viewer;
    if (colours.mode === "operator") return null;
    const bar = make("span", { class: "gradient", style: { background: gradient(colours.css) } });
    const ends = (low, high) => make("p", { class: "legend" }, low, bar, high);
    if (colours.mode === "stall") return ends("no stall", "all of the run");
    if (colours.mode === "layer") return ends("layer 0", `layer ${colours.entries.length - 1}`);
    const used = trace.requests.length ? colours.entries : colours.entries.slice(0, 1);
    const items = used
      .slice(0, 12)
      .map((entry, i) => make("span", {}, swatch(colours.css[i]), entry.name));
    return make("p", { class: "legend wrap" }, items);
  }

  operatorTable(stats) {
    const { viewer } = this;
    const { colours } = viewer;
    const total = Math.max(stats.run, 1);
    const rows = stats.operators.slice(0, OPERATORS_SHOWN).map((row) => {
      const find = () => viewer.setQuery(viewer.query === row.key ? "" : row.key);
      const colour = colours.mode === "operator" ? colours.css[colours.index.get(row.key)] : null;
      const button = make(
        "button",
        { class: "link", onclick: find, title: `find ${row.key}` },
        colour ? swatch(colour) : null,
        row.key,
      );
      return make(
        "tr",
        {},
        make("th", { scope: "row" }, button),
        make("td", {}, percent(row.run / total)),
        make("td", {}, duration(row.run)),
        make("td", {}, duration(row.wait)),
      );
    });
    const head = ["operator", "share", "run", "wait"].map((text) =>
      make("th", { scope: "col" }, text),
    );
    return make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
  }

  // ---- critical path -------------------------------------------------------------------------
  showPath() {
    const { viewer } = this;
    const section = byId("path");
    section.hidden = !viewer.pathShown;
    if (!viewer.pathShown) return;
    const step = this.pathStep();
    const head = make("h2", {}, "Critical path");
    if (step === null) {
      fill(section, head, make("p", { class: "hint" }, "Zoom to a step to see its path."));
      return;
    }
    const { trace, chains } = viewer;
    const path = chains.criticalPath(step);
    const times = runsAlong(trace, path);
    const runs = times.reduce((sum, time) => sum + time, 0);
    const { met, end } = trace.spans;
    const row = trace.stepRow.get(step);
    const length = end[path.at(-1)] - Math.min(met[path[0]], row.begin);
    const list = make("ul", { class: "path" }, pathGroups(viewer, path, times, length));
    fill(
      section,
      head,
      facts([
        ["step", `${trace.firstStep + step}`],
        ["tasks", count(path.length)],
        ["in runs", `${duration(runs)}, ${percent(runs / length)} of the step`],
        ["hops and waits", duration(length - runs)],
      ]),
      list,
      this.gapList(path),
    );
  }

  gapList(path) {
    const { trace } = this.viewer;
    const items = largestGaps(trace, path).map(([span, gap]) =>
      make(
        "li",
        {},
        this.link(span),
        make("span", { class: "where" }, trace.laneName(trace.lane[span])),
        make("span", { class: "figure" }, duration(gap)),
      ),
    );
    if (!items.length) return null;
    const head = make("h3", {}, "Largest gaps, before");
    return make("div", { class: "edges" }, head, make("ul", {}, items));
  }

  /** The step of the selection, or the one in the middle of the view. */
  pathStep() {
    const { viewer } = this;
    const { view, trace, selected } = viewer;
    if (selected >= 0) return trace.step[selected];
    const middle = (view.begin + view.end) / 2;
    const near = trace.steps.find((s) => s.end > middle && trace.stepRanges.has(s.step));
    return near && near.begin < view.end && !viewer.tooManyPaths ? near.step : null;
  }
}

/** What each task adds of its run: one that polls for its data runs beside those before it. */
function runsAlong(trace, path) {
  const { met, end } = trace.spans;
  let reached = 0;
  return path.map((span) => {
    const run = Math.max(0, end[span] - Math.max(met[span], reached));
    reached = Math.max(reached, end[span]);
    return run;
  });
}

function pathGroups(viewer, path, times, length) {
  const { trace, colours } = viewer;
  const { met, end } = trace.spans;
  const groups = new Map();
  for (const [index, span] of path.entries()) {
    const key = trace.op(span).key;
    const group = groups.get(key) ?? { tasks: 0, run: 0, longest: span };
    group.tasks += 1;
    group.run += times[index];
    if (end[span] - met[span] > end[group.longest] - met[group.longest]) group.longest = span;
    groups.set(key, group);
  }
  const sorted = [...groups].sort((a, b) => b[1].run - a[1].run).slice(0, OPERATORS_SHOWN);
  return sorted.map(([key, group]) => {
    const go = () => viewer.select(group.longest, { reveal: true });
    const colour = colours.css[colours.categoryOf(group.longest)];
    return make(
      "li",
      {},
      make(
        "button",
        { class: "link", onclick: go, title: "the longest of them" },
        swatch(colour),
        key,
      ),
      make("span", { class: "where" }, `${group.tasks} ×`),
      make("span", { class: "figure" }, percent(group.run / length)),
    );
  });
}

function facts(rows) {
  const items = rows.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  return make("dl", { class: "facts" }, items.flat());
}

function stepsText(stats) {
  if (!stats.steps) return "none";
  if (stats.steps === 1) return `1, ${duration(stats.median)}`;
  return `${count(stats.steps)}, median ${duration(stats.median)}, p99 ${duration(stats.p99)}`;
}

function splitBar(split) {
  const bar = make("div", { class: "split", role: "img", "aria-label": "time of the workers" });
  const names = make("p", { class: "legend wrap" });
  for (const { name, share } of split) {
    bar.append(make("span", { class: name, style: { width: `${100 * share}%` } }));
    names.append(
      make("span", {}, make("i", { class: `swatch ${name}` }), `${name} ${percent(share)}`),
    );
  }
  return make("div", {}, bar, names);
}

function swatch(colour) {
  return make("i", { class: "swatch", style: { background: colour } });
}

function gradient(colours) {
  return `linear-gradient(to right, ${colours.join(", ")})`;
}
