// Tooltip: what a span under the mouse is, in a few lines.

import { make } from "./dom.js";
import { bytes, count, duration, rate } from "./format.js";

export class Tooltip {
  constructor(viewer, element) {
    this.viewer = viewer;
    this.element = element;
  }

  show(span, x, y) {
    const { viewer, element } = this;
    if (span !== this.span) element.replaceChildren(...this.lines(span));
    this.span = span;
    element.hidden = false;
    const { clientWidth, clientHeight } = viewer.elements.stage;
    const [width, height] = [element.offsetWidth, element.offsetHeight];
    const left = x + 16 + width > clientWidth ? x - width - 12 : x + 16;
    const top = Math.min(Math.max(4, y + 16), clientHeight - height - 4);
    element.style.transform = `translate(${Math.max(4, left)}px, ${top}px)`;
  }

  hide() {
    this.element.hidden = true;
  }

  lines(span) {
    const { trace, chains } = this.viewer;
    const { begin, met, end, stall } = trace.spans;
    const task = trace.task[span];
    const run = end[span] - met[span];
    const moved = trace.bytesOf(span);
    const parts = [`run ${duration(run)}`, `wait ${duration(met[span] - begin[span])}`];
    if (stall[span]) parts.push(`stall ${duration(stall[span])}`);
    if (trace.expertRows[span]) parts.unshift(trace.expertText(span));
    if (moved) parts.push(`${bytes(moved)}, ${rate(moved, run)}`);
    const edges = `${count(chains.producers(task).length)} edges in, ${count(
      chains.consumers(task).length,
    )} out`;
    const shapes = trace.regionsOf(trace.writes, task).slice(0, 2);
    const place = `task ${task} · step ${trace.firstStep + trace.step[span]} · ${trace.laneName(
      trace.lane[span],
    )}`;
    return [
      make("strong", {}, trace.op(span).name),
      make("div", {}, place),
      make("div", { class: "figures" }, parts.join(" · ")),
      ...shapes.map((text) => make("div", { class: "code" }, `writes ${text}`)),
      make("div", { class: "muted" }, edges),
    ];
  }
}
