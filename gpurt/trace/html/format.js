// How figures read: times, bytes, rates, counts. Times are nanoseconds everywhere in the page.

const GAP = "\u00a0"; // no line breaks between a figure and its unit
const UNITS = [
  [1, "ns"],
  [1e3, "µs"],
  [1e6, "ms"],
  [1e9, "s"],
];

/** A duration with three or four digits: `812 ns`, `12.34 µs`. */
export function duration(ns) {
  const [size, unit] = unitOf(Math.abs(ns));
  const value = ns / size;
  const digits = size === 1 || Math.abs(value) >= 100 ? (size === 1 ? 0 : 1) : 2;
  return `${value.toFixed(digits)}${GAP}${unit}`;
}

/** A moment, to the precision that a distance of `tick` needs: `12.345 ms`. */
export function moment(ns, tick) {
  const [size, unit] = unitOf(Math.max(Math.abs(ns), tick));
  const digits = Math.max(0, Math.ceil(Math.log10(size / tick) - 1e-9));
  return `${(ns / size).toFixed(Math.min(digits, 9))}${GAP}${unit}`;
}

export function bytes(count) {
  if (count < 1e3) return `${count}${GAP}B`;
  if (count < 1e6) return `${(count / 1e3).toFixed(1)}${GAP}kB`;
  return count < 1e9
    ? `${(count / 1e6).toFixed(2)}${GAP}MB`
    : `${(count / 1e9).toFixed(2)}${GAP}GB`;
}

/** Bytes in nanoseconds, as GB/s. */
export function rate(byteCount, ns) {
  const value = ns > 0 ? byteCount / ns : 0;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)}${GAP}GB/s`;
}

/** 1234567 as `1,234,567`. */
export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}${GAP}%`;
}

/** The last part of a path: `q` of `layers[3].attn.q`. */
export function lastPart(path) {
  return path.slice(path.lastIndexOf(".") + 1);
}

/** The distance of ticks, 1, 2 or 5 times a power of ten, at least `least`. */
export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  for (const factor of [1, 2, 5]) if (factor * power >= least) return factor * power;
  return 10 * power;
}

function unitOf(ns) {
  for (let i = UNITS.length - 1; i > 0; --i) if (ns >= UNITS[i][0]) return UNITS[i];
  return UNITS[0];
}
