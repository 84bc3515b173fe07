"""What a hop by counter is made of: `python -m tools.bench.signals` (one GPU, seconds).

Entries of tools/bench/signals.cu: stages of one empty task a block, each waiting for the whole
stage before, by who polls, how the team is told, who signals and how; then fences alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpurt.executors.cuda_compile import Compiled, compile_source

SETUP = np.dtype(
    [
        *[(name, "<u8") for name in ("words", "sink", "failed", "times")],
        ("rounds", "<u4"),
        ("blocks", "<u4"),
    ]
)
BLOCKS, THREADS, ROUNDS = 132, 21 * 32, 4000
BARRIER, MBARRIER, WORD = range(3)
STORER, TEAM, ALONE = range(3)
ATOM, RED, RELAXED, FENCE_RED, FLAGS, FENCE_ONLY = range(6)
# name: POLLER (0: the team), HAND, SIGNALLER, SEND, SHARDS, SPANS, NOISE
STAGES = {
    "bare: one warp does all": (0, BARRIER, ALONE, RED, 1, 0, 0),
    "bare, without the fence": (0, BARRIER, ALONE, RELAXED, 1, 0, 0),
    "bare, 4 shards": (0, BARRIER, ALONE, RED, 4, 0, 0),
    "bare, 8 shards": (0, BARRIER, ALONE, RED, 8, 0, 0),
    "bare, a flag a block": (0, BARRIER, ALONE, FLAGS, 1, 0, 0),
    "now: team polls, barrier, storer": (0, BARRIER, STORER, ATOM, 1, 1, 1),
    "now, no spans": (0, BARRIER, STORER, ATOM, 1, 0, 1),
    "now, no spans, no records": (0, BARRIER, STORER, ATOM, 1, 0, 0),
    "now, fence timed": (0, BARRIER, STORER, FENCE_ONLY, 1, 1, 1),
    "now, fence timed, no spans": (0, BARRIER, STORER, FENCE_ONLY, 1, 0, 0),
    "now, red": (0, BARRIER, STORER, RED, 1, 1, 1),
    "now, no fence": (0, BARRIER, STORER, RELAXED, 1, 1, 1),
    "now, 2 shards": (0, BARRIER, STORER, RED, 2, 1, 1),
    "now, 4 shards": (0, BARRIER, STORER, RED, 4, 1, 1),
    "now, 8 shards": (0, BARRIER, STORER, RED, 8, 1, 1),
    "now, a flag a block": (0, BARRIER, STORER, FLAGS, 1, 1, 1),
    **{
        f"now, {rest} cycles between polls": (0, BARRIER, STORER, RED, 1, 1, 1, rest)
        for rest in (50, 100, 150, 200, 300, 500)
    },
    **{
        f"now, nanosleep({rest}) between polls": (0, BARRIER, STORER, RED, 1, 1, 1, 1000 + rest)
        for rest in (0, 20, 50, 100, 200)
    },
    "now, 4 shards, 150 cycles": (0, BARRIER, STORER, RED, 4, 1, 1, 150),
    "team's thread signals": (0, BARRIER, TEAM, RED, 1, 0, 0),
    "team's thread, no fence": (0, BARRIER, TEAM, RELAXED, 1, 0, 0),
    "one poller, mbarrier": (1, MBARRIER, STORER, RED, 1, 1, 1),
    "one poller, word": (1, WORD, STORER, RED, 1, 1, 1),
    "two pollers, word": (2, WORD, STORER, RED, 1, 1, 1),
    "three pollers, word": (3, WORD, STORER, RED, 1, 1, 1),
    "one poller, word, 4 shards": (1, WORD, STORER, RED, 4, 1, 1),
    "two pollers, word, 4 shards": (2, WORD, STORER, RED, 4, 1, 1),
    "three pollers, word, 4 shards": (3, WORD, STORER, RED, 4, 1, 1),
    "two pollers, word, no fence": (2, WORD, STORER, RELAXED, 1, 1, 1),
    "three pollers, word, 4 shards, no fence": (3, WORD, STORER, RELAXED, 4, 1, 1),
    "two pollers, word, flags": (2, WORD, STORER, FLAGS, 1, 1, 1),
}
KINDS = (
    "fence.acq_rel.gpu",
    "fence.acq_rel.cta",
    "fence.sc.gpu",
    "store.release",
    "load.acquire",
    "load.relaxed, one word",
    "atom.relaxed, own word",
    "fence.acq_rel.sys",
    "atom.relaxed, one word",
    "fence.proxy.async",
)
OTHERS = ("alone", "beside an acquiring poll", "a relaxed poll", "stores", "loads of lines")
# BEFORE (tens of cycles since a store of 32 bytes), OTHERS, KIND
FENCES = [
    *[(0, 0, kind) for kind in range(len(KINDS))],
    *[(before, 0, 0) for before in (1, 30, 60, 100, 200)],
    *[(0, others, 0) for others in (1, 2, 3, 4)],
    (200, 1, 0),
    (0, 1, 4),
    (0, 1, 3),
]


def source() -> str:
    """The kernels, an entry for each line above."""
    text = Path(__file__).with_name("signals.cu").read_text()
    bounds = f"__launch_bounds__({THREADS}, 1)"
    for i, flags in enumerate(STAGES.values()):
        call = f"gpurt::stages<{', '.join(map(str, flags))}>();"
        text += f'\nextern "C" __global__ void {bounds} stages_{i}() {{ {call} }}'
    for i, which in enumerate(FENCES):
        call = f"gpurt::fences<{', '.join(map(str, which))}>();"
        text += f'\nextern "C" __global__ void {bounds} fences_{i}() {{ {call} }}'
    return text + "\n"


def compiled(arch: str) -> Compiled:
    """For `arch`; needs no GPU."""
    return compile_source(source(), arch, headers={}, name="signals.cu")


class Bench:
    """All entries on GPU 0."""

    def __init__(self) -> None:
        """Compile and load."""
        from gpurt.executors.cuda_driver import Device

        self.device: Any = Device.open(0)
        self.cubin = compiled("sm_90a").cubin
        with self.device.current():
            self.stream = self.device.stream()
            self.words = self.device.allocate(8 << 20, "words")
            self.staging = self.device.host_mapped(4096)

    def run(self, name: str, rounds: int = ROUNDS) -> tuple[float, list[int]]:
        """(nanoseconds a round, times), the best of three launches."""
        from gpurt.executors.cuda_driver import Kernel

        best, kept = 1e30, [0] * 4
        with self.device.current():
            kernel = Kernel(self.device, self.cubin, name)
            for _ in range(4):
                ns, times, failed = self._once(kernel, rounds)
                if failed:
                    print(f"{name}: a wait did not end")
                    return 0.0, times
                if ns < best:
                    best, kept = ns, times
            kernel.unload()
        return best, kept

    def _once(self, kernel: Any, rounds: int) -> tuple[float, list[int], bool]:
        device, size = self.device, 8 << 20
        setup = np.zeros(1, SETUP)
        setup["words"], setup["sink"] = self.words, self.words + (7 << 20)
        setup["failed"] = self.words + size - 128
        setup["times"] = self.words + size - 64
        setup["rounds"], setup["blocks"] = rounds, BLOCKS
        device.fill(self.words, 0, size, self.stream)
        device.upload(kernel.symbol("setup")[0], setup, self.staging, self.stream)
        device.wait(self.stream)
        began = time.perf_counter()
        kernel.launch(BLOCKS, THREADS, 0, self.stream)
        device.wait(self.stream)
        ns = (time.perf_counter() - began) * 1e9 / rounds
        tail = device.download(self.words + size - 128, 128, self.staging, self.stream)
        raw = np.frombuffer(np.ascontiguousarray(tail).tobytes(), np.uint64)
        times = [int(v) for v in raw[8:12]]
        return ns, times, bool(int(raw[0]))


def main() -> None:
    """Run all, print a line each."""
    if "--compile" in sys.argv:
        code = compiled("sm_90a")
        Path("/tmp/signals.cubin").write_bytes(code.cubin)
        print(len(code.cubin), max(r.registers for r in code.resources))
        return
    bench = Bench()
    for i, name in enumerate(STAGES):
        ns, times = bench.run(f"stages_{i}")
        more = ""
        if times[2]:
            more = f"; fence {times[2] / ROUNDS:.0f}, add with its answer {times[1] / ROUNDS:.0f}"
        print(f"{name}: {ns:.0f} ns, {times[0] / ROUNDS:.0f} cycles a stage{more}", flush=True)
    for i, (before, others, kind) in enumerate(FENCES):
        _, times = bench.run(f"fences_{i}", 2000)
        stored = f", {before * 10} cycles behind a store" if before else ""
        print(f"{KINDS[kind]}, {OTHERS[others]}{stored}: {times[2] / 2000:.0f} cycles", flush=True)


if __name__ == "__main__":
    main()
