// Search: which spans a query means. All its words must hold.
//
//   word            part of the operator's path or body
//   task:5 step:3 worker:1 layer:2 rank:0 request:7 expert:4
//   run>5  wait>20  stall>1     microseconds

const FIELDS = ["task", "step", "worker", "layer", "rank", "request", "expert"];

/** {ids, problem}: numbers of the spans that match, growing; null: the query is empty. */
export function search(trace, query) {
  const words = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return { ids: null, problem: "" };
  const tests = [];
  for (const word of words) {
    const test = testOf(trace, word);
    if (typeof test === "string") return { ids: new Uint32Array(0), problem: test };
    tests.push(test);
  }
  const found = new Uint32Array(trace.size);
  let size = 0;
  for (let i = 0; i < trace.size; ++i) if (tests.every((test) => test(i))) found[size++] = i;
  return { ids: found.slice(0, size), problem: "" };
}

function testOf(trace, word) {
  const field = /^([a-z]+):(\d+)$/.exec(word);
  if (field && FIELDS.includes(field[1])) return fieldTest(trace, field[1], Number(field[2]));
  const longer = /^(run|wait|stall)>(\d+(?:\.\d*)?)$/.exec(word);
  if (longer) return lengthTest(trace, longer[1], 1000 * Number(longer[2]));
  if (/^[a-z]+[:>]/.test(word)) return `no filter reads “${word}”`;
  const hits = Uint8Array.from(trace.operators, ({ name, body, key }) =>
    [name, body, key].some((text) => text.toLowerCase().includes(word)) ? 1 : 0,
  );
  return (i) => hits[trace.taskOp[trace.task[i]]] === 1;
}

function fieldTest(trace, name, value) {
  const { task, step, taskLayer, lane, lanes } = trace;
  if (name === "expert") return (i) => trace.expert[i] === value + 1;
  if (name === "task") return (i) => task[i] === value;
  if (name === "step") return (i) => step[i] + trace.firstStep === value;
  if (name === "layer") return (i) => taskLayer[task[i]] === value;
  if (name === "worker") return (i) => lanes[lane[i]].worker === value;
  if (name === "rank") return (i) => lanes[lane[i]].rank === value;
  const request = trace.requests.find((r) => r.sequence === value);
  if (!request) return () => false;
  const inside = (number) => request.first <= number && number <= request.last;
  return (i) => inside(step[i] + trace.firstStep);
}

function lengthTest(trace, name, ns) {
  const { begin, met, end, stall } = trace.spans;
  if (name === "run") return (i) => end[i] - met[i] > ns;
  if (name === "wait") return (i) => met[i] - begin[i] > ns;
  return (i) => stall[i] > ns;
}
