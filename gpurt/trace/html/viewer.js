// Viewer: the state of the page and all that changes it. A change asks for a frame; a frame draws
// what changed, at most once per screen refresh.

import { Chains } from "./chain.js";
import { columnCount, drawCharts, Integrals } from "./charts.js";
import { Colours, INKS } from "./colour.js";
import { drawGutter, drawLabels, drawPaths, drawRuler, drawSteps } from "./frame.js";
import { LanePainter } from "./lanes.js";
import { Links } from "./links.js";
import { drawOverlay } from "./overlay.js";
import { Overview } from "./overview.js";
import { search } from "./search.js";
import { View } from "./view.js";

const FADED = 0.26;
const PATH_STEPS_MAX = 400; // more steps than this in view: no paths are drawn
const PATH_BUDGET_MS = 10; // a frame spends no more on finding paths
const ANIMATION_MS = 170;
const QUIET_MS = 140; // after this, figures of the view are computed anew

export class Viewer {
  constructor(trace, elements) {
    this.trace = trace;
    this.elements = elements;
    this.chains = new Chains(trace);
    this.integrals = new Integrals(trace);
    this.painter = new LanePainter();
    this.view = new View(trace);
    this.listeners = [];
    this.selected = -1;
    this.chain = [];
    this.hover = -1;
    this.pointer = null;
    this.range = null;
    this.query = "";
    this.problem = "";
    this.matches = null;
    this.pathShown = false;
    this.pathSet = null;
    this.pathKey = "";
    this.themeChosen = false;
    this.frames = []; // milliseconds of the last frames, for the benchmark
    this.dirty = { base: false, overlay: false };
    this.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    this.setMode("operator");
    this.overview = new Overview(this, elements.overview);
    this.links = new Links(this);
    new ResizeObserver(() => this.resize()).observe(elements.stage);
    this.resize();
  }

  get ink() {
    return INKS[this.theme];
  }

  /** `listener(what)` hears "select", "view", "range", "query", "mode", "path", "theme". */
  onChange(listener) {
    this.listeners.push(listener);
  }

  changed(what) {
    for (const listener of this.listeners) listener(what);
    if (this.links) this.links.write();
  }

  // ---- what is seen --------------------------------------------------------------------------
  resize() {
    const { stage, base, overlay } = this.elements;
    this.ratio = devicePixelRatio || 1;
    const [width, height] = [stage.clientWidth, stage.clientHeight];
    for (const canvas of [base, overlay]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    this.view.resize(width, height);
    this.fitPainter();
    this.viewChanged();
  }

  fitPainter() {
    const { view, ratio } = this;
    this.painter.resize(Math.round(view.plotWidth * ratio), Math.round(view.lanesHeight * ratio));
  }

  viewChanged() {
    this.invalidate("base");
    clearTimeout(this.quiet);
    this.quiet = setTimeout(() => this.changed("view"), QUIET_MS);
  }

  show(begin, end) {
    this.animation = null;
    this.view.show(begin, end);
    this.viewChanged();
  }

  /** Moves there smoothly, unless the user asked for no motion. */
  moveTo(begin, end) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return this.show(begin, end);
    const { view } = this;
    const from = [view.begin, view.end];
    view.show(begin, end);
    const to = [view.begin, view.end];
    [view.begin, view.end] = from;
    this.animation = { from, to, since: performance.now() };
    return this.viewChanged();
  }

  zoom(factor, at, smooth = false) {
    const target = this.view.zoomed(factor, at ?? (this.view.begin + this.view.end) / 2);
    if (smooth) this.moveTo(...target);
    else this.show(...target);
  }

  pan(ns) {
    this.animation = null;
    this.view.pan(ns);
    this.viewChanged();
  }

  panSmoothly(share) {
    const { begin, end, length } = this.view;
    this.moveTo(begin + share * length, end + share * length);
  }

  scrollLanes(pixels) {
    this.view.scrollBy(pixels);
    this.viewChanged();
  }

  growLanes(pixels) {
    this.view.growLanes(pixels);
    this.fitPainter();
    this.viewChanged();
  }

  /** The selected span with room around it. */
  showSpan(span) {
    const { begin, end } = this.trace.spans;
    const room = Math.max(2 * (end[span] - begin[span]), 200);
    this.view.reveal(this.trace.lane[span]);
    this.moveTo(begin[span] - room, end[span] + room);
  }

  showAll() {
    this.moveTo(...this.view.whole);
  }

  /** What the page opens with: the whole trace, or of many steps the median of the last phase. */
  showFirst() {
    const { trace } = this;
    const whole = trace.wholeSteps.map((s) => trace.stepRow.get(s));
    if (whole.length <= 3) return;
    const rows = whole.filter((s) => s.phase === whole.at(-1).phase);
    rows.sort((a, b) => a.end - a.begin - (b.end - b.begin));
    const row = rows[rows.length >> 1];
    const room = 0.04 * (row.end - row.begin);
    this.show(row.begin - room, row.end + room);
  }

  /** The step of the selection, or the one in the middle of the view. */
  showStepHere() {
    const { trace, view, selected } = this;
    const middle = (view.begin + view.end) / 2;
    const here = selected >= 0 ? trace.step[selected] : null;
    const row = here !== null ? trace.stepRow.get(here) : trace.steps.find((s) => s.end > middle);
    if (row) this.showStep(row);
  }

  /** A step as range, and all of it in view. */
  showStep(row) {
    const room = 0.04 * (row.end - row.begin);
    this.setRange([row.begin, row.end]);
    this.moveTo(row.begin - room, row.end + room);
  }

  /** Where keys zoom: at the mouse, at the selection, or in the middle. */
  zoomPoint() {
    const { view, pointer, selected, trace } = this;
    if (pointer && pointer.x >= view.gutter) return view.time(pointer.x);
    const at = selected >= 0 ? (trace.spans.met[selected] + trace.spans.end[selected]) / 2 : NaN;
    return at > view.begin && at < view.end ? at : (view.begin + view.end) / 2;
  }

  // ---- choices -------------------------------------------------------------------------------
  select(span, { reveal = false } = {}) {
    this.selected = span;
    this.chain = span >= 0 ? this.chains.chainTo(span) : [];
    if (span >= 0) {
      this.view.reveal(this.trace.lane[span]);
      const { met, end } = this.trace.spans;
      const outside = end[span] < this.view.begin || met[span] > this.view.end;
      const tiny = (end[span] - met[span]) / this.view.nsPerPixel < 1;
      if (reveal && (outside || tiny)) this.showSpan(span);
    }
    this.invalidate("base");
    this.changed("select");
  }

  /** Along the chain: to who was late (-1), or to who waited for this one (+1). */
  follow(direction) {
    if (this.selected < 0) return;
    const next = direction < 0 ? (this.chain.at(-2) ?? -1) : this.nextInChain(this.selected);
    if (next >= 0) this.select(next, { reveal: true });
  }

  /** Of those that wait for `span`, the first whose last producer it was; else the first to run;
   *  if none waits, what its worker does next in the step.
   */
  nextInChain(span) {
    const { chains, trace } = this;
    const consumers = chains.spansOf(chains.consumers(trace.task[span]), span);
    consumers.sort((a, b) => trace.spans.met[a] - trace.spans.met[b]);
    const next = consumers.slice(0, 64).find((c) => chains.late(c) === span) ?? consumers[0];
    if (next !== undefined) return next;
    const inLane = span + 1 < trace.spans.offsets[trace.lane[span] + 1];
    return inLane && trace.step[span + 1] === trace.step[span] ? span + 1 : -1;
  }

  /** To the span before or after on the same lane. */
  step(direction) {
    if (this.selected < 0) return;
    const { offsets } = this.trace.spans;
    const lane = this.trace.lane[this.selected];
    const next = this.selected + direction;
    if (next >= offsets[lane] && next < offsets[lane + 1]) this.select(next, { reveal: true });
  }

  setRange(range) {
    this.range = range && range[1] > range[0] ? range : null;
    this.invalidate("overlay");
    this.changed("range");
  }

  setQuery(query) {
    this.query = query;
    const { ids, problem } = search(this.trace, query);
    this.problem = problem;
    this.matches = ids && this.trace.spans.subset(ids, this.trace.lanes.length);
    this.invalidate("base");
    this.changed("query");
  }

  /** Selects the next match after the selection, or the first in view; backwards: direction -1. */
  nextMatch(direction) {
    const ids = this.matches?.id;
    if (!ids?.length) return;
    const { begin } = this.trace.spans;
    this.matchesByTime ??= new Map();
    let sorted = this.matchesByTime.get(ids);
    if (!sorted) {
      sorted = Uint32Array.from(ids).sort((a, b) => begin[a] - begin[b] || a - b);
      this.matchesByTime = new Map([[ids, sorted]]);
    }
    const at = sorted.indexOf(this.selected);
    let next = at + direction;
    if (at < 0)
      next = Math.max(
        0,
        sorted.findIndex((span) => begin[span] >= this.view.begin),
      );
    this.select(sorted[(next + sorted.length) % sorted.length], { reveal: true });
  }

  /** Takes one choice back: the range, else the selection, else the search, else the path. */
  clear() {
    if (this.range) this.setRange(null);
    else if (this.selected >= 0) this.select(-1);
    else if (this.query) this.setQuery("");
    else if (this.pathShown) this.setPath(false);
  }

  setMode(mode) {
    this.colours = new Colours(this.trace, mode, this.theme);
    this.invalidate("base");
    this.changed("mode");
  }

  setPath(shown) {
    this.pathShown = shown;
    this.pathKey = "";
    this.invalidate("base");
    this.changed("path");
  }

  setTheme(theme, chosen = true) {
    this.theme = theme;
    this.themeChosen = chosen;
    document.documentElement.dataset.theme = theme;
    this.setMode(this.colours.mode);
    this.changed("theme");
  }

  // ---- frames --------------------------------------------------------------------------------
  invalidate(what) {
    this.dirty[what] = true;
    this.dirty.overlay = true;
    this.frameAsked ??= requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    this.frameAsked = null;
    if (!this.elements) return;
    const began = performance.now();
    if (this.animation) this.animate(now);
    const { base, overlay } = this.dirty;
    this.dirty = { base: false, overlay: false };
    if (base) this.drawBase();
    if (overlay) drawOverlay(this.contextOf(this.elements.overlay), this);
    if (!base) return;
    this.frames.push(performance.now() - began);
    if (this.frames.length > 600) this.frames.shift();
  }

  animate(now) {
    const { from, to, since } = this.animation;
    const share = Math.min(1, Math.max(0, (now - since) / ANIMATION_MS));
    const eased = 1 - (1 - share) ** 3;
    this.view.begin = from[0] + (to[0] - from[0]) * eased;
    this.view.end = from[1] + (to[1] - from[1]) * eased;
    if (share < 1) this.viewChanged();
    else this.animation = null;
  }

  drawBase() {
    const { view, trace, ink, painter, ratio } = this;
    const context = this.contextOf(this.elements.base);
    const layers = this.layers();
    const wide = painter.paint(view, layers, this.colours, ink, ratio);
    context.fillStyle = ink.ground;
    context.fillRect(0, 0, view.width, view.height);
    const [left, top] = [Math.round(view.gutter * ratio), Math.round(view.lanesTop * ratio)];
    context.putImageData(painter.image, left, top);
    const sums = this.integrals.columns(view.begin, view.end, columnCount(view));
    drawRuler(context, view, ink);
    drawSteps(context, view, trace, ink);
    drawGutter(context, view, trace, sums.busy, ink);
    drawLabels(context, view, trace, wide, ink);
    if (this.pathShown) drawPaths(context, view, trace, this.pathsSeen, ink.path);
    drawCharts(context, view, trace, sums, ink);
    this.overview.draw(ratio);
  }

  contextOf(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    return context;
  }

  /** What the lanes show: everything, faded below what was asked for. */
  layers() {
    if (this.pathShown) this.findPaths();
    const special = [this.matches, this.pathShown ? this.pathSet : null].filter(Boolean);
    const all = { set: this.trace.spans, strength: special.length ? FADED : 1 };
    return [all, ...special.map((set) => ({ set, strength: 1 }))];
  }

  /** Critical paths of the steps in view; what a frame has no time for comes in the next one. */
  findPaths() {
    const { view, trace, chains } = this;
    const steps = trace.steps.filter(
      (s) => s.end > view.begin && s.begin < view.end && trace.stepRanges.has(s.step),
    );
    this.tooManyPaths = steps.length > PATH_STEPS_MAX;
    const wanted = this.tooManyPaths ? [] : steps.map((s) => s.step);
    const until = performance.now() + PATH_BUDGET_MS;
    const found = [];
    for (const step of wanted) {
      if (chains.memo.path.has(step) || performance.now() < until) found.push(step);
      else this.invalidate("base");
      if (found.at(-1) === step) chains.criticalPath(step);
    }
    const key = found.join();
    if (key === this.pathKey && this.pathSet) return;
    this.pathKey = key;
    this.pathsSeen = found.map((step) => chains.criticalPath(step));
    const ids = Uint32Array.from(this.pathsSeen.flat()).sort();
    this.pathSet = trace.spans.subset(ids, trace.lanes.length);
    this.pathSteps = found;
  }
}
