// Overlay: what moves with the mouse or the selection, on a canvas above the lanes.

import { clipped, curve, drawPaths, font } from "./frame.js";
import { duration } from "./format.js";

const EDGES_MAX = 400;
const OUTLINED_FROM_PX = 5; // an outline would hide a narrower span of the chain

export function drawOverlay(context, viewer) {
  const { view } = viewer;
  context.clearRect(0, 0, view.width, view.height);
  if (viewer.range) drawRange(context, viewer, viewer.range);
  if (viewer.selected >= 0) drawSelection(context, viewer);
  if (viewer.hover >= 0 && viewer.hover !== viewer.selected)
    outline(context, viewer, viewer.hover, viewer.ink.text, 1);
  if (viewer.pointer) drawCursor(context, viewer);
}

function drawRange(context, { view, ink }, [begin, end]) {
  const [from, to] = [view.x(begin), view.x(end)];
  clipped(context, view.gutter, 0, view.plotWidth, view.height, () => {
    context.fillStyle = ink.shade;
    context.fillRect(from, 0, to - from, view.height);
    context.fillStyle = ink.accent;
    context.fillRect(from, 0, 1, view.height);
    context.fillRect(to - 1, 0, 1, view.height);
    const text = duration(end - begin);
    context.font = font(11, 600);
    context.textBaseline = "middle";
    const wide = context.measureText(text).width + 12;
    const left = Math.min(Math.max((from + to - wide) / 2, view.gutter + 4), view.width - wide - 4);
    context.fillRect(left, 4, wide, 18);
    context.fillStyle = ink.ground;
    context.fillText(text, left + 6, 13.5);
  });
}

/** The chain to the selected span, its edges in and out, and the span itself. */
function drawSelection(context, viewer) {
  const { trace, chains, selected, ink, view, chain } = viewer;
  drawPaths(context, view, trace, [chain], ink.accent);
  const producers = chains.spansOf(chains.producers(trace.task[selected]), selected);
  const consumers = chains.spansOf(chains.consumers(trace.task[selected]), selected);
  drawEdges(context, viewer, producers.slice(0, EDGES_MAX), true);
  drawEdges(context, viewer, consumers.slice(0, EDGES_MAX), false);
  for (const span of chain)
    if (trace.spans.end[span] - trace.spans.met[span] >= OUTLINED_FROM_PX * view.nsPerPixel)
      outline(context, viewer, span, ink.accent, 1);
  outline(context, viewer, selected, ink.text, 2);
}

function drawEdges(context, { trace, view, selected, ink }, spans, incoming) {
  const middle = (span) => view.laneY(trace.lane[span]) + view.laneHeight / 2;
  clipped(context, view.gutter, view.lanesTop, view.plotWidth, view.lanesHeight, () => {
    context.strokeStyle = incoming ? ink.accent : ink.muted;
    context.globalAlpha = Math.max(0.12, Math.min(0.8, 8 / spans.length));
    context.lineWidth = 1;
    context.setLineDash(incoming ? [] : [3, 3]);
    context.beginPath();
    for (const span of spans) {
      const [from, to] = incoming ? [span, selected] : [selected, span];
      const [x0, y0] = [view.x(trace.spans.end[from]), middle(from)];
      context.moveTo(x0, y0);
      curve(context, x0, y0, view.x(trace.spans.met[to]), middle(to));
    }
    context.stroke();
  });
}

function outline(context, { trace, view }, span, colour, thick) {
  const { begin, met, end } = trace.spans;
  const y = view.laneY(trace.lane[span]);
  if (end[span] < view.begin || begin[span] > view.end) return;
  clipped(context, view.gutter, view.lanesTop, view.plotWidth, view.lanesHeight, () => {
    const [from, to] = [view.x(met[span]), view.x(end[span])];
    context.strokeStyle = colour;
    context.lineWidth = thick;
    const wide = Math.max(to - from, 2);
    context.strokeRect(from - 0.5, y + thick / 2 - 0.5, wide + 1, view.laneHeight - thick + 0.5);
  });
}

function drawCursor(context, { view, pointer, ink }) {
  if (pointer.x < view.gutter) return;
  context.fillStyle = ink.muted;
  context.globalAlpha = 0.4;
  context.fillRect(Math.round(pointer.x), 0, 1, view.height);
  context.globalAlpha = 1;
}
