// Lanes: draws spans into pixels. Its cost grows with pixels, not with spans.
//
// For each lane, walk from span to span. A span that lies inside one pixel column stands for all
// that end in that column: a galloping search finds the last of them, sums give how much of the
// column they cover, and the longest of a few of them gives its colour. Wide spans fill columns
// one by one. Then the column colours are copied to the lane's pixel rows:
//
//   run        whole height, colour of the span
//   wait       a thin grey line at half height
//   stall      a strip at the bottom: how much of the run waited for weights, not when

import { packed } from "./colour.js";

const SAMPLES = 4; // spans of a column that compete for its colour
const SEPARATED_FROM_PX = 3; // runs this wide start with a lighter column
const LABEL_FROM_PX = 46;

/** What one lane's columns hold. */
class Columns {
  constructor(width) {
    this.width = width;
    this.run = new Float32Array(width); // covered share
    this.wait = new Float32Array(width);
    this.stall = new Float32Array(width);
    this.best = new Float32Array(width); // share of the span that gives the colour
    this.span = new Int32Array(width); // that span
    this.starts = new Uint8Array(width); // whether a wide run starts here
  }

  clear() {
    for (const array of [this.run, this.wait, this.stall, this.best, this.starts]) array.fill(0);
  }
}

export class LanePainter {
  constructor() {
    this.resize(1, 1);
  }

  resize(width, height) {
    this.image = new ImageData(Math.max(1, width), Math.max(1, height));
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.columns = new Columns(this.image.width);
    this.rows = Array.from({ length: 3 }, () => new Uint32Array(this.image.width));
  }

  /**
   * Paints lanes. `layers`: [{set, strength}], each over the one before; strength below 1 fades.
   * `ratio`: device pixels a CSS pixel. Returns the wide runs of the last layer, for labels.
   */
  paint(view, layers, colours, ink, ratio) {
    const { width } = this.image;
    const wide = [];
    const nsPerColumn = view.length / width;
    this.pixels.fill(packed(ink.ground));
    const [first, last] = view.lanesSeen();
    for (let lane = first; lane < last; ++lane) {
      const ground = packed(lane % 2 ? ink.laneOther : ink.lane);
      for (const row of this.rows) row.fill(ground);
      layers.forEach(({ set, strength }, depth) => {
        this.columns.clear();
        const labels = depth === layers.length - 1 ? wide : null;
        fillColumns(this.columns, set, lane, view.begin, nsPerColumn, labels, ratio);
        this.blend(set, strength, colours, ink);
      });
      this.copyRows(view, lane, ratio);
    }
    return wide;
  }

  /** Adds the columns to the three kinds of pixel rows. */
  blend(set, strength, colours, ink) {
    const { run, wait, stall, span, starts, width } = this.columns;
    const [plain, middle, bottom] = this.rows;
    const [grey, hot] = [packed(ink.wait), packed(ink.stall)];
    let [known, colour] = [-1, 0];
    for (let x = 0; x < width; ++x) {
      if (run[x] > 0) {
        if (span[x] !== known) colour = colours.of(set.spanOf((known = span[x])));
        const share = visible(run[x]) * strength * (starts[x] ? 0.45 : 1);
        plain[x] = mixed(plain[x], colour, share);
        middle[x] = mixed(middle[x], colour, share);
        bottom[x] = mixed(bottom[x], colour, share);
        if (stall[x] > 0) bottom[x] = mixed(bottom[x], hot, visible(stall[x]) * strength);
      }
      if (wait[x] > 0) middle[x] = mixed(middle[x], grey, visible(wait[x]) * strength);
    }
  }

  copyRows(view, lane, ratio) {
    const { width, height } = this.image;
    const top = (view.laneY(lane) - view.lanesTop) * ratio;
    const tall = view.laneHeight * ratio;
    const gap = tall >= 4 * ratio ? Math.round(ratio) : 0; // between lanes
    const [plain, middle, bottom] = this.rows;
    const line = Math.max(1, Math.round(Math.min(tall / 9, 2 * ratio)));
    const strip = Math.max(1, Math.round(Math.min(tall / 6, 8 * ratio)));
    const size = Math.round(top + tall) - Math.round(top) - gap;
    for (let y = 0; y < size; ++y) {
      const at = Math.round(top) + y;
      if (at < 0 || at >= height) continue;
      const inMiddle = 2 * y >= size - line && 2 * y < size + line;
      const row = inMiddle ? middle : y >= size - strip ? bottom : plain;
      this.pixels.set(row, at * width);
    }
  }
}

function fillColumns(columns, set, lane, begin, nsPerColumn, wide, ratio) {
  const high = set.offsets[lane + 1];
  const stop = begin + columns.width * nsPerColumn;
  for (let i = set.firstAfter(lane, begin); i < high && set.begin[i] < stop;) {
    const from = (set.begin[i] - begin) / nsPerColumn;
    const to = (set.end[i] - begin) / nsPerColumn;
    const column = Math.floor(from);
    if (column >= 0 && to <= column + 1) {
      const next = Math.max(i + 1, set.gallop(i, high, begin + (column + 1) * nsPerColumn));
      fillOne(columns, set, column, i, next, nsPerColumn);
      i = next;
      continue;
    }
    const met = (set.met[i] - begin) / nsPerColumn;
    const stalled = Math.min(met + set.stall[i] / nsPerColumn, to);
    fillMany(columns, columns.wait, from, met, -1);
    fillMany(columns, columns.run, met, to, i);
    fillMany(columns, columns.stall, met, stalled, -1);
    if (to - met >= SEPARATED_FROM_PX && met >= 0) columns.starts[Math.floor(met)] = 1;
    const seen = Math.min(to, columns.width) - Math.max(met, 0);
    if (wide && seen >= LABEL_FROM_PX * ratio) wide.push({ lane, span: set.spanOf(i) });
    ++i;
  }
}

/** Spans [i, next) all lie in one column. */
function fillOne(columns, set, column, i, next, nsPerColumn) {
  columns.run[column] += (set.sumRun[next] - set.sumRun[i]) / nsPerColumn;
  columns.wait[column] += (set.sumWait[next] - set.sumWait[i]) / nsPerColumn;
  columns.stall[column] += (set.sumStall[next] - set.sumStall[i]) / nsPerColumn;
  const stride = Math.max(1, Math.floor((next - i) / SAMPLES));
  for (let k = i; k < next; k += stride) {
    const share = (set.end[k] - set.met[k]) / nsPerColumn;
    if (share < columns.best[column]) continue;
    columns.best[column] = share;
    columns.span[column] = k;
  }
}

/** Adds [from, to) in columns to `shares`; span >= 0: it may give the colour. */
function fillMany(columns, shares, from, to, span) {
  const [low, high] = [Math.max(0, from), Math.min(columns.width, to)];
  for (let x = Math.floor(low); x < high; ++x) {
    const share = Math.min(high, x + 1) - Math.max(low, x);
    shares[x] += share;
    if (span < 0 || share < columns.best[x]) continue;
    columns.best[x] = share;
    columns.span[x] = span;
  }
}

/** Little work in a column still shows. */
function visible(share) {
  return share >= 1 ? 1 : 0.12 + 0.88 * share;
}

function mixed(under, over, share) {
  if (share >= 1) return over;
  const keep = 1 - share;
  const r = (under & 255) * keep + (over & 255) * share;
  const g = ((under >> 8) & 255) * keep + ((over >> 8) & 255) * share;
  const b = ((under >> 16) & 255) * keep + ((over >> 16) & 255) * share;
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
