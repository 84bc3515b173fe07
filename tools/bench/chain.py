"""The dependency chain: y = W x in bf16, one row, every layer needs all of the layer before.

The price of the runtime's machinery on its fastest path: payload edges, records, steps in one
launch, re-arm, abort exits, time-outs and spans, all on. Compare with a bare chain on the same
machine and day (us a layer at 33.6 / 8.4 / 2.1 MB a layer).

    python -m tools.bench.chain [--quick] [--rows 1] [--edges payload] [--team 16]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpurt import wire
from gpurt.body import Target
from gpurt.graphs.ops.packing import mma16_name, mma16_tile_bytes
from gpurt.plan import (
    TASK_ADVANCE,
    TASK_REARM,
    Memory,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanOperator,
    PlanSegment,
    PlanTask,
)
from tools.bench.rig import Options, Rig

STEPS = 8
SHAPES = {"33.6": (64, 4096), "8.4": (64, 2048), "2.1": (256, 1024)}
BF16 = int(wire.DTypeCode.BF16)
PACKING = mma16_name(8, 1)


@dataclass(frozen=True)
class ChainShape:
    """What a chain's plan is made from."""

    layers: int
    k: int
    workers: int = 132
    team: int = 16
    payload: bool = True
    rows: int = 1

    @property
    def tiles(self) -> int:
        """Tasks of a layer."""
        return self.k // 16

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer's activations."""
        return self.rows * self.k * 2

    @property
    def set_bytes(self) -> int:
        """Bytes of one payload set."""
        return -(-self.layers * self.row_bytes // 256) * 256 if self.payload else 0

    def buffers(self) -> tuple[PlanBuffer, ...]:
        """Weights, x (read by layer 0, written by the last), h (one row block a layer)."""
        layers, k, rows = self.layers, self.k, self.rows
        memory: Memory = "payload" if self.payload else "activation"
        w_bytes, h_bytes = layers * k * k * 2, layers * self.row_bytes
        return (
            PlanBuffer("w", (layers * k, k), "bf16", "weight", PACKING, w_bytes, "weight", 0),
            PlanBuffer("x", (rows, k), "bf16", "state", "", self.row_bytes, "state", 0),
            PlanBuffer("h", (layers, rows, k), "bf16", "activation", "", h_bytes, memory, 0),
        )

    def matvec(self, layer: int, tile: int) -> PlanTask:
        """Task `tile` of `layer`. Counter edges: it waits for all of the layer before."""
        last = layer == self.layers - 1
        tile_bytes = mma16_tile_bytes(16, self.k)
        at = (layer * self.tiles + tile) * tile_bytes
        source = (1, 0) if layer == 0 else (2, (layer - 1) * self.row_bytes)
        target = (1, 0) if last else (2, layer * self.row_bytes)
        mask = (int(layer > 0) | int(not last) << 4) if self.payload else 0
        waits = ((layer - 1, self.tiles),) if layer and not self.payload else ()
        signals = () if self.payload and not last else (0 if self.payload else layer,)
        params = (self.k, self.k, 0, 0.0, 0, BF16, BF16, BF16)
        return PlanTask(
            *(layer, "matvec", (tile * 16, tile * 16 + 16, 0, 0), 0, waits, signals),
            *((source, (0, at), None, None, target), mask, params, (0, at, tile_bytes)),
            *(layer, (), (), 0),
        )

    def rearms(self) -> list[PlanTask]:
        """One fill a worker; they share counter 1."""
        part = (self.set_bytes // self.workers + 256) // 256 * 256
        return [
            PlanTask(
                *(self.layers, "rearm", (begin, 0, 0, 0), TASK_REARM, (), (1,), ((2, 0),), 1),
                *((min(part, self.set_bytes - begin), 0), None, self.layers, (), (), 0),
            )
            for begin in range(0, self.set_bytes, part)
        ]


def chain_plan(layers: int, k: int, **options: Any) -> Plan:
    """Layer l reads h[l - 1], layer 0 reads x, the last layer writes x. Static lists."""
    shape = ChainShape(layers, k, **options)
    tasks: list[PlanTask] = []
    lists: list[list[int]] = [[] for _ in range(shape.workers)]
    for layer in range(layers):
        for tile in range(shape.tiles):
            lists[len(tasks) % shape.workers].append(len(tasks))
            tasks.append(shape.matvec(layer, tile))
        if shape.payload and layer == layers * 3 // 4:
            for worker, task in enumerate(shape.rearms()):
                lists[worker].append(len(tasks))
                tasks.append(task)
    producers: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        for counter in task.signals:
            producers.setdefault(counter, []).append(index)
    ends = sorted(producers) if shape.payload else [layers - 1]
    waits = tuple((c, len(producers[c])) for c in ends)
    lists[len(tasks) % shape.workers].append(len(tasks))
    advance = ("advance", (0, 0, 0, 0), TASK_ADVANCE, waits, (), (), 0, (), None)
    tasks.append(PlanTask(layers + 1, *advance, layers, (), (), 0))
    operators = [PlanOperator(f"layer{i}", "matvec", "chain", i, "static") for i in range(layers)]
    operators += [PlanOperator(n, n, "chain", layers, "static") for n in ("rearm", "advance")]
    return Plan(
        1,
        f"chain {layers} x {k}^2",
        Target("cuda", shape.workers, shape.team, "sm_90a", 232448, 60 << 20),
        *(shape.rows, 1, 1, 0),
        shape.buffers(),
        tuple(operators),
        tuple(tasks),
        tuple(PlanCounter(len(p), tuple(p), ()) for _, p in sorted(producers.items())),
        (PlanSegment("static", 0, len(tasks)),),
        tuple((tuple(tasks_of),) for tasks_of in lists),
        (),
        shape.set_bytes,
    )


def pack_gpu(w: torch.Tensor) -> torch.Tensor:
    """[L, N, K] bf16 in packing mma16g8x1, on the GPU; graphs/ops/packing.py is the definition."""
    layers, n, k = w.shape
    axes = w.view(torch.int16).reshape(layers, n // 16, 2, 8, k // 64, 2, 4, 2, 2, 2)
    return axes.permute(0, 1, 4, 5, 7, 3, 6, 8, 2, 9).contiguous().reshape(layers, -1)


class Chain:
    """One size: weights, memory and what a run must give."""

    def __init__(self, layers: int, k: int, rows: int) -> None:
        generator = torch.Generator("cuda").manual_seed(layers * k)
        self.layers, self.k, self.rows = layers, k, rows
        self.w = torch.empty(layers, k, k, dtype=torch.bfloat16, device="cuda")
        for layer in range(layers):
            u = torch.rand(k, k, generator=generator, device="cuda") * 2 - 1
            self.w[layer] = (u * math.sqrt(3.0 / k)).to(torch.bfloat16)
        self.packed = pack_gpu(self.w).reshape(-1).view(torch.uint8)
        u = torch.rand(16, k, generator=generator, device="cuda") * 2 - 1
        self.x0 = u[:rows].to(torch.bfloat16)
        self.x = torch.empty_like(self.x0)

    def rig(self, plan: Plan, options: Options) -> Rig:
        """The plan over this chain's memory."""
        sets = 2 * plan.payload_set_bytes if plan.payload_set_bytes else 0
        self.h = torch.empty(
            max(sets, plan.arena_bytes("activation"), 256), dtype=torch.uint8, device="cuda"
        )
        memory = {
            "weight": self.packed,
            "state": self.x.view(torch.uint8),
            "payload": self.h,
            "activation": self.h,
        }
        return Rig(plan, memory, options)

    def run(self, rig: Rig, steps: int = STEPS) -> float:
        """Milliseconds of one launch; exits on a fault."""
        self.x.copy_(self.x0)
        self.h.fill_(255)
        ms = rig.run(steps)
        fault = rig.fault
        if fault["kind"] or rig.output["finish_reason"] != wire.FinishReason.STEPS:
            print("FAULT", fault, rig.output, flush=True)
            raise SystemExit(4)
        return ms

    def result(self, plan: Plan, steps: int) -> torch.Tensor:
        """[layers, rows, k] of the last step: h, then x."""
        size = (self.layers - 1) * self.rows * self.k * 2
        at = (steps - 1 & 1) * plan.payload_set_bytes
        h = self.h[at : at + size].view(torch.bfloat16).reshape(self.layers - 1, self.rows, self.k)
        return torch.cat([h, self.x[None]]).clone()

    def worst_error(self, out: torch.Tensor) -> float:
        """Each layer against fp32 on the kernel's own input."""
        worst = 0.0
        for layer in range(1, self.layers):
            want = out[layer - 1].float() @ self.w[layer].float().T
            error = (out[layer].float() - want).norm() / want.norm()
            worst = max(worst, float(error)) if math.isfinite(float(error)) else math.inf
        return worst


def span_medians(rig: Rig, plan: Plan) -> dict[str, float]:
    """What spans say, in ns: of the matvec tasks, and of the boundary between two steps."""
    spans = rig.read("spans", wire.SPAN)
    spans = spans[spans["run"] > 0]
    layer = np.array([t.layer for t in plan.tasks])
    is_matvec = np.array([t.body == "matvec" for t in plan.tasks])
    spans = spans[is_matvec[spans["task"]]]
    met = spans["begin"].astype(np.int64) + spans["wait"]
    at, last = layer[spans["task"]], layer[-2]
    gaps = []
    for step in range(1, STEPS):
        ends = (met + spans["run"])[(spans["step"] == step - 1) & (at == last)]
        starts = met[(spans["step"] == step) & (at == 0)]
        gaps.append(int(starts.min()) - int(ends.max()))
    middle = spans[(at > 0) & (at < last)]
    medians = {f"{n}_ns": float(np.median(middle[n])) for n in ("wait", "run", "stall")}
    return medians | {"boundary_ns": float(np.median(gaps))}


def measure(
    name: str, chain: Chain, plan: Plan, options: Options, reps: int, want: torch.Tensor | None
) -> tuple[dict[str, Any], torch.Tensor]:
    rig = chain.rig(plan, options)
    times, inner, wrong = [], [], 0
    for rep in range(reps + 1):
        ms = chain.run(rig)
        out = chain.result(plan, STEPS)
        if want is None:
            want = out
        wrong += int(not torch.equal(out.view(torch.int16), want.view(torch.int16)))
        if rep:
            times.append(ms * 1e3 / STEPS / chain.layers)
            inner.append(rig.step_us() / chain.layers)
    spans = int(rig.read("span_counts", np.uint64)[::8].sum()) if options.trace else -1
    row = {
        "name": name,
        "us": float(np.median(times)),
        "min": min(times),
        "max": max(times),
        "inner_us": float(np.median(inner)),
        "wrong": wrong,
        "spans": spans,
        "expected_spans": len(plan.tasks) * STEPS,
        "regs": rig.kernel.register_count,
        "GB/s": 2 * chain.k**2 / float(np.median(times)) / 1e3,
        "error": chain.worst_error(want),
    }
    if options.trace:
        row |= span_medians(rig, plan)
    print(
        f"  {name:34s} {row['us']:7.3f} us/layer (min {row['min']:.3f} max {row['max']:.3f}) "
        f"in-kernel {row['inner_us']:7.3f} {row['GB/s']:5.0f} GB/s wrong {wrong} "
        f"err {row['error']:.1e} spans {spans}/{row['expected_spans']} "
        + " ".join(f"{n} {row[n]:.0f}" for n in row if n.endswith("_ns")),
        flush=True,
    )
    return row, want


def check_bits(options: Options) -> None:
    """Row 0 has the same bits for every number of rows, team and kind of edge."""
    want: torch.Tensor | None = None
    for rows, team, payload in itertools.product((1, 3, 16), (16, 1), (True, False)):
        chain = Chain(4, 1024, rows)
        plan = chain_plan(4, 1024, team=team, payload=payload, rows=rows)
        chain.run(chain.rig(plan, options))
        out = chain.result(plan, STEPS)[:, 0]
        want = out if want is None else want
        same = torch.equal(out.view(torch.int16), want.view(torch.int16))
        print(f"  rows {rows:2d} team {team:2d} payload {payload}: {'equal' if same else 'WRONG'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--sizes", default="33.6,8.4,2.1")
    args = parser.parse_args()
    torch.cuda.init()
    options = Options(linger_ms=0, wait_timeout_ms=1000, queue_capacity=1)
    rows = []
    if not args.quick:
        check_bits(options)
    for size in args.sizes.split(","):
        layers, k = SHAPES[size]
        print(f"== {size} MB a layer: {layers} x {k}^2", flush=True)
        chain = Chain(layers, k, 1)
        row, want = measure(
            "payload, all on", chain, chain_plan(layers, k), options, args.reps, None
        )
        rows.append({"size": size, **row})
        if args.quick:
            continue
        for name, plan, opts in (
            ("payload, spans off", chain_plan(layers, k), replace(options, trace=False)),
            ("counter edges", chain_plan(layers, k, payload=False), options),
            ("payload, team of 1", chain_plan(layers, k, team=1), options),
        ):
            row, _ = measure(name, chain, plan, opts, 3 if "team" in name else args.reps, want)
            rows.append({"size": size, **row})
        del chain
        torch.cuda.empty_cache()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
