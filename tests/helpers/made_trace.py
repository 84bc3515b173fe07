"""Traces of any size, made by a small model of a GPU: workers, an operator after another, tiles.

The same arguments give the same trace. Every operator's tiles wait for all tiles of the one
before, through one counter; a worker takes its tiles in turn, so all waits follow from the model.
"""

from __future__ import annotations

import numpy as np

from gpurt.trace import SPAN, STEP, OperatorInfo, RequestInfo, StepSpans, Trace

HOP_NS = 700  # signal to start
GAP_NS = 1500  # end of a step to the first start of the next
#          name     body       tiles (0: one a worker)  run ns  bytes
LAYER_OPS = (
    ("qkv", "matvec", 0, 2600, 62_000),
    ("attention", "attention", 8, 3900, 0),
    ("o", "matvec", 0, 1700, 40_000),
    ("gate_up", "matvec", 0, 5200, 140_000),
    ("down", "matvec", 0, 3100, 70_000),
)


def made_operators(layers: int, slower: dict[str, int]):
    """(info, tiles, run ns, bytes) in program order."""
    rows = [("embed", "embed", "made.embed", 0, 1, 1200, 0)]
    for layer in range(layers):
        for name, body, tiles, run, size in LAYER_OPS:
            path = f"made.layers[{layer}].{name}"
            run_ns = run + slower.get(name, 0)
            rows.append((f"layers[{layer}].{name}", body, path, layer, tiles, run_ns, size))
    last = layers - 1
    rows.append(("head.logits", "matvec", "made.head.logits", last, 0, 9800, 310_000))
    rows.append(("head.sample", "sample", "made.head.sample", last, 1, 2100, 0))
    rows.append(("advance", "advance", "made.advance", last, 1, 600, 0))
    return [(OperatorInfo(*row[:4]), *row[4:]) for row in rows]


def made_trace(
    workers: int = 132,
    layers: int = 16,
    steps: int = 4,
    seed: int = 1,
    slower: dict[str, int] | None = None,
) -> Trace:
    """A trace of `steps` whole steps: the first prefill, the rest decode, two requests.

    slower: nanoseconds that each task of an operator takes longer, by its name in LAYER_OPS.
    """
    rng = np.random.default_rng(seed)
    operators = made_operators(layers, slower or {})
    tiles = [min(count or workers, workers) for _, count, _, _ in operators]
    first = np.concatenate([[0], np.cumsum(tiles)])
    parts: list[np.ndarray] = []
    table = np.zeros(steps, STEP)
    free = np.zeros(workers, np.int64)  # when each worker is done with all so far
    opened = 0
    for step in range(steps):
        scale = 2.4 if step == 0 else 1.0
        begin = opened
        ready = opened
        for op, (info, _, run_ns, size) in enumerate(operators):
            rows = np.zeros(tiles[op], SPAN)
            # As far apart as they can be; no worker gets two.
            worker = (np.arange(tiles[op]) * (workers // tiles[op]) + 5 * op) % workers
            rows["task"] = first[op] + np.arange(tiles[op])
            rows["step"], rows["op"] = step, op
            rows["worker"], rows["layer"] = worker, info.layer
            rows["begin_ns"] = free[worker]
            rows["wait_ns"] = np.maximum(0, ready - free[worker])
            noise = rng.gamma(40, 1 / 40, tiles[op])
            late = (rng.random(tiles[op]) < 0.004) * rng.integers(800, 5000, tiles[op])
            rows["run_ns"] = run_ns * scale * noise + late
            if size:
                rows["stall_ns"] = rows["run_ns"] * rng.beta(1.2, 9, tiles[op]) + late // 2
                rows["stall_ns"] = np.minimum(rows["stall_ns"], rows["run_ns"])
            parts.append(rows)
            ends = rows["begin_ns"] + rows["wait_ns"] + rows["run_ns"]
            free[worker] = ends
            ready = int(ends.max()) + HOP_NS
        ended = int(ends.max())
        table[step] = (
            step,
            begin,
            ended,
            64 if step == 0 else 1 + step % 3,
            1 if step == 0 else 2,
            0,
        )
        opened = ended + GAP_NS
    return _trace(workers, operators, tiles, np.concatenate(parts), table)


def _trace(workers, operators, tiles, spans, table) -> Trace:
    count = len(operators)
    task_op = np.repeat(np.arange(count), tiles)
    waited = np.arange(int(np.sum(tiles))) >= tiles[0]  # all but the first operator's
    steps = len(table)
    return Trace(
        name="made",
        device=f"cuda model of {workers} SMs",
        workers=workers,
        operators=tuple(o[0] for o in operators),
        task_op=task_op,
        task_bytes=np.repeat([o[3] for o in operators], tiles),
        waits=(np.concatenate([[0], np.cumsum(waited)]), task_op[waited] - 1),
        producers=(np.concatenate([[0], np.cumsum(tiles)]), np.arange(len(task_op))),
        payload_edges=(),
        kept=StepSpans(spans[np.lexsort((spans["begin_ns"], spans["step"]))]),
        steps=table,
        regions=tuple(f"{o[0].name}.y[0:16, 0:576] f32" for o in operators),
        task_reads=(np.arange(len(task_op) + 1), np.maximum(task_op - 1, 0)),
        task_writes=(np.arange(len(task_op) + 1), task_op),
        requests=(RequestInfo(7, 0, steps // 2, 64, 40), RequestInfo(8, steps // 2, steps, 9, 40)),
    )
