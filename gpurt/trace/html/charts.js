// Charts below the lanes, on the same time axis: bandwidth, what workers do, tokens of each step.
//
// All are exact integrals: a lane's sums up to a moment come from its growing sums and the share
// of the one span that the moment lies in.

import { clipped, firstStep, font } from "./frame.js";

const COLUMN_PX = 2;

/** Nanoseconds run, stalled and waited and bytes moved up to moments, over all lanes. */
export class Integrals {
  constructor(trace) {
    this.trace = trace;
  }

  /** Sums per column of [begin, end): {run, stall, wait, bytes}, and `busy`: run share a lane. */
  columns(begin, end, count) {
    const sums = ["run", "stall", "wait", "bytes"].map(() => new Float64Array(count));
    const lanes = this.trace.lanes.length;
    const busy = new Float64Array(lanes);
    for (let lane = 0; lane < lanes; ++lane)
      busy[lane] = this.addLane(lane, begin, end, count, sums) / (end - begin);
    const [run, stall, wait, bytes] = sums;
    return { run, stall, wait, bytes, busy, length: (end - begin) / count };
  }

  /** Adds one lane's columns; returns nanoseconds that it ran without stall. */
  addLane(lane, begin, end, count, [run, stall, wait, bytes]) {
    const { spans } = this.trace;
    const high = spans.offsets[lane + 1];
    let i = spans.firstAfter(lane, begin);
    const last = [0, 0, 0, 0];
    const now = [0, 0, 0, 0];
    this.upTo(i, high, begin, last);
    const first = last.slice();
    for (let column = 0; column < count; ++column) {
      const time = begin + ((column + 1) / count) * (end - begin);
      if (i < high && spans.end[i] <= time) i = spans.gallop(i, high, time);
      this.upTo(i, high, time, now);
      run[column] += now[0] - last[0];
      stall[column] += now[1] - last[1];
      wait[column] += now[2] - last[2];
      bytes[column] += now[3] - last[3];
      for (let k = 0; k < 4; ++k) last[k] = now[k];
    }
    return last[0] - first[0] - (last[1] - first[1]);
  }

  /** Sums before span i (the first that ends after `time`), and of i itself up to `time`. */
  upTo(i, high, time, out) {
    const { spans, sumBytes } = this.trace;
    out[0] = spans.sumRun[i];
    out[1] = spans.sumStall[i];
    out[2] = spans.sumWait[i];
    out[3] = sumBytes[i];
    if (i >= high || spans.begin[i] >= time) return;
    out[2] += Math.min(time, spans.met[i]) - spans.begin[i];
    const run = spans.end[i] - spans.met[i];
    if (spans.met[i] >= time || run <= 0) return;
    const share = (time - spans.met[i]) / run;
    out[0] += share * run;
    out[1] += share * spans.stall[i];
    out[3] += share * (sumBytes[i + 1] - sumBytes[i]);
  }
}

export function columnCount(view) {
  return Math.max(1, Math.floor(view.plotWidth / COLUMN_PX));
}

export function drawCharts(context, view, trace, sums, ink) {
  const { chartsTop, chartHeight, width, height } = view;
  context.fillStyle = ink.ground;
  context.fillRect(0, chartsTop, width, height - chartsTop);
  drawBandwidth(context, view, sums, chartsTop, chartHeight, ink);
  drawWork(context, view, trace, sums, chartsTop + chartHeight, chartHeight, ink);
  drawTokens(context, view, trace, chartsTop + 2 * chartHeight, chartHeight, ink);
}

function drawBandwidth(context, view, sums, top, height, ink) {
  const values = Array.from(sums.bytes, (b) => b / sums.length);
  const most = niceTop(values);
  drawTitle(context, view, "bandwidth", `${label(most)} GB/s`, top, height, ink);
  const areas = [{ values, colour: ink.accent, alpha: 0.75 }];
  drawAreas(context, view, areas, most, top, height, ink);
}

function drawWork(context, view, trace, sums, top, height, ink) {
  const lanes = trace.lanes.length;
  drawTitle(context, view, "workers busy", `${lanes}`, top, height, ink);
  const run = Array.from(sums.run, (v, i) => (v - sums.stall[i]) / sums.length);
  const stall = Array.from(sums.stall, (v, i) => v / sums.length + run[i]);
  const wait = Array.from(sums.wait, (v, i) => v / sums.length + stall[i]);
  const areas = [
    { values: wait, colour: ink.wait, alpha: 0.45 },
    { values: stall, colour: ink.stall, alpha: 0.9 },
    { values: run, colour: ink.accent, alpha: 1 },
  ];
  drawAreas(context, view, areas, lanes, top, height, ink);
}

/** A bar a step: its rows, which are the tokens that it feeds. */
function drawTokens(context, view, trace, top, height, ink) {
  const seen = [];
  for (let i = firstStep(trace.steps, view.begin); i < trace.steps.length; ++i) {
    if (trace.steps[i].begin >= view.end) break;
    seen.push(trace.steps[i]);
  }
  const most = niceTop(seen.map((s) => s.rows));
  drawTitle(context, view, "rows a step", label(most), top, height, ink);
  const [low, high] = [top + height - 4, top + 8];
  clipped(context, view.gutter, top, view.plotWidth, height, () => {
    drawFloor(context, view, low, ink);
    for (const step of seen) {
      const [from, to] = [view.x(step.begin), view.x(step.end)];
      const tall = ((low - high) * step.rows) / most;
      context.fillStyle = step.phase === "prefill" ? ink.stall : ink.accent;
      context.globalAlpha = 0.4;
      context.fillRect(from, low - tall, Math.max(1, to - from - 1), tall);
      context.globalAlpha = 1;
      context.fillRect(from, low - tall, Math.max(1, to - from - 1), 1.5);
    }
    context.globalAlpha = 1;
  });
}

function drawAreas(context, view, areas, most, top, height, ink) {
  const [low, high] = [top + height - 4, top + 8];
  clipped(context, view.gutter, top, view.plotWidth, height, () => {
    drawFloor(context, view, low, ink);
    for (const { values, colour, alpha } of areas) {
      context.beginPath();
      context.moveTo(view.gutter, low);
      const wide = view.plotWidth / values.length;
      values.forEach((value, i) => {
        const y = low - ((low - high) * value) / most;
        context.lineTo(view.gutter + i * wide, y);
        context.lineTo(view.gutter + (i + 1) * wide, y);
      });
      context.lineTo(view.width, low);
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fill();
    }
    context.globalAlpha = 1;
  });
}

function drawFloor(context, view, y, ink) {
  context.fillStyle = ink.line;
  context.fillRect(view.gutter, y, view.plotWidth, 1);
}

function drawTitle(context, view, title, most, top, height, ink) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = font(11);
  context.fillStyle = ink.text;
  context.fillText(title, 14, top + height / 2 - 3);
  context.font = font(10);
  context.fillStyle = ink.muted;
  context.fillText(`0 – ${most}`, 14, top + height / 2 + 11);
}

/** A round figure that no value is over. */
function niceTop(values) {
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((f) => f * power >= most * 0.9999) * power;
}

function label(value) {
  return value >= 1 ? value.toLocaleString("en-US") : value.toPrecision(1);
}
