// Colours: made in OKLCH, so that hues of one lightness look equally strong; one set a theme.

const HUES = [255, 150, 55, 325, 200, 100, 290, 25, 228, 125, 350, 75];
const MODES = ["operator", "layer", "request", "stall"];

export const COLOUR_MODES = MODES;

/** What the canvas draws with beside span colours. */
export const INKS = {
  light: {
    ground: "#ffffff",
    lane: "#f6f7f9",
    laneOther: "#fbfcfd",
    line: "#e3e6ea",
    strong: "#c3c8d0",
    text: "#1d2530",
    muted: "#677383",
    accent: "#3457d5",
    path: "#c2255c",
    wait: "#aeb6c1",
    stall: "#d9480f",
    onSpan: "#10151d",
    shade: "rgba(52, 87, 213, 0.10)",
  },
  dark: {
    ground: "#14171c",
    lane: "#1a1e24",
    laneOther: "#171a20",
    line: "#2a2f38",
    strong: "#444c59",
    text: "#e4e8ee",
    muted: "#8d97a6",
    accent: "#7f9cff",
    path: "#ff6f9c",
    wait: "#4a525f",
    stall: "#ff9355",
    onSpan: "#0b0d10",
    shade: "rgba(127, 156, 255, 0.14)",
  },
};

/** Categories of a mode, and the category of every span. Colours are packed as RGBA bytes. */
export class Colours {
  constructor(trace, mode, theme) {
    this.mode = mode;
    this.dark = theme === "dark";
    const make = { operator: byOperator, layer: byLayer, request: byRequest, stall: byStall }[mode];
    Object.assign(this, make(trace, this));
    this.packed = Uint32Array.from(this.entries, (entry) => packed(entry.colour));
    this.css = this.entries.map((entry) => cssOf(entry.colour));
  }

  /** The packed colour of a span. */
  of(span) {
    return this.packed[this.categoryOf(span)];
  }

  hue(index) {
    const round = Math.floor(index / HUES.length);
    const lightness = this.dark ? [0.68, 0.58, 0.76] : [0.72, 0.6, 0.82];
    return oklch(lightness[round % 3], 0.115, HUES[index % HUES.length]);
  }

  get neutral() {
    return this.dark ? oklch(0.52, 0.012, 260) : oklch(0.74, 0.012, 260);
  }
}

/** `#rrggbb` or [r, g, b] as a 32-bit pixel. */
export function packed(colour) {
  const [r, g, b] = typeof colour === "string" ? parsed(colour) : colour;
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

function byOperator(trace, colours) {
  const keys = [...new Set(trace.operators.map((o) => o.key))];
  const index = new Map(keys.map((key, i) => [key, i]));
  const run = new Float64Array(keys.length);
  const { met, end } = trace.spans;
  const ofOp = Uint32Array.from(trace.operators, (o) => index.get(o.key));
  for (let i = 0; i < trace.size; ++i) run[ofOp[trace.taskOp[trace.task[i]]]] += end[i] - met[i];
  const body = new Map(trace.operators.map((o) => [o.key, o.body]));
  const entries = keys.map((name) => ({ name, colour: colours.neutral }));
  const ranked = keys.map((_, i) => i).sort((a, b) => run[b] - run[a]);
  let next = 0;
  for (const i of ranked)
    if (!["advance", "noop", "rearm"].includes(body.get(keys[i])))
      entries[i].colour = colours.hue(next++);
  return { entries, index, categoryOf: (span) => ofOp[trace.taskOp[trace.task[span]]] };
}

function byLayer(trace, colours) {
  const most = trace.taskLayer.reduce((m, layer) => Math.max(m, layer), 0);
  const entries = Array.from({ length: most + 1 }, (_, layer) => ({
    name: `layer ${layer}`,
    colour: ramp(colours, layer / Math.max(most, 1), layer % 2),
  }));
  return { entries, categoryOf: (span) => trace.taskLayer[trace.task[span]] };
}

function byRequest(trace, colours) {
  const entries = trace.requests.map((request, i) => ({
    name: `request ${request.sequence}`,
    colour: colours.hue(i),
  }));
  const none = entries.push({ name: "no known request", colour: colours.neutral }) - 1;
  const several = entries.push({ name: "several requests", colour: colours.hue(6) }) - 1;
  const ofStep = new Map();
  for (const step of trace.stepRanges.keys()) {
    const number = trace.firstStep + step;
    const mine = trace.requests.flatMap((r, i) =>
      r.first <= number && number <= r.last ? [i] : [],
    );
    ofStep.set(step, mine.length === 1 ? mine[0] : mine.length ? several : none);
  }
  return { entries, categoryOf: (span) => ofStep.get(trace.step[span]) };
}

const STALL_LEVELS = 10;

function byStall(trace, colours) {
  const calm = colours.dark ? [0.45, 0.03, 250] : [0.84, 0.025, 250];
  const hot = colours.dark ? [0.74, 0.16, 45] : [0.66, 0.18, 40];
  const entries = Array.from({ length: STALL_LEVELS + 1 }, (_, i) => {
    const share = i / STALL_LEVELS;
    const mixed = calm.map((c, k) => c + (hot[k] - c) * (k === 2 ? 1 : share));
    return { name: `${10 * i} % of the run`, colour: oklch(...(i ? mixed : calm)) };
  });
  const { met, end, stall } = trace.spans;
  const categoryOf = (span) => {
    const run = end[span] - met[span];
    return run > 0 ? Math.min(STALL_LEVELS, Math.ceil((STALL_LEVELS * stall[span]) / run)) : 0;
  };
  return { entries, categoryOf };
}

/** Blue to orange, neighbours of slightly different lightness. */
function ramp(colours, share, odd) {
  const lightness = (colours.dark ? 0.62 : 0.68) + 0.08 * odd;
  return oklch(lightness, 0.115, (265 + 160 * share) % 360);
}

function parsed(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function cssOf([r, g, b]) {
  return `rgb(${r}, ${g}, ${b})`;
}

/** sRGB bytes of lightness 0..1, chroma 0..0.4, hue in degrees. Source: Ottosson, Oklab, 2020. */
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const value = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, value)));
  });
}
