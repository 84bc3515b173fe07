// Frame: what stands around the lanes: ruler, steps, lane names, labels on spans, path lines.

import { duration, lastPart, moment, niceStep } from "./format.js";

const FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
const TICK_DISTANCE_PX = 110;
const LABEL_LANE_HEIGHT = 13;
const LABELS_MAX = 3000;
const LETTER_PX = 6.1; // mean width of a letter at 11 px
const PATH_LINK_PX = 4; // a link of a path for every so many pixels, at most

export function font(size, weight = 400) {
  return `${weight} ${size}px ${FONT}`;
}

export function drawRuler(context, view, ink) {
  const { width, gutter, rulerHeight } = view;
  context.fillStyle = ink.ground;
  context.fillRect(0, 0, width, rulerHeight);
  context.font = font(11);
  context.textBaseline = "middle";
  const tick = niceStep(view.nsPerPixel * TICK_DISTANCE_PX);
  clipped(context, gutter, 0, view.plotWidth, view.chartsTop, () => {
    for (let t = Math.ceil(view.begin / tick) * tick; t < view.end; t += tick) {
      const x = Math.round(view.x(t)) + 0.5;
      context.fillStyle = ink.line;
      context.fillRect(x - 0.5, rulerHeight - 7, 1, 7);
      context.fillStyle = ink.muted;
      context.fillText(moment(t, tick), x + 5, rulerHeight / 2 + 1);
    }
  });
  context.fillStyle = ink.muted;
  context.textAlign = "right";
  context.fillText(duration(view.length), gutter - 12, rulerHeight / 2 + 1);
  context.textAlign = "left";
}

/** A box a step: number, phase, rows, duration, as much as fits. */
export function drawSteps(context, view, trace, ink) {
  const top = view.rulerHeight;
  const height = view.lanesTop - top - 4;
  context.fillStyle = ink.ground;
  context.fillRect(0, top, view.width, view.lanesTop - top);
  context.font = font(11);
  context.fillStyle = ink.muted;
  context.textAlign = "right";
  context.fillText("steps", view.gutter - 12, top + height / 2);
  context.textAlign = "left";
  clipped(context, view.gutter, top, view.plotWidth, height + 4, () => {
    let lastDrawn = -1;
    for (let i = firstStep(trace.steps, view.begin); i < trace.steps.length; ++i) {
      const step = trace.steps[i];
      if (step.begin >= view.end) break;
      const [from, to] = [view.x(step.begin), view.x(step.end)];
      if (to - lastDrawn < 1) continue; // closer than a pixel: one box stands for all
      lastDrawn = to;
      const kept = trace.stepRanges.has(step.step);
      context.fillStyle = kept ? ink.strong : ink.line;
      context.globalAlpha = step.step % 2 ? 0.42 : 0.6;
      context.fillRect(from, top, Math.max(1, to - from - 1), height);
      context.globalAlpha = 1;
      const left = Math.max(from, view.gutter) + 6;
      const text = stepText(trace, step, Math.min(to, view.width) - left - 6);
      context.fillStyle = kept ? ink.text : ink.muted;
      if (text) context.fillText(text, left, top + height / 2 + 0.5);
    }
  });
}

function stepText(trace, step, room) {
  const name = `${trace.firstStep + step.step}`;
  const count = step.limit ? `${step.rows} of ${step.limit}` : step.rows;
  const rows = count === 1 ? "1 row" : `${count} rows`;
  const parts = [
    `step ${name}`,
    step.phase,
    step.rows ? rows : "",
    duration(step.end - step.begin),
  ];
  const whole = parts.filter(Boolean).join(" · ");
  for (const text of [whole, `step ${name}`, name])
    if (text.length * LETTER_PX <= room) return text;
  return "";
}

/** Index of the first step that ends after a moment. */
export function firstStep(steps, time) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Names of lanes and how busy each is in the view, a bar and a figure. */
export function drawGutter(context, view, trace, busy, ink) {
  const { gutter, laneHeight, lanesTop, lanesHeight } = view;
  context.fillStyle = ink.ground;
  context.fillRect(0, lanesTop, gutter, lanesHeight);
  const every = Math.max(1, Math.ceil(13 / laneHeight));
  const [first, last] = view.lanesSeen();
  clipped(context, 0, lanesTop - 4, gutter, lanesHeight + 4, () => {
    context.font = font(11);
    for (let lane = first; lane < last; ++lane) {
      const y = view.laneY(lane);
      const tall = Math.max(1, laneHeight - (laneHeight >= 4 ? 1 : 0));
      const size = 22 * Math.min(1, busy[lane] ?? 0);
      context.fillStyle = ink.line;
      context.fillRect(gutter - 30, y + tall / 2 - 1.5, 22, 3);
      context.fillStyle = ink.accent;
      context.fillRect(gutter - 30, y + tall / 2 - 1.5, size, 3);
      if (lane % every) continue;
      context.fillStyle = ink.text;
      context.fillText(trace.laneName(lane), 14, y + laneHeight / 2);
    }
  });
}

/** Names on the wide runs. */
export function drawLabels(context, view, trace, wide, ink) {
  if (view.laneHeight < LABEL_LANE_HEIGHT) return;
  clipped(context, view.gutter, view.lanesTop, view.plotWidth, view.lanesHeight, () => {
    context.font = font(11, 500);
    context.fillStyle = ink.onSpan;
    for (const { lane, span } of wide.slice(0, LABELS_MAX)) {
      const from = Math.max(view.x(trace.spans.met[span]), view.gutter);
      const to = Math.min(view.x(trace.spans.end[span]), view.width);
      const text = fitted(trace.op(span).name, to - from - 10);
      if (text) context.fillText(text, from + 5, view.laneY(lane) + view.laneHeight / 2);
    }
  });
}

function fitted(name, room) {
  const letters = Math.floor(room / LETTER_PX);
  if (name.length <= letters) return name;
  const last = lastPart(name);
  if (last.length <= letters) return last;
  return letters >= 3 ? `${last.slice(0, letters - 1)}…` : "";
}

/** Lines through the spans of chains, from signal to start; none where they would hide all else. */
export function drawPaths(context, view, trace, paths, colour) {
  const { met, end } = trace.spans;
  const links = [];
  for (const path of paths)
    for (let i = 0; i + 1 < path.length; ++i)
      if (met[path[i + 1]] >= view.begin && end[path[i]] <= view.end)
        links.push([path[i], path[i + 1]]);
  if (links.length > view.plotWidth / PATH_LINK_PX) return;
  const middle = (span) => view.laneY(trace.lane[span]) + view.laneHeight / 2;
  clipped(context, view.gutter, view.lanesTop, view.plotWidth, view.lanesHeight, () => {
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    for (const [from, to] of links) {
      const [y0, y1] = [middle(from), middle(to)];
      context.moveTo(view.x(end[from]), y0);
      if (y0 === y1) context.lineTo(view.x(met[to]), y1);
      else curve(context, view.x(end[from]), y0, view.x(met[to]), y1);
    }
    context.stroke();
  });
}

/** From one point to another, leaving and coming in level. */
export function curve(context, x0, y0, x1, y1) {
  const bend = Math.min(60, Math.max(6, Math.abs(x1 - x0) / 2));
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
}

export function clipped(context, x, y, width, height, draw) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  draw();
  context.restore();
}
