"""Peers of the Muse Spark cases: torch in a CUDA graph, its experts by our stand-alone kernel."""

from __future__ import annotations

import zlib
from typing import Any

from gpurt.bench.case import Side, Workload
from gpurt.bench.graphs import drawn_choice
from gpurt.bench.grouped import GroupedKernel, Shape
from gpurt.bench.machine import Machine
from gpurt.bench.peers import TorchPeer, captured, reference, replay_us
from gpurt.bench.traffic import step_bytes

_REPLAYS = 8


def torch_slice(machine: Machine, workload: Workload) -> Side:
    """The whole slice: torch.matmul in bf16, one kernel an operator, experts by our kernel."""
    return _Slice(machine, workload)


def grouped_experts(machine: Machine, workload: Workload) -> Side:
    """The experts alone: two launches a layer of the stand-alone kernel, routing known."""
    return _Experts(machine, workload)


class _Experts(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine)
        torch, step, modules = self.torch, workload.step, reference("muse_slice")
        experts, rows, top_k = step["experts"], step["rows"], step["top_k"]
        launch = launcher(torch, machine.target.arch, rows)
        made = modules.Maker("cuda", torch.bfloat16)
        layers = []
        for layer in range(step["layers"]):
            chosen = torch.from_numpy(drawn_choice(experts, top_k, rows, layer)).cuda()
            routes = modules.routes_of(chosen, experts)
            sizes = (step["width"], step["inner"])
            layers.append((routes, made.experts(experts, *sizes, quantised=True)))
        live = sum(int((r.counts > 0).sum()) for r, _ in layers) / len(layers)
        assert workload.graph is not None
        self.bytes_moved = step_bytes(workload.graph(), rows=rows, live=live)
        x = torch.randn(rows, step["width"], device="cuda")
        h = torch.empty(rows * top_k, step["inner"], device="cuda")
        d = torch.empty(rows * top_k, step["width"], device="cuda")

        def run() -> None:
            for routes, (up, down) in layers:
                launch(up, x, routes, h)
                launch(down, h, modules.by_pair(routes), d)

        self.kept = layers, x, h, d
        self.graph = captured(torch, run)
        self.measure()

    def measure(self) -> float:
        return self.bytes_moved / replay_us(self.torch, self.graph, _REPLAYS) / 1e3


class _Slice(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine)
        torch, step, config = self.torch, workload.step, workload.config
        self.position, rows = step["position"], step["rows"]
        self.model = reference("muse_slice").Slice(
            config,
            step["context"],
            launcher(torch, machine.target.arch, rows),
            rows=rows,
            ranks=step["ranks"],
            forced=_forced(torch, workload),
        )
        self.graph = captured(torch, self.model.step)
        self.measure()

    def measure(self) -> float:
        rows = self.model.rows
        first = self.position - _REPLAYS // 2 * rows
        self.model.positions.copy_(self.torch.arange(first, first + rows))
        return replay_us(self.torch, self.graph, _REPLAYS)


def _forced(torch: Any, workload: Workload) -> Any:
    """The tables of the graph: the same experts at the same positions."""
    from gpurt.graphs.ops.route import forced_table

    config, rows = workload.config, workload.step["rows"]
    if workload.routing == "natural":
        return None

    def table(layer: int) -> Any:
        seed = zlib.crc32(f"layers[{layer}]".encode())
        drawn = forced_table(workload.routing, config.experts, config.top_k, seed, rows)
        return torch.from_numpy(drawn.astype("int64")).cuda()

    return table


def launcher(torch: Any, arch: str, rows: int) -> Any:
    """The stand-alone kernel as muse_slice.Experts, on torch's current stream and context."""
    torch.zeros(1, device="cuda")  # torch's context is current from here on
    kernel = GroupedKernel(arch)

    def launch(half: Any, x: Any, routes: Any, y: Any) -> None:
        arrays = {"x": x.contiguous(), "w": half.w, "scales": half.scales, "second": half.second}
        arrays |= {"counts": routes.counts, "users": routes.users, "pairs": routes.pairs, "y": y}
        addresses = {name: t.data_ptr() for name, t in arrays.items() if t is not None}
        experts = half.w.shape[0]
        shape = Shape(experts, half.n, half.k, rows, half.swiglu, half.scales is not None)
        kernel.launch(shape, addresses, torch.cuda.current_stream().cuda_stream)

    return launch
