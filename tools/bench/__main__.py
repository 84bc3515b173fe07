"""All benches that this machine can run, one after another; the last line is one JSON object.

    python -m tools.bench [NAME ...]   names: host_bodies smollm2_host; chain dispatch smollm2_gpu

Each bench is a process of its own: none warms or disturbs another, and one that fails is reported
and does not stop the rest (exit code 1 then). Those that need a GPU are left out without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gpurt.doctor import probe_cuda

HOST = {
    "host_bodies": ["tools.bench.host_bodies"],
    "smollm2_host": ["tools.bench.smollm2_host"],
}
GPU = {
    "chain": ["tools.bench.chain"],
    "dispatch": ["tools.bench.dispatch"],
    "smollm2_gpu": ["tools.bench.smollm2_gpu", "--model", "smollm2"],
}


def run(name: str, command: list[str]) -> tuple[int, Any]:
    """Run one bench, showing its lines as they come. Returns: exit code, its last line as JSON."""
    print(f"== {name}", flush=True)
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if last:
                print(last, flush=True)
            last = line.rstrip()
    try:
        return process.returncode, json.loads(last)
    except json.JSONDecodeError:
        print(last, flush=True)
        return process.returncode or 1, None


def main(names: list[str]) -> int:
    """Run the named benches, or all that can run here. Returns: exit code."""
    usable = {**HOST, **(GPU if probe_cuda(0).usable else {})}
    unknown = [name for name in names if name not in usable]
    if unknown:
        print(f"no bench {unknown} runs here - at tools.bench - use {sorted(usable)}")
        return 2
    results: dict[str, Any] = {}
    failed = []
    for name, command in usable.items():
        if names and name not in names:
            continue
        code, results[name] = run(name, command)
        if code:
            failed.append(name)
    print(json.dumps({"results": results, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
