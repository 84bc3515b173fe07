"""Cases of several ranks: all-reduces of 8 bytes to 512 KB, alone and beside streamed weights.

Two GPUs if there are two; else one in loop-back, which moves one rank's bytes inside its own memory
and has no link in it: the record says which. NCCL is measured beside on two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

from gpurt.bench import graphs, made_up, peers_ranks
from gpurt.bench.case import Case, Workload
from gpurt.bench.machine import Machine
from gpurt.bench.ours import Steps
from gpurt.buffer import Buffer
from gpurt.graph import Graph, Operand
from gpurt.graphs.collectives import all_reduce_into
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.matvec import matvec
from gpurt.ranks import group

RANKS = 2
NCCL = "NCCL in a CUDA graph, two GPUs"
COUNT = 64  # all-reduces one after another in a step
STEPS = 16
# Rows and columns of the matrix beside each: 8.2 MB, about 2 us of memory, by 100 tasks: as of the
# prototype, other SMs stream it than those that sum.
STREAM = 1600, 2560
# Bytes of a rank's part, and what the bare prototype took on two H200s: idle, and under load.
SIZES: dict[str, tuple[int, float | None, float | None]] = {
    "8B": (8, None, None),
    "4K": (4 << 10, None, None),
    "32K": (32 << 10, 1.26, 2.3),
    "128K": (128 << 10, 1.4, 2.7),
    "256K": (256 << 10, 1.32, None),
    "512K": (512 << 10, 1.55, 8.5),
}
FLOATS = tuple(size // 4 for size, _, _ in SIZES.values())


def rank_cases() -> list[Case]:
    """Each size idle, and under load."""
    idle = [_case(name, size, figure, False) for name, (size, figure, _) in SIZES.items()]
    loaded = [_case(name, size, figure, True) for name, (size, _, figure) in SIZES.items()]
    return [*idle, *loaded]


def sums(
    rank: int, ranks: int, *, count: int, floats: int, stream_rows: int = 0, stream_k: int = 0
) -> Graph:
    """`count` all-reduces, each of the sum of the one before. stream_rows, stream_k: beside each a
    matrix of so many rows and columns is streamed that nobody waits for.
    """
    graph = Graph(f"{count} sums", rank=rank, rank_count=ranks)
    part: Buffer = graph.input("x", [1, floats], "f32")
    x = graph.input("z", [1, stream_k], "bf16") if stream_k else None
    for number in range(count):
        with graph.at(f"sums[{number}]", layer=number):
            if x is not None:
                w = graph.weight(f"w[{number}]", [stream_rows, stream_k], "bf16", graphs.pending)
                z = graph.activation(f"z[{number}]", [1, stream_rows], "bf16")
                matvec(graph, x, w, z, name="beside")
            make = graph.output if number == count - 1 else graph.activation
            y = make("y" if number == count - 1 else f"y[{number}]", [1, floats], "f32")
            all_reduce_into(graph, part, ranks, partial(_collect, graph, y), adds=True)
            part = y
    if stream_k:
        made_up.share_matrices(graph)
    return graph


def _collect(graph: Graph, y: Buffer, slots: Operand) -> None:
    collect(graph, slots, y)


class Sums(Steps):
    """Microseconds of one all-reduce."""

    def place(self, machine: Machine) -> str | Sequence[str]:
        """As many devices as ranks, if there are; else one rank alone."""
        if machine.kind == "host":
            return ["host"] * RANKS
        from gpurt.doctor import probe_cuda

        if all(probe_cuda(device).usable for device in range(RANKS)):
            return [f"cuda:{device}" for device in range(RANKS)]
        self.graph.group = (self.graph,)
        return "cuda:0"

    def note(self) -> str:
        """How many devices there were."""
        alone = len(self.graph.group) == 1
        where = "one GPU, looped back: no link in it" if alone else f"{RANKS} devices"
        return f"{where}; {super().note()}"


def _case(name: str, size_bytes: int, prototype: float | None, loaded: bool) -> Case:
    def make(small: bool) -> Workload:
        count, (rows, k) = (3, (64, 64)) if small else (COUNT, STREAM)
        shape = {"count": count, "floats": size_bytes // 4}
        if loaded:
            shape |= {"stream_rows": rows, "stream_k": k}
        return Workload(
            graph=cache(lambda: group([sums(rank, RANKS, **shape) for rank in range(RANKS)])),
            bytes_moved=lambda: 2 * rows * k if loaded else 0,
            step={"steps": STEPS, **shape},
            per=count,
        )

    beside = f" beside {2 * math.prod(STREAM) / 1e6:.2g} MB of weights streamed" if loaded else ""
    return Case(
        name=f"allreduce-{name}{'-load' if loaded else ''}",
        measures=f"an all-reduce of {size_bytes} bytes over {RANKS} ranks{beside}, in a chain",
        kind="cuda",
        unit="us",
        make=make,
        ours=Sums,
        peers={} if loaded else {NCCL: partial(peers_ranks.nccl, sizes=FLOATS)},
        goal=None if prototype is None else 1.5 * prototype,
        prototype=prototype,
        rounds=3,
    )
