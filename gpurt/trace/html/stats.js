// Statistics of a range of time: where worker time went, which operators ran, bytes, steps.

import { firstStep } from "./frame.js";

/** Figures of [begin, end). Spans that lie in it partly count with that part. */
export function rangeStats(trace, begin, end) {
  const rows = new Map();
  const sums = { run: 0, stall: 0, wait: 0, bytes: 0, spans: 0 };
  for (let lane = 0; lane < trace.lanes.length; ++lane)
    addLane(trace, lane, begin, end, rows, sums);
  const worker = (end - begin) * trace.lanes.length;
  const split = [
    ["compute", sums.run - sums.stall],
    ["stall", sums.stall],
    ["wait", sums.wait],
    ["idle", Math.max(0, worker - sums.run - sums.wait)],
  ].map(([name, ns]) => ({ name, ns, share: worker ? ns / worker : 0 }));
  const operators = [...rows.values()].sort((a, b) => b.run - a.run || b.wait - a.wait);
  return {
    begin,
    end,
    length: end - begin,
    split,
    operators,
    ...sums,
    ...stepTimes(trace, begin, end),
  };
}

function addLane(trace, lane, begin, end, rows, sums) {
  const { spans, task, taskOp, taskBytes, operators } = trace;
  const high = spans.offsets[lane + 1];
  for (let i = spans.firstAfter(lane, begin); i < high && spans.begin[i] < end; ++i) {
    const [from, met, to] = [spans.begin[i], spans.met[i], spans.end[i]];
    const run = Math.max(0, Math.min(to, end) - Math.max(met, begin));
    const wait = Math.max(0, Math.min(met, end) - Math.max(from, begin));
    const share = to > met ? run / (to - met) : 1;
    const key = operators[taskOp[task[i]]].key;
    let row = rows.get(key);
    if (!row) rows.set(key, (row = { key, tasks: 0, run: 0, wait: 0, stall: 0, bytes: 0 }));
    const [stall, bytes] = [spans.stall[i] * share, taskBytes[task[i]] * share];
    row.tasks += 1;
    for (const sum of [row, sums]) {
      sum.run += run;
      sum.wait += wait;
      sum.stall += stall;
      sum.bytes += bytes;
    }
    sums.spans += 1;
  }
}

/** How many steps lie in the range whole, and their median and 99th percentile. */
function stepTimes(trace, begin, end) {
  const lengths = [];
  for (let i = firstStep(trace.steps, begin); i < trace.steps.length; ++i) {
    const step = trace.steps[i];
    if (step.begin >= end) break;
    // A nanosecond: a range that was made from a step holds that step.
    if (step.begin >= begin - 1 && step.end <= end + 1) lengths.push(step.end - step.begin);
  }
  lengths.sort((a, b) => a - b);
  const at = (share) => lengths[Math.min(lengths.length - 1, Math.floor(share * lengths.length))];
  return { steps: lengths.length, median: at(0.5) ?? 0, p99: at(0.99) ?? 0 };
}
