"""A million all-reduces beside streamed weights, with random delays: none may be lost.

Every round's parts follow from the sum before, so one wrong or stale granule changes all that come
after; the last sum is compared with numpy's, bit by bit. A rank's task sometimes waits up to 30 us,
by a number of its own, so ranks are apart by all there is. Every third round sums the sum before as
it is, so that one's tasks store on all ranks themselves.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import gpurt
from gpurt.doctor import probe_cuda
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_reduce_into
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.matvec import matvec
from gpurt.ranks import group
from gpurt.runtime import Runtime

pytestmark = pytest.mark.timeout(120)

RANKS, FLOATS = 2, 256
STREAM = 2048  # 8 MB of weights beside each sum, of eight matrices in turn: more than L2 holds
COUNT, STEPS = 100, 10_000
MIX = """
struct mix {
  __device__ static void run(const gpurt::TaskRecord& task, const gpurt::BodyContext& context) {
    using namespace gpurt;
    const f32* sum = arg<const f32>(task, 0);
    f32* part = arg<f32>(task, 1);
    const u32 rank = context.program->rank;
    u32 random = u32(context.round) * 7919u + task.param[0] * 104729u + rank * 31337u;
    random *= 2654435761u;
    random ^= random >> 15;
    if (context.thread == 0 && random % 64 == 0) {
      const u64 begin = clock_ns();
      while (clock_ns() - begin < random / 64 % 30000) {
      }
    }
    context.sync();
    for (u32 i = context.thread; i < task.param[1]; i += context.team_threads) {
      const f32 x = __fadd_rn(__fmul_rn(sum[i], 0.61803f), __fmul_rn(f32(rank + 1), 0.1f));
      part[i] = __fadd_rn(x, -floorf(x));
    }
  }
};
"""


def mixed(total: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    f32 = np.float32
    x = total * f32(0.61803) + f32(rank + 1) * f32(0.1)
    return np.asarray(x - np.floor(x))


def is_mixed(number: int) -> bool:
    return number % 3 != 2


def mix(*_, **__):
    raise AssertionError("on the GPU alone")


def chain(rank: int, count: int, stream: int) -> Graph:
    """`count` sums a step; the last one is what the next step begins with."""
    graph = Graph("rounds", rank=rank, rank_count=RANKS)
    body = gpurt.body("mix", mix, cuda=MIX)
    x = total = graph.input("x", [1, FLOATS], "f32")
    z = graph.input("z", [1, stream], "bf16")
    zeros = np.zeros((stream, stream), np.uint16)
    w = [graph.weight(f"w[{i}]", [stream, stream], "bf16", zeros) for i in range(8)]
    for number in range(count):
        beside = graph.activation(f"beside[{number}]", [1, stream], "f32")
        matvec(graph, z, w[number % len(w)], beside, name="beside")
        part = total
        if is_mixed(number):
            part = graph.activation(f"part[{number}]", [1, FLOATS], "f32")
            graph.task(body, [total], [part], number=number, floats=FLOATS)
        total = x if number == count - 1 else graph.activation(f"y[{number}]", [1, FLOATS], "f32")

        def add(slots, y=total):
            collect(graph, slots, y)

        all_reduce_into(graph, part, RANKS, add, adds=True)
    return graph


def run(devices: str | list[str], count: int = COUNT, steps: int = STEPS, stream: int = STREAM):
    """The last sum of every rank, and what it should be."""
    alone = isinstance(devices, str)
    graphs = [chain(rank, count, stream) for rank in range(1 if alone else RANKS)]
    graph = graphs[0] if alone else group(graphs)
    begin = np.linspace(0, 1, FLOATS, dtype=np.float32)[None]
    total = begin
    for round_index in range(count * steps):
        parts = [total, total]
        if is_mixed(round_index % count):
            parts = [mixed(total, 0), mixed(total, 0 if alone else 1)]
        total = parts[0] + parts[1]
    with Runtime(devices, wait_timeout_ms=20_000) as runtime:
        inputs = {"x": begin, "z": np.zeros((1, stream), np.uint16)}
        runtime.submit(graph, inputs=inputs, steps=steps).result()
        runtime.park()  # rank 0's last step may end before another's
        ranks = runtime._find(graph).executor.ranks
        assert any(b.memory == "symmetric_payload" for b in ranks[0].plan.buffers)
        return [one.read("x") for one in ranks], total


def check(devices: str | list[str], **sizes: int) -> None:
    seen, wanted = run(devices, **sizes)
    for rank, x in enumerate(seen):
        wrong = np.flatnonzero(x.view(np.uint32) != wanted.view(np.uint32))
        assert not len(wrong), f"rank {rank}: {len(wrong)} of {FLOATS} differ, first {wrong[:4]}"


@pytest.mark.skipif(not probe_cuda(1).usable, reason="needs two GPUs")
def test_two_gpus_lose_no_round_of_a_million() -> None:
    check([f"cuda:{rank}" for rank in range(RANKS)])


def test_one_gpu_looped_back_loses_no_round_of_a_million() -> None:
    check("cuda:0")
