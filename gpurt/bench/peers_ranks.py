"""NCCL: the same chain of all-reduces in a CUDA graph, a process a GPU.

    python -m gpurt.bench.peers_ranks RANK RANKS PORT COUNT FLOATS ROUNDS

is one of the processes; rank 0 prints microseconds an all-reduce, a line a round.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from typing import Any

from gpurt.bench.case import Side, Workload
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.bench.peers import Peer

RANKS, ROUNDS, REPLAYS = 2, 5, 20
_TIMEOUT_S = 180


def nccl(machine: Machine, workload: Workload) -> Side:
    """Raises: UnavailableError without two GPUs and a torch that sees them."""
    from gpurt.doctor import probe_cuda

    if machine.kind != "cuda" or not all(probe_cuda(i).usable for i in range(RANKS)):
        raise UnavailableError(f"NCCL is measured on {RANKS} GPUs, which are not here")
    return Nccl(workload.step["count"], workload.step["floats"])


class Nccl(Peer):
    """All rounds are measured when it is opened, since starting takes seconds; the processes are
    then gone, and leave both GPUs to ours.
    """

    def __init__(self, count: int, floats: int) -> None:
        """Raises: UnavailableError with what the processes said if they failed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "gpurt.bench.peers_ranks"]
        sizes = [str(n) for n in (RANKS, port, count, floats, ROUNDS)]
        running = [
            subprocess.Popen(
                [*command, str(rank), *sizes],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            said = [process.communicate(timeout=_TIMEOUT_S)[0] for process in running]
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"NCCL did not end in {_TIMEOUT_S} s") from error
        finally:
            for process in running:
                process.kill()
        if any(process.returncode for process in running):
            last = next(text for p, text in zip(running, said, strict=True) if p.returncode)
            raise UnavailableError(f"NCCL failed: {last.strip().splitlines()[-1:]}")
        self._figures = [float(line) for line in said[0].split()]

    def measure(self) -> float:
        """Microseconds of the next round; the last one stays."""
        return self._figures.pop() if len(self._figures) > 1 else self._figures[0]


def run_rank(rank: int, ranks: int, port: int, count: int, floats: int, rounds: int) -> None:
    """One process: warm up, capture, replay."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    x = torch.zeros(floats, device="cuda")
    for _ in range(3):
        distributed.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            distributed.all_reduce(x)
    graph.replay()
    for _ in range(rounds):
        distributed.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        us = (time.perf_counter() - began) * 1e6 / REPLAYS / count
        if rank == 0:
            sys.stdout.write(f"{us:.4f}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_rank(*(int(argument) for argument in sys.argv[1:]))
