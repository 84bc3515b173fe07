// View: which time and which lanes are seen, and where things lie on the canvas (CSS pixels).
//
//   gutter |  ruler                                   |
//          |  steps                                   |
//          |  lanes (scroll when they do not fit)     |
//          |  charts                                  |

const RULER_HEIGHT = 26;
const BAND_HEIGHT = 22;
const LANE_HEIGHT_MIN = 4;
const LANE_HEIGHT_MAX = 64;
const CHART_HEIGHT_MIN = 46;
const CHART_HEIGHT_MAX = 160;
const CHART_COUNT = 3;
const NARROWEST_NS = 20;
const GUTTER = 112;

export class View {
  constructor(trace) {
    this.trace = trace;
    const margin = 0.01 * (trace.end - trace.begin) + 1;
    this.whole = [trace.begin - margin, trace.end + margin];
    [this.begin, this.end] = this.whole;
    this.scroll = 0;
    this.laneHeightWanted = 0; // 0: as it fits
    this.gutter = GUTTER;
    this.resize(800, 600);
  }

  resize(width, height) {
    Object.assign(this, { width, height });
    const lanes = this.trace.lanes.length;
    this.lanesTop = RULER_HEIGHT + BAND_HEIGHT;
    const room = Math.max(60, height - this.lanesTop - CHART_COUNT * CHART_HEIGHT_MIN);
    const fit = Math.min(LANE_HEIGHT_MAX, Math.max(LANE_HEIGHT_MIN, Math.floor(room / lanes)));
    this.laneHeight = this.laneHeightWanted || fit;
    this.lanesHeight = Math.min(room, this.laneHeight * lanes);
    this.chartsTop = this.lanesTop + this.lanesHeight;
    const rest = (height - this.chartsTop) / CHART_COUNT;
    this.chartHeight = Math.max(CHART_HEIGHT_MIN, Math.min(CHART_HEIGHT_MAX, rest));
    this.scrollBy(0);
  }

  get rulerHeight() {
    return RULER_HEIGHT;
  }

  get length() {
    return this.end - this.begin;
  }

  get plotWidth() {
    return Math.max(1, this.width - this.gutter);
  }

  get nsPerPixel() {
    return this.length / this.plotWidth;
  }

  x(time) {
    return this.gutter + (time - this.begin) / this.nsPerPixel;
  }

  time(x) {
    return this.begin + (x - this.gutter) * this.nsPerPixel;
  }

  laneY(lane) {
    return this.lanesTop + lane * this.laneHeight - this.scroll;
  }

  /** The lane at a height, or -1. */
  laneAt(y) {
    if (y < this.lanesTop || y >= this.chartsTop) return -1;
    const lane = Math.floor((y - this.lanesTop + this.scroll) / this.laneHeight);
    return lane < this.trace.lanes.length ? lane : -1;
  }

  /** [first, last + 1] of the lanes that are seen. */
  lanesSeen() {
    const first = Math.floor(this.scroll / this.laneHeight);
    const last = Math.ceil((this.scroll + this.lanesHeight) / this.laneHeight);
    return [first, Math.min(last, this.trace.lanes.length)];
  }

  /** Which part of the canvas a point is in. */
  regionAt(x, y) {
    if (y < RULER_HEIGHT) return "ruler";
    if (y < this.lanesTop) return "steps";
    if (x < this.gutter) return "gutter";
    return y < this.chartsTop ? "lanes" : "charts";
  }

  /** Shows [begin, end), not narrower or wider than makes sense. */
  show(begin, end) {
    const [first, last] = this.whole;
    const length = Math.min(Math.max(end - begin, NARROWEST_NS), last - first);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - length / 2, first), last - length);
    this.end = this.begin + length;
  }

  /** What `show` would make of a zoom by `factor` around a moment. */
  zoomed(factor, at) {
    const length = Math.min(Math.max(this.length * factor, NARROWEST_NS), this.wholeLength);
    const begin = at - ((at - this.begin) / this.length) * length;
    return [begin, begin + length];
  }

  get wholeLength() {
    return this.whole[1] - this.whole[0];
  }

  pan(ns) {
    const shift = Math.min(Math.max(ns, this.whole[0] - this.begin), this.whole[1] - this.end);
    this.begin += shift;
    this.end += shift;
  }

  scrollBy(pixels) {
    const most = this.laneHeight * this.trace.lanes.length - this.lanesHeight;
    this.scroll = Math.round(Math.min(Math.max(this.scroll + pixels, 0), Math.max(0, most)));
  }

  /** Scrolls as little as shows a lane whole. */
  reveal(lane) {
    const top = lane * this.laneHeight;
    if (top < this.scroll) this.scrollBy(top - this.scroll);
    const bottom = top + this.laneHeight - this.lanesHeight;
    if (bottom > this.scroll) this.scrollBy(bottom - this.scroll);
  }

  /** Taller or lower lanes, the lane at the middle kept in place. */
  growLanes(pixels) {
    const middle = (this.scroll + this.lanesHeight / 2) / this.laneHeight;
    const height = Math.min(80, Math.max(2, this.laneHeight + pixels));
    this.laneHeightWanted = height;
    this.resize(this.width, this.height);
    this.scroll = 0;
    this.scrollBy(middle * height - this.lanesHeight / 2);
  }
}
