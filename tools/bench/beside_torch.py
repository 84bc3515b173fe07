"""How long may a resident kernel stay? What torch can do beside one, per operation and state.

Runs a minimal resident kernel (one block per SM, a controller that polls host memory, linger and
residency bounds, as the CUDA executor's) and times torch work in the same process:
  busy     a request of BUSY_MS is on the device
  linger   the last request ended, the kernel waits LINGER_MS for another
  stream   another thread submits requests without a pause; the kernel yields every RESIDENCY_MS
The kernel lies in torch's own (primary) context, or in a context of its own, where the GPU shares
time between the two. Then kill -9: a process dies with its kernel resident; a new one must work.

    python tools/bench/beside_torch.py        # needs a GPU and torch; last line is JSON
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

BUSY_MS, LINGER_MS, RESIDENCY_MS, STREAM_MS = 400, 200, 250, 20
LIMIT_S = 5.0
SMEM_BYTES = 200 * 1024
THREADS = 544

KERNEL = r"""
typedef unsigned long long u64; typedef unsigned int u32;
struct Control { u64 tail; u64 abort; u64 pad0[6]; u64 state; u64 head; u64 tokens; u64 steps; };
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ u64 ld_sys(u64* p) { u64 v;
  asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ void st_sys(u64* p, u64 v) {
  asm volatile("st.release.sys.b64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
__device__ u64 ld_gpu(u64* p) { u64 v;
  asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ void st_gpu(u64* p, u64 v) {
  asm volatile("st.release.gpu.b64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
__device__ void add_gpu(u64* p, u64 v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }

// words[0]: steps opened; words[16]: arrivals, only grows; words[32]: 1 = leave
extern "C" __global__ void __launch_bounds__(544, 1)
resident(Control* host, u64* words, const u64* durations, u64 linger, u64 residency, float* sink) {
  extern __shared__ char shared[];
  const u64 start = now();
  u64 step = 0;
  float r[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) r[i] = threadIdx.x * 0.5f + i;
  __shared__ u64 leave;
  u64 head = 0, idle = start, until = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) { head = host->head; st_sys(&host->state, 1); }
  for (;;) {
    if (threadIdx.x == 0) {
      leave = 0;
      if (blockIdx.x == 0) {
        u64 t = now();
        if (until && t >= until) { until = 0; idle = t; st_sys(&host->head, ++head); }
        while (!until && !leave) {
          t = now();
          const bool over = residency && t - start > residency;
          if (ld_sys(&host->abort)) leave = 1;
          else if (ld_sys(&host->tail) > head && !over) until = t + durations[head % 1024];
          else if ((linger && t - idle > linger) || over) {
            st_sys(&host->state, 2);
            asm volatile("fence.sc.sys;" ::: "memory");
            if (ld_sys(&host->tail) > head && !over) st_sys(&host->state, 1); else leave = 1;
          }
        }
        if (leave) st_gpu(words + 32, 1);
        st_gpu(words, step + 1);
      } else {
        while (ld_gpu(words) < step + 1) {}
        leave = ld_gpu(words + 32);
      }
    }
    __syncthreads();
    if (leave) break;
    #pragma unroll 1
    for (int k = 0; k < 8; ++k)
      #pragma unroll
      for (int i = 0; i < 64; ++i) r[i] = r[i] * 1.0001f + r[(i + 1) % 64];
    __syncthreads();
    if (threadIdx.x == 0) {
      add_gpu(words + 16, 1);
      if (blockIdx.x == 0) {
        while (ld_gpu(words + 16) < (step + 1) * gridDim.x) {}
        st_sys(&host->tokens, host->tokens + 1);
      }
    }
    ++step;
    __syncthreads();
  }
  float s = 0;
  #pragma unroll
  for (int i = 0; i < 64; ++i) s += r[i];
  if (s == 1.2345f) sink[0] = s + shared[0];
}
"""


def call(result: tuple[Any, ...]) -> Any:
    """The value of a driver or NVRTC call. Raises: RuntimeError on an error code."""
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{code!r}")
    return values[0] if len(values) == 1 else values


def compile_kernel(arch: str) -> bytes:
    """The cubin of KERNEL for `arch`."""
    program = call(nvrtc.nvrtcCreateProgram(KERNEL.encode(), b"resident.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}".encode()]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) != 0:
        log = bytearray(call(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize(program)))
    call(nvrtc.nvrtcGetCUBIN(program, cubin))
    return bytes(cubin)


class Resident:
    """A minimal runtime: requests are durations; one kernel serves them until it may end."""

    def __init__(self, own_context: bool, residency_ms: int, resident: bool = False) -> None:
        call(driver.cuInit(0))
        device = call(driver.cuDeviceGet(0))
        previous = driver.cuCtxGetCurrent()[1]
        if own_context:
            try:
                self.context = call(driver.cuCtxCreate(None, 0, device))
            except TypeError:  # cuda-bindings 12 has no creation parameters
                self.context = call(driver.cuCtxCreate(0, device))
        else:
            self.context = call(driver.cuDevicePrimaryCtxRetain(device))
        call(driver.cuCtxSetCurrent(self.context))
        attribute = driver.CUdevice_attribute
        major = call(
            driver.cuDeviceGetAttribute(
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
            )
        )
        minor = call(
            driver.cuDeviceGetAttribute(
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device
            )
        )
        self.sms = call(
            driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
        )
        module = call(driver.cuModuleLoadData(compile_kernel(f"sm_{major}{minor}")))
        self.kernel = call(driver.cuModuleGetFunction(module, b"resident"))
        smem = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute(self.kernel, smem, SMEM_BYTES))
        self.stream = call(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self.words = call(driver.cuMemAlloc(4096))
        mapped = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        address = int(call(driver.cuMemHostAlloc(16384, mapped)))
        self.address = address
        words = (ctypes.c_uint64 * 2048).from_address(address)
        self.host = np.frombuffer(words, dtype=np.uint64)
        self.host[:] = 0
        self.durations = self.host[16 : 16 + 1024]
        self.linger_ns = 0 if resident else LINGER_MS * 1_000_000
        self.residency_ns = 0 if resident else residency_ms * 1_000_000
        self.launches = 0
        self.lock = threading.Lock()
        call(driver.cuCtxSetCurrent(previous))

    def _running(self) -> bool:
        code = driver.cuStreamQuery(self.stream)[0]
        return int(code) == int(driver.CUresult.CUDA_ERROR_NOT_READY)

    def submit(self, ms: float) -> int:
        """Queue a request of `ms`; launch if no kernel will take it. Returns: its number."""
        with self.lock:
            ticket = int(self.host[0])
            self.durations[ticket % 1024] = int(ms * 1e6)
            self.host[0] = ticket + 1
            self.nudge_locked()
            return ticket

    def nudge_locked(self) -> None:
        """Launch if the kernel has ended with requests left."""
        if int(self.host[8]) == 1 and self._launched:
            return
        previous = driver.cuCtxGetCurrent()[1]
        call(driver.cuCtxSetCurrent(self.context))
        while self._running() and int(self.host[8]) != 1:
            time.sleep(0)
        if not self._running() and int(self.host[9]) < int(self.host[0]):
            self._launch()
        call(driver.cuCtxSetCurrent(previous))

    _launched = False

    def _launch(self) -> None:
        self._launched = True
        self.host[8] = 0
        call(driver.cuMemsetD8Async(self.words, 0, 4096, self.stream))
        values = [self.address, int(self.words), self.address + 128, self.linger_ns]
        values += [self.residency_ns, int(self.words) + 2048]
        holders = [ctypes.c_uint64(v) for v in values]
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
        call(
            driver.cuLaunchCooperativeKernel(
                *(self.kernel, self.sms, 1, 1, THREADS, 1, 1, SMEM_BYTES, self.stream),
                ctypes.addressof(pointers),
            )
        )
        self.launches += 1

    def wait(self, ticket: int, limit_s: float = 30.0) -> bool:
        """Poll host memory until request `ticket` ended; relaunch after a yield."""
        deadline = time.monotonic() + limit_s
        while int(self.host[9]) <= ticket:
            if int(self.host[8]) == 2 and self.lock.acquire(blocking=False):
                try:
                    self.nudge_locked()
                finally:
                    self.lock.release()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def stop(self) -> bool:
        """Ask the kernel to end. Returns: whether it did within 5 s."""
        self.host[1] = 1
        deadline = time.monotonic() + 5
        call(driver.cuCtxSetCurrent(self.context))
        while self._running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        self.host[1] = 0
        return True


def timed(run: Callable[[], Any]) -> tuple[float, str]:
    """Milliseconds `run` took in a thread of its own; "HUNG" if it is not back in LIMIT_S."""
    outcome: list[str] = []
    done = threading.Event()

    def body() -> None:
        try:
            run()
        except Exception as error:
            outcome.append(repr(error)[:90])
        done.set()

    begin = time.monotonic()
    threading.Thread(target=body, daemon=True).start()
    finished = done.wait(LIMIT_S)
    note = "" if finished else "HUNG"
    return (time.monotonic() - begin) * 1e3, note or (outcome[0] if outcome else "")


def operations(torch: Any, lazy: list[Any]) -> dict[str, Callable[[], Any]]:
    """Torch work by name. `lazy` holds functions whose kernels were never loaded; each use pops."""
    x = torch.ones(1 << 20, device="cuda")
    y = torch.empty_like(x)
    big = torch.ones(2048, 2048, device="cuda")
    pinned = torch.empty(1 << 20, pin_memory=True)
    side = torch.cuda.Stream()

    def copy(stream: Any) -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                pinned.copy_(x, non_blocking=True)
                y.copy_(pinned, non_blocking=True)
            stream.synchronize()

    def copy_two() -> None:
        threads = [threading.Thread(target=copy, args=(s,)) for s in (torch.cuda.Stream(), side)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return {
        "loaded kernel + item": lambda: float((x * 2)[0].item()),
        "first use of a kernel": lambda: float(lazy.pop()(x[:10] * 0.1)[0].item()),
        "cudaMalloc 512 MB": lambda: torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
        "empty_cache (cudaFree)": lambda: torch.cuda.empty_cache(),
        "pinned allocation": lambda: torch.empty(8 << 20, pin_memory=True),
        "matmul (cuBLAS) + item": lambda: float((big @ big)[0, 0].item()),
        "copy to host": lambda: float(y[:1000].cpu().sum()),
        "copies, two threads": copy_two,
        "torch.cuda.synchronize": lambda: torch.cuda.synchronize(),
    }


def measure(torch: Any, own_context: bool, lazy: list[Any]) -> list[dict[str, Any]]:
    """One row per operation and state."""
    rows = []
    runtime = Resident(own_context, RESIDENCY_MS)
    for name, operation in operations(torch, lazy).items():
        row: dict[str, Any] = {"context": "own" if own_context else "primary", "op": name}
        torch.cuda.synchronize()
        for state in ("busy", "linger", "stream"):
            stop = threading.Event()
            first = runtime.submit(BUSY_MS if state == "busy" else STREAM_MS)

            def feed(stop: threading.Event = stop) -> None:
                last = -1
                while not stop.is_set():
                    while int(runtime.host[0]) - int(runtime.host[9]) > 4:
                        time.sleep(0.001)
                        runtime.wait(int(runtime.host[9]), 1.0)
                    last = runtime.submit(STREAM_MS)
                runtime.wait(last)

            feeder = threading.Thread(target=feed, daemon=True)
            if state == "linger":
                runtime.wait(first)
            if state == "stream":
                feeder.start()
            time.sleep(0.03)
            before = int(runtime.host[10])
            ms, note = timed(operation)
            row[state] = round(ms, 1)
            row[state + "_note"] = note
            row[state + "_steps"] = int(runtime.host[10]) - before
            stop.set()
            if state == "stream":
                feeder.join(20)
            runtime.wait(first)
        rows.append(row)
        print(
            f"{row['context']:8s}{name:26s}"
            + "".join(
                f"{row[s]:9.1f} {row[s + '_note'] or 'ok':6s}" for s in ("busy", "linger", "stream")
            )
            + f"  steps meanwhile {row['stream_steps']}",
            flush=True,
        )
    ended = runtime.stop()
    print(f"{'own' if own_context else 'primary'}: ended {ended}, launches {runtime.launches}")
    return rows


def speed(own_context: bool) -> float:
    """Steps per second of an undisturbed request: what a context of its own costs."""
    runtime = Resident(own_context, 0, resident=True)
    runtime.wait(runtime.submit(50))
    before = int(runtime.host[10])
    runtime.wait(runtime.submit(300))
    steps = (int(runtime.host[10]) - before) / 0.3
    runtime.stop()
    return steps


def victim() -> None:
    """Stay resident until killed."""
    runtime = Resident(False, 0, resident=True)
    runtime.wait(runtime.submit(50))
    runtime.submit(60_000)
    print("resident", flush=True)
    time.sleep(60)


def killed() -> dict[str, float]:
    """Kill a process whose kernel is resident; then run a request in a new process."""
    here = [sys.executable, os.path.abspath(__file__)]
    process = subprocess.Popen([*here, "--victim"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    begin = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    dead = time.monotonic() - begin
    begin = time.monotonic()
    fresh = subprocess.run([*here, "--once"], capture_output=True, text=True, timeout=60)
    return {
        "was_resident": float(line.strip() == "resident"),
        "dead_s": round(dead, 3),
        "fresh_ok": float(fresh.returncode == 0),
        "fresh_s": round(time.monotonic() - begin, 3),
    }


def once() -> int:
    """One request in this process. Returns: exit code."""
    runtime = Resident(False, 1000)
    return 0 if runtime.wait(runtime.submit(100), 10) and runtime.stop() else 1


def main() -> int:
    """Run all cases. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victim", action="store_true")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    if options.victim:
        victim()
        return 0
    if options.once:
        return once()
    import torch

    torch.ones(1, device="cuda").add_(1).item()
    # All in torch's binary: special functions that it compiles on first use take seconds.
    names = "erfinv sinh asinh cosh atanh expm1 log1p tan acos frac"
    lazy = [getattr(torch, n) for n in names.split()]
    print(f"{'context':8s}{'operation':26s}{'busy ms':>16s}{'linger ms':>16s}{'stream ms':>16s}")
    rows = measure(torch, False, lazy)
    try:
        rows += measure(torch, True, lazy)
        rates = {"primary": speed(False), "own": speed(True)}
    except RuntimeError as error:
        rates = {"error": str(error)}
    kill = killed()
    print("steps/s", rates, "kill -9", kill)
    print(json.dumps({"rows": rows, "steps_per_s": rates, "kill": kill}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
