// Input: mouse, wheel and keys, turned into calls of the Viewer.

import { byId } from "./dom.js";
import { Tooltip } from "./tooltip.js";

const CLICK_PX = 4; // a press that moves less is a click
const WHEEL_ZOOM = 0.0018;
const LINE_PX = 32; // of a wheel that counts lines

/** Keys of the canvas and the page: [keys, what they do (for the help), action]. */
export function keyTable(viewer) {
  const flip = () => viewer.setTheme(viewer.theme === "dark" ? "light" : "dark");
  return [
    [["w", "+", "="], "zoom in", () => viewer.zoom(0.5, viewer.zoomPoint(), true)],
    [["s", "-"], "zoom out", () => viewer.zoom(2, viewer.zoomPoint(), true)],
    [["a", "ArrowLeft"], "left", () => viewer.panSmoothly(-0.25)],
    [["d", "ArrowRight"], "right", () => viewer.panSmoothly(0.25)],
    [["ArrowUp"], "lanes up", () => viewer.scrollLanes(-3 * viewer.view.laneHeight)],
    [["ArrowDown"], "lanes down", () => viewer.scrollLanes(3 * viewer.view.laneHeight)],
    [["{"], "lower lanes", () => viewer.growLanes(-2)],
    [["}"], "taller lanes", () => viewer.growLanes(2)],
    [["["], "to the task that was waited for", () => viewer.follow(-1)],
    [["]"], "to the task that waited", () => viewer.follow(1)],
    [[","], "the span before on this worker", () => viewer.step(-1)],
    [["."], "the next span on this worker", () => viewer.step(1)],
    [
      ["f"],
      "zoom to the selection",
      () => viewer.selected >= 0 && viewer.showSpan(viewer.selected),
    ],
    [["r"], "zoom to the step", () => viewer.showStepHere()],
    [["0", "Home"], "the whole trace", () => viewer.showAll()],
    [["c"], "critical path", () => viewer.setPath(!viewer.pathShown)],
    [["n"], "next match", () => viewer.nextMatch(1)],
    [["N"], "match before", () => viewer.nextMatch(-1)],
    [["/"], "search", () => byId("search").focus()],
    [["t"], "light or dark", flip],
    [["?"], "this help", () => byId("help").showModal()],
    [["Escape"], "clear: range, selection, search", () => viewer.clear()],
  ];
}

export class Input {
  constructor(viewer) {
    this.viewer = viewer;
    this.press = null;
    this.tooltip = new Tooltip(viewer, byId("tooltip"));
    const { overlay } = viewer.elements;
    overlay.addEventListener("pointerdown", (e) => this.down(e));
    overlay.addEventListener("pointermove", (e) => this.move(e));
    overlay.addEventListener("pointerup", (e) => this.up(e));
    overlay.addEventListener("pointerleave", () => this.leave());
    overlay.addEventListener("dblclick", (e) => this.doubleClick(e));
    overlay.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.keys = new Map();
    for (const [names, , action] of keyTable(viewer))
      for (const name of names) this.keys.set(name, action);
    addEventListener("keydown", (e) => this.key(e));
  }

  // ---- mouse ---------------------------------------------------------------------------------
  down(e) {
    const { view, elements } = this.viewer;
    if (e.button !== 0) return;
    const region = view.regionAt(e.offsetX, e.offsetY);
    const ranges = e.shiftKey || region === "ruler" || region === "charts";
    this.press = { x: e.offsetX, y: e.offsetY, lastX: e.offsetX, lastY: e.offsetY, region, ranges };
    this.press.time = view.time(e.offsetX);
    this.press.moved = false;
    elements.overlay.setPointerCapture(e.pointerId);
  }

  move(e) {
    const { viewer, press } = this;
    const { view } = viewer;
    viewer.pointer = { x: e.offsetX, y: e.offsetY };
    if (!press) return this.hover(e);
    const far = Math.hypot(e.offsetX - press.x, e.offsetY - press.y) >= CLICK_PX;
    press.moved ||= far;
    if (!press.moved) return undefined;
    this.tooltip.hide();
    if (press.ranges) {
      const ends = [press.time, view.time(e.offsetX)].sort((a, b) => a - b);
      viewer.setRange([Math.max(ends[0], view.whole[0]), Math.min(ends[1], view.whole[1])]);
    } else {
      viewer.elements.overlay.style.cursor = "grabbing";
      viewer.view.scrollBy(press.lastY - e.offsetY);
      viewer.pan((press.lastX - e.offsetX) * view.nsPerPixel);
    }
    [press.lastX, press.lastY] = [e.offsetX, e.offsetY];
    return undefined;
  }

  up(e) {
    const { viewer, press } = this;
    this.press = null;
    viewer.elements.overlay.style.cursor = "";
    if (!press || press.moved) return;
    if (press.region === "steps") {
      const row = viewer.trace.steps.find((s) => s.begin <= press.time && press.time < s.end);
      if (row) viewer.showStep(row);
    } else if (press.ranges) viewer.setRange(null);
    else viewer.select(this.spanAt(e));
  }

  hover(e) {
    const { viewer } = this;
    const span = this.spanAt(e);
    viewer.hover = span;
    viewer.elements.overlay.classList.toggle("on-span", span >= 0);
    if (span >= 0) this.tooltip.show(span, e.offsetX, e.offsetY);
    else this.tooltip.hide();
    viewer.invalidate("overlay");
  }

  leave() {
    this.viewer.pointer = null;
    this.viewer.hover = -1;
    this.tooltip.hide();
    this.viewer.invalidate("overlay");
  }

  doubleClick(e) {
    const span = this.spanAt(e);
    if (span >= 0) this.viewer.showSpan(span);
  }

  /** The span under the mouse, or within two pixels of it. */
  spanAt(e) {
    const { view, trace } = this.viewer;
    const lane = e.offsetX >= view.gutter ? view.laneAt(e.offsetY) : -1;
    if (lane < 0) return -1;
    for (const shift of [0, -1, 1, -2, 2]) {
      const span = trace.at(lane, view.time(e.offsetX + shift));
      if (span >= 0) return span;
    }
    return -1;
  }

  /** Over lane names: scrolls lanes. With Shift or sideways: pans. Else zooms. */
  wheel(e) {
    e.preventDefault();
    const { viewer } = this;
    const { view } = viewer;
    const scale = e.deltaMode === 1 ? LINE_PX : 1;
    const [dx, dy] = [e.deltaX * scale, e.deltaY * scale];
    this.tooltip.hide();
    if (e.altKey || view.regionAt(e.offsetX, e.offsetY) === "gutter") viewer.scrollLanes(dy);
    else if (e.shiftKey || Math.abs(dx) > Math.abs(dy)) viewer.pan((dx || dy) * view.nsPerPixel);
    else viewer.zoom(Math.exp(dy * WHEEL_ZOOM), view.time(Math.max(e.offsetX, view.gutter)));
  }

  // ---- keys ----------------------------------------------------------------------------------
  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey || byId("help").open) return;
    const inField = e.target.closest?.("input, textarea, select");
    if (inField) return;
    if ((e.key === "Enter" || e.key === " ") && e.target.closest?.("button, a, label")) return;
    const action = this.keys.get(e.key);
    if (!action) return;
    e.preventDefault();
    action();
  }
}
