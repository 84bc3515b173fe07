// The trace: decodes the bytes that the page carries into typed arrays, and finds spans in them.
//
// Spans lie lane by lane, in each lane by begin. A lane is one worker of one rank. For a span i:
//   begin[i]  claimed      met[i]  its edges met, the run starts      end[i]  signalled
// Spans of a lane do not overlap, so begins and ends of a lane both grow: binary search finds all.

/** Decodes base64 of zlib of: u32 header length, header as JSON, columns as byte planes. */
export async function readTrace(base64) {
  const packed = fromBase64(base64);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(data.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + size)));
  return new Trace(header, data.subarray(4 + size));
}

/** Spans by lane, with sums that grow along each lane. `id`: their numbers in the whole trace. */
export class SpanSet {
  constructor(offsets, begin, met, end, stall, id) {
    Object.assign(this, { offsets, begin, met, end, stall, id });
    const size = begin.length;
    this.sumRun = new Float64Array(size + 1);
    this.sumWait = new Float64Array(size + 1);
    this.sumStall = new Float64Array(size + 1);
    for (let i = 0; i < size; ++i) {
      this.sumRun[i + 1] = this.sumRun[i] + end[i] - met[i];
      this.sumWait[i + 1] = this.sumWait[i] + met[i] - begin[i];
      this.sumStall[i + 1] = this.sumStall[i] + stall[i];
    }
  }

  get size() {
    return this.begin.length;
  }

  /** The span's number in the whole trace. */
  spanOf(index) {
    return this.id ? this.id[index] : index;
  }

  /** First span of a lane that ends after `time`. */
  firstAfter(lane, time) {
    return upperBound(this.end, this.offsets[lane], this.offsets[lane + 1], time);
  }

  /** First span from `from` on that ends after `time`; near spans are found at once. */
  gallop(from, high, time) {
    let step = 1;
    let low = from;
    while (low + step < high && this.end[low + step] <= time) {
      low += step;
      step *= 2;
    }
    return upperBound(this.end, low, Math.min(low + step, high), time);
  }

  /** The spans (numbers of the whole trace, growing) of `ids`, as a set of their own. */
  subset(ids, lanes) {
    const offsets = new Uint32Array(lanes + 1);
    let at = 0;
    for (let lane = 0; lane < lanes; ++lane) {
      while (at < ids.length && ids[at] < this.offsets[lane + 1]) ++at;
      offsets[lane + 1] = at;
    }
    const pick = (source) => Float64Array.from(ids, (i) => source[i]);
    const columns = [this.begin, this.met, this.end, this.stall].map(pick);
    return new SpanSet(offsets, ...columns, ids);
  }
}

class Trace {
  constructor(header, data) {
    const column = (name) => decodeColumn(data, header.columns[name]);
    this.name = header.name;
    this.device = header.device;
    this.version = header.version;
    this.dropped = header.dropped;
    this.lanes = header.lanes.map(([rank, worker]) => ({ rank, worker }));
    this.ranks = new Set(this.lanes.map((lane) => lane.rank)).size;
    this.operators = header.operators.map(([name, body, key, layer, experts]) => ({
      name,
      body,
      key,
      layer,
      experts,
    }));
    this.expertPlaces = new Map(header.expert_places); // the first operator of each -> its name
    this.regions = header.regions;
    this.requests = header.requests.map(([sequence, first, last, prompt, tokens]) => ({
      sequence,
      first,
      last,
      prompt,
      tokens,
    }));
    this.phases = header.phases;
    this.firstStep = header.first_step;
    this.ceiling = header.ceiling_gbps; // bytes a nanosecond; 0: not measured
    this.slowSteps = header.slow_steps.map(([step, rows, length, times, kept, task, why]) => ({
      step,
      rows,
      length,
      times,
      kept,
      task,
      why,
    }));
    this.payloadEdges = header.payload_edges;
    this.taskOp = column("task_op");
    this.taskLayer = column("task_layer");
    this.taskBytes = column("task_bytes");
    for (const name of ["waits", "producers", "reads", "writes"])
      this[name] = { offsets: column(`${name}_offsets`), values: column(`${name}_values`) };
    this.tasks = this.taskOp.length;
    this.readSpans(column);
    this.readSteps(column);
  }

  readSpans(column) {
    const offsets = column("lane_offsets");
    const begin = Float64Array.from(column("begin")); // differences within a lane
    const size = begin.length;
    const [wait, run] = [column("wait"), column("run")];
    const [met, end] = [new Float64Array(size), new Float64Array(size)];
    this.lane = new Uint16Array(size);
    for (let lane = 0; lane < this.lanes.length; ++lane) {
      let last = 0;
      for (let i = offsets[lane]; i < offsets[lane + 1]; ++i) {
        last = begin[i] += last;
        met[i] = last + wait[i];
        end[i] = met[i] + run[i];
        this.lane[i] = lane;
      }
    }
    this.spans = new SpanSet(offsets, begin, met, end, Float64Array.from(column("stall")), null);
    this.task = column("task");
    [this.expert, this.expertRows] = [column("expert"), column("expert_rows")]; // 1 + expert, or 0
    const [stepIndex, keptSteps] = [column("step_index"), column("kept_steps")];
    this.step = new keptSteps.constructor(size); // from firstStep on
    for (let i = 0; i < size; ++i) this.step[i] = keptSteps[stepIndex[i]];
    this.sumBytes = new Float64Array(size + 1);
    for (let i = 0; i < size; ++i)
      this.sumBytes[i + 1] = this.sumBytes[i] + this.taskBytes[this.task[i]];
    this.size = size;
    [this.begin, this.end] = [Infinity, 0];
    for (let i = 0; i < size; ++i) {
      if (begin[i] < this.begin) this.begin = begin[i];
      if (end[i] > this.end) this.end = end[i];
    }
    this.orderBySteps(stepIndex, keptSteps);
    const whole = column("kept_whole");
    this.wholeSteps = Array.from(keptSteps).filter((_, i) => whole[i]);
  }

  /** `order`: spans by step, then task. `stepRanges`: where those of a step lie in it. */
  orderBySteps(stepIndex, keptSteps) {
    const byTask = countingOrder(null, this.task, this.tasks);
    this.order = countingOrder(byTask, stepIndex, keptSteps.length);
    this.stepRanges = new Map();
    let low = 0;
    for (const step of keptSteps) {
      let high = low;
      while (high < this.size && this.step[this.order[high]] === step) ++high;
      this.stepRanges.set(step, [low, high]);
      low = high;
    }
  }

  /**
   * Rows of the step table: {step, begin, end, rows, limit, phase}, by step; `step` from firstStep
   * on. limit: the rows that steps of its size may carry, 0 if all are of one size.
   */
  readSteps(column) {
    const [number, begin, length] = [column("steps"), column("step_begin"), column("step_length")];
    const [rows, phase] = [column("step_rows"), column("step_phase")];
    const limit = column("step_limit");
    this.steps = Array.from(number, (step, i) => ({
      step,
      begin: begin[i],
      end: begin[i] + length[i],
      rows: rows[i],
      limit: limit[i],
      phase: this.phases[phase[i]] ?? "other",
    }));
    this.stepRow = new Map(this.steps.map((row) => [row.step, row]));
    for (const step of this.stepRanges.keys()) {
      if (this.stepRow.has(step)) continue;
      const [from, to] = this.spanWindow(step);
      const row = { step, begin: from, end: to, rows: 0, limit: 0, phase: "" };
      this.steps.push(row);
      this.stepRow.set(step, row);
    }
    this.steps.sort((a, b) => a.step - b.step);
    for (const row of this.steps) {
      this.begin = Math.min(this.begin, row.begin);
      this.end = Math.max(this.end, row.end);
    }
  }

  /** [begin, end] of a step's spans: from its first run to its last signal. */
  spanWindow(step) {
    const [low, high] = this.stepRanges.get(step);
    let [begin, end] = [Infinity, 0];
    for (let i = low; i < high; ++i) {
      begin = Math.min(begin, this.spans.met[this.order[i]]);
      end = Math.max(end, this.spans.end[this.order[i]]);
    }
    return [begin, end];
  }

  /** The span of a task in a step, or -1. */
  find(step, task) {
    const range = this.stepRanges.get(step);
    if (!range) return -1;
    let [low, high] = range;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.task[this.order[middle]] < task) low = middle + 1;
      else high = middle;
    }
    return low < range[1] && this.task[this.order[low]] === task ? this.order[low] : -1;
  }

  /** The span of a lane at a moment, or -1. */
  at(lane, time) {
    const i = this.spans.firstAfter(lane, time);
    const inLane = i < this.spans.offsets[lane + 1];
    return inLane && this.spans.begin[i] <= time ? i : -1;
  }

  op(span) {
    return this.operators[this.taskOp[this.task[span]]];
  }

  /** `expert 7, 3 rows`; empty for a task of none. */
  expertText(span) {
    const rows = this.expertRows[span];
    return rows ? `expert ${this.expert[span] - 1}, ${rows} row${rows === 1 ? "" : "s"}` : "";
  }

  bytesOf(span) {
    return this.taskBytes[this.task[span]];
  }

  /** Regions that a task reads or writes, as text. */
  regionsOf(rows, task) {
    if (rows.offsets.length <= task + 1) return [];
    return Array.from(rows.values.subarray(rows.offsets[task], rows.offsets[task + 1])).map(
      (index) => this.regions[index],
    );
  }

  laneName(lane) {
    const { rank, worker } = this.lanes[lane];
    return this.ranks > 1 ? `rank ${rank} · ${worker}` : `worker ${worker}`;
  }
}

/** First index in [low, high) whose value is over `limit`; `values` grow. */
export function upperBound(values, low, high, limit) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A stable order of `order` (null: 0, 1, 2, ..) by key. */
function countingOrder(order, keys, keyCount) {
  const starts = new Uint32Array(keyCount + 1);
  for (let i = 0; i < keys.length; ++i) ++starts[keys[i] + 1];
  for (let k = 0; k < keyCount; ++k) starts[k + 1] += starts[k];
  const sorted = new Uint32Array(keys.length);
  for (let i = 0; i < keys.length; ++i) {
    const item = order ? order[i] : i;
    sorted[starts[keys[item]]++] = item;
  }
  return sorted;
}

/** Integers whose bytes lie in planes: first all lowest bytes, then all second ones, .. */
function decodeColumn(data, { offset, length, planes }) {
  const values = planes > 4 ? new Float64Array(length) : new Uint32Array(length);
  let scale = 1;
  for (let plane = 0; plane < planes; ++plane, scale *= 256) {
    const from = offset + plane * length;
    for (let i = 0; i < length; ++i) values[i] += data[from + i] * scale;
  }
  return values;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const out = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; ++i) out[i] = binary.charCodeAt(i);
  return out;
}
