// Dependencies: who a task waits for, who waits for it, who was late, what set a step's length.
//
// The same rules as gpurt/trace/analysis.py, so the page and the terminal name the same tasks.

export class Chains {
  constructor(trace) {
    this.trace = trace;
    const counters = trace.producers.offsets.length - 1;
    this.waiters = transposed(trace.waits, counters); // counter -> tasks that wait for it
    this.signals = transposed(trace.producers, trace.tasks); // task -> counters it signals
    this.opTasks = transposed(rowsOfOne(trace.taskOp), trace.operators.length);
    this.memo = { in: new Map(), out: new Map(), path: new Map() };
  }

  /** Tasks that `task` waits for in a step, growing. */
  producers(task) {
    return remembered(this.memo.in, task, () => {
      const { waits, producers } = this.trace;
      return this.gather(row(waits, task), producers, task, ([a, b], op) => (b === op ? a : -1));
    });
  }

  /** Tasks that wait for `task` in a step, growing. */
  consumers(task) {
    return remembered(this.memo.out, task, () => {
      const counters = row(this.signals, task);
      return this.gather(counters, this.waiters, task, ([a, b], op) => (a === op ? b : -1));
    });
  }

  gather(counters, tasksOf, task, otherEnd) {
    const found = new Set();
    for (const counter of counters) for (const t of row(tasksOf, counter)) found.add(t);
    for (const edge of this.trace.payloadEdges) {
      const op = otherEnd(edge, this.trace.taskOp[task]);
      if (op >= 0) for (const t of row(this.opTasks, op)) found.add(t);
    }
    return [...found].sort((a, b) => a - b);
  }

  /** Spans of tasks in the step of `span`; those that ended last first. */
  spansOf(tasks, span) {
    const { trace } = this;
    const found = tasks.map((t) => trace.find(trace.step[span], t)).filter((s) => s >= 0);
    const { end, begin } = trace.spans;
    return found.sort((a, b) => end[b] - end[a] || begin[a] - begin[b]);
  }

  /** Of the producers of `span`, the one that signalled last; -1 if it has none. */
  late(span) {
    return this.spansOf(this.producers(this.trace.task[span]), span)[0] ?? -1;
  }

  /** What the worker of `span` did before it in the same step; -1: nothing. */
  before(span) {
    const { trace } = this;
    const first = trace.spans.offsets[trace.lane[span]];
    return span > first && trace.step[span - 1] === trace.step[span] ? span - 1 : -1;
  }

  /** Why `span` waited: {late, lateBy, why} of the one that signalled last, or null. */
  blame(span) {
    const late = this.late(span);
    if (late < 0) return null;
    const { begin, met, end, stall } = this.trace.spans;
    const [since, seen] = [begin[span], met[span]];
    const parts = [
      ["claimed late", Math.max(0, begin[late] - since)],
      ["waited itself", Math.max(0, met[late] - Math.max(begin[late], since))],
      ["its own run", Math.max(0, end[late] - Math.max(met[late], since))],
      ["seen late", Math.max(0, seen - Math.max(end[late], since))],
    ];
    let why = parts.reduce((most, part) => (part[1] > most[1] ? part : most))[0];
    if (why === "its own run" && 2 * stall[late] > end[late] - met[late])
      why = "its weights came late";
    return { late, lateBy: Math.max(0, end[late] - since), why };
  }

  /** The chain that `span` could not have ended without, first to last, `span` included. */
  chainTo(span) {
    const { end } = this.trace.spans;
    const path = [span];
    const seen = new Set(path);
    for (let at = span; ;) {
      const candidates = this.producers(this.trace.task[at]).map((t) =>
        this.trace.find(this.trace.step[at], t),
      );
      candidates.push(this.before(at));
      let next = -1;
      for (const c of candidates)
        if (c >= 0 && !seen.has(c) && (next < 0 || end[c] > end[next])) next = c;
      if (next < 0) return path.reverse();
      path.push(next);
      seen.add(next);
      at = next;
    }
  }

  /** The chain that set the length of a step. */
  criticalPath(step) {
    return remembered(this.memo.path, step, () => {
      const { trace } = this;
      const range = trace.stepRanges.get(step);
      if (!range) return [];
      let last = -1;
      for (let i = range[0]; i < range[1]; ++i) {
        const span = trace.order[i];
        if (last < 0 || endsLater(trace.spans, span, last)) last = span;
      }
      return this.chainTo(last);
    });
  }
}

function endsLater({ end, begin }, a, b) {
  return end[a] > end[b] || (end[a] === end[b] && begin[a] < begin[b]);
}

function row({ offsets, values }, index) {
  return values.subarray(offsets[index], offsets[index + 1]);
}

/** Rows by value: where row i holds v, row v of the result holds i. */
function transposed(rows, size) {
  const offsets = new Uint32Array(size + 1);
  for (const value of rows.values) ++offsets[value + 1];
  for (let i = 0; i < size; ++i) offsets[i + 1] += offsets[i];
  const next = offsets.slice();
  const values = new Uint32Array(rows.values.length);
  for (let i = 0; i + 1 < rows.offsets.length; ++i)
    for (const value of row(rows, i)) values[next[value]++] = i;
  return { offsets, values };
}

function rowsOfOne(values) {
  return { offsets: Uint32Array.from({ length: values.length + 1 }, (_, i) => i), values };
}

function remembered(map, key, make) {
  let value = map.get(key);
  if (value === undefined) map.set(key, (value = make()));
  return value;
}
