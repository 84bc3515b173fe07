"""NCCL: the same chains of all-reduces in CUDA graphs, a process a GPU.

    python -m gpurt.bench.peers_ranks RANK FOLDER BACKEND LIMIT_S COUNT FLOATS...

is one of the processes. One pair of them measures every size of a run, since starting takes far
longer than measuring: rank 0 adds a line a size to FOLDER/figures as soon as it has it, `FLOATS US
US ...`, a figure a round. What is there counts, whatever becomes of the pair afterwards.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from gpurt.bench.case import Side, Workload
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.bench.peers import Peer, captured

RANKS, ROUNDS, REPLAYS = 2, 5, 20
_LIMIT_S = 60.0  # of a pair: importing torch and starting NCCL take half of it
_DUMP_S = 4.0  # before that, a rank that hangs says where
_SAID = 600  # characters of what a rank said that a report keeps
# The ranks share a machine, so nothing looks for a network; multicast hangs on some hosts.
_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def nccl(machine: Machine, workload: Workload, *, sizes: tuple[int, ...]) -> Side:
    """sizes: floats of all cases of a run, which the first one that asks has measured.

    Raises: UnavailableError without two GPUs, or with what the ranks said if they have no figure.
    """
    from gpurt.doctor import probe_cuda

    if machine.kind != "cuda" or not all(probe_cuda(i).usable for i in range(RANKS)):
        raise UnavailableError(f"NCCL is measured on {RANKS} GPUs, which are not here")
    return AllReduces(measured("nccl", workload.step["count"], sizes), workload.step["floats"])


@dataclass(frozen=True)
class Pair:
    """What two ranks measured: by floats, microseconds an all-reduce, a round each; and how each
    rank ended.
    """

    figures: dict[int, list[float]]
    report: str


class AllReduces(Peer):
    """One size of a pair that is gone by now: both GPUs are ours."""

    def __init__(self, pair: Pair, floats: int) -> None:
        """Raises: UnavailableError if the pair has no figure of it."""
        if not pair.figures.get(floats):
            raise UnavailableError(f"no figure of {4 * floats} bytes: {pair.report}")
        self._figures = list(pair.figures[floats])

    def measure(self) -> float:
        """Microseconds of the next round; the last one stays."""
        return self._figures.pop(0) if len(self._figures) > 1 else self._figures[0]


@cache
def measured(backend: str, count: int, sizes: tuple[int, ...], limit_s: float = _LIMIT_S) -> Pair:
    """Chains of `count` all-reduces of each of `sizes`, in floats: measured once, then known. Both
    ranks have ended when it returns: by themselves or, `limit_s` after their start, by force.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + limit_s
        arguments = [str(n) for n in (folder, backend, limit_s - _DUMP_S, count, *sizes)]
        ranks = [_start(rank, folder, arguments) for rank in range(RANKS)]
        try:
            ends = [_wait(process, deadline) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        figures = folder / "figures"
        lines = figures.read_text().split("\n")[:-1] if figures.exists() else []
        said = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
    parts = [f"rank {rank} {ends[rank]}: {said[rank][-_SAID:].strip()}" for rank in range(RANKS)]
    values = [[float(value) for value in line.split()] for line in lines]
    return Pair({int(floats): us for floats, *us in values}, "; ".join(parts))


def run_rank(rank: int, folder: str, backend: str, count: int, sizes: list[int]) -> None:
    """One process: for each size warm up, capture, replay. gloo, on CPUs, has nothing to capture.

    Ends the process, whose communicator and graphs are left to the driver: giving them back is
    known to hang.
    """
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    method = f"file://{folder}/ranks"
    distributed.init_process_group(backend, init_method=method, rank=rank, world_size=RANKS)
    kept = []
    for floats in sizes:
        x = torch.zeros(floats, device=device)
        sums = partial(_sums, distributed, x, count)
        run = captured(torch, sums).replay if on_gpu else sums
        kept.append(run)
        rounds = [_round(torch, distributed, x, run) / count for _ in range(ROUNDS)]
        if rank == 0:
            with (Path(folder) / "figures").open("a") as file:
                file.write(f"{floats} {' '.join(f'{us:.4f}' for us in rounds)}\n")
    _round(torch, distributed, torch.zeros(1, device=device), int)  # nobody needs the other now
    os._exit(0)


# ---- helpers ---------------------------------------------------------------------------------
def _start(rank: int, folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gpurt.bench.peers_ranks", str(rank), *arguments],
            env=os.environ | _VARIABLES,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        return f"ended with {process.wait(max(0.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        return "had not ended in time"


def _sums(distributed: Any, x: Any, count: int) -> None:
    for _ in range(count):
        distributed.all_reduce(x)


def _round(torch: Any, distributed: Any, x: Any, run: Callable[[], Any]) -> float:
    """Microseconds of one `run`; both ranks begin together."""
    wait = torch.cuda.synchronize if x.is_cuda else int
    distributed.all_reduce(x)
    wait()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        run()
    wait()
    return (time.perf_counter() - began) * 1e6 / REPLAYS


if __name__ == "__main__":
    _rank, _folder, _backend, _limit, _count, *_sizes = sys.argv[1:]
    faulthandler.dump_traceback_later(float(_limit), exit=True)
    run_rank(int(_rank), _folder, _backend, int(_count), [int(n) for n in _sizes])
